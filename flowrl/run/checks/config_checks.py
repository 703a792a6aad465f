"""Checks that need only the settings, and the functions, engines, environments and packages that the settings name."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flowrl.config import (
    TRAIN_ENGINES,
    ActorConfig,
    AdvantageConfig,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ImportNameError,
    JudgeConfig,
    ModelRoleConfig,
    PreferenceActorConfig,
    PreferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    StudentConfig,
    TrainedConfig,
    VllmConfig,
    import_function,
    models_of,
)
from flowrl.config.algorithm.advantage import PenalizedAdvantageConfig
from flowrl.config.engines.rollout_engines import DEFAULT_ENGINE, TORCHAO, name_alternatives
from flowrl.config.model import OPTIMIZERS
from flowrl.engines.rollout.base import check_engine_class
from flowrl.engines.rollout.vllm.engine_args import find_argument_problem
from flowrl.environments.base import EnvironmentLoadError, create_environment
from flowrl.rewards.judgments import load_verdict
from flowrl.rewards.reward_function import RewardError, load_answer_function, load_reward_function
from flowrl.run.checks.checked_run import find_generators


def check_functions(config: RunConfig) -> str:
    """Imports all user-defined functions, engines and environments, and returns the names of the reward functions.

    Raises ConfigError if one is invalid.
    """
    names: dict[str, None] = {}
    for group, value in config:
        if isinstance(value, RolloutConfig):
            check_engine_class(value.engine)
        if isinstance(value, RewardConfig):
            for key, function in value.functions():
                names[function] = None
                _check_loads(f"{group}.{key}", function, load_reward_function)
        for key, evaluation in _evaluations(group, value):
            _check_loads(f"{key}.extract_answer", evaluation.extract_answer, load_answer_function)
    for role, value in config.role_settings.items():
        _check_training(role, value)
        if isinstance(value, JudgeConfig):
            _check_judge(role, value)
        elif isinstance(value, EnvironmentConfig):
            try:
                create_environment(value.name, value.options)
            except EnvironmentLoadError as error:
                raise ConfigError(f"{role}.name: {error}") from error
    _check_algorithm(config)
    return ", ".join(names) or "no user function"


def _check_training(role: str, value: RoleConfig) -> None:
    """Raises ConfigError if the user-defined training engine or optimizer of a role is invalid."""
    if isinstance(value, ModelRoleConfig) and value.engine.kind not in TRAIN_ENGINES:
        from flowrl.engines.train.base import check_train_engine  # noqa: PLC0415 (torch, only for a user's engine)

        check_train_engine(value.engine.kind)
    if isinstance(value, TrainedConfig) and value.optimizer.kind not in OPTIMIZERS:
        _check_loads(f"{role}.optimizer.kind", value.optimizer.kind, import_function)


def _evaluations(group: str, value: object) -> Iterator[tuple[str, EvaluationConfig]]:
    """Yields (key, settings) of every evaluation in a section of the config."""
    if isinstance(value, EvaluationConfig):
        yield group, value
    if isinstance(value, DataConfig):
        for name, held_out in value.tests.items():
            if held_out.evaluation is not None:
                yield f"{group}.tests.{name}.evaluation", held_out.evaluation


def _check_algorithm(config: RunConfig) -> None:
    """Raises ConfigError if a user-defined function of the algorithm, such as a loss or an estimator, is invalid."""
    user_defined = [choice for choice in _chosen_functions(config) if ":" in choice[2]]
    if not user_defined:
        return
    from flowrl.algorithms import registry  # noqa: PLC0415 (torch, only for user-defined functions)

    kinds = {known.kind: known for known in registry.REGISTRIES}
    for key, kind, name, options in user_defined:
        try:
            kinds[kind].check(name, options)
        except registry.RegistryError as error:
            raise ConfigError(f"{key}: {error}") from error


def _check_judge(role: str, config: JudgeConfig) -> None:
    """Raises ConfigError if the engine, the prompt or the verdict of a judge cannot be loaded."""
    check_engine_class(config.engine)
    try:
        config.read_prompt()
        load_verdict(config.applied_verdict)
    except ValueError as error:
        raise ConfigError(f"{role}.{error}") from error


def _check_loads(key: str, name: str | None, load: Callable[[str], object]) -> None:
    try:
        _ = name and load(name)
    except (RewardError, ImportNameError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _chosen_functions(config: RunConfig) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yields (key, kind, name, settings) of every function of the algorithm that the config names."""
    for group, value in config:
        if isinstance(value, ActorConfig):
            yield f"{group}.loss", "policy loss", value.loss.kind, value.loss.arguments()
            yield f"{group}.kl_loss_kind", "KL estimator", value.kl_loss_kind, {}
            yield f"{group}.aggregation", "aggregation", value.aggregation, {}
        elif isinstance(value, PreferenceActorConfig):
            yield f"{group}.loss", "preference loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, StudentConfig):
            yield f"{group}.loss", "distillation loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, RewardModelConfig):
            yield f"{group}.loss", "reward model loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, PreferenceConfig):
            yield group, "preference loss", value.kind, value.arguments()
        elif isinstance(value, AdvantageConfig):
            yield from _functions_of_advantages(group, value)


