"""Names and shapes of a model's weights in its files.

For some families, transformers combines several entries of the files into one weight of the model. For example, the
files of a mixture of experts have one matrix per expert and projection. The model has one weight [E, R, C] for all
experts of a layer. For example, `gate_up_proj[e]` has the rows of the gate matrix of expert e, then the rows of the up
matrix. `file_parts` returns the file entries of each weight. A rank uses them to read only its shard. A weight sync
uses them to send weights to vLLM by their names in the files.

Shape suffixes: E experts, R rows and C columns of the matrices of an expert.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from flowrl.engines.models.weights import unique_weights


@dataclass(frozen=True)
class FilePart:
    """A file entry that contains a complete weight, or consecutive rows of one expert of a weight [E, R, C]."""

    name: str
    """Name in the files."""
    shape: tuple[int, ...]
    expert: int | None = None
    """Index of the expert. None if the part is the complete weight."""
    first_row: int = 0
    """Index of the first row in the matrix of the expert."""

    def select(self, weight: Tensor) -> Tensor:
        """Returns the part of a full weight, without a copy."""
        if self.expert is None:
            return weight
        return weight[self.expert, self.first_row : self.first_row + self.shape[0]]


def file_parts(model: PreTrainedModel) -> dict[str, tuple[FilePart, ...]]:
    """Returns the file entries of each weight and persistent buffer, by name. A tied weight appears under the first of
    its names.

    The result omits weights that transformers converts by another operation than stacking, such as a transposition.
    """
    weights = unique_weights(model)
    shapes, names = {name: tuple(weight.stored.shape) for name, weight in weights.items()}, list(weights)
    # Rows of probes have their numbers as values, so the converted probes show which rows of which weight each entry
    # has.
    probes = {name: _number_rows(i, shapes[name]) for i, name in enumerate(names)}
    renamed = {id(probe): name for name, probe in probes.items()}
    parts: dict[str, list[FilePart]] = {}
    for file_name, probe in revert_weight_conversion(model, dict(probes)).items():
        if id(probe) in renamed:
            name = renamed[id(probe)]
            parts.setdefault(name, []).append(FilePart(file_name, shapes[name]))
        elif (found := _find_rows(probe)) is not None:
            index, first, num_rows = found
            name = names[index]
            expert, first_row = divmod(first, shapes[name][1])
            parts.setdefault(name, []).append(FilePart(file_name, (num_rows, shapes[name][2]), expert, first_row))
    return {name: tuple(found) for name, found in parts.items() if _is_complete(found, shapes[name])}


def converted_parts(model: PreTrainedModel) -> dict[str, tuple[FilePart, ...]]:
    """Returns the items of `file_parts` for weights whose name or shape differs between the model and the files."""
    return {name: parts for name, parts in file_parts(model).items() if [part.name for part in parts] != [name]}


def split_parts(
    weights: Iterable[tuple[str, Tensor]], parts: Mapping[str, Sequence[FilePart]]
) -> Iterator[tuple[str, Tensor]]:
    """Splits full weights into file entries (name, tensor), without copies. A weight that is not in `parts` is yielded
    unchanged.
    """
    for name, weight in weights:
        if name not in parts:
            yield name, weight
        for part in parts.get(name, ()):
            yield part.name, part.select(weight)


def _number_rows(index: int, shape: tuple[int, ...]) -> Tensor:
    """For a weight [E, R, C], returns two numbers per row, [E, R, 2]: the row's number from 0 to E x R - 1, and
    `index`. For other weights, returns a meta tensor.
    """
    if len(shape) != 3:
        return torch.empty(shape, device="meta")
    numbers_ER = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape[:2])
    return torch.stack([numbers_ER, torch.full_like(numbers_ER, index)], dim=-1)


def _find_rows(probe: Tensor) -> tuple[int, int, int] | None:
    """Returns (index of the weight, number of the first row, number of rows) of an entry. Returns None unless the entry
    has consecutive rows of one weight.
    """
    if probe.is_meta or probe.ndim != 2 or probe.shape[1] != 2:
        return None
    rows_R, indices_R = probe.unbind(-1)
    first, index = int(rows_R[0]), int(indices_R[0])
    is_consecutive = torch.equal(rows_R, torch.arange(first, first + len(rows_R), dtype=rows_R.dtype))
    return (index, first, len(rows_R)) if is_consecutive and bool((indices_R == index).all()) else None


def _is_complete(parts: Sequence[FilePart], shape: tuple[int, ...]) -> bool:
    """Returns whether `parts` consist of one complete weight, or of all rows of all experts without duplicates."""
    if parts[0].expert is None:
        return len(parts) == 1
    if any(part.expert is None or part.first_row + part.shape[0] > shape[1] for part in parts):
        return False
    rows = {(part.expert, row) for part in parts for row in range(part.first_row, part.first_row + part.shape[0])}
    return len(rows) == sum(part.shape[0] for part in parts) == shape[0] * shape[1]
