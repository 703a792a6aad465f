"""The work of `flowrl generate`: reads prompts, starts an engine, writes responses, and reports the progress."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from flowrl.data.messages import Conversation
from flowrl.inference.bulk_generation import (
    Progress,
    describe_inputs,
    generate_best,
    generate_rows,
    output_keys,
)
from flowrl.inference.generation_settings import GenerationJob
from flowrl.inference.model_source import ModelSource
from flowrl.inference.prompt_file import PromptRow, tokenize_rows
from flowrl.inference.response_file import ResponseOutput, ResumableFile, StreamOutput
from flowrl.inference.response_scorer import open_scorer
from flowrl.inference.text_generator import TextGenerator, open_chat

_UNLIMITED = 2**31


def run_job(job: GenerationJob, conversations: Sequence[Conversation], source: ModelSource) -> None:
    """Generates the responses of a job. `conversations` are the prompts that `read_job` has returned.

    Raises:
        UserError: a prompt, the model or the output does not suit the settings.
        RewardError: a reward function failed.
    """
    if job.is_max_tokens_default and source.max_response_tokens is not None:
        job = replace(job, sampling=replace(job.sampling, max_tokens=source.max_response_tokens))
    chat = open_chat(source, job.template)

    def tokenize(max_length: int) -> list[PromptRow]:
        return tokenize_rows(
            conversations,
            chat,
            max_length=max_length,
            max_tokens=job.sampling.max_tokens,
            can_shorten=job.is_max_tokens_default,
            is_raw=job.is_raw,
        )

    prompts = tokenize(chat.max_positions() or _UNLIMITED)
    output = _open_output(job, source, prompts, chat.stop_ids)
    is_complete = False
    try:
        if len(output.done) < len(prompts) * job.samples:
            with nullcontext() if job.reward is None else closing(open_scorer(job.reward, source)) as scorer:
                generator = TextGenerator(source, job.sampling, job.engine, chat=chat)
                if generator.max_length < (chat.max_positions() or _UNLIMITED):
                    prompts = tokenize(generator.max_length)  # raises an error for a prompt that is too long
                _report_limits(job, prompts, generator.max_length)
                with _reporting(job, len(prompts) * job.samples, len(output.done)) as report:
                    if scorer is None:
                        generate_rows(generator, prompts, output, samples=job.samples, report=report)
                    else:
                        assert job.best_of is not None
                        generate_best(generator, prompts, output, scorer, candidates=job.best_of, report=report)
        is_complete = True
    except KeyboardInterrupt:
        if job.output is not None:
            sys.stderr.write(f"{job.output}.partial has the complete rows: run the same command again to continue\n")
        raise
    finally:
        output.close(is_complete=is_complete)


def _open_output(
    job: GenerationJob, source: ModelSource, prompts: Sequence[PromptRow], stop_ids: Sequence[Sequence[int]]
) -> ResponseOutput:
    """Opens the output of a job. `stop_ids` are the stop sequences of the conversation template."""
    if job.output is None:
        return StreamOutput(sys.stdout, output_keys(len(prompts), job.samples))
    settings = {**_describe_settings(job), "the list of stop sequences": stop_ids}
    return ResumableFile(job.output, {**settings, **describe_inputs(source, prompts, job.reward)})


def _describe_settings(job: GenerationJob) -> Mapping[str, Any]:  # Any: values of JSON
    """Returns option of the command -> value, for the settings that change results."""
    values = asdict(job.sampling) | {
        "engine": job.engine.engine,
        "quantization": job.engine.quantization,
        "dtype": job.engine.dtype,
        "samples": job.samples,
        "best_of": job.best_of,
        "reward": job.reward,
    }
    if job.engine.engine_args:
        values["engine_arg"] = dict(job.engine.engine_args)
    return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


def _report_limits(job: GenerationJob, prompts: Sequence[PromptRow], max_length: int) -> None:
    """Prints on stderr how many prompts are so long that their responses may have fewer tokens than the default."""
    limits = [row.max_tokens for row in prompts if row.max_tokens < job.sampling.max_tokens]
    if limits:
        least, most = min(limits), max(limits)
        span = str(least) if least == most else f"{least} to {most}"
        sys.stderr.write(
            f"responses to {len(limits)} of {len(prompts)} prompts have at most {span} instead of "
            f"{job.sampling.max_tokens} tokens, because prompt and response together have at most {max_length}\n"
        )


@contextmanager
def _reporting(job: GenerationJob, num_rows: int, num_done: int) -> Iterator[Callable[[Progress], None]]:
    """Shows a progress bar if stderr is a terminal, and writes a summary to stderr at the end. Yields the function that
    receives the progress.
    """
    console = Console(stderr=True)
    begun_s, totals = time.monotonic(), {"rows": num_done, "tokens": 0}

    def rate() -> float:
        return totals["tokens"] / max(time.monotonic() - begun_s, 1e-9)

    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with ProgressBar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=num_rows, completed=num_done, rate=0.0)

        def report(progress: Progress) -> None:
            totals["rows"] += progress.num_rows
            totals["tokens"] += progress.num_tokens
            bar.update(task, completed=totals["rows"], rate=rate())

        yield report
    resumed = f" ({num_done:,} of them by an earlier command)" if num_done else ""
    name = "" if job.output is None else f"{job.output}: "
    sys.stderr.write(
        f"{name}{totals['rows']:,} responses{resumed}, {totals['tokens']:,} new tokens in "
        f"{time.monotonic() - begun_s:.1f} s ({rate():,.0f} tokens/s)\n"
    )
