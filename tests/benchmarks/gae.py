"""GAE of padded rewards and values, compared with a NumPy loop over rows and a torch loop over time.

python -m tests.benchmarks.gae [--repeats N] [--threads N]
"""

import argparse
import json
import sys

import numpy as np
import torch
from torch import Tensor

from flowrl.algorithms import gae
from tests.benchmarks.measure import machine, median_ms, paired, read_arguments

GAMMA, LAM = 0.99, 0.95
LOOP_ROWS = 64
"""Number of rows of the NumPy loop. Its time is extrapolated to all rows."""


def numpy_loop(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes the recursion of the paper row by row and token by token."""
    advantages = np.zeros_like(rewards)
    for row in range(len(rewards)):
        carry = next_value = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                delta = rewards[row, t] + GAMMA * next_value - values[row, t]
                carry = delta + GAMMA * LAM * carry
                next_value = values[row, t]
                advantages[row, t] = carry
    return advantages


def torch_loop(rewards_BT: Tensor, values_BT: Tensor, mask: Tensor) -> Tensor:
    """Computes all rows at once, with a loop over the columns of [B, T]."""
    carry_B = next_value_B = rewards_BT.new_zeros(len(rewards_BT))
    columns = []
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + GAMMA * next_value_B - values_BT[:, t]
        carry_B = torch.where(mask[:, t], delta_B + GAMMA * LAM * carry_B, carry_B)
        next_value_B = torch.where(mask[:, t], values_BT[:, t], next_value_B)
        columns.append(torch.where(mask[:, t], carry_B, 0))
    return torch.stack(columns[::-1], 1)


def main() -> None:
    """Prints medians in milliseconds and the differences of the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    arguments = read_arguments(parser, repeats=1, rows=64, positions=256)
    torch.set_num_threads(arguments.threads)
    rows, positions = arguments.rows, arguments.positions
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, rows, positions, generator=generator)
    mask = torch.rand(rows, positions, generator=generator) < 0.9
    few = [tensor[:LOOP_ROWS].numpy() for tensor in (rewards, values, mask)]

    ours = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)[0]
    differences = {
        "numpy loop": float(np.abs(ours[:LOOP_ROWS].numpy() - numpy_loop(*few)).max()),
        "torch loop": float((ours - torch_loop(rewards, values, mask)).abs().max()),
    }
    figure = paired(
        f"gae of [{rows}, {positions}]; raw is a torch loop over time",
        lambda: gae(rewards, values, mask, gamma=GAMMA, lam=LAM),
        lambda: torch_loop(rewards, values, mask),
        arguments.repeats,
        bound=1.0,
    )
    loop_ms = median_ms(lambda: numpy_loop(*few), 1) * rows / LOOP_ROWS
    report = {
        "machine": machine() | {"threads": str(arguments.threads)},
        "figures": [figure],
        "numpy_loop_ms": round(loop_ms),
        "numpy_loop_ratio": round(loop_ms / figure["ours"]),
        "largest_difference": differences,
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
