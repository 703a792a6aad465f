"""`flowrl generate`, `flowrl chat` and `flowrl serve`: the use of trained models."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli.command_parser import Commands, natural, port, positive, positive_count, share, temperature
from flowrl.cli.imports import add_working_folder, collection_paused
from flowrl.config import CheckFailed, ReplicaSizes, UserError
from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.config.engines.vllm_settings import find_rejected_argument
from flowrl.config.source import parse
from flowrl.data.messages import DataError

if TYPE_CHECKING:
    from flowrl.data.template import ConversationTemplate
    from flowrl.inference.generation_settings import EngineSettings, SamplingSettings
    from flowrl.inference.model_source import ModelSource

_QUANTIZATIONS = sorted({name for engine in ENGINES.values() for name in engine.quantizations})


def add_inference(commands: Commands) -> None:
    """Adds the commands that use a trained model to the parser of the `flowrl` command."""
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a model."""
    parser.add_argument(
        "model", metavar="MODEL|RUN|CHECKPOINT", help="a model's folder or Hub name, a run folder, or a checkpoint"
    )
    parser.add_argument("--step", type=natural, metavar="N", help="use the checkpoint of this step of a run")
    parser.add_argument("--adapter", metavar="FOLDER", help="LoRA adapter in the format of peft, merged into the model")
    parser.add_argument(
        "--template", metavar="FILE|NAME", help="conversation template file, or an included template such as chatml"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select and load a model."""
    add_source_options(parser)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="hf", help="hf (transformers) or vllm")
    parser.add_argument("--quantization", choices=_QUANTIZATIONS, help="quantize the linear layers")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float64"],
        help="dtype of the weights; default: float32 on the CPU; on a GPU bfloat16 for vLLM, that of the files for hf",
    )
    parser.add_argument(
        "--kv-cache-gb",
        type=positive,
        metavar="GB",
        help="memory of vLLM's KV cache on each device; default: 1 on the CPU, 90%% of the free memory of a GPU",
    )
    add_vllm_options(parser)


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of vLLM's engine."""
    add_parallel_sizes(parser)
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further argument of vLLM's engine, such as block_size=32; the value is YAML; can be repeated",
    )


