"""GPU transports to real vLLM: their parts without a GPU, and end to end with GPUs."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl import Batch, Cluster, Placement, WorkerGroup
from flowrl.config import ActorConfig, ModelConfig, RolloutConfig, RunConfig
from flowrl.controller.worker import Worker
from flowrl.weight_sync.transfer import WeightSync
from flowrl.workers import LANGUAGE_MODELING, Actor, Rollout
from tests.engines import tiny, vllm_link_checks
from tests.engines.closeness import FLOAT32_RTOL, reduction_rtol, relative_error
from tests.engines.rollout.vllm.test_engine import PROMPTS, SIZES, TF32_RTOL
from tests.engines.vllm_link_checks import WEIGHTS, Bare

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


def test_an_ipc_bucket_is_loaded_with_tied_weights_under_each_name(call_worker: Callable[..., Any]) -> None:
    loaded = call_worker(vllm_link_checks.load_ipc_bucket)
    assert [name for name, _ in loaded] == ["embed", "head", "third", "norm", "bias"]
    expected = WEIGHTS | dict.fromkeys(("head", "third"), WEIGHTS["embed"])
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded)


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
    folder: Path,
    device: Any,
    rollout_pool: str,
    transfer: str | dict[str, str],
    dtype: Literal["float32", "bfloat16"],
    num_devices: int = 1,
) -> float:
    """Trains, syncs and generates twice; returns the largest relative error of log-probabilities.

    With several devices, FSDP2 shards the actor over them, and one replica of the rollout uses as many.
    """
    transfer = {"via": transfer} if isinstance(transfer, str) else transfer
    torch.manual_seed(0)
    # Small weights, so that bfloat16 rounding errors of logits are small.
    sizes = {**SIZES, "initializer_range": 0.05}
    trained = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    tiny.save(trained.to(getattr(torch, dtype)), folder)  # pyright: ignore (transformers narrows `to`)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    pools = {"main": [num_devices]} | ({"other": [num_devices]} if rollout_pool == "other" else {})
    roles = {"actor": "main", "rollout": {"pool": rollout_pool, "tp": num_devices}}
    placement = Placement.model_validate({"device": device, "pools": pools, "roles": roles})
    model = ModelConfig(path=folder, dtype=dtype)
    config = SplitRun.model_validate(
        {
            "output": folder / "out",
            "steps": 1,
            "placement": placement,
            "actor": {
                "model": model,
                "optimizer": {"lr": 0.005},
                "engine": {"strategy": "fsdp" if num_devices > 1 else "auto"},
            },
            "rollout": {"engine": "vllm", "max_response_tokens": 12, "transfer": {"bucket_mb": 0.05} | transfer},
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
        assert not any(actor.run(has_vllm))
    return max(errors)


def has_vllm(worker: Worker) -> bool:
    return "vllm" in sys.modules


@pytest.mark.slow
@DTYPES
def test_an_update_through_the_object_store_arrives(
    dtype: Any, limit: float, ray_session: None, tmp_path: Path
) -> None:
    assert check_updates(tmp_path / "model", "cpu", "other", "auto", dtype) < limit


@pytest.mark.slow
@DTYPES
def test_an_update_through_a_broadcast_arrives(dtype: Any, limit: float, ray_session: None, tmp_path: Path) -> None:
    """gloo, which stands for NCCL."""
    assert check_updates(tmp_path / "model", "cpu", "other", "gloo", dtype) < limit


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("senders", ["one", "all"])
def test_the_parts_of_a_sharded_actor_arrive_on_all_devices_of_a_replica(
    senders: Literal["one", "all"], ray_session: None, tmp_path: Path
) -> None:
    """Two ranks with shards send to two tensor-parallel devices."""
    transfer = {"via": "gloo", "senders": senders}
    limit = FLOAT32_RTOL
    assert check_updates(tmp_path / "model", "cpu", "other", transfer, "float32", num_devices=2) < limit


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
