"""Generates responses to all prompts of a file, or the best of several responses to each prompt."""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.algorithms.best_of_n import best_of_n
from flowrl.checkpoints.inputs import combined_checksum, source_checksum
from flowrl.config import UserError
from flowrl.data.checksums import FileChecksum
from flowrl.data.messages import Conversation
from flowrl.inference.model_source import ModelSource
from flowrl.inference.prompt_file import PromptRow
from flowrl.inference.response_file import Key, ResponseOutput
from flowrl.inference.response_scorer import ResponseScorer
from flowrl.inference.text_generator import GeneratedText, TextGenerator, TextRequest

_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclass(frozen=True)
class Progress:
    """Number of new responses and of their tokens."""

    num_rows: int
    num_tokens: int


def output_keys(num_prompts: int, samples: int) -> list[Key]:
    """Returns the keys of all rows, in the order of the output."""
    return [(index, sample) for index in range(num_prompts) for sample in range(samples)]


def generate_rows(
    generator: TextGenerator,
    prompts: Sequence[PromptRow],
    output: ResponseOutput,
    *,
    samples: int,
    report: Callable[[Progress], None],
) -> None:
    """Writes `samples` responses to each prompt, except responses that the output already has."""
    requests = (
        TextRequest(index, sample, prompts[index].token_ids, prompts[index].max_tokens)
        for index, sample in output_keys(len(prompts), samples)
        if (index, sample) not in output.done
    )
    for text in generator.generate(requests):
        output.write(make_row(prompts[text.request.index], text))
        report(Progress(1, len(text.token_ids)))


def generate_best(
    generator: TextGenerator,
    prompts: Sequence[PromptRow],
    output: ResponseOutput,
    scorer: ResponseScorer,
    *,
    candidates: int,
    report: Callable[[Progress], None],
) -> None:
    """Generates `candidates` responses to each prompt, and writes the response with the best score. Of several
    best responses, writes the one with the smallest sample index.

    Raises RewardError if a score cannot be computed.
    """
    missing = [index for index in range(len(prompts)) if (index, 0) not in output.done]
    requests = (
        TextRequest(i, sample, prompts[i].token_ids, prompts[i].max_tokens)
        for i in missing
        for sample in range(candidates)
    )
    scored: dict[int, list[tuple[GeneratedText, Future[float]]]] = defaultdict(list)

    def write_complete() -> None:
        for index in [i for i, rows in scored.items() if len(rows) == candidates and all(f.done() for _, f in rows)]:
            best, score = _select_best(scored.pop(index))
            selected = {"sample": 0, "candidate": best.request.sample, "score": score}
            output.write(make_row(prompts[index], best) | selected)
            report(Progress(1, 0))

    for text in generator.generate(requests):
        index = text.request.index
        scored[index].append((text, scorer.submit(reward_columns(prompts[index].conversation), text)))
        report(Progress(0, len(text.token_ids)))
        write_complete()
    scorer.flush()
    for rows in list(scored.values()):
        for _, score in rows:
            score.result()
    write_complete()


def _select_best(rows: Sequence[tuple[GeneratedText, Future[float]]]) -> tuple[GeneratedText, float]:
    ordered = sorted(((text, score.result()) for text, score in rows), key=lambda row: row[0].request.sample)
    scores = torch.tensor([score for _, score in ordered], dtype=torch.float64)
    if not scores.isfinite().all():
        index, score = ordered[0][0].request.index, float(scores[~scores.isfinite()][0])
        raise UserError(
            f"--reward gave {score} for a response to prompt {index}, which is not a finite number: correct the "
            "reward, or use another one"
        )
    return ordered[int(best_of_n(scores, torch.zeros(len(ordered), dtype=torch.int64)))]


def make_row(prompt: PromptRow, text: GeneratedText) -> dict[str, Any]:
    """Returns the row of the output for a response, with the columns of the prompt's row."""
    conversation = prompt.conversation
    messages = [asdict(message) for message in conversation.messages]
    return {
        "prompt_index": text.request.index,
        "sample": text.request.sample,
        "prompt": conversation.messages[-1].content,
        **({"messages": messages} if len(messages) > 1 else {}),
        "response": text.text,
        "finish_reason": text.finish_reason,
        "prompt_tokens": len(prompt.token_ids),
        "response_tokens": len(text.token_ids),
        "logprob": text.logprob if math.isfinite(text.logprob) else None,
        **conversation.columns,
    }


def reward_columns(conversation: Conversation) -> Mapping[str, Any]:
    """Returns the columns that a reward function receives in a run, except the columns of the response."""
    return {
        **conversation.columns,
        "prompt": conversation.messages[-1].content,
        "conversation": [asdict(message) for message in conversation.messages],
        "answer": conversation.columns.get("answer"),
    }


def describe_inputs(source: ModelSource, prompts: Sequence[PromptRow], reward: str | None) -> Mapping[str, str]:
    """Returns checksums of the model, the prompts and the reward, by which a resumed program detects changed inputs."""
    inputs = {
        "the checksum of the model": _model_checksum(source.path),
        "the checksum of the prompts": f"{zlib.crc32(b''.join(_encoded(prompts))):08x}",
    }
    return inputs if reward is None else {**inputs, "the checksum of the reward": _reward_checksum(reward)}


def _model_checksum(path: Path) -> str:
    if not path.is_dir():
        return str(path)  # a Hub name
    files = sorted(file for pattern in _MODEL_FILES for file in path.glob(pattern))
    return _format(combined_checksum(files, has_names=True))


def _reward_checksum(reward: str) -> str:
    folder = Path(reward)
    return _model_checksum(folder) if folder.is_dir() else _format(source_checksum(reward))


def _format(checksum: FileChecksum | None) -> str:
    return "unreadable" if checksum is None else f"{checksum.crc32:08x}"


def _encoded(prompts: Sequence[PromptRow]) -> Iterator[bytes]:
    for prompt in prompts:
        conversation = prompt.conversation
        messages = [asdict(message) for message in conversation.messages]
        yield json.dumps([messages, dict(conversation.columns), prompt.token_ids]).encode()
