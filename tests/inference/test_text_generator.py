"""Generation with one model: the same responses in any order and batch, stop strings, and streams."""

import json
import shutil
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flowrl import Batch, Cluster, Placement
from flowrl.config import ModelConfig, ReplicaSizes, RolloutConfig, UserError
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.config.engines.vllm_settings import PlannedVllmConfig
from flowrl.engines.models.loading import load_policy
from flowrl.inference.model_source import ModelSource, resolve_model
from flowrl.inference.text_generator import (
    EngineSettings,
    GeneratedText,
    SamplingSettings,
    TextGenerator,
    TextRequest,
    check_engine,
    engine_config,
)
from flowrl.workers import Rollout
from tests.errors import rejects

SAMPLING = SamplingSettings(max_tokens=12, temperature=0.9)


@pytest.fixture(scope="module")
def source(run_folder: Path) -> ModelSource:
    return resolve_model(str(run_folder))


def requests(generator: TextGenerator, count: int = 6) -> list[TextRequest]:
    prompts = [generator.chat.encode(f"{index}+{index}=") for index in range(count)]
    return [TextRequest(index, sample, ids) for index, ids in enumerate(prompts) for sample in range(2)]


def by_request(texts: Sequence[GeneratedText]) -> dict[str, tuple[tuple[int, ...], str, float]]:
    return {text.request.request_id: (tuple(text.token_ids), text.finish_reason, text.logprob) for text in texts}


def test_responses_depend_neither_on_their_order_nor_on_the_batch(source: ModelSource) -> None:
    generator = TextGenerator(source, SAMPLING)
    expected = by_request(list(generator.generate(requests(generator))))
    small = TextGenerator(source, SAMPLING, EngineSettings(max_num_seqs=1))
    assert by_request(list(small.generate(reversed(requests(generator))))) == expected
    assert len({tokens for tokens, _, _ in expected.values()}) > 6
    other = TextGenerator(source, SamplingSettings(max_tokens=12, temperature=0.9, seed=1))
    assert by_request(list(other.generate(requests(generator)))) != expected


def test_the_kv_cache_of_a_gpu_needs_no_more_than_one_response() -> None:
    """28 layers with keys and values of 2 heads of 128 in 2 bytes: 12 tokens need 344 kB, and 32,768 tokens 0.9 GB."""
    model = ModelConfig(path=Path("Qwen/Qwen2.5-1.5B"), dtype="bfloat16")
    config = engine_config(model, SAMPLING, EngineSettings(engine="vllm", max_num_seqs=256), "cuda")
    assert isinstance(config.vllm, PlannedVllmConfig)
    assert config.vllm.least == 12 * 28 * 2 * 2 * 128 * 2
    gb = 10**9
    assert 0 < config.vllm.measured_cache(8 * gb, 8 * gb - config.vllm.present) < 0.9 * gb


def test_a_chat_has_responses_of_the_full_context_and_a_cache_of_one_response(source: ModelSource) -> None:
    generator = TextGenerator(source, SAMPLING, uses_full_context=True)
    request = TextRequest(0, 0, generator.chat.encode("1+1="), max_tokens=SAMPLING.max_tokens + 1)
    (text,) = generator.generate([request])
    assert 0 < len(text.token_ids) <= SAMPLING.max_tokens + 1


