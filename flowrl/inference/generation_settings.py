"""Settings of `flowrl generate` and `flowrl chat`, and the checks that need neither torch nor the model."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.config import ONE_DEVICE, ReplicaSizes, UserError, import_function
from flowrl.data.messages import Conversation
from flowrl.data.template import ConversationTemplate
from flowrl.inference.prompt_file import read_prompt_rows
from flowrl.inference.response_file import check_is_new

Dtype = Literal["float32", "bfloat16", "float64"]

OUTPUT_COLUMNS = frozenset(
    {
        "prompt_index",
        "sample",
        "candidate",
        "prompt",
        "messages",
        "response",
        "finish_reason",
        "prompt_tokens",
        "response_tokens",
        "logprob",
        "score",
    }
)
"""Columns of the output. The input may not have columns with these names."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings that determine the responses."""

    max_tokens: int = 256
    """Maximum number of tokens of a response."""
    temperature: float = 1.0
    """0 selects the most likely tokens."""
    top_k: int = 0
    """Number of most likely tokens from which to sample; 0 uses all tokens."""
    top_p: float = 1.0
    """Total probability of the most likely tokens from which to sample."""
    stop: tuple[str, ...] = ()
    """Stop strings. A response ends when it contains one of them. The stop string is removed from the response."""
    seed: int = 0


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine."""

    engine: str = "hf"
    quantization: Literal["int8", "int4", "fp8"] | None = None
    dtype: Dtype | None = None
    """Dtype of the weights. None: float32 on the CPU; on a GPU bfloat16 for vLLM, and for hf the dtype of the model's
    files.
    """
    max_num_seqs: int | None = None
    """Maximum number of responses that are generated at the same time. None: the default of `rollout.max_num_seqs`."""
    kv_cache_gb: float | None = None
    """Memory of vLLM's KV cache on each device in GB. None: the default of `rollout.vllm.kv_cache_gb`."""
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of an engine with several devices. Only for vLLM."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, as in `rollout.vllm.engine_args`."""


@dataclass(frozen=True)
class GenerationJob:
    """Settings of `flowrl generate`."""

    prompts: str
    """Path of the prompts, or `-` for standard input."""
    output: Path | None
    """New file; None is standard output."""
    sampling: SamplingSettings
    engine: EngineSettings
    is_max_tokens_default: bool = False
    """True: the user has set no `max_tokens`. If the model has a run, `rollout.max_response_tokens` of the run then
    replaces `sampling.max_tokens`. A prompt near the context limit gets a shorter response.
    """
    template: ConversationTemplate | None = None
    """Replaces the conversation template of the model. None keeps the model's template."""
    samples: int = 1
    """Number of responses per prompt."""
    best_of: int | None = None
    """Number of responses per prompt from which the best is written."""
    reward: str | None = None
    """Reward function or folder of a reward model, for `best_of`."""
    system: str | None = None
    """System message of conversations that have none."""
    is_raw: bool = False
    """True: prompts are plain text, which the model continues. False: the chat template is applied to prompts."""


def check_num_gpus(replica: ReplicaSizes, num_gpus: int) -> None:
    """Raises UserError if a machine has fewer GPUs than a replica needs."""
    if replica.num_devices > num_gpus:
        raise UserError(
            f"an engine with {replica} needs {replica.num_devices} GPUs, but this machine has {num_gpus}: make tp or "
            f"pp smaller"
        )


def read_job(job: GenerationJob) -> list[Conversation]:
    """Checks the settings of a job, and returns its prompts. Raises UserError."""
    if (job.best_of is None) != (job.reward is None):
        present, missing = ("--reward", "--best-of N") if job.best_of is None else ("--best-of", "--reward FUNCTION")
        raise UserError(f"{present} is set without {missing}: set both, or neither")
    if job.best_of is not None and job.samples > 1:
        raise UserError(
            f"--samples is {job.samples}, but --best-of writes one response per prompt: remove one of the two"
        )
    count = job.best_of or job.samples
    if count > 1 and job.sampling.temperature == 0:
        option = "--samples" if job.best_of is None else "--best-of"
        raise UserError(f"{option} is {count}, but with --temperature 0 all responses are equal: raise the temperature")
    if job.reward is not None:
        _check_reward(job.reward)
    if job.output is not None:
        check_is_new(job.output)
    return read_prompt_rows(job.prompts, sys.stdin.buffer, system=job.system, reserved=OUTPUT_COLUMNS)


def _check_reward(reward: str) -> None:
    """Raises UserError if a reward is neither a function that can be imported (`module:function` or
    `file.py:function`) nor the folder of a reward model.
    """
    if Path(reward).is_dir():
        return
    if ":" not in reward:
        raise UserError(
            f"--reward: {reward} is neither module:function nor the folder of a reward model: correct the name or the "
            f"path"
        )
    with redirect_stdout(sys.stderr):  # standard output may receive the rows
        import_function(reward)
