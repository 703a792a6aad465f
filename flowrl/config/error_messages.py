"""Error messages for invalid settings: the setting, its file and line, what is allowed, and the likely mistake."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic_core import ErrorDetails

from flowrl.config.algorithm.loss_settings import AnyPolicyLoss
from flowrl.config.base import CUSTOM, Config, Member, members_of, unknown_name
from flowrl.config.setting_tree import (
    config_classes,
    fields_of,
    find_unions,
    meaning_of,
    names_of,
    select_members,
    setting_paths,
    walk,
)
from flowrl.config.source import Key, Source, dotted

_RENAMED_KEYS = {
    "rows_per_step": "batch_size",
    "minibatch_rows": "minibatch_size",
    "epochs": "ppo_epochs",
    "rollout.max_rows": "rollout.max_num_seqs",
    "rollout.transfer.chunk_mb": "rollout.transfer.bucket_mb",
    "rollout.vllm.max_row_tokens": "rollout.vllm.max_model_len",
    "data.shuffle": "data.order",
    "schedule.redundancy": "schedule.overprovision",
    "actor.loss_options": "actor.loss.options",
}


def renamed_keys() -> dict[str, str]:
    """Maps a removed key to its new key. The error for a removed key names the new key."""
    settings = {name for member in members_of(AnyPolicyLoss).values() for name in member.model_fields}
    return _RENAMED_KEYS | {f"actor.{name}": f"actor.loss.{name}" for name in settings - {"kind", "options"}}


REMOVED_KEYS = {
    "rollout.environment": "write a class with the methods reset, step and close, and set environment.name "
    "(docs/environments.md)",
}
"""Maps a removed key to its replacement."""

_MINIBATCH_OF_COLOSSAL = "minibatch_size: train_batch_size * accumulation_steps * processes / tp"
_BATCH_OF_COLOSSAL = "batch_size: num_collect_steps * experience_batch_size * processes / tp"

FOREIGN_KEYS: dict[str, str | tuple[str, ...]] = {
    "accumulation_steps": (_MINIBATCH_OF_COLOSSAL, "batch_size: batch_size * accumulation_steps * processes / tp"),
    "actor_rollout_ref.model.path": "actor.model.path",
    "adv_estimator": "algorithm.estimator",
    "beta": ("algorithm.kl_coef", "actor.kl_loss_coef"),
    "bf16": "engine.compute_dtype: bfloat16",
    "clip_ratio": "loss.clip_low",
    "epsilon": "loss.clip_low",
    "eval_steps": "evaluate_every",
    "experience_batch_size": _BATCH_OF_COLOSSAL,
    "fp16": "engine.compute_dtype: float16",
    "kl_coef": "actor.kl_loss_coef",
    "kl_ctrl.kl_coef": "algorithm.kl_coef",
    "learning_rate": "optimizer.lr",
    "lora_rank": "lora.rank",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "num_collect_steps": _BATCH_OF_COLOSSAL,
    "n_gpus_per_node": "devices: [n_gpus_per_node]",
    "num_generations": "samples_per_prompt",
    "num_iterations": "ppo_epochs",
    "num_train_epochs": ("epochs", "steps: num_train_epochs * prompts in data.train / prompts per step"),
    "optim.lr": "optimizer.lr",
    "output_dir": "output",
    "per_device_train_batch_size": ("batch_size: per_device_train_batch_size * devices * gradient_accumulation_steps"),
    "ppo_mini_batch_size": "minibatch_size: ppo_mini_batch_size * {samples_per_prompt}",
    "pretrain": "model.path",
    "ptx_batch_size": "ptx.batch_size",
    "ptx_coef": "ptx.coef",
    "reward_funcs": "reward.function",
    "rollout.n": "samples_per_prompt",
    "save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "scale_rewards": "algorithm.normalize_std",
    "stop": "data.template: a file with stop_strings",
    "stop_strings": "data.template: a file with stop_strings",
    "test_freq": "evaluate_every",
    "total_epochs": ("epochs", "steps: total_epochs * prompts in data.train / prompts per step"),
    "total_training_steps": "steps",
    "train_batch_size": (
        "batch_size: train_batch_size * {samples_per_prompt} for verl, or for ColossalChat " + _MINIBATCH_OF_COLOSSAL,
        "batch_size",
    ),
    "use_kl_loss": "actor.kl_loss_coef",
    "use_vllm": "rollout.engine: vllm",
}
"""Maps the last parts of a key of TRL, transformers, verl or ColossalChat to the last parts of flowrl's key, with a
value or formula. From a tuple, the error suggests the first alternative whose keys, including keys in braces, the
config class has. If the config class has a setting with the other library's name, the error suggests this setting. verl
counts batch sizes in prompts, flowrl in sequences.
"""

_IN_BRACES = re.compile(r"{(\w+)}")


def describe_errors(errors: Sequence[ErrorDetails], source: Source, cls: type[Config]) -> str:
    """Returns a message with one line per invalid setting. Misspelled settings come first."""
    errors = [part for error in errors for part in _split_unknown_group(error, source, cls)]
    # A misspelled key is often the cause of other errors.
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    keys = [_setting_of(error, walk(error["loc"], cls, source.values)[0]) for error in errors]
    repeated = _alternatives_of_misspelled(errors, source, cls)
    locations: dict[Key, str] = {}
    problems: dict[Key, list[str]] = {}
    for error, key in zip(errors, keys, strict=True):
        is_group = any(len(other) > len(key) and other[: len(key)] == key for other in keys)
        if is_group or (error["type"] == "missing" and dotted(key) in repeated):
            continue
        located = _located_key(error, key, source, cls)
        is_relation = error["type"] == "value_error"  # may name several settings
        locations.setdefault(key, source.locations(located, error["msg"]) if is_relation else source.origin(located))
        problems.setdefault(key, []).append(_problem(error, key, source, cls))
    lines = [f"{locations[key]}: {_join(dict.fromkeys(texts))}" for key, texts in problems.items()]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} settings are invalid:", *lines])


def _split_unknown_group(error: ErrorDetails, source: Source, cls: type[Config]) -> list[ErrorDetails]:
    """Splits the error for an unknown group into one error per leaf key if another library has one of the keys.

    Otherwise returns `[error]`.
    """
    if error["type"] != "extra_forbidden" or not isinstance(error["input"], Mapping):
        return [error]
    leaves = list(_leaves(error["input"], error["loc"]))
    paths = [path for path in setting_paths(cls) if _has_setting(path, cls, source.values)]
    if not any(_translate(loc, paths) for loc, _ in leaves):
        return [error]
    return [ErrorDetails(type=error["type"], loc=loc, msg=error["msg"], input=value) for loc, value in leaves]


def _leaves(values: Mapping[str, object], loc: Key) -> Iterator[tuple[Key, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*loc, name))
        else:
            yield (*loc, name), value


def _setting_of(error: ErrorDetails, key: Key) -> Key:
    """Returns the setting that an error is about. For an absent entry of a list, this is the list."""
    return key[:-1] if error["type"] == "missing" and isinstance(key[-1], int) else key


def _join(problems: Iterable[str]) -> str:
    """Joins the problems of one setting. A setting of several types has one problem per type."""
    first, *others = problems
    return ", or ".join([first, *(problem.partition(", but ")[2] or problem for problem in others)])


def _alternatives_of_misspelled(errors: Sequence[ErrorDetails], source: Source, cls: type[Config]) -> set[str]:
    """Returns the keys that the messages for unknown keys suggest. No other message reports that these are missing."""
    unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    return {text.partition(":")[0] for loc in unknown for text in _alternatives(loc, source, cls)}


def _located_key(error: ErrorDetails, key: Key, source: Source, cls: type[Config]) -> Key:
    """Returns the key whose location an error message names."""
    match error["type"]:
        case "value_error":  # The first word of an error of a group is the setting.
            named = (*key, *error["msg"].removeprefix("Value error, ").partition(" ")[0].split("."))
            return named if named in source.origins else key
        case "union_tag_invalid" | "union_tag_not_found":
            return (*key, select_members(walk(error["loc"], cls)[1])[0].KEY)
        case "extra_forbidden":  # An override of a nested key creates the unknown group.
            return next((known for known in source.origins if known[: len(key)] == key), key)
    return key


def _problem(error: ErrorDetails, key: Key, source: Source, cls: type[Config]) -> str:
    name, value, classes = dotted(key), error["input"], walk(error["loc"], cls, source.values)[1]
    message = error["msg"].replace("Input should be", "must be").replace("Input is not", "is not")
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(error["loc"], key, source, cls)
        case "missing":
            return _missing(error, key, source, cls)
        case "union_tag_invalid" | "union_tag_not_found" if isinstance(value, Mapping):
            members = select_members(classes)
            setting = f"{name}.{members[0].KEY}"
            if value.get(members[0].KEY) is not None:
                return unknown_choice(setting, value[members[0].KEY], members, cls)
            return f"`{setting}` is required; available: {', '.join(names_of(members))}"
        case "union_tag_invalid" | "union_tag_not_found":
            message = f"must be a group of settings with the key {select_members(classes)[0].KEY}"
        case "value_error":
            cause = message.removeprefix("Value error, ")
            return f"{name}: {cause}" if name else cause
        case "model_type" | "model_attributes_type":
            required = [field for field, info in fields_of(classes).items() if info.is_required()]
            is_value = isinstance(value, str) and len(required) == 1
            message = "must be a group of settings" + (f", like {{{required[0]}: {value}}}" if is_value else "")
        case "int_type" | "float_type" | "bool_type" if _is_quoted(value, error["type"]):
            return f"{name} is the text {value!r}, but {message[0].lower()}{message[1:]}: remove the quotes"
        case "too_long" | "too_short":
            message = re.sub(r".*should have (.*?) items? .*", r"must be a list with \1 entries", message)
            message = re.sub(r"\b1 entries", "1 entry", message)
        case known:
            message = _TYPES.get(known, message)
    return f"{name} is {'empty' if value is None else repr(value)}, but {message[0].lower()}{message[1:]}"


def _missing(error: ErrorDetails, key: Key, source: Source, cls: type[Config]) -> str:
    """Returns the error message for a missing setting, or for a list with too few entries."""
    if isinstance(error["loc"][-1], int):
        number = error["loc"][-1] + 1
        return f"{dotted(key)} is {error['input']!r}, which has no entry {number}: add entries"
    info = fields_of(walk(error["loc"][:-1], cls, source.values)[1]).get(str(key[-1]))
    meaning = _first_sentence(meaning_of(info)) if info else ""
    return f"`{dotted(key)}` is required" + (f": {meaning}" if meaning else "")


_TYPES = {
    "tuple_type": "must be a list, in square brackets",
    "list_type": "must be a list, in square brackets",
    "dict_type": "must be a mapping, like {key: value}",
    "mapping_type": "must be a mapping, like {key: value}",
    "path_type": "must be a path",
}
"""Error type of pydantic -> the allowed type of value."""


def _first_sentence(description: str) -> str:
    """Returns the first sentence without its period. Its first letter is lower case, except in an acronym."""
    sentence = re.split(r"(?<=\.)\s", description)[0].rstrip(".")
    is_acronym = sentence[1:2].isupper()
    return sentence if is_acronym else sentence[:1].lower() + sentence[1:]


def _is_quoted(value: object, error_type: str) -> bool:
    """Returns whether a text would be a valid number, or true or false, without its quotes."""
    if not isinstance(value, str) or error_type == "bool_type":
        return value in ("true", "false")
    try:
        return bool([(int if error_type == "int_type" else float)(value)])
    except ValueError:
        return False


def unknown_choice(setting: str, choice: object, members: Sequence[type[Member]], cls: type[Config]) -> str:
    """Returns the error message for a value of `setting` that selects none of the members of a union."""
    for path, others in find_unions(cls):
        if choice in names_of(others) and others[0].NOUN != members[0].NOUN:
            return (
                f"{setting} is {choice}, but {choice} is {others[0].NOUN} ({path}.{others[0].KEY}), not "
                f"{members[0].NOUN}; available: {', '.join(names_of(members))}"
            )
    names = names_of(members)
    return unknown_name(setting, choice, names, custom=CUSTOM if CUSTOM in names else None)


def _unknown_key(loc: Key, key: Key, source: Source, cls: type[Config]) -> str:
    """Returns the error message for an unknown key, with the most likely fix."""
    name, word, group = dotted(key), str(key[-1]), dotted(key[:-1])
    if (renamed := renamed_keys().get(name)) is not None and renamed in setting_paths(cls):
        return f"{name} was renamed: set {renamed}"
    if name in REMOVED_KEYS:
        return f"{name} was removed: {REMOVED_KEYS[name]}"
    classes = walk(loc[:-1], cls, source.values)[1]
    members = select_members(walk(key[:-1], cls)[1])
    is_group = any(path.startswith(f"{group}.") for path in setting_paths(cls))
    owners = names_of([member for member in members if word in member.model_fields]) if is_group else []
    if owners and (selected := select_members(classes)):
        setting = dotted((*key[:-1], selected[0].KEY))
        tag = next(str(part) for part in reversed(loc) if part in names_of(selected))
        fix = f"set {setting}: {owners[0]}" if len(owners) == 1 else f"set {setting} to one of these"
        return f"{name} belongs to {selected[0].KEY} {', '.join(owners)}, not to {tag}: remove it, or {fix}"
    if alternatives := _alternatives(loc, source, cls):
        return f"unknown setting {name}; did you mean {' or '.join(alternatives)}?"
    parent = group if key[0] in cls.model_fields and group else "the file"
    return f"unknown setting {name}; {parent} accepts {', '.join(fields_of(classes))}"


def _alternatives(loc: Key, source: Source, cls: type[Config]) -> list[str]:
    """Returns likely intended keys for the unknown key at a pydantic error location, with a value or a formula."""
    key = walk(loc, cls, source.values)[0]
    name, word = dotted(key), str(key[-1])
    if (renamed := renamed_keys().get(name)) is not None and renamed in setting_paths(cls):
        return [renamed]
    paths = [path for path in setting_paths(cls) if _has_setting(path, cls, source.values)]
    if translated := _translate(key, paths):
        return translated
    siblings = fields_of(walk(loc[:-1], cls, source.values)[1])
    if near := difflib.get_close_matches(word, siblings, n=1):
        return [dotted((*key[:-1], near[0]))]
    leaves = {path: path.rpartition(".")[2] for path in paths}
    alike = difflib.get_close_matches(word, sorted(set(leaves.values())), n=1)
    return [path for path, leaf in leaves.items() if leaf in alike][:3]


def _has_setting(path: str, cls: type[Config], values: object) -> bool:
    """Returns whether `cls` has the setting `path`, given the union members that `values` selects."""
    classes: tuple[type[Config], ...] = (cls,)
    for part in path.split("."):
        if members := select_members(classes):
            name = values.get(members[0].KEY) if isinstance(values, Mapping) else values
            classes = tuple(member for member in members if name in member.names()) or classes
        field = fields_of(classes).get(part)
        if field is None:
            return False
        values = values.get(part) if isinstance(values, Mapping) else None
        classes = config_classes(field.annotation)
    return True


def _translate(key: Key, paths: Sequence[str]) -> list[str]:
    """Returns the keys among `paths` to which a key of another library translates, with a value if there is one.

    Prefers paths in a group that the key names: `actor_rollout_ref.actor.optim.lr` gives `actor.optimizer.lr`, not
    `critic.optimizer.lr`.
    """
    suffix = next((end for start in range(len(key)) if (end := dotted(key[start:])) in FOREIGN_KEYS), None)
    if suffix is None:
        return []
    choices = FOREIGN_KEYS[suffix]
    for choice in (suffix, *([choices] if isinstance(choices, str) else choices)):
        end, colon, value = choice.partition(": ")
        if not all(setting in paths for setting in _IN_BRACES.findall(value)):
            continue
        value = _IN_BRACES.sub(r"\1", value)
        if end in paths:
            return [f"{end}{colon}{value}"]
        if matches := [path for path in dict.fromkeys(paths) if path.endswith(f".{end}")]:
            groups = (dotted(key[start:depth]) for start in range(len(key)) for depth in range(len(key) - 1, start, -1))
            near = ([path for path in matches if path.startswith(f"{group}.")] for group in groups)
            return [f"{path}{colon}{value}" for path in next(filter(None, near), matches)]
    return []