def test_the_engine_has_the_threads_of_the_environment(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    TextGenerator(source, SAMPLING)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(before)
    assert num_threads == 3


def test_a_stop_string_cuts_the_response_of_the_same_random_numbers(source: ModelSource) -> None:
    generator = TextGenerator(source, SAMPLING)
    plain = {text.request.request_id: text for text in generator.generate(requests(generator))}
    letter = max("0123456789", key=lambda digit: sum(digit in text.text for text in plain.values()))
    stopping = TextGenerator(source, SamplingSettings(max_tokens=12, temperature=0.9, stop=(letter,)))
    cut = list(stopping.generate(requests(generator)))
    assert len(cut) == len(plain) and any(letter in text.text for text in plain.values())
    for text in cut:
        full = plain[text.request.request_id]
        assert text.text == text.tagged_text == full.text.partition(letter)[0]
        assert list(text.token_ids) == list(full.token_ids)[: len(text.token_ids)]
        assert text.finish_reason == ("stop" if letter in full.text else full.finish_reason)


def test_the_text_is_that_of_a_rollout_also_before_a_stop_string_of_the_template(
    source: ModelSource, tmp_path: Path
) -> None:
    plain = TextGenerator(source, SAMPLING)
    texts = [text.text for text in plain.generate(requests(plain))]
    letter = max("0123456789", key=lambda digit: sum(digit in text for text in texts))
    model = tmp_path / "model"
    shutil.copytree(source.path, model)
    path = model / TEMPLATE_FILE
    path.write_text(json.dumps({"chat_template": "{{ messages[0].content }}", "stop_strings": [letter]}))

    generator = TextGenerator(replace(source, path=model), SAMPLING)
    rows = requests(generator)
    generated = {text.request.request_id: text for text in generator.generate(rows)}
    config = RolloutConfig(max_response_tokens=12, temperature=0.9, template=path)
    placement = Placement(pools={"main": [1]}, roles={"rollout": "main"})
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        rollout = cluster.group("rollout", Rollout, config, source.model_config(), seed=0)
        columns = [{"prompt_ids": list(row.token_ids), "prompt_id": row.index, "sample": row.sample} for row in rows]
        responses = rollout.generate(Batch.from_rows(columns)).get("response")
    assert responses == [generated[row.request_id].text for row in rows]
    assert any(text.finish_reason == "stop" and text.text for text in generated.values())
    assert not any(letter in response for response in responses)


def test_a_stream_grows_to_the_response_of_generate(source: ModelSource) -> None:
    generator = TextGenerator(source, SAMPLING)
    (request, *_) = requests(generator)
    (expected,) = generator.generate([request])
    states = list(generator.stream(request.token_ids, index=0, sample=0, max_tokens=12, temperature=0.9))
    assert states[-1].result is not None
    assert by_request([states[-1].result]) == by_request([expected])
    assert all(after.text.startswith(before.text) for before, after in pairwise(states))
    short = list(generator.stream(request.token_ids, index=0, sample=0, max_tokens=2, temperature=0.9))[-1]
    assert short.result is not None and list(short.result.token_ids) == list(expected.token_ids)[:2]


def test_a_closed_stream_leaves_no_request(source: ModelSource) -> None:
    generator = TextGenerator(source, SAMPLING)
    stream = generator.stream([5, 6], index=0, sample=0, max_tokens=12, temperature=1.0)
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    assert generator._engine.num_running == 0


def test_int8_weights_generate_other_responses(source: ModelSource) -> None:
    plain, quantized = (TextGenerator(source, SAMPLING, EngineSettings(quantization=name)) for name in (None, "int8"))
    texts = [by_request(list(generator.generate(requests(generator)))) for generator in (plain, quantized)]
    assert texts[0].keys() == texts[1].keys() and texts[0] != texts[1]


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("settings", "sampling", "device", "dtype", "fix"),
    [
        (EngineSettings(quantization="int4"), SAMPLING, "cpu", "float32", "vllm"),
        (EngineSettings("vllm", "int4"), SAMPLING, "cpu", "bfloat16", "int8"),
        (EngineSettings("vllm", "fp8"), SAMPLING, "cpu", "float32", "bfloat16"),
        (EngineSettings("vllm"), SAMPLING, "cpu", "float64", "float32"),
        (EngineSettings("vllm"), SamplingSettings(temperature=0.001), "cpu", "float32", "0.01"),
        (EngineSettings(replica=ReplicaSizes(tp=2)), SAMPLING, "cpu", "float32", "tp is 2.*vllm"),
        (EngineSettings(replica=ReplicaSizes(pp=2)), SAMPLING, "cpu", "float32", "pp is 2.*vllm"),
        (
            EngineSettings("vllm", replica=ReplicaSizes(64, 64)),
            SAMPLING,
            "cuda:0",
            "float32",
            "tp 64 x pp 64 .*4096",
        ),
        (EngineSettings(engine_args={"block_size": 32}), SAMPLING, "cpu", "float32", "block_size .* engine vllm"),
        (EngineSettings("vllm", engine_args=NGRAM), SAMPLING, "cpu", "float32", "speculative_config .*temperature 0"),
    ],
)
def test_what_an_engine_does_not_support_is_rejected(
    settings: EngineSettings, sampling: SamplingSettings, device: str, dtype: str, fix: str
) -> None:
    with pytest.raises(UserError, match=fix):
        check_engine(settings, Path("unknown"), device, dtype, sampling)


def test_vllm_on_a_cpu_rejects_heads_that_its_attention_does_not_support(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "head_dim": 8}))
    with rejects("vllm", "cpu", 8, 32, 512, tmp_path, "hf"):
        check_engine(EngineSettings("vllm"), tmp_path, "cpu", "float32", SAMPLING)


def test_log_probabilities_are_those_of_the_sampled_tokens(source: ModelSource) -> None:
    generator = TextGenerator(source, SamplingSettings(max_tokens=4, temperature=0))
    ids = generator.chat.encode("1+1=")
    (text,) = generator.generate([TextRequest(0, 0, ids)])
    policy = load_policy(source.model_config())
    tokens = torch.tensor([[*ids, *text.token_ids]])
    with torch.no_grad():
        logprobs = policy(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    assert text.logprob == pytest.approx(float(logprobs[len(ids) - 1 :].sum()), abs=1e-4)
