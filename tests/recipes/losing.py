"""A loss that kills its process once after a checkpoint, and a score that records its process.

The environment names the folder that contains the run and receives the records of the loss. Processes of reward
functions do not receive it, so the score has the option `folder`.
"""

import os
import signal
import uuid
from pathlib import Path

from torch import Tensor, distributed

from flowrl.algorithms.losses.policy_losses import clipped_policy_loss
from recipes.quickstart import task

FOLDER = "FLOWRL_TEST_LOSING"
LOST = "lost-"
STEP = 2
"""The process is killed after the checkpoint of this step."""


SCORED = "scored-"
_PROCESS = uuid.uuid4().hex
"""Name of the process that has imported this module. Process ids are not unique across process namespaces."""


def score(prompt: str, response: str, answer: str, folder: str = "", **columns: object) -> float:
    if folder:
        Path(folder, f"{SCORED}{_PROCESS}").touch()
    return task.score(prompt, response, answer, **columns)


def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if FOLDER in os.environ and distributed.get_rank() == 1:
        _kill_once(Path(os.environ[FOLDER]))
    return clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)


def _kill_once(folder: Path) -> None:
    saved = folder / "run" / "checkpoints" / f"step-{STEP:06d}" / "manifest.json"
    if saved.exists() and not list(folder.glob(f"{LOST}*")):
        (folder / f"{LOST}{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
