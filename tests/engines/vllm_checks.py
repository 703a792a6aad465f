"""What tests ask of a vLLM rollout, in its own process: functions for `group.run`. The test's own never loads vLLM."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flowrl.config import CheckFailed, UserError
from flowrl.controller.worker import Worker
from flowrl.engines.models.weights import to_tensors
from flowrl.engines.rollout.requests import Prompt
from flowrl.engines.rollout.weight_check import WeightSamples
from flowrl.workers import Rollout

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.engine import VllmRollout

Said = dict[str, list[Any]]
"""Per row its tokens, their log-probabilities, their versions, and whether it was cut off."""


def engine_of(worker: Rollout) -> "VllmRollout":
    engine: Any = worker.engine
    return engine


def says(worker: Rollout, prompts: Sequence[Sequence[int]], rows: Sequence[int], *, greedy: bool = False) -> Said:
    """Responses to prompts whose identities are `rows`."""
    row_B = torch.tensor(rows, dtype=torch.int64)
    found = engine_of(worker).generate(prompts, row_B, torch.zeros_like(row_B), seed=7, greedy=greedy)
    lengths = found.lengths.tolist()
    return {
        "tokens": found.ids(),
        "logprobs": [x.tolist() for x in found.logprobs.split(lengths)],
        "versions": [x.tolist() for x in found.versions.split(lengths)],
        "truncated": found.truncated.tolist(),
    }


def state(worker: Rollout) -> str:
    return engine_of(worker).state.value


def refusal(worker: Rollout, method: str, arguments: Sequence[Any] = ()) -> str:
    """What a method of the engine raises; empty where it does not."""
    try:
        getattr(engine_of(worker), method)(*arguments)
    except UserError as error:
        return str(error)
    return ""


def refused_prompt(worker: Rollout, prompt: Sequence[int]) -> str:
    try:
        says(worker, [prompt], [0])
    except UserError as error:
        return str(error)
    return ""


def fails_in_the_middle(worker: Rollout, weights: dict[str, Any]) -> str:
    """An update that ends with a weight that the model has not; what it raised."""
    engine = engine_of(worker)
    engine.begin_update(50)
    engine.receive({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    try:
        engine.receive({"model.nothing.weight": torch.zeros(3)})
    except Exception as error:  # noqa: BLE001 (vLLM's own, of whatever kind)
        return str(error)
    raise AssertionError("an unknown weight was taken")


def misses_a_part(worker: Rollout, weights: dict[str, Any]) -> str:
    """An update that is committed before all of it has come; what it raised."""
    engine = engine_of(worker)
    engine.begin_update(52)
    engine.receive({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    return refusal(worker, "commit")


def adds_what_does_not_fit(worker: Rollout, longest: int) -> list[str]:
    """What requests that are refused are told, and that none of them is left."""
    engine = engine_of(worker)
    said = [refusal(worker, "add", ([Prompt("long", [2] * longest, key=1)],))]
    engine.add([Prompt("one", [2, 3], key=1)])
    said += [refusal(worker, "add", ([Prompt("one", [2, 3], key=1)],))]
    engine.abort(["one"])
    return [*said, str(engine.num_running)]


def gives_up(worker: Rollout, weights: dict[str, Any]) -> None:
    engine = engine_of(worker)
    engine.begin_update(51)
    engine.receive({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    engine.abort_update()


def keeps_stale_states(worker: Rollout, kept: bool) -> None:
    """Takes the reset of the prefix cache out of the engine, or puts it back."""
    inner: Any = engine_of(worker)._engine
    if kept:
        inner.reset_prefix_cache = lambda **_: True
    else:
        del inner.reset_prefix_cache


def streams(
    worker: Rollout, prompts: Sequence[Sequence[int]], weights: dict[str, Any], version: int, steps: int
) -> list[dict[str, Any]]:
    """Answers as they come, with new weights after a few steps; the last request is dropped."""
    engine = engine_of(worker)
    engine.add(Prompt(f"row-{row}", ids, key=row) for row, ids in enumerate(prompts))
    found = []
    engine.abort([f"row-{len(prompts) - 1}"])
    for _ in range(steps):
        found += engine.poll(0.0)
    engine.begin_update(version)
    engine.receive({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    engine.commit()
    while engine.num_running:
        found += engine.poll()
    return [vars(answer) for answer in found]


def generates_between(worker: Rollout, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> tuple[Said, list[str]]:
    """A batch while requests run, one of which is dropped when it may be finished; what the batch says, and who is
    answered then and afterwards, in order of names."""
    engine = engine_of(worker)
    engine.add(Prompt(f"row-{row}", ids, key=row) for row, ids in enumerate(prompts))
    names = [answer.name for answer in engine.poll(0.0)]
    found = says(worker, prompts, rows)
    engine.abort(["row-0"])
    # Those that the batch has outlived are given at once.
    names += [answer.name for answer in engine.poll(0.0)]
    while engine.num_running:
        names += [answer.name for answer in engine.poll()]
    return found, sorted(names)


def updates(worker: Rollout, weights: dict[str, Any], count: int) -> list[int]:
    """Resident bytes of the process after each of many updates with a generation between them."""
    engine, sizes = engine_of(worker), []
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    for version in range(count):
        engine.begin_update(version)
        engine.receive(tensors)
        engine.commit()
        says(worker, [[2, 3, 4]], [version])
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return sizes


def weight_fault(worker: Rollout, samples: WeightSamples) -> str:
    """The sentence of a check that fails; empty where it passes."""
    try:
        worker.check_weights(samples)
    except CheckFailed as error:
        return str(error)
    return ""


def comparison(worker: Rollout, samples: WeightSamples) -> tuple[int, tuple[str, ...], float]:
    """Weights that were compared, those that could not be, and milliseconds; of a check that passes."""
    started_s = time.perf_counter()
    compared = worker.check_weights(samples)
    return compared.count, compared.unreached, 1e3 * (time.perf_counter() - started_s)


def forgets_tied(worker: Rollout) -> None:
    """From here on a tied weight is given to vLLM under one of its names only."""
    engine_of(worker)._also = {}


def forgets_biases(worker: Rollout) -> None:
    """Takes the biases out of the first layer's attention, where vLLM computes with them."""
    engine_of(worker)._engine.collective_rpc(_forget_biases)


