"""The data of a run, read and validated before the run starts.

Entry points: `read_prompts` (prompts of reinforcement learning), `read_held_out` (only prompts of evaluations),
`SftExamples` (SFT examples and text), `PtxText` (text of PTX), `read_rows` (tokenized_data.py: tokenized rows of any
kind).
May import `flowrl.algorithms`, `flowrl.config`, `flowrl.data`, `flowrl.environments.base`, `flowrl.memory`,
`flowrl.rewards` and, for types, `flowrl.workers`.
"""

from flowrl.run.datasets.examples import PtxText, SftExamples
from flowrl.run.datasets.prompt_data import read_held_out, read_prompts

__all__ = ["PtxText", "SftExamples", "read_held_out", "read_prompts"]
