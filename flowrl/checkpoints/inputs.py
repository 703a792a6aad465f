"""Checksums of a run's inputs: data files, frozen models, tokenizer, templates, and the user's functions and classes.

Checkpoints contain only the checksums, and a resumed run rejects changed inputs. For rows that reasoning-gym generates,
the version of the package is the input.
"""

import ast
import inspect
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from typing import Any

from flowrl.checkpoints.checkpoints import Checkpoint
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import (
    Config,
    DataConfig,
    ImportNameError,
    JudgeConfig,
    ModelConfig,
    ModelRoleConfig,
    PtxConfig,
    ReportConfig,
    RolloutConfig,
    RunConfig,
    ScoringModelConfig,
    TrainedConfig,
    find_tokenizer_role,
    import_attribute,
    imported_module_name,
    is_import_name,
)
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.config.setting_tree import may_name_code
from flowrl.data.checksums import FileChecksum
from flowrl.data.reading.generated_rows import generator_version
from flowrl.data.reading.raw_rows import MANIFEST
from flowrl.data.template import find_named_template

_FULL_CHECKSUM_BYTES = 256 * 1024**2
"""Largest model file, in bytes, whose checksum covers the full file. Larger files are sampled."""

_CHUNK_BYTES = 1024**2
"""Bytes per sampled chunk of a large file. Chunks are evenly spaced over the file."""

_TOKENIZER_FILES = (
    "*token*.json",
    "*vocab*.json",
    "vocab.*",
    "merges.txt",
    "emoji.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
)
_TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of the folders with installed packages."""


def input_checksums(config: RunConfig) -> dict[str, FileChecksum]:
    """Returns the checksum of each input, except trained weights, files of the Hub and unreadable files.

    The key of an input is its setting. If a setting names several inputs, the key ends with the kind in parentheses.
    """
    checksums = {key: combined_checksum(paths, has_names=has_names) for key, paths, has_names in _input_files(config)}
    generated = [
        key for name, value in config if isinstance(value, DataConfig | PtxConfig) for key in value.generated(name)
    ]
    # The version of reasoning-gym determines generated rows.
    version = generator_version()
    checksum = None if version is None else FileChecksum(len(version), zlib.crc32(version.encode()))
    checksums |= dict.fromkeys(generated, checksum)
    return {key: checksum for key, checksum in checksums.items() if checksum is not None}


def _input_files(config: RunConfig) -> Iterator[tuple[str, Sequence[Path], bool]]:
    """Yields the key and the files of each input, and whether the checksum includes the names of the files."""
    for name, value in config:
        if isinstance(value, DataConfig | PtxConfig):
            yield from _data_files(name, value)
    for key, code, is_setting in _named_code(config):
        yield from _code_files(key, code, is_setting)
    encoder = find_tokenizer_role(config)
    for name, role in config.role_settings.items():
        if isinstance(role, ModelRoleConfig | JudgeConfig) and role.model is not None:
            yield from _model_files(name, role, role.model, generates=name == encoder or isinstance(role, JudgeConfig))
        match role:
            case JudgeConfig():
                yield from ((f"{name}.{key}", [path], False) for key, path in role.files.items())
                yield from _template_files(f"{name}.template", role.template)
            case RolloutConfig():
                yield from _template_files(f"{name}.template", role.template)
            case ScoringModelConfig():
                yield from _template_files(f"{name}.policy_template", role.policy_template)
                yield from _tokenizer_files(f"{name}.policy_tokenizer", role.policy_tokenizer)


def _data_files(name: str, data: DataConfig | PtxConfig) -> Iterator[tuple[str, Sequence[Path], bool]]:
    for key, path in data.files(name).items():
        yield key, data_paths(path), False
        if shards := _files_in(path, ("arrow/*.arrow",)) if (path / MANIFEST).is_file() else []:
            yield f"{key} (shards)", shards, True
    if isinstance(data, DataConfig):
        yield from _template_files(f"{name}.template", data.template)


def _named_code(config: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """Yields (key, `module:name`, is_setting) of all functions and classes in the settings. If `is_setting` is False,
    the text is an option, which may not name a function.

    Excludes `recipe`, whose settings are compared by value, and `report`, which may change on resume.
    """
    for name, value in config:
        if name != "recipe" and not isinstance(value, ReportConfig):
            yield from _names_below(name, value, may_name_code(type(config).model_fields[name]))


def _names_below(key: str, value: object, is_setting: bool) -> Iterator[tuple[str, str, bool]]:
    match value:
        case str() if is_import_name(value):
            yield key, value, is_setting
        case Config():
            for name, part in value:
                can_name = may_name_code(type(value).model_fields[name])
                if can_name or not isinstance(part, str):
                    yield from _names_below(f"{key}.{name}", part, can_name)
        case Mapping():
            for name, part in value.items():
                yield from _names_below(f"{key}.{name}", part, is_setting)
        case list() | tuple():
            for index, part in enumerate(value):
                yield from _names_below(f"{key}.{index}", part, is_setting)


def _code_files(key: str, name: str, is_setting: bool) -> Iterator[tuple[str, Sequence[Path], bool]]:
    """Yields the files of a function or class, and the files of the user's modules that these files import."""
    files = _source_files(name) if is_setting else _module_files(name)
    if files:
        yield key, files, False
        if imported := _imported_files(name, files):
            yield f"{key} (imported modules)", imported, False


