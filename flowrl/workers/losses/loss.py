"""Losses of trained models: a function, the inputs that it reads, and its aggregation to one number.

Shape suffixes: B rows, G groups of rows, L tokens of the longest row of a micro-batch, U units of the loss.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from flowrl.algorithms import aggregate, masked_range
from flowrl.algorithms.registry import aggregation_modes, described, scalar
from flowrl.config import UserError
from flowrl.config.base import AGGREGATIONS, Config
from flowrl.data.metric import Max, Mean, Metric, Min
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.microbatch import Groups, MicroBatch

MASK, GROUPS, TOPK_IDS, TOPK_LOGPROBS = "mask", "groups", "topk_ids", "topk_logprobs"
"""Names of inputs with a special meaning."""


class MaskedMetric(NamedTuple):
    """A metric that is averaged over the tokens, rows or groups in its own mask."""

    values: Tensor
    mask: Tensor
    """Bool tensor with the shape of the values."""


LossFunction = Callable[..., Any]
"""A function of inputs, by name. Returns the loss, or a tuple (loss, dictionary of metrics)."""


Settings = TypeVar("Settings", bound=Config)


class ConfiguredFunction(Generic[Settings]):
    """Base class of loss functions that settings select. Only the settings are pickled: a user's function may be in a
    file that other processes have not imported. Each process therefore imports it again.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[type, tuple[Settings]]:
        return type(self), (self._settings,)


