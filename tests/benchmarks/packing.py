"""Tokens per second of an optimizer step for rows of different lengths, compared with rows of one length.

python -m tests.benchmarks.packing [--repeats N] [--width N] [--rows N] [--table]

The baseline is a step with rows of one length. It is compared with the same number of tokens in four forms:

- long-tailed lengths (log-normal), packed without padding;
- long-tailed lengths, sorted by length and padded, as the engine does for models that do not support packs;
- long-tailed lengths, padded in their given order, each micro-batch to its longest row;
- rows of one length, packed.

Times are CPU times of one thread, which other programs on the machine affect least.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.data.metric import Mean
from flowrl.engines.train.base import Denominators, mask_outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import MicroBatch, microbatches
from tests.benchmarks.measure import Figure, alone, machine, paired, read_arguments, table
from tests.engines.losses import LOGPROBS
from tests.engines.tables import take_rows

MEDIAN, SPREAD, LONGEST = 96, 0.9, 1024
BUDGET = 4096
VOCABULARY = 1024
BOUND = 1 / 0.85
"""Largest ratio of times, of long-tailed to equal rows. It corresponds to 0.85 of the tokens per second."""


def rows_of(lengths_B: torch.Tensor) -> TensorDict:
    """Returns rows of random tokens; all tokens except the first are trained."""
    total = int(lengths_B.sum())
    mask_T = torch.ones(total, dtype=torch.bool)
    mask_T[torch.cumsum(lengths_B, 0) - lengths_B] = False
    ids_T = torch.randint(VOCABULARY, (total,), generator=torch.Generator().manual_seed(1))
    return make_tensordict({}, {"input_ids": ids_T, "response_mask": mask_T}, lengths_B, len(lengths_B))


def long_tailed(num_rows: int) -> torch.Tensor:
    """Returns lengths like those of responses: most are short, and a few reach the limit."""
    normal_B = torch.randn(num_rows, generator=torch.Generator().manual_seed(0))
    return (MEDIAN * (SPREAD * normal_B).exp()).round().long().clamp(8, LONGEST)


def imitation(values: Mapping[str, torch.Tensor], micro: MicroBatch, counts: Denominators):
    """Returns the cross-entropy over the mask."""
    loss = -values["logprobs"].sum() / counts.tokens
    return loss, {"loss": Mean(float(loss.detach()), 1)}


def in_order(rows: TensorDict) -> Iterator[TensorDict]:
    """Splits rows in their given order into micro-batches within the budget."""
    lengths_B, chosen = lengths(rows).tolist(), []
    for row, length in enumerate(lengths_B):
        if chosen and (len(chosen) + 1) * max(length, *(lengths_B[i] for i in chosen)) > BUDGET:
            yield take_rows(rows, torch.tensor(chosen))
            chosen = []
        chosen.append(row)
    yield take_rows(rows, torch.tensor(chosen))


class Stepper:
    """A model with its optimizer, and timed steps."""

    def __init__(self, width: int, packing: Literal["always", "never"]) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LONGEST,
        )
        self.engine = FsdpEngine(
            PolicyModel(Qwen2ForCausalLM(config)),
            policy_outputs,
            OptimizerConfig(lr=1e-4),
            EngineConfig(max_tokens_per_microbatch=BUDGET, packing=packing),
        )

    def step(self, rows: TensorDict) -> None:
        self.engine.update(rows, imitation, LOGPROBS)

    def padded_passes(self, parts: list[TensorDict]) -> None:
        """Runs the same passes with micro-batches in the given order of rows."""
        for part in parts:
            (micro,) = microbatches(part, 10**9)
            values = mask_outputs(policy_outputs(self.engine.model, micro, LOGPROBS), micro, LOGPROBS)
            imitation(values, micro, Denominators(1, 1))[0].backward()
        self.engine.model.zero_grad()


def measure_forms(width: int, uneven: TensorDict, repeats: int) -> list[Figure]:
    """Compares every form with rows of one length."""
    packed, padded = Stepper(width, "always"), Stepper(width, "never")
    total, num_rows = int(lengths(uneven).sum()), len(lengths(uneven))
    even = rows_of(torch.full((num_rows,), total // num_rows))
    parts = list(in_order(uneven))
    forms: list[tuple[str, Callable[[], object], float | None]] = [
        ("packed", lambda: packed.step(uneven), BOUND),
        ("padded, sorted by length", lambda: padded.step(uneven), None),
        ("padded, unsorted", lambda: padded.padded_passes(parts), None),
        ("equal lengths, packed", lambda: packed.step(even), None),
    ]
    return [
        paired(
            f"{total} tokens, width {width}: {what}", form, lambda: padded.step(even), repeats, bound, time.process_time
        )
        for what, form, bound in forms
    ]


def main() -> None:
    """Prints the figures. The bound limits the time of long-tailed packed rows relative to equal rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, repeats=1, width=64, rows=16)
    torch.set_num_threads(1)
    ran_on, uneven = machine(), rows_of(long_tailed(arguments.rows))
    results = measure_forms(arguments.width, uneven, arguments.repeats)
    unsorted = [micro for part in in_order(uneven) for micro in microbatches(part, 10**9)]
    for what, micros in (("sorted by length", microbatches(uneven, BUDGET)), ("unsorted", unsorted)):
        share = sum(micro.mask.numel() for micro in micros) / int(lengths(uneven).sum())
        results.append(alone(f"tokens with padding, relative to real tokens, {what}, {len(micros)} passes", "x", share))
    text = table(results).replace("raw Ray", "equal lengths") if arguments.table else None
    sys.stdout.write(f"{text or json.dumps({'machine': ran_on, 'figures': results}, indent=2)}\n")


if __name__ == "__main__":
    main()