def _template_files(key: str, path: Path | None) -> Iterator[tuple[str, Sequence[Path], bool]]:
    """Yields a conversation template file, and the files of the chat template or the model that this file names."""
    if path is None:
        return
    yield key, [path], False
    if (named := find_named_template(path)) is not None:
        files = _files_in(named, (*_TOKENIZER_FILES, *_TEMPLATE_FILES)) if named.is_dir() else [named]
        yield f"{key} (chat template)", files, True


def data_paths(path: Path) -> list[Path]:
    """Returns the files that determine the rows of a dataset.

    For a prepared folder, returns only its manifest.
    """
    if not path.is_dir():
        return [path]
    manifest = path / MANIFEST
    return [manifest] if manifest.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _model_files(
    name: str, role: ModelRoleConfig | JudgeConfig, model: ModelConfig, *, generates: bool
) -> Iterator[tuple[str, Sequence[Path], bool]]:
    """Yields the files in the local folders of a role's model and its tokenizer, except weights that the run trains.
    `generates` is True if the role reads a generation config and encodes text.
    """
    key = f"{name}.model.path"
    if model.path.is_dir():
        if not isinstance(role, TrainedConfig) or role.lora is not None:
            yield key, sorted(model.path.glob("*.safetensors")), False
        # An empty list of files has a checksum, too, so that a file added later counts as a change.
        names = ("config.json", "generation_config.json") if generates else ("config.json",)
        yield f"{key} (config)", _files_in(model.path, names), True
    if model.adapter is not None and model.adapter.is_dir():
        yield f"{name}.model.adapter", _files_in(model.adapter, ("adapter_*",)), False
    if generates or isinstance(role, ScoringModelConfig):
        yield from _tokenizer_files(key, model.tokenizer_path)


def _tokenizer_files(key: str, folder: Path | None) -> Iterator[tuple[str, Sequence[Path], bool]]:
    if folder is None or not folder.is_dir():
        return
    yield f"{key} (tokenizer)", _files_in(folder, _TOKENIZER_FILES), True
    named = find_named_template(folder / TEMPLATE_FILE, is_own=True)
    templates = {*_files_in(folder, _TEMPLATE_FILES), *([] if named is None else [named])}
    yield f"{key} (chat template)", sorted(templates), True


def _files_in(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _source_files(name: str) -> list[Path]:
    """Returns the file of the module in `module:name`, and the file that defines the function or class.

    Returns no file if the module cannot be imported, because the role reports this error.
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
    """Returns the file of the module in `module:name`. Returns no file if the module is not found or is part of the
    standard library. Executes no module.
    """
    module = name.partition(":")[0]
    if module.endswith(".py"):
        return [path] if (path := Path(module)).is_file() else []
    spec = None if module.partition(".")[0] in sys.stdlib_module_names else _find_spec(module)
    return [] if spec is None or not spec.has_location or spec.origin is None else [Path(spec.origin)]


def _find_spec(module: str) -> ModuleSpec | None:
    """Returns the location of a module, or None if it is not found. Executes neither the module nor its parent
    packages.
    """
    parts, spec = module.split("."), None
    for depth in range(1, len(parts) + 1):
        folders = None if spec is None else spec.submodule_search_locations
        if depth > 1 and folders is None:
            return None
        parent = ".".join(parts[:depth])
        try:
            specs = (finder.find_spec(parent, folders) for finder in sys.meta_path)
            spec = next((found for found in specs if found is not None), None)
        except KeyError:  # a folder without __init__.py, in a package that has not been imported
            spec = ModuleSpec(parent, None, is_package=True)
            spec.submodule_search_locations = [os.path.join(folder, parts[depth - 1]) for folder in folders or ()]
        if spec is None:
            return None
    return spec


def _imported_files(name: str, files: Sequence[Path]) -> list[Path]:
    """Returns the files of all modules that the module in `module:name` imports, directly or through other modules.

    Excludes `files`, flowrl, the standard library, and installed packages except the module's own package. Executes no
    module, and follows only `import` statements.
    """
    module, top = name.partition(":")[0], name.partition(":")[0].partition(".")[0]
    if top == "flowrl":
        return []
    imported: dict[str, Path] = {}
    searched: set[str] = set()
    pending = [("", file) if module.endswith(".py") else (module, file) for file in _module_files(name)]
    while pending:
        for found in _imports_of(*pending.pop()):
            parents = accumulate(found.split("."), lambda parent, child: f"{parent}.{child}")
            for part in [parent for parent in parents if parent not in searched]:
                searched.add(part)
                file = next(iter(_module_files(part)), None)
                is_foreign = (
                    file is not None and part.partition(".")[0] != top and not _SITE_FOLDERS.isdisjoint(file.parts)
                )
                if file is None or is_foreign or part.partition(".")[0] == "flowrl":
                    continue
                imported[part] = file
                pending.append((part, file))
    return [file for _, file in sorted(imported.items()) if file not in files]


def _imports_of(module: str, file: Path) -> Iterator[str]:
    """Yields the names that a file imports. Some of them are functions of a module instead of modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([] if node.module is None else [node.module])])
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names)) if base else ()


def source_checksum(name: str) -> FileChecksum | None:
    """Returns the checksum of the files that define `module:function`, and of the user's modules that these files
    import. Returns None if a file is unreadable.
    """
    files = _source_files(name)
    return combined_checksum([*files, *_imported_files(name, files)])


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