@dataclass(frozen=True)
class Loss:
    """A loss for `forward_backward` and `update`. docs/extend_loss.md describes the inputs of its function.

    The function receives its inputs by the names of its parameters. A parameter with a default is an optional column,
    and keyword-only parameters are settings. The function must be picklable, or defined in the training program.

    Raises UserError if the fields contradict each other or the function.
    """

    function: LossFunction
    """Function that returns the loss per token [B, L], per row [B] or per group [G], as `aggregation` requires, or a
    tuple of the loss and a dictionary of metrics. A metric has the shape of the loss, or the shape [B, L]. A
    `MaskedMetric` is averaged over its own mask."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    _: KW_ONLY
    aggregation: str = "token_mean"
    """Reduction to one number. Per token: the names of `actor.aggregation`, or `module:function`. Per row: `row_mean`.
    Per group: `group_mean`."""
    aggregation_scale: float | None = None
    """Divisor of `seq_mean_token_sum_norm`."""
    mask: str | tuple[str, ...] = "response_mask"
    """Token column of dtype bool that marks the trained tokens. If there are several names, the first that the
    batch has is used."""
    group: str | None = None
    """Row column of integers. Rows with the same value are in the same micro-batch, for losses of pairs or groups."""
    group_size: int | str | None = None
    """Number of rows of every group, or a row column with the number of rows of the row's group. Required with `group`,
    because a missing row would change the loss."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Maps an input to the column that contains it, if the names differ."""
    reads: tuple[str, ...] = ()
    """Inputs of a function that has a `**` parameter. `"name?"` is optional."""
    detached: tuple[str, ...] = ()
    """Computed inputs through which no gradient flows. A detached entropy takes less time."""
    topk: int = 0
    """Number of most likely tokens of the trained model in the inputs `topk_ids` and `topk_logprobs`. 0: `topk_ids` is
    a column, for example of a teacher's most likely tokens."""
    temperature: float | None = None
    """Divisor of the logits. None: the temperature of the role, which is 1 for roles that do not train on rollouts."""
    label: str = ""
    """Part of the names of the metrics, `role/label/metric`, if a step has several losses."""
    name: str = ""
    """Name in error messages. By default the name of the function."""

    def __post_init__(self) -> None:
        known = ("row_mean", "group_mean", *AGGREGATIONS)
        problem = None
        if not callable(self.function):
            raise UserError(f"a loss needs a function, but got a {type(self.function).__name__}: pass Loss(function)")
        if self.aggregation not in known and ":" not in self.aggregation:
            problem = f"has the aggregation {self.aggregation!r}: use {', '.join(known)} or module:function"
        elif (self.aggregation == "seq_mean_token_sum_norm") != (self.aggregation_scale is not None):
            problem = "needs aggregation_scale with the aggregation seq_mean_token_sum_norm, and only with it"
        elif (self.group is None) != (self.group_size is None):
            problem = "needs group and group_size together: the column and the number of rows of a group"
        elif self.group is None and (self.aggregation == "group_mean" or GROUPS in dict(self.inputs)):
            problem = "uses groups of rows: set group to their column, and group_size"
        elif isinstance(self.group_size, int) and self.group_size < 1:
            problem = f"has group_size {self.group_size}: use at least 1"
        problem = problem or _signature_problem(self)
        if problem is not None:
            raise UserError(f"loss {self.display_name} {problem}")

    @classmethod
    def of(cls, loss: object) -> Self:
        """Returns the loss, or `Loss(function)` for a function. Raises UserError for other values."""
        return loss if isinstance(loss, cls) else cls(loss)  # pyright: ignore[reportArgumentType] (checked there)

    @property
    def display_name(self) -> str:
        return self.name or getattr(self.function, "__name__", repr(self.function))

    @cached_property
    def inputs(self) -> tuple[tuple[str, bool], ...]:
        """Inputs of the function, as (name, whether it is required)."""
        named = [(name, p.default is p.empty) for name, p in _parameters(self.function) if _is_input(p)]
        extra = [(name.removesuffix("?"), not name.endswith("?")) for name in self.reads]
        return tuple(dict([*named, *extra]).items())

    def computed_inputs(self, computed: Collection[str]) -> list[str]:
        """Returns the inputs that the worker computes. `computed` contains all inputs that it can compute."""
        can_compute = set(computed) - (set() if self.topk else {TOPK_IDS})
        return [name for name, _ in self.inputs if name in can_compute and name not in self.columns]

    def mask_column(self, available: Collection[str]) -> str:
        """Returns the column of the mask in a batch with the columns `available`."""
        names = (self.mask,) if isinstance(self.mask, str) else self.mask
        return next((name for name in names if name in available), names[-1])

    def read_columns(self, available: Collection[str], computed: Collection[str], role: str) -> tuple[str, ...]:
        """Returns the columns that a call reads.

        Args:
            available: columns of the batch.
            computed: inputs that the worker computes.
            role: name of the worker class in error messages.
        Raises UserError if the batch lacks a required column.
        """
        required = ["input_ids", self.mask_column(available)]
        required += [name for name in (self.group, self.group_size) if isinstance(name, str)]
        if TOPK_LOGPROBS in self.computed_inputs(computed) and not self.topk:
            required.append(self.columns.get(TOPK_IDS, TOPK_IDS))
        own = {MASK, GROUPS, *self.computed_inputs(computed)}
        optional = []
        for name, is_required in self.inputs:
            if name not in own or name in self.columns:
                (required if is_required else optional).append(self.columns.get(name, name))
        for name in required:
            if name not in available:
                raise UserError(
                    f"loss {self.display_name} reads the column {name!r}, which the batch does not have (it has "
                    f"{', '.join(available) or 'no columns'}) and {role} does not compute (it computes "
                    f"{', '.join(computed)}): store it in the batch before the call"
                )
        return tuple(dict.fromkeys([*required, *(name for name in optional if name in available)]))

    @property
    def row_groups(self) -> Groups | None:
        if self.group is None:
            return None
        assert self.group_size is not None
        return Groups(self.group, self.group_size)


def check_weight(weight: object) -> float:
    """Returns the weight of a loss. Raises UserError unless it is a finite number."""
    if isinstance(weight, int | float) and math.isfinite(weight):
        return float(weight)
    raise UserError(f"weight is {weight!r}, but the weight of a loss must be a finite number")


