"""Checksums of a run's inputs: data files, frozen models, tokenizer, templates, and the user's functions and classes.

Checkpoints contain only the checksums. For rows that reasoning-gym generates, the input is the version of the package.
A resumed run rejects changed inputs.
"""

import inspect
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.checkpoints.checkpoints import Checkpoint
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import (
    Config,
    DataConfig,
    EnvironmentConfig,
    ImportNameError,
    JudgeConfig,
    PtxConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainedConfig,
    find_tokenizer_role,
    import_attribute,
    imported_module_name,
    is_import_name,
    models_of,
)
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.config.setting_tree import may_name_code
from flowrl.data.checksums import FileChecksum
from flowrl.data.reading.generated_rows import generator_version

_FULL_CHECKSUM_BYTES = 256 * 1024**2
"""Largest model file, in bytes, whose checksum covers the full file. Larger files are sampled."""

_CHUNK_BYTES = 1024**2
"""Bytes per sampled chunk of a large file. Chunks are evenly spaced over the file."""

_TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
_CODE_OPTIONS = ("tools", "reward", "function", "opponent")
"""Options of environments that name functions. The driver does not import them, because they run in the processes of
the environment only.
"""

_TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")


def input_checksums(config: RunConfig) -> dict[str, FileChecksum]:
    """Returns the checksum of each input, except trained weights, files of the Hub and unreadable files.

    The key of an input is its setting. If a setting names several inputs, the key ends with the kind in parentheses.
    """
    checksums = {key: combined_checksum(paths, has_names=has_names) for key, paths, has_names in _input_files(config)}
    checksums |= dict.fromkeys(_generated_inputs(config), _generator_checksum())
    return {key: checksum for key, checksum in checksums.items() if checksum is not None}


def _input_files(config: RunConfig) -> Iterator[tuple[str, Sequence[Path], bool]]:
    """Yields the key and the files of each input, and whether the checksum covers the names of the files."""
    for name, value in config:
        if isinstance(value, DataConfig | PtxConfig):
            yield from ((key, data_paths(path), False) for key, path in value.files(name).items())
        if isinstance(value, Config) and not isinstance(value, ReportConfig):
            sources = {key: _source_files(function) for key, function in _named_objects(name, value)}
            sources |= {key: _module_files(function) for key, function in _named_options(name, value)}
            yield from ((key, files, False) for key, files in sources.items() if files)
        yield from ((f"{name}.{key}", [path], False) for key, path in _templates(value).items() if path is not None)
    for name, role in config.role_settings.items():
        if isinstance(role, JudgeConfig):
            yield from ((f"{name}.{key}", [path], False) for key, path in role.files.items())
    yield from _model_files(config)