def add_parallel_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of an engine with several devices."""
    parser.add_argument(
        "--tp", type=positive_count, default=1, metavar="N", help="devices that share each layer, with vLLM; default: 1"
    )
    parser.add_argument(
        "--pp",
        type=positive_count,
        default=1,
        metavar="N",
        help="pipeline stages of the model, with vLLM; default: 1",
    )


def add_sampling_options(parser: argparse.ArgumentParser, default_max_tokens: str) -> None:
    """Adds the options that determine a response."""
    parser.add_argument(
        "--max-tokens",
        type=positive_count,
        metavar="N",
        help=f"largest number of tokens of a response; default: {default_max_tokens}",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=1.0,
        metavar="T",
        help="sampling temperature; 0 is greedy; default: 1",
    )
    parser.add_argument(
        "--top-k", type=natural, default=0, metavar="K", help="sample from the K most likely tokens; default: 0, all"
    )
    parser.add_argument(
        "--top-p",
        type=share,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities sum to P; default: 1",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends a response; can be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampled tokens; default: 0")
    parser.add_argument("--system", metavar="TEXT", help="system message of conversations that have none")


_MAX_TOKENS = 256
"""Default of `flowrl generate --max-tokens` for a model without a run that generates."""


def _add_generate(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="generate responses to the prompts of a file, or the best of N")
    add_model_options(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE|-",
        help="prompts as lines of text, JSON lines or a table; - reads standard input",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="new file of JSON lines; if killed, the same command resumes it"
    )
    parser.add_argument(
        "--samples", type=positive_count, default=1, metavar="N", help="number of responses per prompt; default: 1"
    )
    parser.add_argument("--best-of", type=positive_count, metavar="N", help="write the best of N responses per prompt")
    parser.add_argument(
        "--reward", metavar="FUNCTION|FOLDER", help="for --best-of: module:function, or the folder of a reward model"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text of a prompt, without the chat template")
    parser.add_argument(
        "--max-num-seqs",
        type=positive_count,
        metavar="N",
        help="largest number of concurrent responses; default: 256, and for vLLM on a GPU its own default",
    )
    add_sampling_options(
        parser, f"that of the run's rollouts, otherwise {_MAX_TOKENS}; fewer if the model's context has no more"
    )
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    add_working_folder()

    from flowrl.inference.generation_settings import GenerationJob, read_job  # noqa: PLC0415 (jinja2)

    job = GenerationJob(
        prompts=arguments.prompts,
        output=arguments.output,
        sampling=sampling_settings(arguments, _MAX_TOKENS),
        engine=engine_settings(arguments),
        is_max_tokens_default=arguments.max_tokens is None,
        template=read_template_option(arguments.template),
        samples=arguments.samples,
        best_of=arguments.best_of,
        reward=arguments.reward,
        system=arguments.system,
        is_raw=arguments.raw,
    )
    conversations, source = read_job(job), find_source(arguments)

    with collection_paused():
        from flowrl.inference.generation_job import run_job  # noqa: PLC0415 (torch, after the arguments are valid)

    run_job(job, conversations, source)


def _add_chat(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="chat with a model in the terminal")
    add_model_options(parser)
    add_sampling_options(parser, f"{_CHAT_MAX_TOKENS}; fewer if the model's context has no more")
    parser.set_defaults(run=_chat, max_num_seqs=_CHAT_SEQS)


_CHAT_MAX_TOKENS = 512

_CHAT_SEQS = 16
"""Largest number of concurrent responses of a chat. A smaller number would not save memory."""


def _chat(arguments: argparse.Namespace) -> None:
    sampling, settings = sampling_settings(arguments, _CHAT_MAX_TOKENS), engine_settings(arguments)
    template, model = read_template_option(arguments.template), find_source(arguments)

    # imported here, because they import torch, which takes seconds: errors of the arguments come first
    with collection_paused():
        from flowrl.inference.chat_session import ChatSession  # noqa: PLC0415
        from flowrl.inference.chat_terminal import ChatTerminal  # noqa: PLC0415
        from flowrl.inference.model_source import ModelSource, resolve_model  # noqa: PLC0415
        from flowrl.inference.text_generator import TextGenerator, open_chat  # noqa: PLC0415

    def open_session(source: ModelSource) -> ChatSession:
        chat = open_chat(source, template)
        try:
            chat.check_chat_template()
        except DataError as error:
            raise DataError(f"{error}; or choose a template with --template, such as chatml") from error
        generator = TextGenerator(source, sampling, settings, chat=chat, uses_full_context=True)
        return ChatSession(
            generator, system=arguments.system, temperature=sampling.temperature, max_tokens=sampling.max_tokens
        )

    def open_other(name: str) -> ChatSession:
        if settings.engine == "vllm":
            raise UserError(
                "/compare needs a second engine in this process, but vllm allows one: chat with --engine hf"
            )
        return open_session(resolve_model(name))

    ChatTerminal(open_session(model), open_other).run()


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="serve a model with vLLM's OpenAI-compatible server")
    add_source_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, for this machine only")
    parser.add_argument("--port", type=port, default=8000, help="default: 8000")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key that clients must send")
    keys.add_argument(
        "--api-key",
        metavar="KEY",
        help="the key itself, which other users of this machine can see; default: the variable VLLM_API_KEY",
    )
    parser.add_argument("--name", help="name of the model for clients; default: the name of the folder")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 on the CPU, that of the files on a GPU",
    )
    parser.add_argument("--max-model-len", type=positive_count, metavar="N", help="tokens of prompt and response")
    parser.add_argument(
        "--kv-cache-gb",
        type=positive,
        metavar="GB",
        help="memory of the KV cache on each device; default: 1 on the CPU, vLLM's share of a GPU",
    )
    add_vllm_options(parser)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    # imported here, because only commands that run a model need torch
    from flowrl.inference.serving.api_key import read_api_key  # noqa: PLC0415
    from flowrl.inference.serving.model_server import (  # noqa: PLC0415
        ServerSettings,
        check_server,
        serve,
        unsupported_stops,
    )

    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        api_key=read_api_key(arguments.api_key, arguments.api_key_file),
        name=arguments.name,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        kv_cache_gb=arguments.kv_cache_gb,
        replica=ReplicaSizes(arguments.tp, arguments.pp),
        engine_args=read_engine_args(arguments.engine_arg),
    )
    check_server(settings)
    template, source = read_template_option(arguments.template), find_source(arguments)

    with collection_paused():
        from flowrl.inference.text_generator import open_chat  # noqa: PLC0415 (torch, after the arguments are valid)

    chat = open_chat(source, template)
    if stops := unsupported_stops(chat):
        sys.stderr.write(f"clients must send stop={list(stops)!r}, because vLLM ends responses at single tokens only\n")
    if (code := serve(source, chat, settings)) != 0:
        raise CheckFailed(f"the server ended with exit code {code}: see its messages above")


def find_source(arguments: argparse.Namespace) -> "ModelSource":
    """Returns the model that the options select."""
    from flowrl.inference.model_source import resolve_model  # noqa: PLC0415 (huggingface_hub)

    return resolve_model(arguments.model, step=arguments.step, adapter=arguments.adapter)


def read_template_option(value: str | None) -> "ConversationTemplate | None":
    """Returns the template of `--template`: an included one, or that of a file."""
    from flowrl.data.template import INCLUDED, ConversationTemplate, read_template  # noqa: PLC0415 (jinja2)

    if value is None:
        return None
    if value in INCLUDED:
        return ConversationTemplate(chat_template=value)
    if not Path(value).is_file():
        raise UserError(
            f"--template: {value} is neither a file nor an included template ({', '.join(INCLUDED)}): correct it"
        )
    return read_template(Path(value))


def sampling_settings(arguments: argparse.Namespace, default_max_tokens: int) -> "SamplingSettings":
    """Returns the settings of the options. `default_max_tokens` applies without `--max-tokens`."""
    from flowrl.inference.generation_settings import SamplingSettings  # noqa: PLC0415 (jinja2)

    if "" in arguments.stop:
        raise UserError("--stop is an empty text, which would end every response immediately: remove it")
    return SamplingSettings(
        max_tokens=default_max_tokens if arguments.max_tokens is None else arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        stop=tuple(arguments.stop),
        seed=arguments.seed,
    )


def engine_settings(arguments: argparse.Namespace) -> "EngineSettings":
    from flowrl.inference.generation_settings import EngineSettings  # noqa: PLC0415 (jinja2)

    return EngineSettings(
        engine=arguments.engine,
        quantization=arguments.quantization,
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        kv_cache_gb=arguments.kv_cache_gb,
        replica=ReplicaSizes(arguments.tp, arguments.pp),
        engine_args=read_engine_args(arguments.engine_arg),
    )


def read_engine_args(options: Sequence[str]) -> Mapping[str, Any]:  # Any: as vLLM types them
    """Returns the arguments of `--engine-arg`. Raises UserError for one that vLLM rejects or that flowrl sets."""
    from flowrl.engines.rollout.vllm.engine_args import find_argument_problem  # noqa: PLC0415 (torch)

    values: dict[str, Any] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not (name and separator):
            raise UserError(f"--engine-arg {option} is not NAME=VALUE: write it like block_size=32")
        values[name], _ = parse(text, f"--engine-arg {option}", numbered=False)
    if (problem := find_rejected_argument(values)) is not None:
        raise UserError(f"--engine-arg: {problem}")
    if (problem := find_argument_problem(values)) is not None:
        raise UserError(f"--engine-arg {problem}")
    return values
