"""GPU transports to real vLLM: their parts without a GPU, and end to end with GPUs."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, ModelConfig, RolloutConfig, RunConfig
from flowrl.weight_sync.transfer import WeightSync
from flowrl.workers import LANGUAGE_MODELING, Actor, Rollout
from tests.engines import tiny, vllm_link_checks
from tests.engines.closeness import FLOAT32_RTOL, reduction_rtol, relative_error
from tests.engines.rollout.vllm.test_engine import PROMPTS, SIZES, TF32_RTOL
from tests.engines.vllm_link_checks import WEIGHTS, Bare
from tests.errors import missing_facts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]


@pytest.fixture(scope="module")
def call_worker(ray_session: None) -> Iterator[Callable[..., Any]]:
    """Runs a function of `vllm_link_checks` in a separate process."""
    placement = Placement(device="cpu", pools={"main": [1]}, roles={"vllm": "main"})
    with Cluster(placement, num_threads=1) as cluster:
        group: WorkerGroup = cluster.group("vllm", Bare)
        yield lambda check, *args: group.run(check, *args)[0]


def test_vllm_rejects_inconsistent_metadata(call_worker: Callable[..., Any]) -> None:
    assert "`dtype_names`" in call_worker(vllm_link_checks.update_with_missing_dtype)


def test_a_bucket_has_the_layout_of_vllm(call_worker: Callable[..., Any]) -> None:
    actual = call_worker(vllm_link_checks.unpack_bucket)
    assert list(actual) == list(WEIGHTS)
    assert all(
        torch.equal(actual[name], weight) and actual[name].dtype == weight.dtype for name, weight in WEIGHTS.items()
    )


@pytest.mark.parametrize(("leads", "num_replicas"), [(1, 1), (1, 3), (2, 2)])
def test_every_worker_of_every_replica_has_its_own_rank(
    leads: int, num_replicas: int, call_worker: Callable[..., Any]
) -> None:
    ranks, info = call_worker(vllm_link_checks.transfer_ranks, leads, num_replicas)
    assert [0, *ranks] == list(range(info["world_size"])), "the actor is 0"
    assert (info["master_address"], info["master_port"]) == ("127.0.0.1", 4321)
    assert info["packed"] and info["packed_buffer_size_bytes"] == 1000


def test_an_ipc_bucket_is_loaded_with_tied_weights_under_each_name(call_worker: Callable[..., Any]) -> None:
    loaded = call_worker(vllm_link_checks.load_ipc_bucket)
    assert [name for name, _ in loaded] == ["embed", "head", "third", "norm", "bias"]
    expected = WEIGHTS | dict.fromkeys(("head", "third"), WEIGHTS["embed"])
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded)


def test_the_nccl_receiver_gets_rank_and_buffer_size(call_worker: Callable[..., Any]) -> None:
    assert call_worker(vllm_link_checks.nccl_receiver) == (1000, (3, "parallel"))


def test_a_disabled_communicator_is_an_error(call_worker: Callable[..., Any]) -> None:
    errors = call_worker(vllm_link_checks.errors_of_disabled_nccl)
    assert [missing_facts(error, "rollout.transfer.via", "object_store") for error in errors] == [set(), set()]


def test_vllm_still_has_the_functions_of_the_nccl_transport(call_worker: Callable[..., Any]) -> None:
    """A vLLM version that renames one of them would otherwise fail on GPUs only."""
    expected = {
        "packed_nccl_broadcast_producer": ["iterator", "group", "src", "post_iter_func", "buffer_size_bytes"],
        "PyNcclCommunicator": ["group", "device"],
        "create": ["host", "port", "rank", "world_size"],
        "__init__": ["self", "config", "vllm_config", "device", "model"],
        "init_transfer_engine": ["self", "init_info"],
        "receive_weights": ["self", "update_info"],
        "shutdown": ["self"],
    }
    actual = call_worker(vllm_link_checks.signatures)
    assert {name: actual[name][: len(names)] for name, names in expected.items()} == expected
    assert "listen_socket" in actual["create"]


def test_attention_in_float32_has_no_products_in_tf32(call_worker: Callable[..., Any]) -> None:
    assert call_worker(vllm_link_checks.precision_of_triton) == "ieee"


class SplitRun(RunConfig):
    actor: ActorConfig
    rollout: RolloutConfig


BFLOAT16_RTOL = reduction_rtol(torch.bfloat16, length=1, depth=1)
"""Products accumulate in float32 and round each output once; log-probabilities are mostly log 32, and the logits, which
rounding reaches, are a small part of them."""

DTYPES = pytest.mark.parametrize(("dtype", "limit"), [("float32", FLOAT32_RTOL), ("bfloat16", BFLOAT16_RTOL)])

GPU_DTYPES = pytest.mark.parametrize(("dtype", "limit"), [("float32", TF32_RTOL), ("bfloat16", BFLOAT16_RTOL)])
"""vLLM's float32 attention on a GPU multiplies in TF32."""


