"""What a rollout with transformers takes: keys and values of all rows (flowrl/engines/rollout/hf/kv_cache.py),
and what a prefill or a decode step holds beside that. In bytes."""

from dataclasses import dataclass

from flowrl.config import RolloutConfig, VllmConfig
from flowrl.memory.activations import run_bytes
from flowrl.memory.model_size import ModelSize
from flowrl.memory.role_memory import Call, Kind, RoleMemory, RoleModel

SLOT_MULTIPLE = 32
"""Of flowrl/engines/rollout/hf/kv_cache.py."""

MIN_ROWS = 16
PREFILL_TOKENS = 16384
"""Of flowrl/engines/rollout/hf/decoder.py."""

SAMPLED_ELEMENTS = 2**22
"""Probabilities that are worked on at a time (flowrl/engines/rollout/sampling.py)."""


VLLM_STEP_TOKENS = 8192
"""Of flowrl/engines/rollout/vllm/engine.py: prompt tokens of one step."""

PRODUCT_ROWS = 4096
"""Of flowrl/engines/models/int8.py: tokens whose sums are integers and floats at once."""

_BITS = {"int8": 8, "fp8": 8, "int4": 4}


@dataclass(frozen=True)
class Prompts:
    """What one rank answers in a call, as far as known."""

    rows: int
    different: int
    """Prompts among the rows that differ: each is prefilled once."""
    longest: int
    """Tokens of the longest prompt."""


def rollout_role(
    size: ModelSize, item: int, config: RolloutConfig, prompts: Prompts, lender: RoleModel | None, kind: Kind
) -> RoleMemory:
    """A rollout with weights of its own, as a quantised one always has, or beside an actor with those of the actor.

    Args:
        item: bytes of a parameter.
    """
    quantized = config.quantization is not None
    whole = 0 if lender is None or quantized else lender.whole if lender.is_cut else lender.merged
    rows = max(MIN_ROWS, min(config.max_num_seqs, prompts.rows))
    different = min(rows, prompts.different)
    slots, before = num_slots(prompts.longest, config.max_response_tokens)
    a_slot = 2 * size.keys * item * size.layers
    prefilled = different * _round_up(prompts.longest)
    begun = rows * _round_up(prompts.longest) if kind == "cuda" else prefilled
    products = min(PRODUCT_ROWS, PREFILL_TOKENS, prefilled) * 8 * size.mlp if quantized else 0
    steps = [
        # Rows that are alike are prefilled once, in places that are there for all.
        (begun * a_slot, _prefill(size, item, prefilled) + products),
        (rows * _touched(slots, prompts, config, kind) * a_slot, _decode(size, item, rows, slots, before)),
    ]
    cache, activations = max(steps, key=sum)
    calls = [Call("generate", activations=activations, whole=whole, cache=cache)]
    if quantized:
        calls.append(Call("set_version" if lender else "load_weights", whole=_quantizing(size, item)))
    weights = weight_bytes(size, item, config.quantization) if lender is None or quantized else 0
    return RoleMemory(weights, 0, tuple(calls), borrows=lender is not None)


def weight_bytes(size: ModelSize, item: int, quantization: str | None) -> int:
    """All weights; a quantised rollout has its layers' matrices in few bits, and a scale per output."""
    if quantization is None:
        return size.parameters * item
    matrices = size.layers * sum(inputs * outputs for _, inputs, outputs in size.linears)
    scales = size.layers * sum(outputs for _, _, outputs in size.linears)
    return (size.parameters - matrices) * item + matrices * _BITS[quantization] // 8 + 4 * scales


def _quantizing(size: ModelSize, item: int) -> int:
    """One weight after another: whole, in float32, its magnitudes, and divided by its scales."""
    largest = max(inputs * outputs for _, inputs, outputs in size.linears)
    return max(size.embedding * item, largest * (8 if item == 4 else 10))


def vllm_role(size: ModelSize, item: int, config: RolloutConfig, devices: int, *, leaves: bool) -> RoleMemory:
    """A rollout with vLLM on one of the devices that a process leads: its part of the weights, and the room for keys
    and values that it takes when it starts; both may leave it while other roles run."""
    step = Call("generate", activations=VLLM_STEP_TOKENS * run_bytes(size, "plain" if item == 4 else "half") // devices)
    cache = int((config.vllm or VllmConfig()).kv_cache_gb * 1e9)
    weights = weight_bytes(size, item, config.quantization)
    return RoleMemory(weights // devices, 0, (step,), leaves=leaves, cache=cache)


def num_slots(prompt: int, response: int) -> tuple[int, int]:
    """(slots of each row at the end, before they last grew): they double when the longest row needs one more."""
    needed, slots = _needed(prompt, response), _round_up(prompt)
    before = slots
    while slots < needed:
        before, slots = slots, 2 * (slots + SLOT_MULTIPLE)
    return slots, before


def _touched(slots: int, prompts: Prompts, config: RolloutConfig, kind: Kind) -> int:
    """Slots that take memory. On the CPU those that nothing was written to do not, until rows leave and others, at most
    three quarters, are copied with all their slots."""
    if kind == "cuda":
        return slots
    return max(_needed(prompts.longest, config.max_response_tokens), 3 * slots // 4)


def _prefill(size: ModelSize, item: int, num_tokens: int) -> int:
    return min(PREFILL_TOKENS, num_tokens) * run_bytes(size, "plain" if item == 4 else "half")


def _decode(size: ModelSize, item: int, rows: int, slots: int, before: int) -> int:
    """Logits of this step and of the one before, and of some rows probabilities, in float64 their sums, and
    log-probabilities; or one layer's scores and weights and the mask; or one layer's keys, copied into more slots."""
    sampled = min(rows, max(1, SAMPLED_ELEMENTS // size.vocabulary)) * size.vocabulary
    logits = 2 * rows * size.vocabulary * item + sampled * (16 if item == 4 else 20)
    attention = rows * slots * (2 * size.heads * item + 1 + item)
    return max(logits, attention, 2 * size.keys * item * rows * before)


def _needed(prompt: int, response: int) -> int:
    """The last token of a response is said and not run."""
    return _round_up(prompt + response - 1)


def _round_up(number: int) -> int:
    return -(-number // SLOT_MULTIPLE) * SLOT_MULTIPLE
