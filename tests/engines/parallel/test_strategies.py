from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.config import EngineConfig
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.metric import merge_metrics
from flowrl.engines.checkpoint.engine_checkpoint import load
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.engines.train.fsdp.engine import is_sharded
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol
from tests.engines.strategies import (
    CASES,
    NUM_STEPS,
    Case,
    fourth_step,
    main,
    policy_of,
    train,
    train_in_half,
    train_on_bfloat16,
)
from tests.engines.tables import table
from tests.processes import run_ranks
from tests.slow_cases import selected_values, slow

pytestmark = pytest.mark.timeout(1800)  # with the slow cases, the fixture `results` takes minutes


def cases(holds: Callable[[Case], object] = lambda case: True) -> list[Any]:
    """Returns the names of the cases that satisfy a predicate, with the marker of slow cases."""
    chosen = {name: case for name, case in CASES.items() if holds(case)}
    return [slow(name) if case.slow else name for name, case in chosen.items()]


def shards(case: Case) -> bool:
    return case.tp > 1 or "fsdp" in str(case.settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates the folder for results, and for checkpoints of cases with four ranks."""
    root = tmp_path_factory.mktemp("strategies")
    for name, case in CASES.items():
        if case.ranks == 4:
            (root / name).mkdir()
    return root


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> list[dict]:
    """Runs the requested cases in four processes; returns one mapping from case to results per process."""
    names = selected_values(request, "name") | selected_values(request, "replicated")
    run_ranks(main, (folder, names), 4)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@cache
def train_alone(lora: bool, dtype: torch.dtype, kind: str, num_layers: int, experts: bool) -> dict:
    """Returns the results of one process with padded rows."""
    settings = {"lora": lora, "dtype": dtype, "kind": kind, "num_layers": num_layers, "experts": experts}
    return train(Case(1, {"packing": "never"}, **settings), None)


@pytest.fixture
def alone(name: str) -> dict:
    case = CASES[name]
    return train_alone(case.lora, case.dtype, case.kind, case.num_layers, case.experts)


def rtol(name: str) -> float:
    """Returns the bound of a case: in float32 that of three optimizer steps with two passes over all layers each."""
    if CASES[name].dtype == torch.float64:
        return FLOAT64_RTOL
    return reduction_rtol(CASES[name].dtype, length=MAX_REDUCTION, depth=NUM_STEPS * 2 * CASES[name].num_layers * 7)


MAX_REDUCTION = 96
"""Width of the MLP, the longest reduction of the models."""


@pytest.mark.parametrize("name", cases())
def test_three_steps_end_with_the_weights_of_one_process(results: list[dict], alone: dict, name: str):
    for rank in range(CASES[name].ranks):
        for model in ("policy", "critic"):
            assert_norm_close(results[rank][name][model], alone[model], rtol(name))


@pytest.mark.parametrize(
    ("name", "replicated"),
    [("zero1 on 2", "ddp on 2"), slow("zero1 on 4", "ddp on 4"), slow("sp x zero1 on 2 x 2", "sp x ddp on 2 x 2")],
)
def test_zero1_equals_ddp_bit_by_bit(results: list[dict], name: str, replicated: str):
    for own, other in zip(results[: CASES[name].ranks], results, strict=False):
        for model in ("policy", "critic"):
            assert own[name][model].keys() == other[replicated][model].keys()
            assert all(torch.equal(w, other[replicated][model][key]) for key, w in own[name][model].items())


@pytest.mark.parametrize("name", cases(lambda case: "zero1" in str(case.settings) and not case.lora and case.pp == 1))
def test_zero1_divides_the_optimizer_state(results: list[dict], alone: dict, name: str):
    shares = [results[rank][name]["num_moments"] for rank in range(CASES[name].ranks)]
    assert sum(shares) == alone["num_moments"]
    assert max(shares) <= 1.2 * alone["num_moments"] / CASES[name].ranks


@pytest.mark.parametrize("name", cases())
def test_gradients_have_the_norm_of_one_process(results: list[dict], alone: dict, name: str):
    for rank in range(CASES[name].ranks):
        for (model, report), (expected_model, expected) in zip(
            results[rank][name]["reports"], alone["reports"], strict=True
        ):
            assert model == expected_model and report == pytest.approx(expected, rel=rtol(name))


@pytest.mark.parametrize("name", cases())
def test_the_losses_of_all_ranks_are_those_of_one_process(results: list[dict], alone: dict, name: str):
    case = CASES[name]
    for step, expected in enumerate(alone["losses"]):
        # Ranks that share rows report the same, and stages before the last one report nothing.
        parts = [results[rank][name]["losses"][step] for rank in case.leaders]
        actual = merge_metrics([{"loss": part} for part in parts])["loss"]
        assert actual.result() == pytest.approx(expected.result(), rel=rtol(name))


@pytest.mark.parametrize("name", cases(lambda case: case.ranks == 4))
def test_one_process_resumes_from_a_checkpoint_of_four(results: list[dict], folder: Path, name: str):
    policy = policy_of(replace(CASES[name], ranks=1, settings={}, tp=1, sp=1, pp=1), SINGLE_PROCESS)
    load(policy, folder / name)
    assert policy.steps.num_steps == 3
    assert_norm_close(fourth_step(policy, list(range(11))), results[0][name]["later"], rtol(name))


@pytest.mark.parametrize("name", cases(lambda case: case.ranks == 4))
def test_ranks_resume_bit_by_bit(results: list[dict], name: str):
    for rank in range(4):
        later, resumed = results[rank][name]["later"], results[rank][name]["resumed"]
        assert [key for key in later if not torch.equal(resumed[key], later[key])] == []


@pytest.mark.parametrize("name", cases())
def test_passes_without_gradient_match_one_process(results: list[dict], alone: dict, name: str):
    case = CASES[name]
    lengths_B = lengths(table(11)).tolist()
    expected = {kind: alone[kind].split(lengths_B) for kind in ("logprobs", "values")}
    for rank in range(case.ranks):
        rows = case.rows(rank)
        for kind, by_row in expected.items():
            own = torch.cat([by_row[row] for row in rows]) if rows else torch.zeros(0)
            is_last = rank >= case.leaders[0]
            assert_norm_close(results[rank][name][kind], own if is_last else torch.zeros_like(own), rtol(name))


@pytest.mark.parametrize("name", cases(lambda case: shards(case) and case.pp == 1))
def test_ranks_generate_from_gathered_weights(results: list[dict], alone: dict, name: str):
    for rank in range(CASES[name].ranks):
        assert results[rank][name]["generated"] == alone["generated"]


@pytest.mark.parametrize("name", cases())
def test_weight_samples_are_slices_of_the_exported_weights(results: list[dict], name: str):
    assert [results[rank][name]["wrong samples"] for rank in range(CASES[name].ranks)] == [[]] * CASES[name].ranks


@pytest.mark.parametrize("name", cases())
def test_the_parts_of_all_ranks_are_the_exported_weights(results: list[dict], name: str):
    case = CASES[name]
    parts = [results[rank][name]["part"] for rank in range(case.ranks)]
    own = {index: part for index, _, part in parts if index is not None}
    ((count,),) = {(count,) for _, count, _ in parts}
    assert sorted(own) == list(range(count))
    assert (count == 1) == (case.ranks == 1 or case.tp > 1 or case.pp > 1 or case.lora)
    for weight_name, weight in results[0][name]["policy"].items() if count > 1 else ():
        rows = [own[index][weight_name] for index in range(count)]
        assert torch.equal(torch.cat(rows), weight), weight_name


@pytest.mark.parametrize("name", cases())
def test_an_idle_engine_of_every_strategy_holds_no_memory(results: list[dict], name: str):
    """A CPU with a memory of its own stands for a GPU."""
    assert all(results[rank][name]["held while idle"] == 0 for rank in range(CASES[name].ranks))


@pytest.mark.parametrize("name", cases(shards))
def test_no_weight_stays_gathered_after_a_pass_without_gradient(results: list[dict], name: str):
    assert all(results[rank][name]["still gathered"] == 0 for rank in range(CASES[name].ranks))


@pytest.mark.parametrize("name", cases(lambda case: case.pp > 1 and case.tp == 1 and not case.lora))
def test_stages_divide_the_weights_and_share_the_tied_embeddings(results: list[dict], alone: dict, name: str):
    case = CASES[name]
    held = [results[rank][name]["num_held"] for rank in range(case.ranks)]
    num_copies = 1 if case.settings.get("strategy") == "fsdp" else case.ranks // case.pp
    full = alone["num_held"] + alone["policy"]["model.embed_tokens.weight"].numel()
    assert full <= sum(held) / num_copies <= 1.05 * full
    most_layers = -(-case.num_layers // case.pp) / case.num_layers
    num_shards = case.ranks // case.pp // num_copies
    assert max(held) <= 1.1 * most_layers * full / num_shards


@pytest.mark.parametrize("name", cases(lambda case: case.pp == 1))
def test_a_rank_holds_its_shard_of_the_weights(results: list[dict], alone: dict, name: str):
    """Uneven shards are padded, and tensor parallelism does not shard embeddings, norms and routed experts."""
    case, full_bytes = CASES[name], alone["num_held"]
    parts = case.settings.get("shard_ranks", case.ranks // case.tp)
    for rank in range(case.ranks):
        num_held = results[rank][name]["num_held"]
        if case.tp > 1:
            assert full_bytes / (parts * case.tp) <= num_held < (1 if case.experts else 0.8) * full_bytes / parts
        elif case.settings["strategy"] == "fsdp":
            assert full_bytes / parts <= num_held <= 1.05 * full_bytes / parts
        else:
            assert num_held == full_bytes


@pytest.mark.parametrize("name", cases(lambda case: case.lora))
def test_the_base_model_is_unchanged(results: list[dict], name: str):
    for rank in range(CASES[name].ranks):
        assert torch.equal(results[rank][name]["reference"], results[rank][name]["logprobs"])


@pytest.mark.parametrize("name", cases(lambda case: case.lora))
def test_every_rank_can_gather_the_full_adapter_of_its_stage(results: list[dict], alone: dict, name: str):
    num_ranks = CASES[name].ranks // CASES[name].pp
    for rank in range(num_ranks):
        stages = [results[rank + i * num_ranks][name]["adapter"] for i in range(CASES[name].pp)]
        assert sum(map(len, stages)) == len(alone["adapter"])
        assert_norm_close({key: weight for own in stages for key, weight in own.items()}, alone["adapter"])


def test_an_adapter_of_bfloat16_weights_is_trained_in_float32_on_ranks(results: list[dict]):
    expected = train_on_bfloat16(None)
    for rank in (0, 1):
        first, *_, last = results[rank]["bfloat16"]
        # Only the float32 sum of the gradients of 11 rows has another order.
        assert_norm_close(first, expected[0], reduction_rtol(torch.float32, length=11, depth=2))
        # Later, a rounding error of the adapter can change the rounding of a bfloat16 activation.
        assert_norm_close(last, expected[-1], 1e-3)
    assert all(weight.dtype == torch.float32 for weight in expected[-1].values())


@pytest.mark.parametrize(
    # Each of the four weights has the gradient 256 + 20 on one rank, and twice this sum over two data-parallel ranks.
    ("strategy", "norm"),
    [("ddp", 2 * 552.0), ("fsdp", 2 * 552.0), ("tp", 2 * 276.0)],
)
def test_gradients_of_bfloat16_weights_are_summed_in_float32(results: list[dict], strategy: str, norm: float):
    # The norm of each gradient is rounded to float32.
    assert [results[rank][f"sum with {strategy}"] for rank in range(2)] == pytest.approx([norm, norm], rel=1e-6)


@pytest.mark.parametrize(("rank", "name"), [(0, "moves"), (1, "moves"), (0, "moves on 1")])
def test_sharded_bfloat16_weights_train_on_after_moves_between_and_within_steps(
    results: list[dict], rank: int, name: str
):
    unmoved, moved = (results[rank][name][moves] for moves in (False, True))
    assert {weight.dtype for weight in moved} == {torch.bfloat16}
    assert all(map(torch.equal, moved, unmoved))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fsdp_in_half_precision_equals_one_process_in_half_precision(results: list[dict], dtype: str):
    """Compares the first two steps only, because rounding errors accumulate."""
    expected, (first, second) = train_in_half(dtype, None), [results[rank][f"in {dtype}"] for rank in (0, 1)]
    assert first["norms"][:2] == pytest.approx(expected["norms"][:2], rel=0.01)
    assert len(first["norms"]) + first["skipped"] == len(expected["norms"]) and len(first["norms"]) >= 3
    for name, weight in first["weights"].items():
        assert weight.dtype == torch.float32 and torch.equal(weight, second["weights"][name])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stages_in_half_precision_equal_one_process_in_half_precision(
    results: list[dict], dtype: str, strategy: str
) -> None:
    """Under autocast (ddp), hidden states between stages have float32, and with fsdp the dtype of the computation. Both
    gradients of the tied embeddings are rounded before their sum, and not only after it.
    """
    expected = train_in_half(dtype, None) if strategy == "ddp" else results[0][f"in {dtype} on 1"]
    first, second = (results[rank][f"in {dtype} on stages with {strategy}"] for rank in (0, 1))
    assert first["norms"][:2] == pytest.approx(expected["norms"][:2], rel=1e-3 if strategy == "ddp" else 0.01)
    assert (first["norms"], first["skipped"], first["scale"]) == (second["norms"], second["skipped"], second["scale"])
    for name, weight in first["weights"].items():
        assert weight.dtype == torch.float32 and torch.equal(weight, second["weights"][name])


def test_stages_with_two_dtypes_of_half_precision_equal_one_process(results: list[dict]) -> None:
    """Autocast in float16 over bfloat16 weights makes the hidden states between stages float32."""
    expected = train_in_half("float16", None, weights=torch.bfloat16)
    for rank in (0, 1):
        actual = results[rank]["in float16 over bfloat16 on stages"]
        assert actual["norms"][:2] == pytest.approx(expected["norms"][:2], rel=0.01)
        assert actual["skipped"] == expected["skipped"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fsdp_on_one_rank_in_half_precision_equals_a_single_process(results: list[dict], dtype: str):
    """As on two ranks. Autocast computes norms and sums in float32."""
    expected, actual = train_in_half(dtype, None), results[0][f"in {dtype} on 1"]
    assert actual["norms"][:2] == pytest.approx(expected["norms"][:2], rel=0.01)
    assert len(actual["norms"]) + actual["skipped"] == len(expected["norms"]) and len(actual["norms"]) >= 3
    assert {weight.dtype for weight in actual["weights"].values()} == {torch.float32}


def test_ranks_agree_on_the_float16_loss_scale_and_bfloat16_has_none(results: list[dict]):
    """fsdp computes full layers in float16 and may overflow where a single process does not."""
    for rank in (0, 1):
        actual = results[rank]["in float16"]
        assert actual["scale"] == (2.0 ** (16 - actual["skipped"]), len(actual["norms"]))
        assert actual["skipped"] == results[0]["in float16"]["skipped"]
        assert results[rank]["in bfloat16"]["scale"] is None and results[rank]["in bfloat16"]["skipped"] == 0


def test_a_single_process_does_not_shard():
    assert not is_sharded(EngineConfig(strategy="fsdp"), SINGLE_PROCESS)
