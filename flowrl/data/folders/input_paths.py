"""Checks the paths of models and datasets, and reads the configs of models, without the libraries that load them.

These libraries take seconds to import, and retry if a path does not exist.
"""

import os
import re
import ssl
import threading
from collections.abc import Mapping
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants

from flowrl.config.source import MAX_MB, InputFileError, find_file_problem, read_json

MAX_POSITIONS = ("max_position_embeddings", "n_positions")
"""Names of the maximum sequence length in the configuration of a language model."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_OTHER_FORMAT = re.compile(r"\.(csv|tsv|xlsx?)(\.gz|\.zst)?$", re.IGNORECASE)
"""Pattern of file names of tables that flowrl does not read."""
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Extensions of files of a model that are read completely before they are parsed."""
_TEXT_FILES = (*(f"*{suffix}" for suffix in _TEXT_SUFFIXES), "additional_chat_templates/*.jinja")
"""Patterns of the files of a model, except weights."""
_SETTINGS_FILES = (
    "adapter_config.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""Small files in the folder of a model. Each has a JSON object."""
_CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the Hub over all its addresses."""


def is_hub_name(path: Path) -> bool:
    """Returns whether a model path is not a local path, and is a possible name on the Hugging Face Hub."""
    return not path.exists() and _HUB_NAME.fullmatch(str(path)) is not None


def find_model_file(model: Path, name: str) -> Path | None:
    """Returns the path of a file of a model, in its folder or in the cache of the Hub, or None if it does not exist."""
    folder = model
    if is_hub_name(model):
        cache = Path(constants.HF_HUB_CACHE) / "--".join(["models", *model.parts])
        try:
            folder = cache / "snapshots" / (cache / "refs" / "main").read_text().strip()
        except OSError:
            return None
    return folder / name if (folder / name).is_file() else None


def read_text_config(model: Path) -> Mapping[str, Any]:  # Any: JSON values
    """Returns the settings of the language model in `config.json`, in the folder of the model or in the cache of the
    Hub. Returns an empty mapping if the file cannot be read.
    """
    file = find_model_file(model, "config.json")
    try:
        settings = None if file is None else read_json(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, Mapping):
        return {}
    text = settings.get("text_config")  # of a model with several modalities
    return text if isinstance(text, Mapping) else settings


def read_vocabulary_size(model: Path) -> int | None:
    """Returns the number of embeddings of a model, or None if its config is missing. Token ids must be smaller."""
    size = read_text_config(model).get("vocab_size")
    return size if isinstance(size, int) else None


def download_model_file(model: Path, name: str) -> Path | None:
    """Returns the path of a file of a model, or None if the model does not have this file. Downloads a file of a Hub
    model unless it is in the cache.
    """
    file = find_model_file(model, name)
    if file is not None or not is_hub_name(model):
        return file
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 (takes 0.4 s, and only models of the Hub need it)
    from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(str(model), name))
    except EntryNotFoundError:
        return None


def find_model_problem(path: Path) -> str | None:
    """Returns the reason for which no model can be loaded from `path`, a local directory or a name on the Hugging Face
    Hub.

    Returns None if the directory is valid, the model is in the cache, or the Hub is reachable. Waits for the Hub for up
    to 3 seconds.
    """
    if path.is_dir():
        return _find_folder_problem(path)
    if path.exists():
        return "it is a file, not a directory: set the directory that contains it"
    if not _HUB_NAME.fullmatch(str(path)):
        return "there is no such directory: correct the path"
    if (Path(constants.HF_HUB_CACHE) / "--".join(["models", *path.parts]) / "snapshots").is_dir():
        return None
    error = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connect(str(path))
    if error is None:
        return None
    return (
        f"there is no such directory, and the Hugging Face Hub is unreachable ({error}): correct the path, or connect "
        f"to the Hub"
    )


def _find_foreign_link(folder: Path) -> str | None:
    """Returns the reason for which a file of a model folder is not read, or None.

    Templates, vocabularies and settings become part of prompts, checkpoints and exported models. A folder from an
    untrusted source must therefore not link these files to private files. A link to a file with the same name is
    allowed, because it is the file of another model.
    """
    root = folder.resolve()
    root = root.parents[1] if root.parent.name == "snapshots" else root  # files of the Hub's cache are links to `blobs`
    for file in sorted(file for pattern in _TEXT_FILES for file in folder.glob(pattern)):
        target = file.resolve()
        if target.name != file.name and not target.is_relative_to(root):
            return f"its file {file.name} is a link to {target}, outside of the folder: replace the link by a copy"
    return None


def _find_folder_problem(folder: Path) -> str | None:
    """Returns the reason for which a file in the folder of a model must not be read or a settings file is invalid, or
    None.
    """
    if problem := _find_foreign_link(folder):
        return problem
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        return f"it cannot be read ({error.strerror}): make the directory readable"
    for file in files:
        if problem := find_file_problem(file, MAX_MB if file.suffix in _TEXT_SUFFIXES else None):
            return f"its {file.name} {problem}"
        if file.name in _SETTINGS_FILES and file.is_file():
            try:
                settings = read_json(file)
            except (OSError, InputFileError) as error:
                return f"its settings are corrupt: {error}"
            if not isinstance(settings, Mapping):
                return f"its {file.name} is a {type(settings).__name__}, but must be a JSON object: restore the file"
    return None


def find_dataset_problem(path: Path) -> str | None:
    """Returns the reason for which no dataset can be read from `path`, or None.

    A dataset is a file with content, a folder of files, or a name on the Hugging Face Hub. Waits for the Hub for up to
    3 seconds.
    """
    if path.is_dir():
        files = [file.name for file in (*path.iterdir(), *path.glob("*/*")) if file.is_file()]
        if any(re.search(r"\.(jsonl?|ndjson|parquet|arrow)(\.gz|\.zst)?$", name) for name in files):
            return None
        return "the folder has no JSON-lines, parquet or arrow files: set a file, or a folder with such files"
    if path.exists():
        if table := _OTHER_FORMAT.search(path.name):
            return (
                f"{table[1]} is not supported: convert the file to JSON lines (.jsonl) or parquet, for example with "
                "pandas"
            )
        if problem := find_file_problem(path, max_mb=None):
            return f"it {problem}"
        is_empty = path.stat().st_size == 0
        return "the file is empty: write one conversation per line (docs/data.md)" if is_empty else None
    if len(path.parts) == 2 and not path.suffix and _HUB_NAME.fullmatch(str(path)):
        return _find_hub_dataset_problem(path)
    return "there is no such file: correct the path"


def _find_hub_dataset_problem(path: Path) -> str | None:
    if find_spec("datasets") is None:
        return (
            "there is no such file, and datasets of the Hugging Face Hub need the library datasets: pip install "
            "'flowrl[data]', or convert the dataset to a JSON-lines file (docs/data.md)"
        )
    cache = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    if (cache / "___".join(path.parts)).is_dir():
        return None
    error = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connect(str(path), "datasets")
    if error is None:
        return None
    return (
        f"there is no such file, and the Hugging Face Hub is unreachable ({error}): correct the path, connect to the "
        f"Hub, or set a local file, such as a JSON-lines file (docs/data.md)"
    )


def _connect(name: str, kind: str = "models") -> str | None:
    """Returns the connection error, or None if the Hub is reachable. Every response of the Hub counts as reachable."""
    errors: list[str | None] = []
    # The timeout of a request holds for each address of a host, so a thread limits the time over all addresses.
    thread = threading.Thread(target=lambda: errors.append(_request(name, kind)), daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    return errors[0] if errors else f"no response within {_CONNECT_TIMEOUT_S:g} s"


def _request(name: str, kind: str) -> str | None:
    request = Request(f"{constants.ENDPOINT}/api/{kind}/{name}", method="HEAD")
    try:
        with urlopen(request, timeout=_CONNECT_TIMEOUT_S):
            return None
    except HTTPError as response:
        response.close()
        return None
    except URLError as error:  # A certificate error does not show that the Hub is unreachable, so the name is accepted.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, HTTPException):  # connected, but without a response
        return None
