"""`engine.compile`: compiled layers and tiles of the head train the same weights, and new shapes compile nothing."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.engines.parallel.rank_mesh import RankMesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.benchmarks.gpu.engines import one_rank_mesh
from tests.engines.closeness import FLOAT32_RTOL
from tests.engines.losses import LOGPROBS
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import qwen2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),  # torch's
]

CASES: dict[str, tuple[dict[str, Any], float]] = {
    "packed rows": ({}, FLOAT32_RTOL),
    "padded rows": ({"packing": "never"}, FLOAT32_RTOL),
    "checkpointing": ({"gradient_checkpointing": True}, FLOAT32_RTOL),
    "fsdp and checkpointing": ({"strategy": "fsdp", "gradient_checkpointing": True}, FLOAT32_RTOL),
    "autocast to bfloat16": ({"compute_dtype": "bfloat16"}, 0.02),
    "fsdp in bfloat16": ({"strategy": "fsdp", "compute_dtype": "bfloat16"}, 0.02),
}
"""Name -> settings of the engine, and bound of the relative difference of the norms of the gradients."""


GPU_CASES = ["padded rows", "autocast to bfloat16"]
"""Cases with different kernels on GPUs, where rows are packed only in bfloat16. Compiled FSDP2 did not finish there."""
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_engine(mesh: RankMesh, device: str = "cpu", **settings: Any) -> FsdpEngine:
    # As large a vocabulary as the head needs to be computed in tiles.
    model = PolicyModel(qwen2(initializer_range=0.1, vocab_size=9000))
    config = EngineConfig.model_validate({"strategy": "single", "max_tokens_per_microbatch": 40, **settings})
    return FsdpEngine(model, policy_outputs, OptimizerConfig(lr=1e-3), config, mesh=mesh, device=device)


@pytest.mark.parametrize(
    ("case", "device"),
    [
        *(pytest.param(case, "cpu", id=case) for case in CASES),
        *(pytest.param(case, "cuda:0", marks=ON_GPU, id=f"{case} on a GPU") for case in GPU_CASES),
    ],
)
def test_compiled_layers_train_the_same_weights_and_compile_once(case: str, device: str) -> None:
    """The steps have several micro-batches with different numbers of rows and tokens. torch compiles padded rows twice:
    for micro-batches of one row, and for all others.
    """
    settings, rtol = CASES[case]
    results = []
    with one_rank_mesh(torch.device(device)) as mesh:
        for is_compiled in (False, True):
            torch._dynamo.reset()
            counters.clear()
            trained = make_engine(mesh, device, compile=is_compiled, **settings)
            first = trained.forward(table(7, 0), LOGPROBS)["logprobs"]
            norms = [trained.update(table(n, n), policy_loss, POLICY)["grad_norm"].result() for n in (9, 1)]
            trained.forward(table(1, 2), LOGPROBS)
            num_graphs = counters["stats"]["unique_graphs"]
            assert bool(num_graphs) == is_compiled
            norms += [
                trained.update(table(5 + seed, seed), policy_loss, POLICY)["grad_norm"].result() for seed in range(2, 5)
            ]
            assert counters["stats"]["unique_graphs"] == num_graphs
            results.append((first, norms))
    assert torch.linalg.vector_norm(results[1][0] - results[0][0]) <= rtol * torch.linalg.vector_norm(results[0][0])
    assert results[1][1] == pytest.approx(results[0][1], rel=rtol)


@pytest.mark.parametrize(
    ("device", "strategy", "is_compiled"),
    [
        ("cpu", "single", False),
        pytest.param("cuda:0", "single", True, marks=ON_GPU),
        pytest.param("cuda:0", "fsdp", False, marks=ON_GPU),
    ],
)
def test_auto_compiles_on_gpus_without_fsdp(device: str, strategy: str, is_compiled: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    with one_rank_mesh(torch.device(device)) as mesh:
        engine = make_engine(mesh, device, compile="auto", strategy=strategy, compute_dtype="bfloat16")
        engine.update(table(9), policy_loss, POLICY)
    assert bool(counters["stats"]["unique_graphs"]) is is_compiled
