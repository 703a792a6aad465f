from pathlib import Path

import pytest
import torch

from tests.engines.split_ranks import TOKENS, main
from tests.processes import run_ranks

WIDTH, LAYERS = 32, 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("split")
    run_ranks(main, (folder,), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_sequence_parallel_peers_save_half_of_the_norm_and_residual_activations(results: list[dict]):
    """Checks the bytes that autograd saves for the two norms of each layer and for the final norm.

    Each norm saves its input, the normalized states and a factor per token. The value head also saves the output of the
    final norm. The outputs of the other norms are saved unsharded.
    """
    norms = 2 * LAYERS + 1
    halved = 4 * TOKENS * (norms * (2 * WIDTH + 1) + WIDTH)
    for saved_bytes in results:
        assert saved_bytes[False, False] - saved_bytes[True, False] == halved / 2


@pytest.mark.slow
def test_sequence_parallel_peers_save_half_of_the_checkpointed_activations(results: list[dict]):
    """Saved are the input of each layer, and the input, normalized states, factors and output of the last norm."""
    halved = 4 * TOKENS * (LAYERS * WIDTH + 3 * WIDTH + 1)
    for saved_bytes in results:
        assert saved_bytes[False, True] - saved_bytes[True, True] == halved / 2


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("widened", "model.widening"),
        ("gated", "model.layers.1.gate"),
        ("convolving", "Lfm2ForCausalLM"),
        ("of one", "engine.sequence_parallel_norms"),
    ],
)
def test_unsupported_models_are_rejected(results: list[dict], case: str, named: str):
    for errors in results:
        assert named in errors[case]


def test_each_rank_trains_the_head_with_the_tokens_of_all_ranks(results: list[dict]):
    for rank in results:
        assert [gradient.tolist() for gradient in rank["head"]] == [[[3.0, 3.0]], [3.0]]


def test_fsdp_over_all_ranks_needs_no_group_besides_that_of_the_role(results: list[dict]):
    """The gradients' group and the weights' group have the ranks of the role."""
    for rank in results:
        assert rank["groups"] == (True, True)
