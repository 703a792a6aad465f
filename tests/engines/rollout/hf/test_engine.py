import pytest
import torch

from flowrl.config import RolloutConfig
from flowrl.engines.models.weights import WeightsError, export_weights, weight_buckets
from flowrl.engines.rollout.hf.engine import HfRollout, Responses, RolloutError
from flowrl.engines.rollout.sampling import row_keys, sample_tokens, uniforms
from tests.engines.losses import policy_logits
from tests.engines.tables import VOCABULARY
from tests.engines.tiny import END, llama, qwen2, tokenizer


def rollout(model=None, device: str = "cpu", **settings) -> HfRollout:
    config = RolloutConfig(**{"max_response_tokens": 10, **settings})
    return HfRollout(qwen2() if model is None else model, tokenizer(), config, device)


def prompts(num: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def generate(engine: HfRollout, prompt_ids: list[list[int]], rows: list[int] | None = None, **settings) -> Responses:
    """The rows' own identities, whichever of them are asked for."""
    index = list(range(len(prompt_ids))) if rows is None else rows
    ids = torch.tensor(index, dtype=torch.int64)
    return engine.generate([prompt_ids[i] for i in index], ids, ids % 3, **{"seed": 5, **settings})


def said(responses: Responses) -> list[tuple[list[int], list[float]]]:
    logprobs = [row.tolist() for row in responses.logprobs.split(responses.lengths.tolist())]
    return list(zip(responses.ids(), logprobs, strict=True))


def one_by_one(model, prompt: list[int], number: int, greedy: bool) -> tuple[list[int], list[float]]:
    """Without cache or batch: the whole row is run again for each token."""
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


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("build", [qwen2, llama])
def test_responses_are_those_of_a_model_without_cache_or_batch(build, greedy: bool):
    model, prompt_ids = build(), prompts(18)
    answers = said(generate(rollout(model), prompt_ids, greedy=greedy))
    with torch.no_grad():
        expected = [one_by_one(model, prompt, i, greedy) for i, prompt in enumerate(prompt_ids)]
    assert [ids for ids, _ in answers] == [ids for ids, _ in expected]
    for (_, logprobs), (_, wanted) in zip(answers, expected, strict=True):
        assert logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 128, "num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_a_row_is_bitwise_the_same_in_any_batch(settings: dict):
    model, prompt_ids = qwen2(**settings), prompts(60)
    whole = said(generate(rollout(model), prompt_ids))
    for max_num_seqs in (7, 33):
        assert said(generate(rollout(model, max_num_seqs=max_num_seqs), prompt_ids)) == whole
    assert said(generate(rollout(model, max_num_seqs=1), prompt_ids, [0, 30, 59])) == [whole[0], whole[30], whole[59]]
    assert len({len(ids) for ids, _ in whole}) > 3


def test_a_row_is_bitwise_the_same_on_any_number_of_threads():
    prompt_ids = prompts(40)
    whole = said(generate(rollout(), prompt_ids))
    torch.set_num_threads(2)
    assert said(generate(rollout(), prompt_ids)) == whole


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_a_row_is_bitwise_the_same_on_any_rank(num_ranks: int):
    engine, prompt_ids = rollout(), prompts(40)
    whole = said(generate(engine, prompt_ids))
    for rank in range(num_ranks):
        rows = list(range(rank, 40, num_ranks))
        assert said(generate(engine, prompt_ids, rows)) == [whole[row] for row in rows]


def test_rows_that_grow_past_several_slot_blocks_stay_bitwise_the_same():
    settings = {"max_response_tokens": 70, "temperature": 1.5}
    prompt_ids = prompts(20, longest=20)
    whole = said(generate(rollout(**settings), prompt_ids))
    assert max(len(ids) for ids, _ in whole) > 40
    assert said(generate(rollout(max_num_seqs=4, **settings), prompt_ids)) == whole


def test_samples_of_one_prompt_differ_and_repeat_with_the_seed():
    engine, prompt = rollout(), [5, 6, 7]
    rows = [prompt] * 20, torch.zeros(20, dtype=torch.int64), torch.arange(20)
    first, again, other = (engine.generate(*rows, seed=seed) for seed in (1, 1, 2))
    assert len({tuple(ids) for ids in first.ids()}) > 10
    assert said(first) == said(again) and first.ids() != other.ids()


def test_shared_prompts_are_answered_like_prompts_on_their_own():
    engine = rollout()
    prompt_ids = [p for p in prompts(6) for _ in range(4)]
    whole = said(generate(engine, prompt_ids))
    assert [said(generate(engine, prompt_ids, [row]))[0] for row in range(24)] == whole


def test_logprobs_are_those_of_the_distribution_sampled_from():
    settings = {"temperature": 0.7, "top_k": 8, "top_p": 0.9}
    model, prompt_ids = qwen2(), prompts(5)
    answers = said(generate(rollout(model, **settings), prompt_ids))
    for number, (prompt, (ids, logprobs)) in enumerate(zip(prompt_ids, answers, strict=True)):
        logits = policy_logits(model, torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
        key = row_keys(5, torch.tensor([number]), torch.tensor([number % 3]))
        numbers = uniforms(key.expand(len(ids)), len(prompt) + torch.arange(len(ids)))
        tokens, expected = sample_tokens(logits, numbers, **settings)
        assert tokens.tolist() == ids and logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_response_ends_with_the_end_token_or_is_truncated():
    responses = generate(rollout(), prompts(60))
    ends = [ids[-1] == END for ids in responses.ids()]
    assert responses.truncated.tolist() == [not end for end in ends] and 0 < sum(ends) < 60
    assert all(END not in ids[:-1] for ids in responses.ids())
    assert all(len(ids) == 10 for ids, end in zip(responses.ids(), ends, strict=True) if not end)


def test_a_stop_sequence_ends_a_response_and_stays_in_it():
    prompt_ids = prompts(60)
    free = generate(rollout(), prompt_ids).ids()
    stop = next(ids[3:5] for ids in free if len(ids) > 6)
    stopped = generate(rollout(stop_ids=(tuple(stop),)), prompt_ids)
    for ids, whole, truncated in zip(stopped.ids(), free, stopped.truncated.tolist(), strict=True):
        ends = [i + 2 for i in range(len(whole) - 1) if whole[i : i + 2] == stop]
        assert ids == whole[: ends[0]] if ends else ids == whole
        assert truncated == (not ends and whole[-1] != END)
    assert sum(len(ids) for ids in stopped.ids()) < sum(len(ids) for ids in free)


def test_every_end_token_of_the_model_ends_a_response():
    model, prompt_ids = qwen2(), prompts(40)
    free = generate(rollout(model), prompt_ids).ids()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [END, 7]
    ended = generate(rollout(model), prompt_ids).ids()
    assert ended == [ids[: ids.index(7) + 1] if 7 in ids else ids for ids in free] and ended != free


def test_no_prompts_give_no_responses():
    responses = generate(rollout(), [])
    assert responses.ids() == [] and responses.tokens.shape == responses.logprobs.shape == (0,)
    assert responses.truncated.shape == (0,)


def test_the_rollout_follows_the_model_that_is_trained():
    model, prompt_ids = qwen2(), prompts(8)
    engine = rollout(model)
    generate(engine, prompt_ids)
    with torch.no_grad():
        model.load_state_dict(qwen2(seed=1).state_dict())
    assert said(generate(engine, prompt_ids)) == said(generate(rollout(qwen2(seed=1)), prompt_ids))


def test_generation_leaves_the_model_as_it_was():
    model = qwen2()
    before = {name: (weight, weight._version) for name, weight in model.named_parameters()}
    attention = model.config._attn_implementation
    generate(rollout(model), prompts(4))
    assert {name: (weight, weight._version) for name, weight in model.named_parameters()}.keys() == before.keys()
    assert all(weight is before[n][0] and weight._version == before[n][1] for n, weight in model.named_parameters())
    assert model.config._attn_implementation == attention and not any(p.grad is not None for p in model.parameters())


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(RolloutError, match=r"prompt 1 has 120 tokens, 130 with .* the model takes 128"):
        generate(rollout(), [[5], [5] * 120])


def test_an_empty_prompt_is_refused():
    with pytest.raises(RolloutError, match="prompt 0 has no tokens"):
        generate(rollout(), [[]])


def test_a_sliding_window_limits_the_length_of_a_row():
    model = qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(RolloutError, match="the model takes 16"):
        generate(rollout(model), [[5] * 8])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_greedy_tokens_of_the_cpu():
    prompt_ids = prompts(30)
    expected = generate(rollout(qwen2(torch.float64)), prompt_ids, greedy=True)
    responses = generate(rollout(qwen2(torch.float64), device="cuda"), prompt_ids, greedy=True)
    assert responses.ids() == expected.ids()
    torch.testing.assert_close(responses.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def parts_of(model) -> list[dict]:
    return [export_weights(model, names) for names in weight_buckets(model, 5000)]


def test_an_update_in_parts_is_served_when_it_is_whole_and_nothing_is_in_between():
    new, engine = qwen2(seed=1), rollout(qwen2(seed=0))
    first, *others = parts_of(new)
    engine.begin_update(3)
    engine.receive(first)
    with pytest.raises(RolloutError, match="the rollout engine is updating and cannot generate; commit or abort"):
        generate(engine, prompts(3))
    assert engine.version == 0
    for part in others:
        engine.receive(part)
    engine.commit()
    assert engine.version == 3
    assert said(generate(engine, prompts(3))) == said(generate(rollout(new), prompts(3)))


@pytest.mark.parametrize("fails", ["a part is missing", "a part does not fit", "it is given up"])
def test_after_half_an_update_it_answers_only_from_a_whole_one(fails: str):
    new, engine = qwen2(seed=1), rollout(qwen2(seed=0))
    parts = parts_of(new)
    engine.begin_update(3)
    engine.receive(parts[0])
    if fails == "a part is missing":
        with pytest.raises(
            RolloutError,
            match=rf"the update brought no .*\({len(export_weights(new)) - len(parts[0])} missing\); send every",
        ):
            engine.commit()
    elif fails == "a part does not fit":
        with pytest.raises(WeightsError, match="have also nothing"):
            engine.receive({"nothing": parts[0].popitem()[1]})
    else:
        engine.abort_update()
    with pytest.raises(RolloutError, match="is broken and cannot generate; its weights are partly new"):
        generate(engine, prompts(3))
    engine.begin_update(4)
    for part in parts_of(new):
        engine.receive(part)
    engine.commit()
    assert said(generate(engine, prompts(3))) == said(generate(rollout(new), prompts(3)))
    assert set(generate(engine, prompts(3)).versions.tolist()) == {4}


@pytest.mark.parametrize("method", ["receive", "commit", "abort_update"])
def test_an_update_that_has_not_begun_takes_nothing(method: str):
    engine = rollout()
    with pytest.raises(RolloutError, match="the rollout engine is serving and cannot"):
        getattr(engine, method)(*([{}] if method == "receive" else []))