def check_updates(
    folder: Path, device: Any, rollout_pool: str, via: str, dtype: Literal["float32", "bfloat16"]
) -> float:
    """Trains, syncs and generates twice; returns the largest relative error of log-probabilities."""
    torch.manual_seed(0)
    # Small weights, so that bfloat16 rounding errors of logits are small.
    sizes = {**SIZES, "initializer_range": 0.05}
    trained = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    tiny.save(trained.to(getattr(torch, dtype)), folder)  # pyright: ignore (transformers narrows `to`)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    pools = {"main": [1]} | ({"other": [1]} if rollout_pool == "other" else {})
    placement = Placement.model_validate(
        {"device": device, "pools": pools, "roles": {"actor": "main", "rollout": rollout_pool}}
    )
    model = ModelConfig(path=folder, dtype=dtype)
    config = SplitRun.model_validate(
        {
            "output": folder / "out",
            "steps": 1,
            "placement": placement,
            "actor": {"model": model, "optimizer": {"lr": 0.005}},
            "rollout": {"engine": "vllm", "max_response_tokens": 12, "transfer": {"via": via, "bucket_mb": 0.05}},
        }
    )
    rows = [{"prompt_ids": ids, "prompt_id": i, "sample": 0} for i, ids in enumerate(PROMPTS)]
    with Cluster(placement, dedicated=("rollout",), num_threads=1) as cluster:
        actor = cluster.group("actor", Actor, config.actor)
        rollout = cluster.group("rollout", Rollout, config.rollout, model, seed=0)
        weight_sync, prompts, errors = WeightSync(config, cluster.plan), Batch.from_rows(rows), []
        responses = rollout.generate(prompts)
        for version in (1, 2):
            actor.update(responses, LANGUAGE_MODELING).get()
            weight_sync.send(actor, rollout, version)
            (compared,) = rollout.check_weights(actor.weight_samples(version, subset=0, num_subsets=1)).get()
            assert compared.count > 20 and not compared.unreached
            before, responses = responses, rollout.generate(prompts)
            assert set(responses.get("weight_version").tolist()) == {-1, version}
            mask = responses.get("response_mask")
            logprobs = actor.logprobs(responses).get("logprobs")
            errors.append(relative_error(responses.get("rollout_logprobs")[mask], logprobs[mask]))
            moved = actor.logprobs(before).get("logprobs") - before.get("rollout_logprobs")
            assert moved[before.get("response_mask")].abs().mean() > 0.05, "the step changed nothing that would show"
    return max(errors)


@pytest.mark.slow
@DTYPES
def test_an_update_through_the_object_store_arrives(
    dtype: Any, limit: float, ray_session: None, tmp_path: Path
) -> None:
    assert check_updates(tmp_path / "model", "cpu", "other", "auto", dtype) < limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@GPU_DTYPES
def test_an_update_through_cuda_ipc_arrives(dtype: Any, limit: float, ray_session: None, tmp_path: Path) -> None:
    assert check_updates(tmp_path / "model", "cuda", "main", "cuda_ipc", dtype) < limit


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@GPU_DTYPES
def test_an_update_through_nccl_arrives(dtype: Any, limit: float, ray_session: None, tmp_path: Path) -> None:
    assert check_updates(tmp_path / "model", "cuda", "other", "nccl", dtype) < limit