def _named_objects(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields the key and the name of every function and class in the settings below `key` that are names of code."""
    match value:
        case Config():
            for name, part in value:
                if isinstance(part, str) and is_import_name(part) and may_name_code(type(value).model_fields[name]):
                    yield f"{key}.{name}", part
                else:
                    yield from _named_objects(f"{key}.{name}", part)
        case Mapping():
            for name, part in value.items():
                yield from _named_objects(f"{key}.{name}", part)
        case list() | tuple():
            for index, part in enumerate(value):
                yield from _named_objects(f"{key}.{index}", part)


def _named_options(key: str, settings: Config) -> Iterator[tuple[str, str]]:
    """Yields the key and the name of every function in the options of an environment."""
    options = settings.options if isinstance(settings, EnvironmentConfig) else {}
    for name in _CODE_OPTIONS:
        value = options.get(name)
        entries = {f".{i}": entry for i, entry in enumerate(value)} if isinstance(value, list) else {"": value}
        for index, entry in entries.items():
            if isinstance(entry, str) and is_import_name(entry):
                yield f"{key}.options.{name}{index}", entry


def _generated_inputs(config: RunConfig) -> Iterator[str]:
    """Yields the key of each setting with generated rows."""
    for name, value in config:
        if isinstance(value, DataConfig | PtxConfig):
            yield from value.generated(name)


def _generator_checksum() -> FileChecksum | None:
    """Returns a checksum of the version of reasoning-gym, which determines the rows, or None if it is missing."""
    version = generator_version()
    return None if version is None else FileChecksum(len(version), zlib.crc32(version.encode()))


def _templates(settings: object) -> dict[str, Path | None]:
    """Returns the conversation templates of a section of the config by setting."""
    match settings:
        case DataConfig() | RolloutConfig():
            return {"template": settings.template}
        case RewardConfig():
            return {"policy_template": settings.policy_template}
        case _:
            return {}


def data_paths(path: Path) -> list[Path]:
    """Returns the files that determine the rows of a dataset.

    For a prepared folder, returns only its manifest, which contains the checksums of its shards.
    """
    if not path.is_dir():
        return [path]
    manifest = path / "manifest.json"
    return [manifest] if manifest.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _model_files(config: RunConfig) -> Iterator[tuple[str, Sequence[Path], bool]]:
    for name, role in config.role_settings.items():
        if isinstance(role, JudgeConfig) and role.model.path.is_dir():
            yield f"{name}.model.path", sorted(role.model.path.glob("*.safetensors")), False
    for name, role in models_of(config).items():
        if role.model is None or not role.model.path.is_dir():
            continue
        path, tokenizer = role.model.path, role.model.tokenizer_path
        if not isinstance(role, TrainedConfig) or role.lora is not None:
            yield f"{name}.model.path", sorted(path.glob("*.safetensors")), False
        if name == find_tokenizer_role(config):
            # An empty list of files has a checksum, too, so that a template added later counts as a change.
            yield f"{name}.model.path (tokenizer)", _files_in(tokenizer, _TOKENIZER_FILES), True
            yield f"{name}.model.path (chat template)", _files_in(tokenizer, _TEMPLATE_FILES), True


def _files_in(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _source_files(name: str) -> list[Path]:
    """Returns the file of the module in `module:name`, and the file that defines the function or class.

    Returns no file if the module cannot be imported, because then the role reports the error.
    """
    objects: list[Any] = []  # Any: a module, a function or a class
    with suppress(ImportNameError):  # a decorator may have registered a function under another name than its own
        objects.append(inspect.unwrap(import_attribute(name)))
    if (module := sys.modules.get(imported_module_name(name))) is not None:
        objects.append(module)
    files = set()
    for source in objects:
        with suppress(TypeError):  # a built-in, or an object with __call__, has no file
            files.add(inspect.getsourcefile(source))
    return sorted(Path(file) for file in files if file is not None)


def _module_files(name: str) -> list[Path]:
    """Returns the file of the module in `module:name`, or no file if it is not found. Executes no module, also no
    package that contains it.
    """
    module = name.partition(":")[0]
    if module.endswith(".py"):
        return [path] if (path := Path(module)).is_file() else []
    parts, spec = module.split("."), None
    for depth in range(1, len(parts) + 1):
        folders = None if spec is None else spec.submodule_search_locations
        if depth > 1 and folders is None:
            return []
        parent = ".".join(parts[:depth])
        specs = (finder.find_spec(parent, folders) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        if spec is None:
            return []
    return [] if spec is None or not spec.has_location or spec.origin is None else [Path(spec.origin)]


def source_checksum(name: str) -> FileChecksum | None:
    """Returns the checksum of the files that define a function, `module:function`, or None if a file is unreadable."""
    return combined_checksum(_source_files(name))


def check_same_inputs(old: Mapping[str, Sequence[int]], config: RunConfig) -> None:
    """Raises RunFolderError if an input differs from its checksum in `old`.

    Accepts inputs without a checksum in `old`, because earlier versions of flowrl recorded fewer inputs.
    """
    for key, now in input_checksums(config).items():
        before = FileChecksum(*old[key]) if key in old else now
        if before != now and key.endswith(".reasoning_gym"):
            raise RunFolderError(
                f"{key}: the run in {config.output} was started with a different version of reasoning-gym than "
                f"{generator_version()}, which may generate different rows; install the old version, or set output to "
                f"a new folder"
            )
        if before != now:
            raise RunFolderError(
                f"{key} has changed since the start of the run in {config.output} ({_difference(before, now)}), which "
                f"would change results; restore the old files, or set output to a new folder"
            )


def check_base_model(checkpoint: Checkpoint, base: Path, role: str = "actor") -> None:
    """Raises RunFolderError if the model in `base` differs from the base model of the role's adapter."""
    old = checkpoint.driver().get("inputs", {})
    before = next((FileChecksum(*old[key]) for key in (f"{role}.model.path", "model.path") if key in old), None)
    if before is None:  # a Hub name, or a checkpoint without checksums
        return
    now = combined_checksum(sorted(base.glob("*.safetensors")))
    if not base.is_dir() or now != before:
        reason = _difference(before, now) if base.is_dir() and now is not None else "it is missing"
        raise RunFolderError(
            f"the adapter of step {checkpoint.manifest.step} was trained on the model in {base}, which has changed "
            f"({reason}): restore the original model"
        )


def _difference(before: FileChecksum, now: FileChecksum) -> str:
    same_size = before.size == now.size
    return "different contents of the same size" if same_size else f"{now.size:,} bytes instead of {before.size:,}"


def combined_checksum(paths: Sequence[Path], *, has_names: bool = False) -> FileChecksum | None:
    """Returns one checksum over several files, optionally with their names, or None if a file is unreadable."""
    size = crc32 = 0
    try:
        for path in paths:
            crc32 = zlib.crc32(path.name.encode(), crc32) if has_names else crc32
            size += path.stat().st_size
            crc32 = _update_crc32(path, crc32)
    except OSError:
        return None
    return FileChecksum(size, crc32)


def _update_crc32(path: Path, crc32: int) -> int:
    """Continues a CRC-32 over a file, or over samples of a large file."""
    size, num_samples = path.stat().st_size, _FULL_CHECKSUM_BYTES // _CHUNK_BYTES
    is_small = size <= _FULL_CHECKSUM_BYTES
    with path.open("rb") as file:
        for i in range(-(-size // _CHUNK_BYTES) if is_small else num_samples):
            file.seek(i * _CHUNK_BYTES if is_small else i * (size - _CHUNK_BYTES) // (num_samples - 1))
            crc32 = zlib.crc32(file.read(_CHUNK_BYTES), crc32)
    return crc32
