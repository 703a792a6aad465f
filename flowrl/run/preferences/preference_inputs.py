"""Adds the reference's log-probabilities to batches of preferences, and evaluates a model on held-out preferences."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.algorithms import kto_reference_kl
from flowrl.checkpoints.run_folder import replacing
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import make_tensordict, num_rows
from flowrl.run.evaluation import Evaluation
from flowrl.run.loop import Run
from flowrl.run.preferences.preference_examples import MISMATCHED, PreferenceExamples
from flowrl.run.replay.replayed_run import ReplayedRun
from flowrl.workers.losses.preference_losses import REFERENCE

if TYPE_CHECKING:
    from flowrl.workers.groups import ActorGroup, ReferenceGroup, TrainedRewardModelGroup

_STORED = "reference_logprobs.npy"
"""File in the run folder with the log-probabilities of `store_reference`."""

_ROWS_PER_CALL = 256


def preference_inputs(batch: Batch, actor: "ActorGroup", reference: "ReferenceGroup | None") -> Batch:
    """Returns the batch that `actor.update` and `actor.measure` read. Does not block.

    With a reference, adds the column `ref_response_logprobs` if `batch` does not have it. For labeled responses,
    computes the row column `reference_kl` from all mismatched rows of the batch, and drops these rows.
    """
    if reference is not None and REFERENCE not in batch:
        batch[REFERENCE] = reference.response_logprobs(batch)
    if MISMATCHED not in batch:
        return batch
    num_own = len(batch) // 2
    mismatched = batch.rows(slice(num_own, None))
    mismatched = mismatched.union(actor.response_logprobs(mismatched))
    estimated = mismatched.apply(_estimate_kl, ("response_logprobs", REFERENCE), ("reference_kl",))
    own = batch.rows(slice(num_own)).drop(MISMATCHED)
    own["reference_kl"] = estimated["reference_kl"]
    return own


def _estimate_kl(table: TensorDict) -> TensorDict:
    """Returns KTO's estimate of the KL as a column with the same value in each row."""
    kl = kto_reference_kl(table["rows", "response_logprobs"], table["rows", REFERENCE])
    return make_tensordict({"reference_kl": kl.repeat(num_rows(table))})


def store_reference(run: Run, examples: PreferenceExamples, reference: "ReferenceGroup") -> None:
    """Computes the reference's log-probabilities of all pairs before training, so that batches contain them. Blocks.

    A resumed run reads the log-probabilities from the run folder, so that they are bitwise identical to those before
    the resume. A replay computes none, because the recorded batch contains them.
    """
    if isinstance(run, ReplayedRun):
        return
    path = run.folder.path / _STORED
    if run.step and path.exists():
        examples.reference_logprobs = np.load(path)
        return
    rows = np.arange(examples.num_rows)
    batches = [rows[start : start + _ROWS_PER_CALL] for start in range(0, len(rows), _ROWS_PER_CALL)]
    results = [reference.response_logprobs(examples.batch(rows)).get("response_logprobs") for rows in batches]
    examples.reference_logprobs = torch.cat(results).numpy()
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, examples.reference_logprobs)


def evaluate_preferences(
    model: "ActorGroup | TrainedRewardModelGroup",
    examples: Batch | Mapping[str, Batch],
    reference: "ReferenceGroup | None" = None,
) -> Evaluation:
    """Computes the configured loss on held-out pairs or labeled responses, and returns its metrics. Blocks.

    `accuracy` is the fraction of pairs whose chosen response has the higher reward, and `validation_loss` is the loss.
    All other metrics have the prefix `evaluation/`. The metrics of a named set of examples end with `/NAME`.
    """
    sets = {"": examples} if isinstance(examples, Batch) else examples
    metrics: dict[str, float] = {}
    for name, batch in sets.items():
        inputs = batch
        if reference is not None:
            inputs = preference_inputs(batch, cast("ActorGroup", model), reference)  # a reward model has no reference
        for key, metric in model.measure(inputs).get().items():
            short = key.partition("/")[2]
            renamed = {"accuracy": "accuracy", "loss": "validation_loss"}.get(short, f"evaluation/{short}")
            metrics[f"{renamed}/{name}" if name else renamed] = metric.result()
    # A pair has two rows. A labeled response also has two rows: its own and the mismatched one.
    return Evaluation(metrics, sum(len(batch) for batch in sets.values()) // 2)
