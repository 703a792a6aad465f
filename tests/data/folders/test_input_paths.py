"""A missing model or dataset is recognized at once, with the reason."""

import io
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.data.chat import ChatTokenizer
from flowrl.data.folders.input_paths import (
    download_model_file,
    find_dataset_problem,
    find_model_file,
    find_model_problem,
)
from flowrl.data.prompts import DataError, read_conversations
from flowrl.inference.prompt_file import read_prompt_rows
from tests.errors import missing_facts, rejects
from tests.hub_cache import REVISION, make_snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A local server as the Hub, which has no model, and an empty cache. Returns the paths of all requests."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield requests
        server.shutdown()
        thread.join()


@pytest.fixture
def no_hub(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the Hub by a port that refuses connections, because a socket is bound to it and does not listen."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        yield


def test_a_reachable_hub_gets_one_request_and_its_status_is_ignored(hub: list[str]) -> None:
    assert find_model_problem(Path("owner/model")) is None and find_model_problem(Path("nowhere")) is None
    assert hub == ["/api/models/owner/model", "/api/models/nowhere"]


TEMPLATES = "additional_chat_templates"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", f"{TEMPLATES}/rag.jinja", "vocab.txt", "generation_config.json", "tokenizer.model"]
)
def test_a_model_folder_cannot_link_to_private_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password")
    link = tmp_path / "model" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "secret")
    problem = find_model_problem(tmp_path / "model")
    assert problem is not None and not missing_facts(problem, link.name, tmp_path / "secret")


def test_a_model_folder_can_link_to_its_own_files_to_files_of_another_model_and_to_weights(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        (folder / "tokenizer.json").touch()
    (model / "chat_template.jinja").symlink_to(model / "tokenizer.json")
    (model / "tokenizer_config.json").symlink_to(other / "tokenizer_config.json")
    (model / "model.safetensors").symlink_to(other / "weights")
    (tmp_path / "link").symlink_to(model)
    assert find_model_problem(model) is None and find_model_problem(tmp_path / "link") is None


def test_the_files_of_a_snapshot_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "models--a--b/snapshots/main", tmp_path / "models--a--b/blobs/0123"
    for path in (snapshot, blob.parent):
        path.mkdir(parents=True)
    blob.touch()
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/0123")
    assert find_model_problem(snapshot) is None


@pytest.mark.parametrize("name", ["nowhere", "owner/model"])
def test_a_name_is_rejected_if_the_hub_is_unreachable(no_hub: None, name: str) -> None:
    problem = find_model_problem(Path(name))
    assert problem is not None and "Hub is unreachable" in problem


def test_a_name_is_rejected_offline_without_a_connection(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = find_model_problem(Path("owner/model"))
    assert problem is not None and "HF_HUB_OFFLINE" in problem and hub == []


def test_a_cached_model_needs_no_hub(no_hub: None) -> None:
    (Path(constants.HF_HUB_CACHE) / "models--owner--model" / "snapshots").mkdir(parents=True)
    assert find_model_problem(Path("owner/model")) is None
    assert find_model_problem(Path("owner/other")) is not None


def test_a_file_of_a_model_is_in_its_folder_or_in_the_cache(no_hub: None, tmp_path: Path) -> None:
    snapshot = make_snapshot(Path(constants.HF_HUB_CACHE), "owner/model")
    for folder in (tmp_path / "model", snapshot, snapshot.with_name("old")):
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text(folder.name)
    for model, text in ((tmp_path / "model", "model"), (Path("owner/model"), REVISION)):
        file = find_model_file(model, "README.md")
        assert file is not None and file.read_text() == text
        assert find_model_file(model, "config.json") is None
    assert find_model_file(Path("owner/other"), "README.md") is None
    assert find_model_file(tmp_path / "other", "README.md") is None


def test_an_optional_file_of_a_hub_model_is_read_from_the_cache(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download_model_file(Path("owner/model"), "generation_config.json") is None
    snapshot = make_snapshot(Path(constants.HF_HUB_CACHE), "owner/model")
    (snapshot / "generation_config.json").write_text("{}")
    file = download_model_file(Path("owner/model"), "generation_config.json")
    assert file is not None and file.read_text() == "{}" and hub == []
    assert download_model_file(tmp_path, "generation_config.json") is None


def test_a_path_that_is_no_name_is_rejected_without_the_hub(hub: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_model_problem(tmp_path) is None
    for path in (tmp_path / "none", tmp_path / "file", Path("runs/quickstart/model")):
        assert find_model_problem(path) is not None
    assert hub == []


def test_the_name_of_a_hub_dataset_is_explained(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    assert find_dataset_problem(tmp_path / "rows.jsonl") is None
    hub, missing = find_dataset_problem(Path("openai/gsm8k")), find_dataset_problem(Path("data/train.jsonl"))
    assert hub is not None and "JSON-lines" in hub
    assert missing is not None and "JSON-lines" not in missing
    with rejects("openai/gsm8k", "JSON-lines", error=DataError):
        read_conversations("openai/gsm8k")


def test_a_dataset_must_be_a_file_with_content(tmp_path: Path) -> None:
    assert find_dataset_problem(tmp_path) is not None
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert find_dataset_problem(empty) is not None
    empty.write_text("{}\n")
    assert find_dataset_problem(empty) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", "vocab.txt"])
def test_a_model_with_an_endless_file_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    problem = find_model_problem(tmp_path)
    assert problem is not None and name in problem
    with rejects(tmp_path, name):
        ChatTokenizer(tmp_path)


def test_a_tokenizer_beyond_the_size_limit_is_rejected_and_large_weights_are_not(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(300_000_000)  # sparse
    assert not missing_facts(find_model_problem(tmp_path) or "", "tokenizer.json", 300, 256)


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "{", "null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_model_with_invalid_settings_is_rejected(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    problem = find_model_problem(tmp_path)
    assert problem is not None and name in problem


def test_a_dataset_that_is_a_pipe_or_a_device_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", Path("/dev/zero")):
        assert find_dataset_problem(path) is not None
        with rejects(path, error=DataError):
            read_conversations(path)
        with rejects(path, error=DataError):
            read_prompt_rows(str(path), io.BytesIO())
