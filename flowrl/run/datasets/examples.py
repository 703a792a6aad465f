"""Batches of conversations and texts with a mask of the trained tokens, for SFT and PTX."""

import numpy as np

from flowrl.config import DataConfig, ModelConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.order.epoch_order import EpochOrder
from flowrl.data.reading import reader
from flowrl.data.reading.kinds import Kind
from flowrl.run.datasets.row_batches import RowBatches
from flowrl.run.datasets.tokenized_data import check_context, read_rows, read_tokenizer


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
            model: the model, whose tokenizer is used.
            max_tokens: maximum number of tokens of a row.
            max_examples: number of rows to keep.
            data: the template, and policies for invalid and long rows. None rejects such rows.
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
        """Returns the examples at `indices`, or all examples."""
        indices = np.arange(len(self._rows)) if indices is None else indices
        sides = [side for index in indices for side in self._rows[int(index)].sides]
        tokens = {
            "input_ids": np.concatenate([side.ids for side in sides]).astype(np.int64),
            "response_mask": np.concatenate([side.mask for side in sides]),
        }
        return Batch.from_columns(tokens=tokens, lengths=[len(side.ids) for side in sides])
