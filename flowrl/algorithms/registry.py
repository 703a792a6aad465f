"""Registries of algorithm functions, one per kind, from which settings select a function by name.

The module also exports the types of settings, for the parameters of algorithm functions.

`@policy_losses.register("my_loss")` declares a function under a name. A name in the settings is a declared name, or
`module:function` for a user function. flowrl's own functions are imported on first use: the settings read their
declarations from the source (`flowrl.config.algorithm.declarations`). A process that ran the decorator of a user
function accepts its name, and every process accepts `module:name`.

The parameters of an algorithm function before `*` are its inputs, which are names of columns. A parameter with a
default is an optional column. Keyword-only parameters are its settings, except those in `KEYWORD_INPUTS`. Callers pass
all parameters by name.

The functions at the end check the values that algorithm functions return. Their argument `what` is the name of the
function in error messages.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from flowrl.config import (
    AdvantageConfig,
    CorrectionConfig,
    DistillationLossConfig,
    KlControlConfig,
    PolicyLossConfig,
    PreferenceConfig,
    RewardModelLossConfig,
    ShapingConfig,
    UserError,
)
from flowrl.config.algorithm.declarations import declarations
from flowrl.config.algorithm.declared_settings import DeclaredMember, find_problem
from flowrl.config.algorithm.setting_types import (
    Annotated as Annotated,
)
from flowrl.config.algorithm.setting_types import (
    ColumnNames as ColumnNames,
)
from flowrl.config.algorithm.setting_types import (
    Constant as Constant,
)
from flowrl.config.algorithm.setting_types import (
    Fraction as Fraction,
)
from flowrl.config.algorithm.setting_types import (
    Ge as Ge,
)
from flowrl.config.algorithm.setting_types import (
    Gt as Gt,
)
from flowrl.config.algorithm.setting_types import (
    LabelSmoothing as LabelSmoothing,
)
from flowrl.config.algorithm.setting_types import (
    NonNegativeFloat as NonNegativeFloat,
)
from flowrl.config.algorithm.setting_types import (
    Numbers as Numbers,
)
from flowrl.config.algorithm.setting_types import (
    PositiveFloat as PositiveFloat,
)
from flowrl.config.algorithm.setting_types import (
    PositiveInt as PositiveInt,
)
from flowrl.config.base import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    ImportNameError,
    import_function,
    imported_module_name,
    unknown_name,
)

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=DeclaredMember)
S = ParamSpec("S")
A = Any  # an input, in the overloads of `Registry.settings`

KEYWORD_INPUTS = ("denominator", "importance_weights", "trained_mask", "behavior_logprobs", "selected", "reference_kl")
"""Inputs that a function may also have as keyword-only parameters."""


class RegistryError(ValueError):
    """Raised for a name that does not refer to a function, or a function whose signature does not match its kind."""


class Registry(Generic[C]):
    """The functions of one kind, such as policy losses."""

    def __init__(
        self,
        kind: str,
        settings: type[C] | None = None,
        *,
        required: tuple[str, ...] = (),
        optional: tuple[str, ...] | None = (),
        computed: tuple[str, ...] = (),
        variants: tuple[str, str, tuple[str, ...]] | None = None,
    ) -> None:
        """Creates the registry.

        Args:
            kind: name of the kind in error messages.
            settings: base class of the settings of the functions. None: they have no settings.
            required: inputs that every function takes.
            optional: inputs that a function may take. None: any column of the batch.
            computed: names of results, which cannot be inputs.
            variants: a function relative to flowrl.algorithms, a parameter, and its values, which are the names.
        """
        self.kind, self.required, self.optional, self._computed = kind, required, optional, computed
        self._settings, self._variants = settings, variants
        self._registered: dict[str, Callable[..., Any]] = {}
        self._bound: dict[str, Callable[..., Any]] = {}
        self._prepare: dict[Callable[..., Any], Mapping[str, Callable[..., Any]]] = {}
        self._checks: dict[Callable[..., Any], tuple[Callable[..., None], ...]] = {}

    @property
    def _declared(self) -> dict[str, tuple[str, str]]:
        """Name -> module and name of the function, for each function of flowrl."""
        if self._settings is None:
            module, _, function = (self._variants or ("",))[0].partition(":")
            return dict.fromkeys(self._variants[2] if self._variants else (), (f"flowrl.algorithms.{module}", function))
        declared = declarations(self._settings.REGISTRY)
        return {name: (declaration.module, declaration.function) for name, declaration in declared.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names: first the functions of flowrl, then the registered functions of users."""
        return tuple(dict.fromkeys((*self._declared, *self._registered)))

    def register(
        self,
        name: str,
        *,
        prepare: Mapping[str, Callable[..., Any]] | None = None,
        checks: tuple[Callable[..., None], ...] = (),
        bind: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        kl_penalty: bool = False,
        returns_mask: bool = False,
    ) -> Callable[[F], F]:
        """Returns a decorator that declares a function under `name`.

        Args:
            name: an identifier.
            prepare: input -> function that computes it from the whole batch of a step. Its keyword-only parameters are
                further settings.
            checks: functions of settings that raise ValueError. In flowrl, they may also read `samples_per_prompt`,
                `batch_size` and `max_response_tokens`, and use nothing but their parameters.
            bind: keyword arguments under this name, which are not settings.
            defaults: of a function of flowrl, defaults of settings under this name, if they differ from the function's.
            kl_penalty: of an estimator of flowrl, whether it has the settings of a KL penalty in the rewards.
            returns_mask: of a correction of flowrl, whether it returns a mask instead of weights.

        Raises: RegistryError if the name is not an identifier or already in use, if the object is not a function, or if
            its signature does not match the kind.
        """
        if not name.isidentifier():
            raise RegistryError(f"{name!r} is not a valid name for a {self.kind}: use letters, digits and _")

        def add(function: F) -> F:
            if not _is_function(function):
                raise RegistryError(f"{self.kind} {name} is a {type(function).__name__}, but must be a def function")
            known = self._registered.get(name)
            place = (known.__module__, known.__qualname__) if known is not None else self._declared.get(name)
            if place not in (None, (function.__module__, function.__qualname__)):
                raise RegistryError(f"{self.kind} {name} already exists: choose a different name")
            self._check_signature(function, name, prepare or {})
            self._registered[name] = function
            self._bound[name] = functools.partial(function, **bind) if bind else function
            self._prepare[function], self._checks[function] = prepare or {}, checks
            return function

        return add

    def load(self, name: str) -> Callable[..., Any]:  # Any: the signature of the kind
        """Returns the function with this name, or imports it if the name is `module:function`.

        Raises: RegistryError if the name is unknown, the import fails, or the signature does not match the kind.
        """
        if ":" in name:
            return self._load_custom(name)
        if name not in self.names:
            raise RegistryError(unknown_name(self.kind, name, self.names))
        if name not in self._registered:
            module, function = self._declared[name]
            imported = importlib.import_module(module)  # runs the decorators
            if self._variants is not None:
                return functools.partial(getattr(imported, function), **{self._variants[1]: name})
        return self._bound[name]

    def check(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Raises RegistryError unless the function exists, accepts `settings`, and has no other required setting."""
        function = self.load(name)
        parameters, settings = self.parameters(function), settings or {}
        for setting, value in settings.items():
            if setting not in parameters:
                available = ", ".join(parameters) or "none"
                raise RegistryError(f"{self.kind} {name} has no setting {setting}; available: {available}")
            if (problem := find_problem(parameters[setting].annotation, value)) is not None:
                raise RegistryError(f"{self.kind} {name}: {setting} is {value!r}, but {problem}: correct it")
        for setting, parameter in parameters.items():
            if parameter.default is parameter.empty and setting not in settings:
                raise RegistryError(f"{self.kind} {name} requires the setting {setting}")
        values = {setting: parameter.default for setting, parameter in parameters.items()} | dict(settings)
        for check in self._checks.get(_unbound(function), ()):
            try:
                call(check, values, {})
            except ValueError as error:
                raise RegistryError(f"{self.kind} {name}: {error}") from error

    def inputs(self, function: Callable[..., Any]) -> dict[str, bool]:
        """Returns input -> whether it is required, in the order of the function's parameters."""
        return {name: p.default is p.empty for name, p in _parameters(function) if _is_input(name, p)}

    def prepared(self, function: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
        """Returns input -> function that computes it from the whole batch of a step."""
        return self._prepare.get(_unbound(function), {})

    def parameters(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        """Returns the settings of a function, and of the functions that prepare its inputs."""
        functions = (function, *self.prepared(function).values())
        return {name: p for each in functions for name, p in _parameters(each) if not _is_input(name, p)}

    @overload
    def settings(
        self, function: Callable[Concatenate[A, A, A, A, A, A, S], A], /, *_: S.args, **values: S.kwargs
    ) -> C: ...
    @overload
    def settings(
        self, function: Callable[Concatenate[A, A, A, A, A, S], A], /, *_: S.args, **values: S.kwargs
    ) -> C: ...
    @overload
    def settings(self, function: Callable[Concatenate[A, A, A, A, S], A], /, *_: S.args, **values: S.kwargs) -> C: ...
    @overload
    def settings(self, function: Callable[Concatenate[A, A, A, S], A], /, *_: S.args, **values: S.kwargs) -> C: ...
    @overload
    def settings(self, function: Callable[Concatenate[A, A, S], A], /, *_: S.args, **values: S.kwargs) -> C: ...
    @overload
    def settings(self, function: Callable[Concatenate[A, S], A], /, *_: S.args, **values: S.kwargs) -> C: ...
    def settings(self, function: Callable[..., Any], /, *_: Any, **values: Any) -> C:
        """Returns the settings that select a function. The values are its keyword-only parameters.

        The overloads are for functions of 6 to 1 inputs.
        """
        assert self._settings is not None
        place = (function.__module__, getattr(function, "__qualname__", ""))
        names = [name for name, declared in self._declared.items() if declared == place]
        if names:
            return self._settings.select(names[0], **values)
        return self._settings.select(":".join(place), options=values)

    def _load_custom(self, name: str) -> Callable[..., Any]:
        attribute = name.partition(":")[2]
        try:
            function = import_function(name)
        except ImportNameError as error:
            if isinstance(error.__cause__, RegistryError):
                raise error.__cause__ from None
            function = self._bound.get(attribute)  # Importing the module runs its decorators.
            if function is None or self._registered[attribute].__module__ != imported_module_name(name):
                raise RegistryError(f"{self.kind}: {error}") from error
        self._check_signature(function, name, self.prepared(function))
        return function

    def _check_signature(self, function: Callable[..., Any], name: str, prepared: Iterable[str] = ()) -> None:
        variadic = [n for n, p in _parameters(function) if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        inputs = [n for n in self.inputs(function) if n not in variadic]
        known = None if self.optional is None else (*self.required, *self.optional, *KEYWORD_INPUTS, *prepared)
        unknown = [n for n in inputs if n in self._computed or (known is not None and n not in known)] + variadic
        missing = [n for n in self.required if n not in inputs]
        if unknown or missing:
            problem = f"has unknown inputs: {', '.join(unknown)}" if unknown else f"lacks inputs: {', '.join(missing)}"
            required = f"required inputs: {', '.join(self.required) or 'none'}"
            names = "columns of the batch" if self.optional is None else ", ".join(self.optional)
            optional = f"; optional inputs: {names}" if names else ""
            raise RegistryError(f"{self.kind} {name} {problem}; {required}{optional}; settings come after a *")


def call(function: Callable[..., Any], inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Calls a function with those of the inputs and settings that it has. An input that is None is omitted."""
    parameters = _parameters(function)
    given = {name: inputs[name] for name, p in parameters if _is_input(name, p) and inputs.get(name) is not None}
    return function(**{name: settings[name] for name, _ in parameters if name in settings} | given)


def _is_function(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    """Returns the parameters of a function, without parameters that functools.partial binds."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [(name, p) for name, p in inspect.signature(function).parameters.items() if name not in bound]


def _is_input(name: str, parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.KEYWORD_ONLY or name in KEYWORD_INPUTS


advantage_estimators = Registry(
    "advantage estimator",
    AdvantageConfig,
    required=("mask",),
    optional=None,
    computed=("advantages", "returns", "token_rewards"),
)
"""Advantage estimators: (columns, mask) -> advantages [B, T], or (advantages, returns) if `values` is an input.

flowrl.run.advantages lists the inputs that are not columns of the same name, such as `rewards`.
"""

policy_losses = Registry(
    "policy loss", PolicyLossConfig, required=("logprobs", "old_logprobs", "advantages", "mask"), optional=None
)
"""Policy losses: (logprobs, old_logprobs, advantages, mask, columns) -> (loss [B, T], metrics [B, T])."""

kl_kinds = Registry[Any](
    "KL estimator",
    required=("logprobs", "ref_logprobs"),
    variants=("kl.kl_estimates:kl_estimate", "kind", KL_ESTIMATORS),
)
"""KL estimators: (logprobs, ref_logprobs) -> an estimate of the same shape."""

aggregation_modes = Registry[Any](
    "aggregation", required=("loss", "mask", "denominator"), variants=("masking:aggregate", "mode", AGGREGATIONS)
)
"""Aggregations: (loss, mask, *, denominator) -> scalar. The denominator counts tokens for token_mean, and rows
otherwise.
"""

rollout_corrections = Registry(
    "rollout correction",
    CorrectionConfig,
    required=("logprobs", "rollout_logprobs", "mask"),
    optional=("trained_mask",),
)
"""Corrections: (logprobs, rollout_logprobs, mask, trained_mask) -> (weights or bool mask [B, T], metrics). The tokens
of the trained mask are those that other settings keep in the loss.
"""

preference_losses = Registry(
    "preference loss",
    PreferenceConfig,
    optional=(
        *("chosen_logprobs", "rejected_logprobs", "chosen_mean_logprobs", "rejected_mean_logprobs"),
        *("ref_chosen_logprobs", "ref_rejected_logprobs", "chosen_lengths", "rejected_lengths"),
        *("logprobs", "ref_logprobs", "desirable"),
    ),
)
"""Preference losses: (log-probabilities of responses) -> (loss per pair or response, metrics)."""

reward_model_losses = Registry(
    "reward model loss", RewardModelLossConfig, required=("chosen_scores", "rejected_scores"), optional=("margins",)
)
"""Losses of reward models: (scores of the responses of each pair) -> (loss per pair, metrics). The input `margins` is
the column `margin`.
"""

distillation_losses = Registry("distillation loss", DistillationLossConfig, optional=None)
"""Distillation losses: (log-probabilities under student and teacher) -> (loss [B, T], metrics [B, T])."""

kl_controls = Registry("KL control", KlControlConfig, required=("coef",))
"""KL controllers: (initial coef) -> a `KlControl`."""

reward_shaping = Registry(
    "reward shaping", ShapingConfig, required=("rewards",), optional=("lengths", "scores", "groups", "moments")
)
"""Reward shapings: (rewards [B] after the previous shaping) -> rewards [B]. The input `scores` is the original
score.
"""

REGISTRIES = (
    advantage_estimators,
    policy_losses,
    kl_kinds,
    aggregation_modes,
    rollout_corrections,
    preference_losses,
    reward_model_losses,
    distillation_losses,
    kl_controls,
    reward_shaping,
)


def per_token(value: object, mask_BT: Tensor, what: str) -> Tensor:
    """Returns `value`. Raises `UserError` unless it is a tensor with the shape of the mask."""
    if isinstance(value, Tensor) and value.shape == mask_BT.shape:
        return value
    raise UserError(
        f"{what} returned {described(value)}, it must return a tensor [B, T], here {list(mask_BT.shape)}: one value "
        f"per token, and 0 where the mask is false"
    )


def loss_and_metrics(result: object, mask_BT: Tensor, what: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a loss per token and its metrics. Raises `UserError` for a wrong shape or type, or if the loss has no
    gradient.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise UserError(
            f"{what} returned {described(result)}, it must return (loss [B, T], a dictionary of metrics [B, T]); the "
            f"dictionary may be empty"
        )
    loss_BT = per_token(result[0], mask_BT, what)
    if torch.is_grad_enabled() and not loss_BT.requires_grad:
        raise UserError(
            f"{what} returned a loss without a gradient: compute it from logprobs, without detach or no_grad"
        )
    return loss_BT, {name: per_token(value, mask_BT, f"{what} (metric {name})") for name, value in result[1].items()}


def weights_or_mask(result: object, mask_BT: Tensor, what: str) -> Tensor:
    """Returns the weights or the mask of an off-policy correction. Raises `UserError` if a weight is negative or NaN.

    Synchronizes with the device.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"{what} returned {described(result)}, it must return (weights or a bool mask [B, T], a dictionary of "
            f"metrics)"
        )
    weights_BT = per_token(result[0], mask_BT, what)
    if weights_BT.dtype != torch.bool and not bool(((weights_BT >= 0) | ~mask_BT).all()):
        raise UserError(
            f"{what} returned weights that are negative or NaN: a weight is at least 0, and 0 leaves a token out"
        )
    return weights_BT


def scalar(value: object, what: str) -> Tensor:
    """Returns `value`. Raises `UserError` unless it is a scalar tensor."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    raise UserError(
        f"{what} returned {described(value)}, it must return a scalar tensor: the sum divided by denominator"
    )


def described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    return f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, tuple) else "")
