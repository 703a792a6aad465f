import pytest
import torch

from flowrl.config import RolloutConfig
from flowrl.engines.models.weights import WeightsError, export_weights, weight_buckets, weight_shapes
from flowrl.engines.rollout.hf.engine import HfRollout, RolloutError
from flowrl.engines.rollout.response_tensors import Responses, make_requests, stack_responses
from flowrl.engines.rollout.sampling import row_keys, sample_tokens, uniforms
from tests.engines.closeness import assert_norm_close, reduction_rtol
from tests.engines.losses import policy_logits
from tests.engines.tables import VOCABULARY
from tests.engines.tiny import END, llama, qwen2, to_float64, tokenizer, with_float64_rotary
from tests.slow_cases import one_of


def rollout(model=None, device: str = "cpu", **settings) -> HfRollout:
    config = RolloutConfig(**{"max_response_tokens": 10, **settings})
    return HfRollout(qwen2() if model is None else model, tokenizer(), config, device)


def prompts(num: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def generate(
    engine: HfRollout, prompt_ids: list[list[int]], rows: list[int] | None = None, *, greedy: bool = False, **settings
) -> Responses:
    """Generates some of the rows, each with its own prompt_id and sample."""
    settings |= {"temperature": 0.0} if greedy else {}
    index = list(range(len(prompt_ids))) if rows is None else rows
    ids = torch.tensor(index, dtype=torch.int64)
    requests = make_requests([prompt_ids[i] for i in index], ids, ids % 3, **{"seed": 5, **settings})
    return stack_responses(engine.generate(requests))


def rows_of(responses: Responses) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and log-probabilities of each row."""
    logprobs = [row.tolist() for row in responses.logprobs.split(responses.lengths.tolist())]
    return list(zip(responses.token_lists(), logprobs, strict=True))


def generate_without_cache(model, prompt: list[int], number: int, greedy: bool) -> tuple[list[int], list[float]]:
    """Generates one row without cache or batch: runs the complete row for each token."""
    row, logprobs, key = list(prompt), [], row_keys(5, torch.tensor([number]), torch.tensor([number % 3]))
    for _ in range(10):
        logits = policy_logits(model, torch.tensor([row]))[:, -1]
        numbers = uniforms(key, torch.tensor([len(row)]))
        token, logprob = sample_tokens(logits, numbers, temperature=0.0 if greedy else 1.0)
        row.append(int(token))
        logprobs.append(float(logprob))
        if row[-1] == END:
            break
    return row[len(prompt) :], logprobs


def windowed():
    """Returns a model whose second layer has a sliding window, which is shorter than most rows."""
    return qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("build", [qwen2, llama, windowed])
def test_responses_equal_generation_without_cache_or_batch(build, greedy: bool):
    model, prompt_ids = to_float64(build()), prompts(18)
    responses = rows_of(generate(rollout(model), prompt_ids, greedy=greedy))
    with torch.no_grad():
        expected = [generate_without_cache(model, prompt, i, greedy) for i, prompt in enumerate(prompt_ids)]
    assert [ids for ids, _ in responses] == [ids for ids, _ in expected]
    for (_, logprobs), (_, expected_logprobs) in zip(responses, expected, strict=True):
        assert logprobs == pytest.approx(expected_logprobs, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 128, "num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_a_row_is_bitwise_identical_in_any_batch(settings: dict):
    model, prompt_ids = qwen2(**settings), prompts(60)
    expected_rows = rows_of(generate(rollout(model), prompt_ids))
    for max_num_seqs in (7, 33):
        assert rows_of(generate(rollout(model, max_num_seqs=max_num_seqs), prompt_ids)) == expected_rows
    assert rows_of(generate(rollout(model, max_num_seqs=1), prompt_ids, [0, 30, 59])) == [
        expected_rows[0],
        expected_rows[30],
        expected_rows[59],
    ]
    assert len({len(ids) for ids, _ in expected_rows}) > 3


def test_a_row_is_bitwise_identical_on_any_number_of_threads():
    prompt_ids = prompts(40)
    expected_rows = rows_of(generate(rollout(), prompt_ids))
    torch.set_num_threads(2)
    assert rows_of(generate(rollout(), prompt_ids)) == expected_rows


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_a_row_is_bitwise_identical_on_any_rank(num_ranks: int):
    engine, prompt_ids = rollout(), prompts(40)
    expected_rows = rows_of(generate(engine, prompt_ids))
    for rank in range(num_ranks):
        rows = list(range(rank, 40, num_ranks))
        assert rows_of(generate(engine, prompt_ids, rows)) == [expected_rows[row] for row in rows]


def test_rows_that_outgrow_the_cache_stay_bitwise_identical():
    settings = {"max_response_tokens": 70, "temperature": 1.5}
    prompt_ids = prompts(20, longest=20)
    expected_rows = rows_of(generate(rollout(**settings), prompt_ids))
    assert max(len(ids) for ids, _ in expected_rows) > 40
    assert rows_of(generate(rollout(max_num_seqs=4, **settings), prompt_ids)) == expected_rows


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", one_of(1, 2))
def test_long_rows_are_bitwise_identical_in_any_batch(num_heads: int):
    """Matrix products choose their summation order by the number of attended positions."""
    model = qwen2(num_key_value_heads=num_heads, max_position_embeddings=512, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[END] = 0.0  # greedy responses do not end
    prompt_ids = [(prompt * 96)[: 6 * (row + 1)] for row, prompt in enumerate(prompts(16))]
    engine = rollout(model, max_response_tokens=250)
    expected_rows = rows_of(generate(engine, prompt_ids, greedy=True))
    long_rows = [row for row in range(16) if len(expected_rows[row][0]) == 250]
    assert len(long_rows) > 5
    for row in long_rows[:4]:
        assert rows_of(generate(engine, prompt_ids, [row], greedy=True)) == [expected_rows[row]]


def test_samples_of_one_prompt_differ_and_repeat_with_the_seed():
    engine, prompt = rollout(), [5, 6, 7]
    rows = [prompt] * 20, torch.zeros(20, dtype=torch.int64), torch.arange(20)
    first, again, other = (stack_responses(engine.generate(make_requests(*rows, seed=seed))) for seed in (1, 1, 2))
    assert len({tuple(ids) for ids in first.token_lists()}) > 10
    assert rows_of(first) == rows_of(again) and first.token_lists() != other.token_lists()


def test_repeated_prompts_equal_single_prompts():
    engine = rollout()
    prompt_ids = [p for p in prompts(6) for _ in range(4)]
    expected_rows = rows_of(generate(engine, prompt_ids))
    assert [rows_of(generate(engine, prompt_ids, [row]))[0] for row in range(24)] == expected_rows


def count_prefilled(engine: HfRollout) -> list[int]:
    """Returns a list to which each prefill appends its number of tokens, including padding."""
    counts: list[int] = []
    engine.model.base_model.register_forward_pre_hook(
        lambda module, args, inputs: counts.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    return counts


@pytest.mark.parametrize("length", [1, 17, 40])
def test_samples_of_one_prompt_share_its_prefill(length: int):
    engine = rollout()
    counts = count_prefilled(engine)
    different = [torch.randint(2, VOCABULARY, (length,)).tolist() for _ in range(3)]
    generate(engine, [prompt for prompt in different for _ in range(8)])
    assert sum(counts) == 3 * (-(-(length - 1) // 16) * 16)


def test_samples_that_join_later_copy_the_prefill_of_rows_that_decode():
    prompt_ids = [prompt for prompt in prompts(3, longest=30, seed=1) for _ in range(16)]
    together, few = rollout(max_num_seqs=64), rollout(max_num_seqs=12)
    expected_rows = rows_of(generate(together, prompt_ids))
    counts_together = count_prefilled(together)
    generate(together, prompt_ids)
    counts = count_prefilled(few)
    assert rows_of(generate(few, prompt_ids)) == expected_rows
    assert sum(counts) == sum(counts_together)


def test_logprobs_are_of_the_sampled_distribution():
    settings = {"temperature": 0.7, "top_k": 8, "top_p": 0.9}
    model, prompt_ids = to_float64(qwen2()), prompts(5)
    responses = rows_of(generate(rollout(model, **settings), prompt_ids))
    for number, (prompt, (ids, logprobs)) in enumerate(zip(prompt_ids, responses, strict=True)):
        logits = policy_logits(model, torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
        key = row_keys(5, torch.tensor([number]), torch.tensor([number % 3]))
        numbers = uniforms(key.expand(len(ids)), len(prompt) + torch.arange(len(ids)))
        tokens, expected = sample_tokens(logits, numbers, **settings)
        assert tokens.tolist() == ids and logprobs == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_response_ends_with_the_end_token_or_is_truncated():
    responses = generate(rollout(), prompts(60))
    ends = [ids[-1] == END for ids in responses.token_lists()]
    assert responses.truncated.tolist() == [not end for end in ends] and 0 < sum(ends) < 60
    assert all(END not in ids[:-1] for ids in responses.token_lists())
    assert all(len(ids) == 10 for ids, end in zip(responses.token_lists(), ends, strict=True) if not end)


def test_a_stop_sequence_ends_a_response_and_stays_in_it():
    prompt_ids = prompts(60)
    free = generate(rollout(), prompt_ids).token_lists()
    stop = next(ids[3:5] for ids in free if len(ids) > 6)
    stopped = generate(rollout(stop_ids=(tuple(stop),)), prompt_ids)
    for ids, expected_rows, truncated in zip(stopped.token_lists(), free, stopped.truncated.tolist(), strict=True):
        ends = [i + 2 for i in range(len(expected_rows) - 1) if expected_rows[i : i + 2] == stop]
        assert ids == expected_rows[: ends[0]] if ends else ids == expected_rows
        assert truncated == (not ends and expected_rows[-1] != END)
    assert sum(len(ids) for ids in stopped.token_lists()) < sum(len(ids) for ids in free)


def test_every_end_token_of_the_model_ends_a_response():
    model, prompt_ids = qwen2(), prompts(40)
    free = generate(rollout(model), prompt_ids).token_lists()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [END, 7]
    ended = generate(rollout(model), prompt_ids).token_lists()
    assert ended == [ids[: ids.index(7) + 1] if 7 in ids else ids for ids in free] and ended != free


def test_no_prompts_give_no_responses():
    responses = generate(rollout(), [])
    assert responses.token_lists() == [] and responses.tokens.shape == responses.logprobs.shape == (0,)
    assert responses.truncated.shape == (0,)


def test_the_rollout_follows_the_model_that_is_trained():
    model, prompt_ids = qwen2(), prompts(8)
    engine = rollout(model)
    generate(engine, prompt_ids)
    with torch.no_grad():
        model.load_state_dict(qwen2(seed=1).state_dict())
    assert rows_of(generate(engine, prompt_ids)) == rows_of(generate(rollout(qwen2(seed=1)), prompt_ids))


def test_generation_leaves_the_model_as_it_was():
    model = qwen2()
    before = {name: (weight, weight._version) for name, weight in model.named_parameters()}
    attention = model.config._attn_implementation
    generate(rollout(model), prompts(4))
    assert {name: (weight, weight._version) for name, weight in model.named_parameters()}.keys() == before.keys()
    assert all(weight is before[n][0] and weight._version == before[n][1] for n, weight in model.named_parameters())
    assert model.config._attn_implementation == attention and not any(p.grad is not None for p in model.parameters())


def test_a_prompt_that_is_too_long_is_rejected():
    with pytest.raises(RolloutError, match=r"prompt 1 .*130 .*128"):
        generate(rollout(), [[5], [5] * 120])


def test_an_empty_prompt_is_rejected():
    with pytest.raises(RolloutError, match="prompt 0"):
        generate(rollout(), [[]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_greedy_tokens_of_the_cpu():
    prompt_ids = prompts(30)
    models = [with_float64_rotary(to_float64(qwen2())) for _ in range(2)]
    expected = generate(rollout(models[0]), prompt_ids, greedy=True)
    responses = generate(rollout(models[1], device="cuda"), prompt_ids, greedy=True)
    assert responses.token_lists() == expected.token_lists()
    # Computed in float64 and stored in float32: at most the last bit differs.
    stored_rtol = reduction_rtol(torch.float32, length=1, depth=1)
    assert_norm_close(responses.logprobs, expected.logprobs, stored_rtol)


def buckets_of(model) -> list[dict]:
    return [export_weights(model, names) for names in weight_buckets(weight_shapes(model), 5000)]


def test_a_bucketed_update_takes_effect_at_commit_and_blocks_generation_until_then():
    new, engine = qwen2(seed=1), rollout(qwen2(seed=0))
    first, *others = buckets_of(new)
    engine.begin_update(3)
    engine.receive(first)
    with pytest.raises(RolloutError, match="updating"):
        generate(engine, prompts(3))
    assert engine.version == 0
    for bucket in others:
        engine.receive(bucket)
    engine.commit()
    assert engine.version == 3
    assert rows_of(generate(engine, prompts(3))) == rows_of(generate(rollout(new), prompts(3)))


@pytest.mark.parametrize("fails", ["missing bucket", "wrong bucket", "abort"])
def test_after_a_failed_update_only_a_complete_one_restores_the_engine(fails: str):
    new, engine = qwen2(seed=1), rollout(qwen2(seed=0))
    buckets = buckets_of(new)
    engine.begin_update(3)
    engine.receive(buckets[0])
    if fails == "missing bucket":
        with pytest.raises(
            RolloutError,
            match=rf"\b{len(export_weights(new)) - len(buckets[0])}\b",
        ):
            engine.commit()
    elif fails == "wrong bucket":
        with pytest.raises(WeightsError, match="nothing"):
            engine.receive({"nothing": buckets[0].popitem()[1]})
    else:
        engine.abort_update()
    with pytest.raises(RolloutError, match="broken"):
        generate(engine, prompts(3))
    engine.begin_update(4)
    for bucket in buckets_of(new):
        engine.receive(bucket)
    engine.commit()
    assert rows_of(generate(engine, prompts(3))) == rows_of(generate(rollout(new), prompts(3)))
    assert set(generate(engine, prompts(3)).versions.tolist()) == {4}


@pytest.mark.parametrize("method", ["receive", "commit", "abort_update"])
def test_update_methods_require_begin_update(method: str):
    engine = rollout()
    with pytest.raises(RolloutError, match="serving"):
        getattr(engine, method)(*([{}] if method == "receive" else []))
