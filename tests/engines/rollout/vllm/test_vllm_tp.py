"""Real vLLM with tensor parallelism: a leader process and one worker process per device, with a common lifetime."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from flowrl import Cluster, Placement
from flowrl.config import ModelConfig, RolloutConfig
from flowrl.config.base import Device
from flowrl.config.placement import RolePlacement
from flowrl.controller.errors import FlowError
from flowrl.engines.models.weights import export_weights
from flowrl.workers import Rollout
from tests.engines import tiny, vllm_checks
from tests.engines.closeness import FLOAT32_RTOL
from tests.engines.rollout.vllm.test_engine import PROMPTS, RESPONSE, SIZES, TF32_RTOL, Pair, check_sleep_by_tags

pytestmark = [
    pytest.mark.slow,  # the first engine with two workers takes 100 s to start
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

LED = RolePlacement(pool="main", tp=2)
ENDS_WITHIN_S = 60


def save(folder: Path, **settings: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**SIZES, **settings}, tie_word_embeddings=True)).eval()
    tiny.save(model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return model


@contextmanager
def open_tp_pair(folder: Path, device: Device = "cpu", led: RolePlacement = LED) -> Iterator[Pair]:
    model = save(folder)
    config = RolloutConfig(engine="vllm", max_response_tokens=RESPONSE)
    placement = Placement(device=device, pools={"main": [2]}, roles={"rollout": led})
    with Cluster(placement, dedicated=("rollout",), num_threads=2) as cluster:
        yield Pair(cluster.group("rollout", Rollout, config, ModelConfig(path=folder), seed=0), model)


@pytest.fixture(scope="module")
def tp_pair(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    before = hosts_of_tests()  # processes of a closed cluster may still be ending
    with open_tp_pair(tmp_path_factory.mktemp("vllm")) as opened:
        yield opened
        hosts = [process for process in hosts_of_tests() if process not in before]
        processes = [*hosts, *(process for host in hosts for process in started_by(host))]
    assert hosts and all_end(processes), "processes of vLLM outlived the cluster"


def hosts_of_tests() -> list[psutil.Process]:
    return [process for process in started_by(psutil.Process()) if "ray::_RayHost" in process.name()]


def leader_of(pair: Pair) -> psutil.Process:
    (process_id,) = pair.group.run(vllm_checks.process_id)
    return psutil.Process(process_id)


def started_by(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def workers_of(leader: psutil.Process) -> list[psutil.Process]:
    return [process for process in started_by(leader) if "Worker" in " ".join(process.cmdline())]


def all_end(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.1)
    return False


def check_updates(pair: Pair) -> None:
    """Checks that two devices generate with the weights of transformers, before and after two updates."""
    assert len(workers_of(leader_of(pair))) == 2
    for seed in range(3):
        if seed:
            pair.sync(seed)
        for greedy in (False, True):
            found = pair.generate(PROMPTS, greedy=greedy)
            assert pair.relative_error(PROMPTS, found) < FLOAT32_RTOL
            assert {version for row in found["versions"] for version in row} == {pair.version}


def test_tp_responses_match_transformers_before_and_after_updates(tp_pair: Pair) -> None:
    check_updates(tp_pair)


def test_stages_match_transformers_before_and_after_updates(ray_session: None, tmp_path: Path) -> None:
    """Each stage loads only the weights of its layers, and two batches are in the pipeline."""
    with open_tp_pair(tmp_path / "model", led=RolePlacement(pool="main", pp=2)) as pair:
        check_updates(pair)


def test_shared_memory_of_the_workers_is_unlinked(tp_pair: Pair) -> None:
    tp_pair.generate(PROMPTS)
    leader = leader_of(tp_pair)
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (leader, *workers_of(leader))]
    found = [line.split(maxsplit=5) for text in maps for line in text.splitlines() if "/dev/shm/" in line]
    # Messages are in segments psm_*. Builds of vLLM for CPUs with AVX-512 also add tensors in segments vllm_*.
    expected = {"psm", "vllm"} if torch.backends.cpu.get_cpu_capability() == "AVX512" else {"psm"}
    assert expected <= {path.removeprefix("/dev/shm/").split("_")[0] for *_, path in found}
    assert not {int(inode) for *_, inode, _ in found} & {segment.inode() for segment in os.scandir("/dev/shm")}


def test_sockets_of_the_workers_are_unlinked(tp_pair: Pair) -> None:
    tp_pair.generate(PROMPTS)
    leader = leader_of(tp_pair)
    processes = (leader, *workers_of(leader))
    sockets = [str(one.laddr) for process in processes for one in process.net_connections("unix")]
    paths = {Path(path) for path in sockets if path.startswith("/")}
    assert paths and not [path for path in paths if path.exists()]


def test_a_failed_tp_update_breaks_the_engine_until_a_complete_one(tp_pair: Pair) -> None:
    first = dict(list(export_weights(tp_pair.model).items())[:5])
    (message,) = tp_pair.group.run(vllm_checks.send_unknown_weight, first)
    assert "nothing" in message and "worker 0" in message
    (message,) = tp_pair.group.run(vllm_checks.error_of, "poll")
    assert "broken" in message
    tp_pair.sync(10)
    assert tp_pair.relative_error(PROMPTS, tp_pair.generate(PROMPTS)) < FLOAT32_RTOL


def test_tp_engine_sleeps_and_wakes_by_tags(tp_pair: Pair) -> None:
    check_sleep_by_tags(tp_pair)
    tp_pair.send()  # updates of a test function are not in the replay log


def test_updates_do_not_leak_memory_in_any_process(tp_pair: Pair) -> None:
    weights = export_weights(tp_pair.model)
    weight_bytes = sum(array.nbytes for array in weights.values())
    processes = workers_of(leader_of(tp_pair))
    tp_pair.group.run(vllm_checks.updates, weights, 10)
    before = [process.memory_info().rss for process in processes]
    tp_pair.group.run(vllm_checks.updates, weights, 40)
    assert max(p.memory_info().rss - b for p, b in zip(processes, before, strict=True)) < 20 * weight_bytes
    tp_pair.send()


def test_a_dead_worker_process_restarts_the_replica(tp_pair: Pair) -> None:
    leader = leader_of(tp_pair)
    old = [leader, *started_by(leader)]
    workers_of(leader)[1].send_signal(signal.SIGKILL)
    assert all_end(old)
    assert tp_pair.relative_error(PROMPTS, tp_pair.generate(PROMPTS)) < FLOAT32_RTOL, (
        "its replacement has other weights"
    )
    assert leader_of(tp_pair).pid != leader.pid


def test_the_error_of_a_worker_that_cannot_start_is_reported(ray_session: None, tmp_path: Path) -> None:
    save(tmp_path / "model", intermediate_size=97)
    config = RolloutConfig(engine="vllm", max_response_tokens=RESPONSE)
    placement = Placement(device="cpu", pools={"main": [2]}, roles={"rollout": LED})
    with Cluster(placement, dedicated=("rollout",), num_threads=2) as cluster:
        group = cluster.group("rollout", Rollout, config, ModelConfig(path=tmp_path / "model"), seed=0)
        with pytest.raises(FlowError, match=r"AssertionError: assert .*tp_size"):
            group.run(vllm_checks.state)


def test_no_worker_outlives_a_killed_leader(tp_pair: Pair) -> None:
    leader = leader_of(tp_pair)
    old = started_by(leader)
    os.kill(leader.pid, signal.SIGKILL)
    assert all_end(old)
    assert leader_of(tp_pair).pid != leader.pid


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_match_transformers_before_and_after_an_update(ray_session: None, tmp_path: Path) -> None:
    with open_tp_pair(tmp_path / "model", "cuda") as pair:
        for seed in range(2):
            if seed:
                pair.sync(seed)
            assert pair.relative_error(PROMPTS, pair.generate(PROMPTS, greedy=True)) < TF32_RTOL
