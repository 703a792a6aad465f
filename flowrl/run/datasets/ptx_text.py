"""Batches of text for PTX, the language modeling in policy updates."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowrl.algorithms import ptx_weights
from flowrl.config import OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.messages import DataError
from flowrl.data.metric import Logged
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.run.datasets.examples import SftExamples

if TYPE_CHECKING:
    from flowrl.workers.groups import ActorGroup
    from flowrl.workers.losses.loss import Loss


class PtxText:
    """Endless batches of the text in `config.ptx`, in a new random order in every pass. Checkpoints save the position.

    Without `config.ptx`, its length is 0, `add_gradient` does nothing, and the weight of the policy loss is 1.
    """

    def __init__(self, config: OnPolicyConfig) -> None:
        """Reads the text, with the template and the policies of `config.data`.

        Raises DataError if a row is invalid or too long.
        """
        self.policy_weight, self.weight = 1.0, 0.0
        """Weight of the policy loss, and weight of the cross-entropy of the text."""
        self._seed, self._num_drawn, self._num_rows = config.seed, 0, 1
        self._examples: SftExamples | None = None
        self._order = EpochOrder([], seed=config.seed)
        if (ptx := config.ptx) is not None:
            self.policy_weight, self.weight = ptx_weights(coef=ptx.coef, form=ptx.form)
            self._num_rows = ptx.batch_size
            self._examples = SftExamples(
                ptx.training_files,
                config.actor.model,
                max_tokens=ptx.max_tokens,
                data=config.data,
                kind="text",
                setting="ptx.max_tokens",
            )
            self._order = self._examples.order(seed=config.seed)

    def __len__(self) -> int:
        """Returns the number of sequences per pass."""
        return len(self._order)

    def __next__(self) -> Batch:
        """Returns the next batch. It has `ptx.batch_size` sequences, or fewer at the end of a pass."""
        assert self._examples is not None, "the config has no ptx"
        num_batches = -(-len(self) // self._num_rows)
        epoch, index = divmod(self._num_drawn, num_batches)
        self._num_drawn += 1
        return self._examples.batch(self._order.rows(epoch)[index * self._num_rows : (index + 1) * self._num_rows])

    def add_gradient(self, actor: "ActorGroup", loss: "Loss") -> Logged:
        """Adds the gradient of a loss on the next batch, times `weight`, to the gradient of the actor's next update.

        Returns the metrics of the loss for `run.log`, or an empty dictionary without text. Does not block.
        """
        return actor.forward_backward.submit(next(self), loss, weight=self.weight) if len(self) else {}

    def state(self) -> dict[str, int]:
        """Returns the position, and the values that determine the order."""
        return {"drawn": self._num_drawn, "seed": self._seed, "batch_size": self._num_rows, "num_examples": len(self)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues at a saved position. Raises DataError if the order of the text has changed."""
        for name, current in self.state().items():
            if name != "drawn" and state[name] != current:
                raise DataError(
                    f"the text of ptx has {name} {current}, but the checkpoint has {state[name]}: restore the value, "
                    "or start a new run"
                )
        self._num_drawn = state["drawn"]
