"""What a rollout with transformers takes: keys and values of all rows, as flowrl/engines/kv_cache.py makes room for
them, and what a prefill or a decode step holds beside that. In bytes."""

from dataclasses import dataclass

from flowrl.config import RolloutConfig
from flowrl.run.activations import run_bytes
from flowrl.run.model_size import ModelSize
from flowrl.run.role_memory import Call, RoleMemory, RoleModel

SLOT_MULTIPLE = 32
"""Of flowrl/engines/kv_cache.py."""

MIN_ROWS = 16
PREFILL_TOKENS = 16384
"""Of flowrl/engines/hf_rollout.py."""

SAMPLED_ELEMENTS = 2**22
"""Probabilities that are worked on at a time (flowrl/engines/sampling.py)."""


@dataclass(frozen=True)
class Prompts:
    """What one rank answers in a call, as far as known."""

    rows: int
    different: int
    """Prompts among the rows that differ: each is prefilled once."""
    longest: int
    """Tokens of the longest prompt."""


def rollout_role(
    size: ModelSize, item: int, config: RolloutConfig, prompts: Prompts, lender: RoleModel | None
) -> RoleMemory:
    """A rollout with weights of its own, or beside an actor with those of the actor.

    Args:
        item: bytes of a parameter.
    """
    generate = Call(
        "generate",
        activations=_largest_step(size, item, config, prompts),
        whole=0 if lender is None else _borrowed(lender),
        cache=cache_bytes(size, item, config, prompts),
    )
    weights = size.parameters * item if lender is None else 0
    return RoleMemory(weights, 0, (generate,), borrows=lender is not None)


def cache_bytes(size: ModelSize, item: int, config: RolloutConfig, prompts: Prompts) -> int:
    """Keys and values, while one layer's are copied into more slots."""
    slots, before = num_slots(prompts.longest, config.max_response_tokens)
    a_slot = 2 * size.keys * item * _rows(config, prompts)
    return a_slot * (size.layers * slots + before)


def num_slots(prompt: int, response: int) -> tuple[int, int]:
    """(slots of each row at the end, before they last grew): they double when the longest row needs one more."""
    # The last token of a response is said and not run.
    needed = _round_up(max(prompt + response - 1, prompt))
    slots = before = _round_up(prompt)
    while slots < needed:
        before, slots = slots, 2 * (slots + SLOT_MULTIPLE)
    return slots, before


def _largest_step(size: ModelSize, item: int, config: RolloutConfig, prompts: Prompts) -> int:
    rows, vocabulary = _rows(config, prompts), size.vocabulary
    slots, _ = num_slots(prompts.longest, config.max_response_tokens)
    together = min(PREFILL_TOKENS, prompts.different * _round_up(prompts.longest))
    prefill = together * run_bytes(size, "plain" if item == 4 else "half")
    # Scores and weights of one layer's attention, and the mask.
    attention = rows * slots * (2 * size.heads * item + 1 + item)
    # Logits of this step and of the one before; of some rows probabilities, in float64 their sums, log-probabilities.
    sampled = min(rows, max(1, SAMPLED_ELEMENTS // vocabulary)) * vocabulary
    logits = 2 * rows * vocabulary * item + sampled * (16 + (4 if item == 2 else 0))
    return max(prefill, attention, logits)


def _borrowed(lender: RoleModel) -> int:
    if lender.is_cut:
        return lender.whole
    return lender.merged


def _rows(config: RolloutConfig, prompts: Prompts) -> int:
    return max(MIN_ROWS, min(config.max_rows, prompts.rows))


def _round_up(number: int) -> int:
    return -(-number // SLOT_MULTIPLE) * SLOT_MULTIPLE
