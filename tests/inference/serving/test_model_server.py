"""`flowrl serve`: settings of vLLM's server, rejected hosts, and the real server."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer

from flowrl.cli import main
from flowrl.config import ReplicaSizes
from flowrl.controller.placement.cpu_threads import count_usable_cpus
from flowrl.data.folders.private_folder import remove_abandoned_folders
from flowrl.data.template import ConversationTemplate
from flowrl.inference.model_source import resolve_model
from flowrl.inference.serving.api_key import API_KEY, LIVENESS_PATHS, KeyMiddleware
from flowrl.inference.serving.model_server import (
    ServerSettings,
    chat_template,
    check_server,
    end_ids,
    server_command,
    server_environment,
)
from flowrl.inference.text_generator import open_chat
from tests.errors import rejects
from tests.hub_cache import make_snapshot

ROOT = Path(__file__).parents[3]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_server_gets_the_template_and_the_end_tokens_of_the_run(run_folder: Path, tmp_path: Path) -> None:
    source = resolve_model(str(run_folder))
    chat = open_chat(source)
    command = server_command(source, chat, ServerSettings(port=1234), tmp_path)
    options = dict(zip(command[2::2], command[3::2], strict=False))
    assert command[:2] == ["serve", str(run_folder / "model")]
    assert (options["--host"], options["--port"], options["--served-model-name"]) == ("127.0.0.1", "1234", "full")
    assert not any("trust" in word for word in command)
    assert (tmp_path / "chat_template.jinja").read_text() == chat.template.chat_template
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert chat.eos_id in generation["eos_token_id"] == end_ids(source.path, chat)


@pytest.mark.slow  # imports vLLM
@pytest.mark.vllm
@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while vLLM is imported
def test_vllm_reads_the_arguments_of_its_engine(run_folder: Path, tmp_path: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415 (takes seconds)
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 (as above)

    arguments = {
        "block_size": 32,
        "enable_chunked_prefill": False,
        "limit_mm_per_prompt": {"image": 1},
        "kv_cache_dtype": "auto",
        "swap_space": None,
    }
    source = resolve_model(str(run_folder))
    settings = ServerSettings(port=1234, replica=ReplicaSizes(tp=2), engine_args=arguments)
    command = server_command(source, open_chat(source), settings, tmp_path)
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(command[1:])
    assert read is not None
    assert (read.tensor_parallel_size, read.pipeline_parallel_size) == (2, 1)
    assert "--swap-space" not in command
    given = {name: value for name, value in arguments.items() if value is not None}
    assert {name: getattr(read, name) for name in given} == given


def test_sizes_that_do_not_divide_the_model_are_rejected(run_folder: Path, tmp_path: Path) -> None:
    source = resolve_model(str(run_folder))
    heads = json.loads((source.path / "config.json").read_text())["num_attention_heads"]
    replica = ReplicaSizes(tp=heads + 1)
    with rejects("tp", heads + 1, heads):
        server_command(source, open_chat(source), ServerSettings(replica=replica), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's server has pipeline stages on GPUs")
def test_stages_of_the_server_are_rejected_on_cpus(run_folder: Path, tmp_path: Path) -> None:
    source = resolve_model(str(run_folder))
    with rejects("pp", 2, "CPUs", "tp"):
        server_command(source, open_chat(source), ServerSettings(replica=ReplicaSizes(pp=2)), tmp_path)


def test_the_server_gets_the_generation_settings_of_a_hub_model(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_snapshot(tmp_path, "owner/model")
    shutil.copytree(run_folder / "model", snapshot, dirs_exist_ok=True)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = resolve_model("owner/model")
    chat = open_chat(source)
    server_command(source, chat, ServerSettings(), tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": sorted({1, 2, *end_ids(snapshot, chat)}), "temperature": 0.6}


def test_the_server_requires_the_key_for_all_paths_and_reads_it_from_its_environment(
    run_folder: Path, tmp_path: Path
) -> None:
    source = resolve_model(str(run_folder))
    chat, settings = open_chat(source), ServerSettings(api_key="secret")
    command = server_command(source, chat, settings, tmp_path)
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    assert getattr(importlib.import_module(module), name) is KeyMiddleware  # as vLLM imports it
    assert server_environment(settings)[API_KEY] == "secret"
    assert not any("secret" in text for text in (*command, repr(settings)))
    assert "--middleware" not in server_command(source, chat, ServerSettings(), tmp_path)
    assert API_KEY not in server_environment(ServerSettings())


def test_the_server_has_the_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert server_environment(ServerSettings())["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    default = None if torch.cuda.is_available() else str(count_usable_cpus())  # on a GPU, vLLM limits its threads
    assert server_environment(ServerSettings()).get("OMP_NUM_THREADS") == default


def test_the_template_of_the_server_adds_the_system_message(run_folder: Path) -> None:
    source = resolve_model(str(run_folder))
    own = ConversationTemplate(chat_template="chatml", system_message='Say "1\'" {{ x }}', end_of_assistant="=")
    chat = open_chat(source, own)
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=chat_template(chat))
    assert rendered == chat.render(chat.with_system(messages), generate=False)


@needs_vllm
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com"])
def test_other_machines_need_a_key(host: str) -> None:
    with rejects("--host", "--api-key-file", API_KEY):
        check_server(ServerSettings(host=host))


@needs_vllm
def test_a_port_in_use_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "model", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def request(port: int, path: str, body: object = None, key: str | None = "secret") -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    with urlopen(Request(f"http://127.0.0.1:{port}/{path}", data, headers), timeout=120) as response:
        return json.loads(response.read() or "{}")


def status_without_key(port: int, path: str, method: str) -> int:
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", method=method.upper()), timeout=120) as response:
            return response.status
    except HTTPError as error:
        return error.code


def processes_with(text: str) -> list[str]:
    """Returns the ids of the processes whose environment contains a text."""
    ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "environ").read_bytes():
                ids.append(folder.name)
        except OSError:
            continue
    return ids


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a path that is short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_the_server_answers_and_leaves_no_process(
    run_folder: Path, tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    port, marker = free_port(), f"FLOWRL_TEST={tmp_path}"
    command = [sys.executable, "-m", "flowrl.cli", "serve", str(run_folder), "--step", "2", "--name", "full"]
    command += ["--port", str(port), "--kv-cache-gb", "0.1"]
    variables = {"PYTHONPATH": str(ROOT), "FLOWRL_TEST": str(tmp_path), "TMPDIR": str(temporary), API_KEY: "secret"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)
    deadline = time.monotonic() + 900
    while True:
        try:
            models = request(port, "v1/models")
            break
        except URLError:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
    assert [model["id"] for model in models["data"]] == ["full"]
    with pytest.raises(URLError, match="401"):
        request(port, "v1/models", key="wrong")
    paths = request(port, "openapi.json")["paths"]
    codes = {path: status_without_key(port, path, next(iter(methods))) for path, methods in paths.items()}
    codes["/metrics"] = status_without_key(port, "/metrics", "get")
    assert {"/tokenize", "/v1/models"} <= codes.keys()
    assert {path for path, code in codes.items() if code != 401} == LIVENESS_PATHS and codes["/health"] == 200
    assert not any(b"secret" in Path("/proc", name, "cmdline").read_bytes() for name in processes_with(marker))
    messages = [{"role": "user", "content": "12+34="}]
    body = {"model": "full", "messages": messages, "max_tokens": 6, "temperature": 0}
    answer = request(port, "v1/chat/completions", body)["choices"][0]
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("12+34=\n")
    options = ["--prompts", str(prompts), "--output", str(output), "--temperature", "0", "--max-tokens", "6"]
    assert main(["generate", str(run_folder), *options]) == 0
    expected = json.loads(output.read_text())
    assert answer["message"]["content"] == expected["response"]
    process.send_signal(number)
    process.wait(timeout=120)
    deadline = time.monotonic() + 120
    while processes_with(marker):
        assert time.monotonic() < deadline, processes_with(marker)
        time.sleep(0.5)
    assert bool(list(temporary.glob("flowrl-*"))) == (number is signal.SIGKILL)
    remove_abandoned_folders(temporary)
    assert list(temporary.glob("flowrl-*")) == []