def _functions_of_advantages(
    group: str, config: AdvantageConfig
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:  # Any: settings of user-defined functions
    yield f"{group}.estimator", "advantage estimator", config.estimator, config.arguments()
    if isinstance(config, PenalizedAdvantageConfig):
        yield f"{group}.kl_kind", "KL estimator", config.kl_kind, {}
        yield f"{group}.kl_control.kind", "KL control", config.kl_control.kind, config.kl_control.arguments()
    if (correction := config.applied_correction) is not None:
        yield f"{group}.correction.kind", "rollout correction", correction.kind, correction.arguments()
    for i, shaping in enumerate(config.shaping):
        yield f"{group}.shaping.{i}.kind", "reward shaping", shaping.kind, shaping.arguments()


def check_processes(config: RunConfig) -> None:
    """Raises ConfigError if the backend is inline, but the engine of a rollout or judge needs a dedicated process."""
    for name, _, value, *_ in find_generators(config):
        if value.capabilities.own_process and config.backend == "inline":
            raise ConfigError(
                f"{name}.engine is {value.engine}, which needs a dedicated process, but backend inline has one "
                f"process: set backend: ray, or {name}.engine: {DEFAULT_ENGINE}"
            )


def check_partial_models(config: RunConfig) -> None:
    """Raises ConfigError if a model has `strict: false`, but the engine of its rollout or judge loads only complete
    models, as vLLM does.
    """
    for _, key, value, model, model_key in find_generators(config):
        if model is not None and not model.strict and not value.capabilities.partial_models:
            engines = name_alternatives(lambda known: known.partial_models)
            raise ConfigError(
                f"{model_key}.strict is false, but {key}.engine is {value.engine}, which reads the files itself and "
                f"rejects missing and unexpected weights: set {key}.engine: {engines}, or {model_key}.strict: true"
            )


def check_packages(config: RunConfig) -> None:
    """Raises ConfigError if a package of an engine, an optimizer or a quantization is not installed on this machine."""
    has_torchao = importlib.util.find_spec(TORCHAO.module) is not None
    for name, role in models_of(config).items():
        if not isinstance(role, TrainedConfig) or has_torchao:
            continue
        kind = None if role.lora is None else role.lora.base_quantization
        for setting, value, fix in (
            ("optimizer.kind", "adamw_8bit" if role.optimizer.kind == "adamw_8bit" else None, "optimizer.kind: adamw"),
            ("lora.base_quantization", kind, "lora.base_quantization: null"),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name}.{setting} is {value}, which needs {TORCHAO.module}, which is not installed: run "
                    f"{TORCHAO.install}, or set {name}.{fix}"
                )
    for name, _, value, *_ in find_generators(config):
        known = value.capabilities
        for package in known.packages:
            if importlib.util.find_spec(package.module) is None:
                raise ConfigError(
                    f"{name}.engine is {value.engine}, which needs {package.module}, which is not installed: run "
                    f"{package.install}, or set {name}.engine: {DEFAULT_ENGINE}"
                )
        for package in () if value.quantization is None else known.quantizations[value.quantization].packages:
            if importlib.util.find_spec(package.module) is None:
                others = [key for key, each in known.quantizations.items() if package not in each.packages]
                raise ConfigError(
                    f"{name}.quantization {value.quantization} needs {package.module}, which is not installed: run "
                    f"{package.install}, or set {name}.quantization: {' or '.join(others) or 'null'}"
                )


def check_engine_args(config: RunConfig) -> None:
    """Raises ConfigError for an argument in `vllm.engine_args` that vLLM does not have, or whose type it rejects.
    Without vLLM on this machine, checks nothing.
    """
    for generator in find_generators(config):
        settings = generator.settings.vllm or VllmConfig()
        if (problem := find_argument_problem(settings.engine_args)) is not None:
            raise ConfigError(f"{generator.key}.vllm.engine_args {problem}")
