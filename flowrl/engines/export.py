"""A policy out of a checkpoint: a `save_pretrained` folder, whatever number of ranks wrote the checkpoint."""

from pathlib import Path
from typing import Any

import torch

from flowrl.data.files import CheckpointError
from flowrl.engines.checkpoint import MODEL
from flowrl.engines.models import model_of, save_model
from flowrl.engines.shards import dtype_of, read_index, read_into

DESCRIPTION = "model"
"""Folder in that of the actor: config and tokenizer."""

_POLICY = MODEL + "language_model."
"""What the weights' names begin with in an actor's checkpoint."""


def export_policy(checkpoint: Path, output: Path) -> None:
    """Writes the policy of an actor's folder so that transformers loads it. Needs memory for its weights once.

    Args:
        checkpoint: what `Actor.save_checkpoint` wrote.
        output: a folder that does not exist yet; it appears whole or not at all.
    Raises:
        CheckpointError: there is no such policy.
        ModelError: `output` exists already.
    """
    described = checkpoint / DESCRIPTION
    if not (described / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} describes no language model: only what an Actor saved is exported")
    index = read_index(checkpoint)
    weights: dict[str, Any] = {
        name: torch.empty(stored["size"], dtype=dtype_of(stored["dtype"]))
        for name, stored in index.tensors.items()
        if name.startswith(_POLICY)
    }
    read_into(weights, checkpoint, index, None)
    model = model_of(described, {name.removeprefix(_POLICY): weight for name, weight in weights.items()})
    output.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, described, output)
