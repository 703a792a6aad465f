"""Checks of the files of models and data. They read only sizes, headers and names."""

from collections.abc import Callable, Iterator
from pathlib import Path

from flowrl.config import (
    ADAPTER_SETTINGS,
    ActorConfig,
    ConfigError,
    CriticConfig,
    DataConfig,
    JudgeConfig,
    PtxConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    ScoringModelConfig,
    TrainedConfig,
    find_tokenizer_role,
    models_of,
)
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.data.folders.input_paths import (
    find_dataset_problem,
    find_model_problem,
    read_text_config,
    read_vocabulary_size,
)
from flowrl.data.mixture import ROUTER_SCORES, has_experts, read_mixture
from flowrl.data.reading.generated_rows import find_generator_problem
from flowrl.memory.model_fit import (
    excess_tokens_message,
    read_max_positions,
    read_num_token_ids,
    read_weight_names,
)


class InvalidPaths(ConfigError):
    """Raised if models or data files cannot be read. `problems` has one sentence per path."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = problems if len(problems) == 1 else [f"{len(problems)} settings are invalid:", *problems]
        super().__init__("\n  ".join(lines))


def check_paths(config: RunConfig) -> str:
    """Returns the checked paths as text. Raises InvalidPaths if a model, adapter, tokenizer or dataset cannot be read
    from this machine or the Hub.
    """
    if problems := list(find_path_problems(config)):
        raise InvalidPaths(problems)
    return f"{len(models_of(config))} roles, and all data files"


def find_path_problems(config: RunConfig) -> Iterator[str]:
    """Yields a message for each path that cannot be read (models, adapters, tokenizers, data), with all settings that
    name the path. Also yields a message if the config generates rows, but reasoning-gym is not installed.
    """
    paths = {
        f"{role}.model.path": (entry.model.path, find_model_problem)
        for role, entry in models_of(config).items()
        # The nodes of a cluster may have other files than the driver, which reads only one tokenizer.
        if entry.model is not None and (config.address is None or role == find_tokenizer_role(config))
    }
    paths |= {
        f"{role}.model.adapter": (entry.model.adapter, _find_adapter_problem)
        for role, entry in models_of(config).items()
        if entry.model is not None and entry.model.adapter is not None and config.address is None
    }
    judges = {role: value for role, value in config.role_settings.items() if isinstance(value, JudgeConfig)}
    if config.address is None:
        paths |= {f"{role}.model.path": (judge.model.path, find_model_problem) for role, judge in judges.items()}
    encoder = models_of(config).get(find_tokenizer_role(config) or "")
    if encoder is not None and encoder.model is not None and encoder.model.tokenizer is not None:
        paths[f"{find_tokenizer_role(config)}.model.tokenizer"] = (encoder.model.tokenizer, find_model_problem)
    for group, value in config:
        if isinstance(value, DataConfig | PtxConfig):
            paths |= {key: (path, find_dataset_problem) for key, path in value.files(group).items()}
    keys: dict[tuple[Path, Callable[[Path], str | None]], list[str]] = {}
    for key, checked in paths.items():
        keys.setdefault(checked, []).append(key)
    for (path, find_problem), names in keys.items():
        if problem := find_problem(path):
            yield f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {path}, but {problem}"
    generated = [
        key for group, value in config if isinstance(value, DataConfig | PtxConfig) for key in value.generated(group)
    ]
    if generated and (problem := find_generator_problem()):
        yield f"{' and '.join(generated)} cannot generate rows, because {problem}"


def _find_adapter_problem(folder: Path) -> str | None:
    """Returns why no adapter can be read from a folder, or None."""
    if missing := [name for name in (ADAPTER_SETTINGS, "adapter_model.safetensors") if not (folder / name).is_file()]:
        return f"it has no {missing[0]}: set a folder in the format of peft, such as that of flowrl export --adapter"
    return find_model_problem(folder)


def check_positions(config: RunConfig) -> None:
    """Raises ConfigError if a local model supports fewer tokens than the data and the rollout allow.

    Reward models are not checked, because they truncate rows that are too long.
    """
    for role in models_of(config).values():
        if (
            isinstance(role, ScoringModelConfig)
            or role.model is None
            or (limit := read_max_positions(role.model.path)) is None
        ):
            continue
        for setting, num_tokens in _sequence_lengths(config, role):
            if num_tokens > limit:
                raise ConfigError(excess_tokens_message(setting, num_tokens, role.model.path, limit))


def _sequence_lengths(config: RunConfig, role: RoleConfig) -> Iterator[tuple[str, int]]:
    """Yields (settings, number of tokens) of the longest sequence of each kind that a role receives."""
    for group, data in config:
        if isinstance(data, PtxConfig):
            if isinstance(role, ActorConfig):  # other roles do not receive this text
                yield f"{group}.max_tokens", data.max_tokens
        elif isinstance(data, DataConfig) and isinstance(config, RolloutRunConfig):
            total = data.max_prompt_tokens + config.rollout.max_response_tokens
            yield f"{group}.max_prompt_tokens + rollout.max_response_tokens", total
        elif isinstance(data, DataConfig):
            yield f"{group}.max_prompt_tokens", data.max_prompt_tokens


def check_vocabularies(config: RunConfig) -> None:
    """Raises ConfigError if a local model can receive token ids for which it has no embeddings.

    All roles receive ids of one tokenizer, except reward models, which can have a tokenizer of their own. Many
    published tokenizers have added tokens beyond the embeddings of their model. Such a tokenizer is allowed, because
    `ChatTokenizer` rejects a template and rows that contain such a token.
    """
    models = models_of(config)
    encoder = find_tokenizer_role(config)
    for role, value in models.items():
        source = role if isinstance(value, ScoringModelConfig) else encoder
        if value.model is None or source is None or (tokenizer := models[source].model) is None:
            continue
        size, num_ids = read_vocabulary_size(value.model.path), read_num_token_ids(tokenizer.tokenizer_path)
        if size is None or num_ids is None:
            continue
        without_added, num_needed = num_ids
        if role == encoder:
            num_needed = without_added
        elif source == encoder and (encoder_size := read_vocabulary_size(tokenizer.path)) is not None:
            # The policy may sample every id for which it has an embedding.
            num_needed = min(num_needed, max(without_added, encoder_size))
        if num_needed <= size:
            continue
        key = f"{source}.model.{'path' if tokenizer.tokenizer is None else 'tokenizer'}"
        fix = "use the model's own tokenizer" if role == source else f"use a model with the tokenizer of {source}"
        raise ConfigError(
            f"{role}.model.path is {value.model.path}, which has embeddings for {size} tokens, but the tokenizer of "
            f"{key} in {tokenizer.tokenizer_path} gives it {num_needed} ids: {fix}"
        )


def check_reward_heads(config: RunConfig) -> None:
    """Raises ConfigError if a local reward model lacks the weights of its head, and the settings create no new head."""
    for role, value in models_of(config).items():
        if (
            not isinstance(value, ScoringModelConfig | RewardModelConfig)
            or value.head == "fresh"
            or value.model is None
            or value.model.adapter is not None  # it may have the head
        ):
            continue
        names = read_weight_names(value.model.path)
        if names and not any(name.endswith("score.weight") for name in names):
            raise ConfigError(
                f"{role}.model.path is {value.model.path}, which is not a reward model, because it lacks the head "
                f"score.weight: train one with recipes/reward_model, or set {role}.head: fresh to try out a program"
            )


def check_trained_weights(config: RunConfig) -> None:
    """Raises ConfigError if a pattern in `optimizer.groups` matches no weight of the local model, or if a saved adapter
    or one of `modules_to_save` does not fit the model.
    """
    for role, value in models_of(config).items():
        if not isinstance(value, TrainedConfig) or not value.model.path.is_dir():
            continue
        has_modules = value.lora is not None and value.lora.modules_to_save
        if not (value.optimizer.groups or has_modules or value.model.adapter is not None):
            continue
        if value.engine.kind == DEFAULT_TRAIN_ENGINE:
            # torch
            from flowrl.engines.models.adapters.lora import LoraError  # noqa: PLC0415
            from flowrl.engines.train.fsdp.role_model import check_trained_weights as check  # noqa: PLC0415

            is_critic, is_scorer = isinstance(value, CriticConfig), isinstance(value, RewardModelConfig)
            kind = "critic" if is_critic else "reward_model" if is_scorer else "policy"
            try:
                check(kind, value, f"{role}.optimizer")
            except LoraError as error:
                where = f"{role}." if str(error).startswith("lora") else f"{role}.model: "
                raise ConfigError(f"{where}{error}") from error


def check_experts(config: RunConfig) -> None:
    """Raises ConfigError if `router_loss_coef` does not fit a trained model, if a mixture of experts would be compiled,
    or if `router_replay` has no routes to replay.
    """
    _check_router_replay(config)
    for role, value in models_of(config).items():
        if not isinstance(value, TrainedConfig) or value.engine.kind != DEFAULT_TRAIN_ENGINE:
            continue
        if not (settings := read_text_config(value.model.path)):
            continue
        coef, key = value.router_loss_coef, f"{role}.router_loss_coef"
        if not has_experts(settings):
            if coef is not None:
                raise ConfigError(f"{key} is {coef:g}, but {value.model.path} is no mixture of experts: remove it")
            continue
        mixture = read_mixture(settings)
        if mixture is None and coef != 0:
            raise ConfigError(
                f"{key} is {coef if coef is None else f'{coef:g}'}, but the auxiliary loss is not defined for the "
                f"family {settings.get('model_type')} of {value.model.path} (it is for {', '.join(ROUTER_SCORES)}): "
                f"set it to 0, which trains without a loss that balances the experts"
            )
        if mixture is not None and mixture.router_loss_coef is None and coef is None:
            raise ConfigError(
                f"{key} is null, which selects the coefficient of the model, but config.json in {value.model.path} has "
                f"no router_aux_loss_coef: set it, for example to 0.001, or to 0 for no auxiliary loss"
            )
        if value.engine.compile is True:
            raise ConfigError(
                f"{role}.engine.compile is true, but {value.model.path} is a mixture of experts, whose shapes depend "
                f"on its routes: set it to auto, which does not compile such a model"
            )


def _check_router_replay(config: RunConfig) -> None:
    """Raises ConfigError if `router_replay` is set, but the actor's training engine does not read routes, or the actor
    is no supported mixture of experts.
    """
    if not any(isinstance(value, RolloutConfig) and value.router_replay for _, value in config):
        return
    actor = models_of(config).get("actor")
    if actor is None or actor.model is None:
        return
    if actor.engine.kind != DEFAULT_TRAIN_ENGINE:
        raise ConfigError(
            f"rollout.router_replay is true, but actor.engine.kind is {actor.engine.kind}, which does not read the "
            f"routes: set rollout.router_replay: false, or actor.engine.kind: {DEFAULT_TRAIN_ENGINE}"
        )
    settings = read_text_config(actor.model.path)
    if settings and read_mixture(settings) is None:
        raise ConfigError(
            f"rollout.router_replay is true, but actor.model.path is {actor.model.path}, which is no mixture of "
            f"experts of the families {', '.join(ROUTER_SCORES)}: set rollout.router_replay: false"
        )