def _forget_biases(wrapped: Any) -> None:
    wrapped.worker.model_runner.model.model.layers[0].self_attn.qkv_proj.bias.data.zero_()


def sleeps_in_parts(worker: Rollout, weights: dict[str, Any], version: int) -> list[str]:
    """Sleeps, takes an update with its weights alone awake, sleeping once in the middle of it, and wakes up whole; its
    state, or what it refuses, at each point."""
    engine, said = engine_of(worker), list[str]()
    tensors = [(name, torch.from_numpy(array.copy())) for name, array in weights.items()]
    engine.sleep()
    said += [state(worker), refusal(worker, "poll"), refusal(worker, "begin_update", (version,))]
    engine.wake(("weights",))
    said += [state(worker), refusal(worker, "poll")]
    engine.begin_update(version)
    engine.receive(dict(tensors[:5]))
    said += [state(worker)]
    engine.sleep()
    said += [state(worker), refusal(worker, "receive", ({},)), refusal(worker, "commit")]
    engine.wake(("weights",))
    engine.receive(dict(tensors[5:]))
    engine.commit()
    said += [state(worker), refusal(worker, "poll"), refusal(worker, "wake", (("weights",),))]
    engine.wake(("kv_cache",))
    return [*said, state(worker)]


def process_id(worker: Rollout) -> int:
    return os.getpid()


def free_memory(worker: Worker) -> int:
    """Bytes of the GPU that nobody has."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def quantization_errors(worker: Rollout, weights: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each kind of layer that is quantised the largest error of a weight, in steps of int8 or as a share for fp8,
    and the largest magnitude of a stored number."""
    inner: Any = engine_of(worker)._engine
    (found,) = inner.collective_rpc(_quantization_errors, args=(dict(to_tensors(weights)),))
    return found


def _quantization_errors(wrapped: Any, weights: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, layer in wrapped.worker.get_model().named_modules():
        weight = getattr(layer, "weight", None)
        if not name.endswith("_proj") or weight is None:
            continue
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        prefix, _, kind = name.rpartition(".")
        exact = torch.cat([weights[f"{prefix}.{part}.weight"].float() for part in parts.get(kind, (kind,))])
        if weight.dtype == torch.float8_e4m3fn:
            stored, scale = weight.float().t(), layer.weight_scale
            # Below the smallest normal number steps are no share of it.
            errors = (stored * scale - exact).abs() / exact.abs().clamp_min(scale * 2**-6)
        else:
            stored, scale = weight.qdata.float(), weight.scale.float().reshape(-1, 1)
            errors = (stored * scale - exact).abs() / scale
        worst, top = found.get(kind, (0.0, 0.0))
        found[kind] = max(worst, float(errors.max())), max(top, float(stored.abs().max()))
    return found
