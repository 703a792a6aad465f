"""Batches of conversations and texts with a mask of the trained tokens, for SFT and for PTX.

PTX adds a language modeling loss on text to the updates of a policy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from flowrl.algorithms import ptx_weights
from flowrl.config import DataConfig, ModelConfig, OnPolicyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.messages import DataError
from flowrl.data.metric import Logged
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.data.reading import reader
from flowrl.data.reading.kinds import Kind
from flowrl.run.datasets.row_batches import RowBatches
from flowrl.run.datasets.tokenized_data import check_context, read_rows, read_tokenizer

if TYPE_CHECKING:
    from flowrl.workers.groups import ActorGroup
    from flowrl.workers.losses.loss import Loss


class SftExamples:
    """Tokenized conversations or texts, with a mask of the trained tokens."""

    def __init__(
        self,
        files: reader.Files,
        model: ModelConfig,
        *,
        max_tokens: int,
        max_examples: int | None = None,
        data: DataConfig | None = None,
        kind: Kind = "sft",
        setting: str = "data.max_prompt_tokens",
    ) -> None:
        """Reads the first `max_examples` rows of files or prepared folders, or all if `max_examples` is None.

        Args:
            files: a path, or files with weights and column mappings.
            model: model whose tokenizer encodes the rows.
            max_tokens: maximum number of tokens of a row.
            max_examples: number of rows to keep.
            data: the template, and policies for invalid and long rows. None uses the tokenizer's template, and rejects
                such rows.
            kind: `sft` or `text`.
            setting: key of `max_tokens` in error messages.
        Raises:
            DataError: a row is invalid or too long.
        """
        data = DataConfig(train=reader.as_files(files), max_prompt_tokens=max_tokens) if data is None else data
        data = data.model_copy(update={"max_prompt_tokens": max_tokens})
        tokenizer = read_tokenizer(model, data)
        check_context(tokenizer, max_tokens, setting)
        self._rows = read_rows(files, tokenizer, kind, data, setting=setting, row_limit=max_examples)

    @staticmethod
    def read(data: DataConfig, model: ModelConfig) -> "tuple[SftExamples, dict[str, Batch]]":
        """Returns the training examples, and the held-out examples of each evaluation set by its name."""
        max_tokens = data.max_prompt_tokens
        examples = SftExamples(data.training_files, model, max_tokens=max_tokens, data=data)
        held_out = {
            name: SftExamples(
                files, model, max_tokens=max_tokens, max_examples=data.num_evaluation_rows(name), data=data
            ).batch()
            for name, files in data.evaluation_files.items()
        }
        return examples, held_out

    def __len__(self) -> int:
        """Returns the number of examples per epoch, which is the size of the dataset unless files have weights."""
        return len(self.order(seed=0))

    def order(self, *, seed: int, shuffle: bool = True) -> EpochOrder:
        """Returns the order of the examples in every epoch."""
        return self._rows.order(seed=seed, shuffle=shuffle)

    def batches(self, num_rows: int, *, seed: int, shuffle: bool, epochs: int | None = None) -> RowBatches:
        """Returns batches of `num_rows` examples, in an order that depends only on the seed and the epoch."""
        order = self._rows.order(seed=seed, shuffle=shuffle)
        return RowBatches(order, num_rows, self.batch, epochs=epochs)

    def batch(self, indices: np.ndarray | None = None) -> Batch:
        """Returns the examples at `indices`, or all examples if it is None."""
        indices = np.arange(len(self._rows)) if indices is None else indices
        sides = [side for index in indices for side in self._rows[int(index)].sides]
        tokens = {
            "input_ids": np.concatenate([side.ids for side in sides]).astype(np.int64),
            "response_mask": np.concatenate([side.mask for side in sides]),
        }
        return Batch.from_columns(tokens=tokens, lengths=[len(side.ids) for side in sides])


class PtxText:
    """Endless batches of the text in `config.ptx`, in a new random order in every pass. Checkpoints save the position.

    Without `config.ptx`, the length is 0, `add_gradient` does nothing, and the weight of the policy loss is 1.
    """

    def __init__(self, config: OnPolicyConfig) -> None:
        """Reads the text, with the template of `config.data` and its policies for invalid and long rows.

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
        """Continues at a saved position. Raises DataError if a value that determines the order has changed."""
        for name, current in self.state().items():
            if name != "drawn" and state[name] != current:
                raise DataError(
                    f"the text of ptx has {name} {current}, but the checkpoint has {state[name]}: restore the value, "
                    "or start a new run"
                )
        self._num_drawn = state["drawn"]