@dataclass(frozen=True)
class BoundLoss:
    """A loss as a function for a training engine, for batches with known columns. Implements `LossTerm`."""

    loss: Loss
    outputs: Outputs
    """Outputs of the model that the loss reads. Their mask marks the trained tokens."""

    @classmethod
    def of(
        cls, loss: Loss, columns: Mapping[str, torch.dtype], computed: Collection[str], temperature: float
    ) -> "BoundLoss":
        """Binds a loss to the columns of a batch.

        Args:
            loss: the loss.
            columns: names and dtypes of the token columns.
            computed: outputs that the engine can compute.
            temperature: divisor of the logits, unless the loss sets another.
        Raises UserError if the mask is not bool.
        """
        mask = loss.mask_column(columns)
        if columns[mask] != torch.bool:
            raise UserError(
                f"the mask {mask!r} of loss {loss.display_name} is {columns[mask]}, but must be bool: convert it with "
                ".bool()"
            )
        names = loss.computed_inputs(computed)
        return cls(
            loss,
            Outputs(
                tuple(names),
                mask,
                temperature if loss.temperature is None else loss.temperature,
                topk=loss.topk or loss.columns.get(TOPK_IDS, TOPK_IDS),
                detached=tuple(name for name in loss.detached if name in names),
            ),
        )

    def __call__(
        self, values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        """Returns a micro-batch's term of the loss, and metrics.

        Args:
            values: outputs of the model.
            micro: the micro-batch.
            counts: denominators of the loss.
        Raises UserError if the function returns a wrong shape, or a loss without a gradient.
        """
        loss, mask_BL = self.loss, self.outputs.mask_of(micro)
        inputs = dict(_select_inputs(loss, values, micro, mask_BL))
        values_U, details, unit_mask = _check_result(loss, loss.function(**inputs, **loss.settings), micro, mask_BL)
        metrics = MeanMetrics({"loss": values_U, **details}, mask_BL, unit_mask)
        return _aggregate(loss, values_U, unit_mask, counts), metrics


def _check_result(
    loss: Loss, result: object, micro: MicroBatch, mask_BL: Tensor
) -> tuple[Tensor, Mapping[str, Tensor | MaskedMetric], Tensor]:
    """Returns the loss per unit (token, row or group), the metrics, and the mask of the units that count."""
    values, details = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    unit_mask, unit = _units(loss, micro, mask_BL)
    expected = f"it must return a loss of shape {list(unit_mask.shape)} (one value per {unit}), or a tuple of the loss "
    expected += "and a dictionary of metrics, which have the same shape or one value per token"
    if not (isinstance(values, Tensor) and values.shape == unit_mask.shape and isinstance(details, Mapping)):
        problem = details if isinstance(values, Tensor) and values.shape == unit_mask.shape else result
        raise UserError(f"loss {loss.display_name} returned {described(problem)}; {expected}")
    for name, value in details.items():
        tensor = value.values if isinstance(value, MaskedMetric) else value
        if not isinstance(tensor, Tensor) or tensor.shape not in (unit_mask.shape, mask_BL.shape):
            raise UserError(f"loss {loss.display_name} returned {described(value)} as metric {name}; {expected}")
    if torch.is_grad_enabled() and not values.requires_grad:
        raise UserError(
            f"loss {loss.display_name} returned a loss without a gradient: compute it from a computed input such as "
            f"logprobs, without detach or no_grad"
        )
    return values, details, unit_mask


class MeanMetrics(Mapping[str, Metric]):
    """The masked mean of each value of a micro-batch, and the minimum and maximum of `ratio`.

    The first read waits for the device. An engine reads the metrics of all micro-batches after the last one.
    """

    def __init__(
        self, values: Mapping[str, Tensor | MaskedMetric], mask_BL: Tensor, unit_mask: Tensor | None = None
    ) -> None:
        """Submits the sums, without a gradient.

        Args:
            values: [B, L] per token, or per row or group with the shape of `unit_mask`. The mask of a `MaskedMetric`
                applies in addition.
            mask_BL: mask of the tokens.
            unit_mask: mask of the rows or groups.
        """
        masks: dict[str, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            tensors[name], mask = value if isinstance(value, MaskedMetric) else (value, None)
            tensors[name] = tensors[name].detach()
            masks[name] = mask_BL if tensors[name].dim() == 2 or unit_mask is None else unit_mask
            masks[name] = masks[name] if mask is None else masks[name] & mask
        sums = [v.masked_fill(~masks[name], 0).sum(dtype=torch.float64) for name, v in tensors.items()]
        kinds = {id(mask): mask for mask in masks.values()}
        order = {key: index for index, key in enumerate(kinds)}
        self._kinds = {name: order[id(mask)] for name, mask in masks.items()}
        """Index of the count of each value's mask."""
        extremes = masked_range(tensors["ratio"], mask_BL) if "ratio" in tensors else ()
        counts = [mask.sum().double() for mask in kinds.values()]
        self._numbers = torch.stack([*counts, *sums, *(x.double() for x in extremes)])
        """Number of values in each mask, sum of each value, and the extremes."""
        self._num_counts = len(kinds)

    @cached_property
    def _metrics(self) -> dict[str, Metric]:
        numbers = self._numbers.tolist()
        totals = zip(self._kinds.items(), numbers[self._num_counts :], strict=False)
        metrics: dict[str, Metric] = {name: Mean(total, numbers[kind]) for (name, kind), total in totals}
        if "ratio" in self._kinds and numbers[self._kinds["ratio"]]:
            metrics |= {"ratio_min": Min(numbers[-2]), "ratio_max": Max(numbers[-1])}
        return metrics

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def _parameters(function: LossFunction) -> list[tuple[str, inspect.Parameter]]:
    return list(inspect.signature(function).parameters.items())


def _is_input(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _signature_problem(loss: Loss) -> str | None:
    """Returns the part of an error message that describes a mismatch between a loss and the function's parameters."""
    parameters = dict(_parameters(loss.function))
    kinds = {parameter.kind for parameter in parameters.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY} & kinds:
        return "has a parameter without a name, but inputs are passed by name: name each parameter"
    has_extra = inspect.Parameter.VAR_KEYWORD in kinds
    if has_extra != bool(loss.reads):
        return "needs reads with a ** parameter, and only with it: the names of the inputs that it receives"
    settings = {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    missing = [name for name, p in settings.items() if p.default is p.empty and name not in loss.settings]
    unknown = [name for name in loss.settings if name not in settings]
    names = dict(loss.inputs)
    unused = [name for name in (*loss.columns, *loss.detached) if name not in names and name != TOPK_IDS]
    if missing:
        return f"requires the settings {', '.join(missing)}: pass them as Loss(function, {{name: value}})"
    if unknown:
        return f"has no settings {', '.join(unknown)} (its settings come after a *: {', '.join(settings) or 'none'})"
    if unused:
        return f"has no inputs {', '.join(unused)}, which columns or detached name (its inputs: {', '.join(names)})"
    return None


def _select_inputs(
    loss: Loss, computed: Mapping[str, Tensor], micro: MicroBatch, mask_BL: Tensor
) -> Iterator[tuple[str, Tensor]]:
    columns = {"input_ids": micro.input_ids} | micro.tokens | micro.rows
    for name, is_required in loss.inputs:
        column = loss.columns.get(name, name)
        if name in loss.columns or name not in (MASK, GROUPS, *computed):
            if column in columns:
                yield name, columns[column]
            elif is_required:
                raise UserError(
                    f"loss {loss.display_name} reads {column!r}, which has no numbers: use a column of tensors"
                )
        elif name == GROUPS:
            assert micro.groups is not None
            yield name, micro.groups
        else:
            yield name, mask_BL if name == MASK else computed[name]


def _units(loss: Loss, micro: MicroBatch, mask_BL: Tensor) -> tuple[Tensor, str]:
    """Returns the mask of the tokens, rows or groups that count, and the name of such a unit."""
    if loss.aggregation == "row_mean":
        return mask_BL.any(-1), "row"
    if loss.aggregation != "group_mean":
        return mask_BL, "token"
    assert micro.groups is not None
    trained_G = mask_BL.new_zeros(micro.num_groups, dtype=torch.int64)
    return trained_G.index_add(0, micro.groups, mask_BL.any(-1).long()) > 0, "group"


def _aggregate(loss: Loss, values: Tensor, unit_mask: Tensor, counts: Denominators) -> Tensor:
    if loss.aggregation in ("row_mean", "group_mean"):
        denominator = counts.rows if loss.aggregation == "row_mean" else counts.groups
        # One token per row or group, so the mean over tokens is the mean over rows or groups.
        return aggregate(values[:, None], unit_mask[:, None], mode="token_mean", denominator=denominator)
    total = aggregation_modes.load(loss.aggregation)(
        loss=values,
        mask=unit_mask,
        denominator=counts.tokens if loss.aggregation == "token_mean" else counts.rows,
        **({} if loss.aggregation_scale is None else {"scale": loss.aggregation_scale}),
    )
    return scalar(total, f"the aggregation {loss.aggregation} of loss {loss.display_name}")
