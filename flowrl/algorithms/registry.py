"""Registries of algorithm functions, one per kind, from which settings select a function by name.

A name is either a key of a registry or `module:function` for a user function. The modules of the included functions are
imported on first use. `@policy_losses.register("my_loss")` registers a user function. The process that ran the
decorator accepts the name `my_loss`, and every process accepts `module:my_loss`.

The parameters of an algorithm function before `*` are its inputs. Keyword-only parameters are its settings, unless the
registry declares them as inputs. Callers pass all parameters by name.

The functions at the end check the values that algorithm functions return. Their argument `what` is the name of the
function in error messages.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.config import UserError
from flowrl.config.base import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    ImportNameError,
    import_attribute,
    import_function,
    imported_module_name,
    unknown_name,
)

F = TypeVar("F", bound=Callable[..., Any])

Target = str | tuple[str, Mapping[str, Any]]
"""`module:function` relative to flowrl.algorithms, optionally with keyword arguments that are bound to the function."""


class RegistryError(ValueError):
    """Raised for a name that does not refer to a function, or a function whose signature does not match its kind."""


class Registry:
    """The functions of one kind, such as policy losses."""

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, Target],
        *,
        required: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        optional_keywords: tuple[str, ...] = (),
        required_keywords: tuple[str, ...] = (),
    ) -> None:
        """Creates the registry.

        Args:
            kind: name of the kind in error messages.
            targets: the included functions by name.
            required: inputs that every function takes.
            optional: inputs that a function may take.
            optional_keywords: inputs that a function may take as keyword-only parameters.
            required_keywords: inputs that every function takes as keyword-only parameters.
        """
        self.kind, self.required, self.optional = kind, required, optional
        self.keywords, self._required_keywords = optional_keywords + required_keywords, required_keywords
        self._targets = dict(targets)
        self._registered: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names: first the included functions, then the registered functions."""
        return (*self._targets, *self._registered)

    def register(self, name: str) -> Callable[[F], F]:
        """Returns a decorator that registers a function under `name`.

        Raises: RegistryError if the name is not an identifier or already in use, if the object is not a function, or if
            its signature does not match the kind.
        """
        if not name.isidentifier():
            raise RegistryError(f"{name!r} is not a valid name for a {self.kind}: use letters, digits and _")

        def add(function: F) -> F:
            if not _is_function(function):
                raise RegistryError(f"{self.kind} {name} is a {type(function).__name__}, but must be a def function")
            known = self._registered.get(name, function)
            is_same = (known.__module__, known.__qualname__) == (function.__module__, function.__qualname__)
            if name in self._targets or not is_same:
                raise RegistryError(f"{self.kind} {name} already exists: choose a different name")
            self._check_signature(function, name)
            self._registered[name] = function
            return function

        return add

    def load(self, name: str) -> Callable[..., Any]:  # Any: the signature of the kind
        """Returns the function registered as `name`, or imports it if the name is `module:function`.

        Raises: RegistryError if the name is unknown, the import fails, or the signature does not match the kind.
        """
        if ":" in name:
            return self._load_custom(name)
        if name in self._registered:
            return self._registered[name]
        if name not in self._targets:
            raise RegistryError(unknown_name(self.kind, name, self.names))
        target = self._targets[name]
        path, settings = (target, {}) if isinstance(target, str) else target
        function = import_attribute(f"flowrl.algorithms.{path}")
        return functools.partial(function, **settings) if settings else function

    def check(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Raises RegistryError unless the function exists, accepts `settings`, and has no other required setting."""
        parameters, settings = self.settings(self.load(name)), settings or {}
        for setting in settings:
            if setting not in parameters:
                available = ", ".join(parameters) or "none"
                raise RegistryError(f"{self.kind} {name} has no setting {setting}; available: {available}")
        for setting, parameter in parameters.items():
            if parameter.default is parameter.empty and setting not in settings:
                raise RegistryError(f"{self.kind} {name} requires the setting {setting}")

    def inputs(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Returns the names of a function's inputs, in the order of its parameters."""
        return tuple(name for name, parameter in _parameters(function) if self._is_input(name, parameter))

    def settings(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        """Returns the settings of a function."""
        return {name: parameter for name, parameter in _parameters(function) if not self._is_input(name, parameter)}

    def _is_input(self, name: str, parameter: inspect.Parameter) -> bool:
        return parameter.kind is not parameter.KEYWORD_ONLY or name in self.keywords

    def _load_custom(self, name: str) -> Callable[..., Any]:
        attribute = name.partition(":")[2]
        try:
            function = import_function(name)
        except ImportNameError as error:
            if isinstance(error.__cause__, RegistryError):
                raise error.__cause__ from None
            function = self._registered.get(attribute)  # Importing the module runs its decorators.
            if function is None or function.__module__ != imported_module_name(name):
                raise RegistryError(f"{self.kind}: {error}") from error
        self._check_signature(function, name)
        return function

    def _check_signature(self, function: Callable[..., Any], name: str) -> None:
        parameters = dict(_parameters(function))
        if missing := [keyword for keyword in self._required_keywords if keyword not in parameters]:
            raise RegistryError(f"{self.kind} {name} does not accept {', '.join(missing)}: add it after a *")
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        inputs = [name for name, parameter in parameters.items() if parameter.kind in kinds]
        variadic = [n for n, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        unknown = [name for name in inputs if name not in (*self.required, *self.optional)] + variadic
        missing = [name for name in self.required if name not in inputs]
        if unknown or missing:
            problem = f"has unknown inputs: {', '.join(unknown)}" if unknown else f"lacks inputs: {', '.join(missing)}"
            required = f"required inputs: {', '.join(self.required) or 'none'}"
            optional = f"; optional inputs: {', '.join(self.optional)}" if self.optional else ""
            raise RegistryError(f"{self.kind} {name} {problem}; {required}{optional}; settings come after a *")


def _is_function(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    """Returns the parameters of a function, without parameters that functools.partial binds."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [(name, p) for name, p in inspect.signature(function).parameters.items() if name not in bound]


advantage_estimators = Registry(
    "advantage estimator",
    {
        "gae": "advantages.estimators:gae",
        "reinforce_plus_plus": "advantages.estimators:reinforce_plus_plus",
        "remax": "advantages.estimators:remax",
        "grpo": "advantages.group_estimators:grpo",
        "rloo": "advantages.group_estimators:rloo",
        "reinforce_plus_plus_baseline": "advantages.group_estimators:reinforce_plus_plus_baseline",
        "opo": "advantages.group_estimators:opo",
        "gpg": "advantages.group_estimators:gpg",
        "pass_at_k": "advantages.group_estimators:pass_at_k",
        "gdpo": "advantages.group_estimators:gdpo",
        "optimal_token_baseline": "advantages.token_baselines:optimal_token_baseline",
    },
    required=("mask",),
    optional=(
        *("scores", "rewards", "groups", "values", "logprobs", "ref_logprobs"),
        *("greedy_scores", "sum_squared_probs"),
    ),
    optional_keywords=("importance_weights", "trained_mask"),
)
"""Advantage estimators: (inputs, mask) -> advantages [B, T], or (advantages, returns) if `values` is an input."""

policy_losses = Registry(
    "policy loss",
    {
        "ppo": "losses.policy_losses:clipped_policy_loss",
        "decoupled_ppo": "losses.policy_losses:decoupled_policy_loss",
        "sapo": "losses.policy_losses:sapo_loss",
        "gspo": "losses.sequence_losses:gspo_loss",
        "gspo_token": "losses.sequence_losses:gspo_token_loss",
        "gmpo": "losses.sequence_losses:gmpo_loss",
        "reinforce": "losses.score_losses:reinforce_loss",
        "gpg": "losses.score_losses:gpg_loss",
        "cispo": "losses.score_losses:cispo_loss",
        "dppo_tv": ("losses.score_losses:dppo_loss", {"divergence": "tv"}),
        "dppo_kl": ("losses.score_losses:dppo_loss", {"divergence": "kl"}),
        "clip_cov": "losses.covariance_losses:clip_cov_loss",
        "kl_cov": "losses.covariance_losses:kl_cov_loss",
    },
    required=("logprobs", "old_logprobs", "advantages", "mask"),
    optional_keywords=("behavior_logprobs", "selected"),
)
"""Policy losses: (logprobs, old_logprobs, advantages, mask) -> (loss [B, T], metrics [B, T])."""

kl_kinds = Registry(
    "KL estimator",
    {kind: ("kl.kl_estimates:kl_estimate", {"kind": kind}) for kind in KL_ESTIMATORS},
    required=("logprobs", "ref_logprobs"),
)
"""KL estimators: (logprobs, ref_logprobs) -> an estimate of the same shape."""

aggregation_modes = Registry(
    "aggregation",
    {mode: ("masking:aggregate", {"mode": mode}) for mode in AGGREGATIONS},
    required=("loss", "mask"),
    required_keywords=("denominator",),
)
"""Aggregations: (loss, mask, *, denominator) -> scalar. The denominator counts tokens for token_mean, and rows
otherwise.
"""

rollout_corrections = Registry(
    "rollout correction",
    {
        "truncated": "corrections:truncated_weights",
        "masked": "corrections:masked_weights",
        "rejection": "corrections:rejection_mask",
    },
    required=("logprobs", "rollout_logprobs", "mask"),
)
"""Corrections: (logprobs, rollout_logprobs, mask) -> (weights or bool mask [B, T], metrics)."""

preference_losses = Registry(
    "preference loss",
    {
        "dpo": ("preference.pairwise:dpo_loss", {"kind": "sigmoid"}),
        "dpo_hinge": ("preference.pairwise:dpo_loss", {"kind": "hinge"}),
        "ipo": ("preference.pairwise:dpo_loss", {"kind": "ipo"}),
        "simpo": "preference.pairwise:simpo_loss",
        "orpo": "preference.pairwise:orpo_loss",
        "cpo": "preference.pairwise:cpo_loss",
        "kto": "preference.kto:kto_loss",
    },
    optional=(
        *("chosen_logprobs", "rejected_logprobs", "ref_chosen_logprobs", "ref_rejected_logprobs"),
        *("chosen_lengths", "rejected_lengths", "logprobs", "ref_logprobs", "desirable"),
    ),
    optional_keywords=("reference_kl",),
)
"""Preference losses: (log-probabilities of responses) -> (loss per pair or response, metrics)."""

reward_model_losses = Registry(
    "reward model loss",
    {"log_sig": "preference.pairwise:log_sig_loss", "log_exp": "preference.pairwise:log_exp_loss"},
    required=("chosen_scores", "rejected_scores"),
    optional=("margin",),
)
"""Losses of reward models: (scores of the responses of each pair) -> (loss per pair, metrics)."""

distillation_losses = Registry(
    "distillation loss",
    {
        "sampled_reverse_kl": "losses.distillation:sampled_reverse_kl_loss",
        "topk_forward_kl": "losses.distillation:topk_forward_kl_loss",
    },
    optional=("logprobs", "teacher_logprobs", "behavior_logprobs", "topk_logprobs", "teacher_topk_logprobs"),
)
"""Distillation losses: (log-probabilities under student and teacher) -> (loss [B, T], metrics [B, T])."""

kl_controls = Registry(
    "KL control",
    {"fixed": "kl.kl_control:FixedKlControl", "adaptive": "kl.kl_control:AdaptiveKlControl"},
    required=("coef",),
)
"""KL controllers: (initial coef) -> a `KlControl`."""

reward_shaping = Registry(
    "reward shaping",
    {
        "overlong_penalty": "advantages.reward_shaping:with_overlong_penalty",
        "length_penalty": "advantages.reward_shaping:with_length_penalty",
        "clip_rewards": "advantages.reward_shaping:clip_rewards",
        "normalize_rewards": "advantages.reward_shaping:normalize_rewards",
    },
    required=("rewards",),
    optional=("lengths", "scores", "groups", "moments"),
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
