"""Functions by name, one registry per kind, for configs and programs that choose them by a word.

A registry knows where its functions are and imports them when they are asked for. Beside the names it knows, it takes
`module:function`, which every process can import for itself; that is how a function of one's own is named in YAML.
`@policy_losses.register("my_loss")` gives one a name, checks its signature where it is defined, and makes it known as
`my_loss` to this process and as `module:my_loss` everywhere.

The parameters of a function that are not keyword-only are its inputs, passed by name; keyword-only ones are settings.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class RegistryError(ValueError):
    """A name that leads to no function, or a function that does not fit its kind. One sentence."""


@dataclass(frozen=True)
class Home:
    """Where a function is, and settings that its name stands for."""

    place: str
    """`module:function`."""
    bound: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """The functions of one kind.

    Arguments:
        kind: in words, for errors.
        homes: the functions that ship, by name.
        required: inputs that every function of the kind takes.
        optional: inputs that it may take too.
        keywords: inputs that may be keyword-only beside the settings.
        needed: those of them that every function of the kind takes.
    """

    def __init__(
        self,
        kind: str,
        homes: Mapping[str, Home],
        *,
        required: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        keywords: tuple[str, ...] = (),
        needed: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.required, self.optional = kind, required, optional
        self.keywords, self._needed = keywords, needed
        self._homes = dict(homes)
        self._registered: dict[str, Callable[..., Any]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All known names, those that ship first."""
        return (*self._homes, *self._registered)

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that makes a function known by a name.

        Raises: RegistryError on a name that is taken, or that is no identifier; and where something is decorated that
            is no function, or whose signature does not fit the kind.
        """
        if not name.isidentifier():
            raise RegistryError(f"{name!r} cannot name a {self.kind}: use letters, digits and _, like my_name")

        def add(function: F) -> F:
            self._check_is_function(function, name)
            taken = name in self._homes or _place(self._registered.get(name, function)) != _place(function)
            if taken:
                raise RegistryError(f"{name} is the name of another {self.kind}: choose one that is not taken")
            self._check_signature(function, name)
            self._registered[name] = function
            return function

        return add

    def load(self, name: str) -> Callable[..., Any]:  # Any: the signature is the kind's
        """The function of a name, or of `module:function`.

        Raises: RegistryError on an unknown name, on what cannot be imported, on a signature that does not fit.
        """
        if ":" in name:
            return self._load_own(name)
        if name in self._registered:
            return self._registered[name]
        if name not in self._homes:
            near = difflib.get_close_matches(name, self.names, n=1)
            meant = f"did you mean {near[0]}? There" if near else "there"
            raise RegistryError(
                f"{name!r} is no {self.kind}; {meant} are {', '.join(self.names)}, and module:function of your own"
            )
        home = self._homes[name]
        module, _, attribute = home.place.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        return functools.partial(function, **home.bound) if home.bound else function

    def check(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Loads the function and checks that it takes these settings, and has all that it needs.

        Raises: RegistryError, as `load`, or naming the setting.
        """
        settings = self.settings(self.load(name))
        for option in options or {}:
            if option not in settings:
                raise RegistryError(
                    f"{self.kind} {name} has no setting {option}; it has {', '.join(settings) or 'none'}"
                )
        for setting, parameter in settings.items():
            if parameter.default is parameter.empty and setting not in (options or {}):
                raise RegistryError(f"{self.kind} {name} needs the setting {setting}, which is not given")

    def inputs(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """The inputs that a function takes, by name."""
        return tuple(name for name, parameter in _parameters(function) if self._is_input(name, parameter))

    def settings(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        """The settings that a function takes."""
        return {name: p for name, p in _parameters(function) if not self._is_input(name, p)}

    def _is_input(self, name: str, parameter: inspect.Parameter) -> bool:
        return parameter.kind is not parameter.KEYWORD_ONLY or name in self.keywords

    def _load_own(self, name: str) -> Callable[..., Any]:
        module, _, attribute = name.partition(":")
        try:
            loaded = importlib.import_module(module)
            registered = self._registered.get(attribute)
            own = registered is not None and registered.__module__ == loaded.__name__
            function = registered if own else getattr(loaded, attribute)
        except RegistryError:
            raise
        except Exception as error:
            raise RegistryError(
                f"{self.kind} {name} cannot be loaded ({type(error).__name__}: {error}): name it as module:function, "
                f"of a module that can be imported where the program is started"
            ) from error
        if not callable(function):
            raise RegistryError(f"{self.kind} {name} is a {type(function).__name__}, not a function")
        self._check_signature(function, name)
        return function

    def _check_is_function(self, function: object, name: str) -> None:
        if not (inspect.isroutine(function) or inspect.isclass(function)):
            raise RegistryError(
                f"{name} is a {type(function).__name__}, and a {self.kind} must be a function: write it with def"
            )

    def _check_signature(self, function: Callable[..., Any], name: str) -> None:
        allowed = (*self.required, *self.optional)
        inputs = [name for name, p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wrong = [given for given in inputs if given not in allowed]
        missing = [wanted for wanted in self.required if wanted not in inputs]
        loose = [name for name, p in _parameters(function) if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        taken = {name for name, _ in _parameters(function)}
        if unheard := [wanted for wanted in self._needed if wanted not in taken]:
            raise RegistryError(f"{self.kind} {name} does not take {', '.join(unheard)}: add it after a *")
        if not (wrong or missing or loose):
            return
        found = f"takes {', '.join(wrong + loose)}" if wrong or loose else f"does not take {', '.join(missing)}"
        others = ["as it needs " + ", ".join(self.optional)] if self.optional else []
        possible = ", and ".join([", ".join(self.required), *others] if self.required else others)
        raise RegistryError(f"{self.kind} {name} {found}: its inputs are {possible}; settings come after a *")


def _parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    """Parameters that are still open: what a partial has bound is none."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [(name, p) for name, p in inspect.signature(function).parameters.items() if name not in bound]


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def _homes(module: str, **functions: str) -> dict[str, Home]:
    return {name: Home(f"flowrl.algorithms.{module}:{function}") for name, function in functions.items()}


def _modes(place: str, setting: str, names: tuple[str, ...]) -> dict[str, Home]:
    return {name: Home(f"flowrl.algorithms.{place}", {setting: name}) for name in names}


advantage_estimators = Registry(
    "advantage estimator",
    _homes("advantages.estimators", gae="gae", reinforce_plus_plus="reinforce_plus_plus", remax="remax")
    | _homes(
        "advantages.group_estimators",
        grpo="grpo",
        rloo="rloo",
        reinforce_plus_plus_baseline="reinforce_plus_plus_baseline",
        opo="opo",
        gpg="gpg",
        pass_at_k="pass_at_k",
        gdpo="gdpo",
    )
    | _homes("advantages.token_baselines", optimal_token_baseline="optimal_token_baseline"),
    required=("mask",),
    optional=(
        "scores",
        "rewards",
        "groups",
        "values",
        "logprobs",
        "ref_logprobs",
        "greedy_scores",
        "sum_squared_probs",
    ),
    keywords=("importance_weights",),
)
"""(inputs of a step, mask) -> advantages [B, T]; with `values` among the inputs (advantages, returns)."""

policy_losses = Registry(
    "policy loss",
    _homes("losses.policy_losses", ppo="clipped_policy_loss", decoupled_ppo="decoupled_policy_loss", sapo="sapo_loss")
    | _homes("losses.sequence_losses", gspo="gspo_loss", gspo_token="gspo_token_loss", gmpo="gmpo_loss")
    | _homes("losses.score_losses", reinforce="reinforce_loss", gpg="gpg_loss", cispo="cispo_loss")
    | {
        "dppo_tv": Home("flowrl.algorithms.losses.score_losses:dppo_loss", {"divergence": "tv"}),
        "dppo_kl": Home("flowrl.algorithms.losses.score_losses:dppo_loss", {"divergence": "kl"}),
    }
    | _homes("losses.covariance_losses", clip_cov="clip_cov_loss", kl_cov="kl_cov_loss"),
    required=("logprobs", "old_logprobs", "advantages", "mask"),
    keywords=("behavior_logprobs", "selected"),
)
"""(logprobs, old_logprobs, advantages, mask) -> (loss [B, T], metrics [B, T])."""

kl_kinds = Registry(
    "KL estimate",
    _modes("kl.kl_estimates:kl_estimate", "kind", ("k1", "k2", "k3", "abs")),
    required=("logprobs", "ref_logprobs"),
)
"""(logprobs, ref_logprobs) -> an estimate of the same shape."""

aggregation_modes = Registry(
    "aggregation",
    _modes(
        "losses.aggregation:aggregate",
        "mode",
        ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"),
    ),
    required=("loss", "mask"),
    keywords=("denominator",),
    needed=("denominator",),
)
"""(loss, mask, *, denominator) -> a scalar; the denominator of all but token_mean is the step's number of rows."""

rollout_corrections = Registry(
    "rollout correction",
    _homes(
        "corrections.importance_weights",
        truncated="truncated_weights",
        masked="masked_weights",
        rejection="rejection_mask",
    ),
    required=("logprobs", "rollout_logprobs", "mask"),
)
"""(logprobs, rollout_logprobs, mask) -> (weights [B, T] or a bool mask [B, T], metrics)."""

preference_losses = Registry(
    "preference loss",
    _homes(
        "preference.pairwise",
        log_sig="log_sig_loss",
        log_exp="log_exp_loss",
        simpo="simpo_loss",
        orpo="orpo_loss",
    )
    | {
        name: Home("flowrl.algorithms.preference.pairwise:dpo_loss", {"kind": kind})
        for name, kind in (("dpo", "sigmoid"), ("dpo_hinge", "hinge"), ("ipo", "ipo"))
    }
    | _homes("preference.kto", kto="kto_loss"),
    optional=(
        "chosen_logprobs",
        "rejected_logprobs",
        "ref_chosen_logprobs",
        "ref_rejected_logprobs",
        "chosen_scores",
        "rejected_scores",
        "logprobs",
        "ref_logprobs",
        "desirable",
    ),
    keywords=("reference_kl",),
)
"""(log-probabilities or scores of answers) -> (loss per pair or answer, metrics)."""

ptx_forms = Registry(
    "ptx form",
    _modes("losses.ptx:ptx_loss", "form", ("add", "mix")),
    required=("policy_loss", "lm_loss"),
)
"""(policy_loss, lm_loss), scalars -> a scalar."""

kl_controls = Registry(
    "KL control",
    _homes("kl.kl_control", fixed="FixedKlControl", adaptive="AdaptiveKlControl"),
    required=("coef",),
)
"""(coef at the start) -> a `KlControl`."""

reward_shaping = Registry(
    "reward shaping",
    _homes(
        "advantages.reward_shaping",
        overlong_penalty="with_overlong_penalty",
        length_penalty="with_length_penalty",
        clip_rewards="clip_rewards",
        normalize_rewards="normalize_rewards",
    ),
    required=("rewards",),
    optional=("lengths", "scores", "groups", "moments"),
)
"""(rewards [B] as the one before left them) -> rewards [B]; `scores` are the task's, before any shaping."""

REGISTRIES = (
    advantage_estimators,
    policy_losses,
    kl_kinds,
    aggregation_modes,
    rollout_corrections,
    preference_losses,
    ptx_forms,
    kl_controls,
    reward_shaping,
)
