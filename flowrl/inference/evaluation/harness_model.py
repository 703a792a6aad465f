"""HarnessModel: implements the model interface of the library lm-eval for a model of flowrl."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flowrl.config import (
    ModelConfig,
    Placement,
    ReferenceConfig,
    RolloutConfig,
)
from flowrl.controller.cluster import Cluster
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.tensordicts import sum_tokens
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.models.loading import stored_dtype
from flowrl.inference.generation_settings import SamplingSettings
from flowrl.inference.model_source import ModelSource
from flowrl.memory.device_settings import fit_engine
from flowrl.workers import Reference, Rollout

_DEFAULT_LENGTH = 2048
"""Largest number of tokens of a sequence if the model does not state a limit."""

_MAX_GENERATED_TOKENS = 256
"""Largest number of generated tokens if the task does not state a limit. The default of lm-eval is the same."""

_ROWS_PER_CALL = 256

Scored = tuple[float, bool]
"""Log-probability of a continuation in nats, and whether greedy decoding generates this continuation."""


class HarnessModel(TemplateLM):
    """A model of flowrl for tasks of lm-eval.

    A reference worker computes log-probabilities. A rollout engine generates text. With engine hf on the CPU in
    float32, responses do not depend on the other requests of a batch.
    """

    def __init__(self, source: ModelSource, *, engine: str = "hf", seed: int = 0) -> None:
        super().__init__()
        self._source, self._engine, self._seed = source, engine, seed
        self._chat = ChatTokenizer(source.tokenizer_path, model=source.path)
        self.tokenizer = self._chat.tokenizer
        self._max_length = self._chat.max_positions() or _DEFAULT_LENGTH

    @property
    def eot_token_id(self) -> int:
        return self._chat.eos_id

    @property
    def tokenizer_name(self) -> str:
        return str(self._source.tokenizer_path).replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: BOS if the tokenizer adds it to plain text, otherwise EOS."""
        return self._chat.text_prefix[-1] if self._chat.text_prefix else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the token ids of a text. They begin with BOS as in training, unless `add_special_tokens` is false."""
        return self._chat.encode(string) if add_special_tokens is False else self._chat.encode_text(string)[0]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Scored]:
        """Returns `Scored` for the continuation of each request. A context that is too long loses its first tokens."""
        limit = self._max_length
        rows = [((context + continuation)[-limit:], len(continuation)) for _, context, continuation in requests]
        with _start_cluster("reference") as cluster:
            reference = cluster.group("reference", Reference, ReferenceConfig(model=self._model))
            results: list[Scored] = []
            for start in range(0, len(rows), _ROWS_PER_CALL):
                results += _score(reference, rows[start : start + _ROWS_PER_CALL])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, as the sum over windows that do not overlap."""
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(
                # `prefix_token` is BOS, which is not predicted.
                token_list=ids[len(self._chat.text_prefix) :],
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length - 1,
                context_len=1,
            )
            own = [(("", ""), *make_disjoint_window(part)) for part in parts]
            windows += own
            counts.append(len(own))
        values = iter(value for value, _ in self._loglikelihood_tokens(windows))
        return [sum(next(values) for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the generated text of each request, without the stop string and the text after it."""
        groups: defaultdict[SamplingSettings, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[read_sampling(request.arguments[1], self._max_length // 2)].append(i)
        texts = [""] * len(requests)
        for sampling, indices in groups.items():
            prompts = [self.tok_encode(requests[i].arguments[0]) for i in indices]
            for i, text in zip(indices, self._generate(sampling, indices, prompts), strict=True):
                stops = requests[i].arguments[1].get("until") or []
                texts[i] = _truncate_at_stop(text, [stops] if isinstance(stops, str) else stops)
        return texts

    def _generate(
        self, sampling: SamplingSettings, prompt_ids: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Sequence[str]:
        """Generates responses with the rollout engine, up to the end of a turn or the token limit."""
        limit = self._max_length - sampling.max_tokens
        rows = [
            {"prompt_ids": list(ids[-limit:]), "prompt_id": i, "sample": 0}
            for i, ids in zip(prompt_ids, prompts, strict=True)
        ]
        config = RolloutConfig(
            engine=self._engine,
            max_response_tokens=sampling.max_tokens,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        with _start_cluster("rollout", is_dedicated=config.needs_own_process) as cluster:
            config = fit_engine(config, self._model, cluster.plan.kind, "the size of vLLM's KV cache in GB")
            rollout = cluster.group("rollout", Rollout, config, self._model, seed=self._seed)
            batch = Batch.from_rows(rows)
            temperature = 0.0 if sampling.temperature == 0 else None
            return batch.union(rollout.generate.submit(batch, temperature=temperature)).get("response")

    @property
    def _model(self) -> ModelConfig:
        return self._source.model_config(stored_dtype(self._source.path))


def read_sampling(arguments: dict[str, Any], max_tokens: int) -> SamplingSettings:
    """Returns the sampling settings of a task of lm-eval. `arguments` are the task's `generation_kwargs`.

    Each argument has the same meaning as in lm-eval. A limit above `max_tokens` is lowered to `max_tokens`. With
    `do_sample` and without a temperature, the temperature is 1.
    """
    if arguments.get("do_sample"):
        arguments = {"temperature": 1.0} | arguments
    arguments = dict(normalize_gen_kwargs(arguments, _MAX_GENERATED_TOKENS))
    temperature = float(arguments.get("temperature", 0.0)) if arguments["do_sample"] else 0.0
    is_sampled = temperature > 0
    return SamplingSettings(
        max_tokens=min(arguments["max_gen_toks"], max_tokens),
        temperature=temperature,
        top_k=int(arguments.get("top_k", 0)) if is_sampled else 0,
        top_p=float(arguments.get("top_p", 1.0)) if is_sampled else 1.0,
    )


def _start_cluster(role: str, *, is_dedicated: bool = False) -> Cluster:
    """Returns a cluster with one device. An engine with its own processes requires Ray."""
    placement = Placement(pools={"main": [1]}, roles={"actor": "main", role: "main"})
    dedicated = (role,) if is_dedicated else ()
    return Cluster(placement, backend="ray" if is_dedicated else "inline", roles=(role,), dedicated=dedicated)


def _truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


def _score(reference: Any, rows: Sequence[tuple[list[int], int]]) -> list[Scored]:  # Any: a group of references
    """Returns `Scored` for each row. A row has token ids, and the number of continuation tokens at their end."""
    lengths_B = torch.tensor([len(ids) for ids, _ in rows])
    ids_T = torch.tensor([token for ids, _ in rows for token in ids])
    mask_T = torch.tensor([i >= len(ids) - count for ids, count in rows for i in range(len(ids))])
    batch = Batch.from_columns(tokens={"input_ids": ids_T, "response_mask": mask_T}, lengths=lengths_B.numpy())
    logprobs_T = reference.logprobs(batch).get("logprobs")
    top_T = reference.topk(batch, k=1).get("topk_ids")[:, 0]
    sums_B = sum_tokens(logprobs_T.double(), mask_T, lengths_B)
    is_top_B = sum_tokens(top_T != ids_T, mask_T, lengths_B) == 0
    return list(zip(sums_B.tolist(), is_top_B.tolist(), strict=True))
