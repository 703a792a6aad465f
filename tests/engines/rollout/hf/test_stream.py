"""Requests that come and go: each says what `generate` would, and every token is of the version that it names."""

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from flowrl.engines.models.weights import export_weights
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.requests import Prompt, Response, prompts_of
from flowrl.engines.rollout.responses import RolloutError
from tests.engines.losses import policy_logits
from tests.engines.rollout.hf.test_engine import generate, prompts, rollout, said
from tests.engines.tiny import END, llama, qwen2

Said = dict[str, tuple[list[int], list[float]]]


def requests(prompt_ids: list[list[int]], *, greedy: bool = False) -> list[Prompt]:
    """As `tests.engines.rollout.hf.test_engine.generate` has them: `generate-0`, `generate-1`, ..."""
    ids = torch.arange(len(prompt_ids))
    return prompts_of(prompt_ids, ids, ids % 3, seed=5, greedy=greedy)


def whole(engine: HfRollout, prompt_ids: list[list[int]], **settings) -> Said:
    """What `generate` says to all of them at once."""
    return {f"generate-{row}": row_said for row, row_said in enumerate(said(generate(engine, prompt_ids, **settings)))}


def of(answers: Sequence[Response]) -> Said:
    return {answer.name: (answer.token_ids, answer.logprobs) for answer in answers}


def finish(engine: HfRollout) -> list[Response]:
    found = []
    while engine.num_running:
        found += engine.poll()
    return found


def update(engine: HfRollout, model: PreTrainedModel, version: int) -> None:
    engine.begin_update(version)
    engine.receive(export_weights(model))
    engine.commit()


@pytest.mark.parametrize("max_num_seqs", [1, 7, 20, 64])
@pytest.mark.parametrize("build", [qwen2, llama])
def test_rows_are_bitwise_those_of_generate_whatever_comes_and_goes(
    build: Callable[[], PreTrainedModel], max_num_seqs: int
) -> None:
    prompt_ids = [prompt for prompt in prompts(30) for _ in range(2)]
    expected = whole(rollout(build()), prompt_ids)
    engine, chance, found = rollout(build(), max_num_seqs=max_num_seqs), random.Random(max_num_seqs), []
    coming = requests(prompt_ids)
    while coming or engine.num_running:
        count = chance.choice([0, 1, 1, 9])
        engine.add(coming[:count])
        del coming[:count]
        found += engine.poll(0.0)
    assert of(found) == expected and len({len(ids) for ids, _ in expected.values()}) > 3


def test_long_rows_beside_short_ones_are_bitwise_those_of_generate() -> None:
    settings = {"max_response_tokens": 70, "temperature": 1.5}
    prompt_ids = prompts(24, longest=50)
    expected = whole(rollout(**settings), prompt_ids)
    engine, found = rollout(max_num_seqs=5, **settings), []
    for prompt in requests(prompt_ids):
        engine.add([prompt])
        found += engine.poll(0.0)
    assert of(found + finish(engine)) == expected


def test_rows_of_one_token_join_rows_that_decode() -> None:
    prompt_ids = [[5], *prompts(20), [6], [7]]
    expected = whole(rollout(), prompt_ids)
    engine = rollout()
    first, *others = requests(prompt_ids)
    engine.add([first])
    found = engine.poll(0.0)
    engine.add(others)
    assert of(found + finish(engine)) == expected


def test_greedy_rows_and_sampled_ones_run_beside_each_other() -> None:
    prompt_ids = prompts(20)
    sampled, greedy = whole(rollout(), prompt_ids), whole(rollout(), prompt_ids, greedy=True)
    engine = rollout()
    engine.add(requests(prompt_ids)[::2] + requests(prompt_ids, greedy=True)[1::2])
    expected = {name: (sampled if row % 2 == 0 else greedy)[name] for row, name in enumerate(sampled)}
    assert of(finish(engine)) == expected


def test_a_stop_sequence_ends_a_request() -> None:
    prompt_ids = prompts(60)
    stops = next((tuple(ids[3:5]),) for ids in generate(rollout(), prompt_ids).ids() if len(ids) > 6)
    engine = rollout(stop_ids=stops, max_num_seqs=16)
    expected = generate(rollout(stop_ids=stops), prompt_ids)
    engine.add(requests(prompt_ids))
    found = {answer.name: answer for answer in finish(engine)}
    answers = [found[f"generate-{row}"] for row in range(60)]
    assert [answer.token_ids for answer in answers] == expected.ids()
    assert [answer.truncated for answer in answers] == expected.truncated.tolist()
    assert any(tuple(ids[-2:]) in stops and ids[-1] != END for ids in expected.ids())


def test_dropped_requests_say_nothing_and_change_nobody() -> None:
    prompt_ids = prompts(40)
    expected = whole(rollout(), prompt_ids)
    engine = rollout(max_num_seqs=16)
    engine.add(requests(prompt_ids))
    found = engine.poll(0.0) + engine.poll(0.0)
    dropped = {f"generate-{row}" for row in (*range(0, 40, 7), 39)} - {answer.name for answer in found}
    engine.abort([*dropped, "no request"])
    assert engine.num_running == 40 - len(found) - len(dropped)
    assert of(found + finish(engine)) == {name: row for name, row in expected.items() if name not in dropped}


def test_all_requests_can_be_dropped_and_others_come() -> None:
    engine = rollout()
    engine.add(requests(prompts(20)))
    engine.poll(0.0)
    engine.abort([f"generate-{row}" for row in range(20)])
    assert engine.num_running == 0 and engine.poll() == []
    engine.add(requests(prompts(6, seed=1)))
    assert of(finish(engine)) == whole(rollout(), prompts(6, seed=1))


def test_a_batch_is_generated_while_requests_run_and_neither_changes_the_other() -> None:
    prompt_ids, others = prompts(30), prompts(9, seed=1)
    expected, answered = whole(rollout(), prompt_ids), whole(rollout(), others, greedy=True)
    engine = rollout(max_num_seqs=16)
    engine.add(requests(prompt_ids))
    found = engine.poll(0.0)
    # Its rows have the names of those that are running.
    assert whole(engine, others, greedy=True) == answered
    assert of(found + finish(engine)) == expected


def test_rows_go_on_with_new_weights_and_every_token_has_its_version() -> None:
    # In float64, where only what is wrong makes a difference.
    models = [qwen2(torch.float64, seed=seed) for seed in range(4)]
    engine, prompt_ids = rollout(qwen2(torch.float64), max_response_tokens=40, max_num_seqs=20), prompts(50)
    engine.add(requests(prompt_ids))
    found: list[Response] = []
    for version, model in enumerate(models):
        if version:
            update(engine, model, version)
        for _ in range(7):
            found += engine.poll(0.0)
    found += finish(engine)
    assert sorted(answer.name for answer in found) == sorted(f"generate-{row}" for row in range(50))
    assert max(len(set(answer.versions)) for answer in found) == 4
    for answer in found:
        assert answer.versions == sorted(answer.versions)
        check_logprobs(answer, prompt_ids[int(answer.name.removeprefix("generate-"))], models)


def check_logprobs(answer: Response, prompt: list[int], models: list) -> None:
    """Each token's is that which the model of its version gives it, after all tokens before it."""
    row = torch.tensor([prompt + answer.token_ids])
    with torch.no_grad():
        logprobs_vL = [policy_logits(model, row)[0].log_softmax(-1)[len(prompt) - 1 : -1] for model in models]
    for place, (token, logprob, version) in enumerate(
        zip(answer.token_ids, answer.logprobs, answer.versions, strict=True)
    ):
        assert logprob == pytest.approx(float(logprobs_vL[version][place, token]), abs=1e-5)


def test_a_stop_sequence_that_two_versions_say_ends_a_row() -> None:
    prompt_ids = prompts(60)
    free = rollout(max_response_tokens=4)
    stop = next(tuple(ids[1:3]) for ids in generate(free, prompt_ids).ids() if len(ids) == 4)
    engine = rollout(stop_ids=(stop,))
    engine.add(requests(prompt_ids))
    found = engine.poll(0.0) + engine.poll(0.0)
    update(engine, qwen2(), 1)  # the same weights, so that rows go on as they would have
    found += finish(engine)
    mixed = [answer for answer in found if tuple(answer.token_ids[-2:]) == stop and answer.versions[-2:] == [0, 1]]
    assert mixed and not any(answer.truncated for answer in mixed)


def test_requests_go_on_in_the_order_in_which_they_came() -> None:
    engine, prompt_ids = rollout(max_num_seqs=16, max_response_tokens=12, stop_ids=()), prompts(60)
    engine.add(requests(prompt_ids))
    found = engine.poll(0.0)
    for version in range(1, 4):
        update(engine, qwen2(), version)
        found += engine.poll(0.0)
    # 16 places and 4 steps: whoever said something came before the others.
    done = {int(answer.name.removeprefix("generate-")) for answer in found}
    engine.abort([f"generate-{row}" for row in range(16 + len(done))])
    assert all(set(answer.versions) == {3} for answer in finish(engine))


def test_after_half_an_update_requests_wait_for_a_whole_one() -> None:
    engine, prompt_ids = rollout(), prompts(20)
    engine.add(requests(prompt_ids))
    found = engine.poll(0.0)
    engine.begin_update(1)
    with pytest.raises(RolloutError, match="is updating and cannot generate"):
        engine.poll()
    engine.abort_update()
    with pytest.raises(RolloutError, match="is broken and cannot generate"):
        engine.poll()
    update(engine, qwen2(seed=1), 2)
    found += finish(engine)
    assert {version for answer in found for version in answer.versions} == {0, 2} and len(found) == 20


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind() -> None:
    engine = rollout()
    with pytest.raises(RolloutError, match="prompt 1 has 120 tokens, 130 with"):
        engine.add([Prompt("a", [5], 1), Prompt("b", [5] * 120, 1)])
    engine.add([Prompt("a", [5], 1)])
    for others in ([Prompt("c", [5], 1), Prompt("a", [6], 1)], [Prompt("c", [5], 1), Prompt("c", [6], 1)]):
        with pytest.raises(RolloutError, match=r"request [ac] is running already; name it otherwise"):
            engine.add(others)
    assert [answer.name for answer in finish(engine)] == ["a"]
    engine.add([Prompt("a", [5], 1)])
    assert engine.num_running == 1


def test_nothing_running_answers_at_once() -> None:
    engine, started = rollout(), time.monotonic()
    assert engine.poll(60.0) == [] and engine.num_running == 0
    assert time.monotonic() - started < 30


def test_a_poll_with_time_left_works_until_something_is_finished() -> None:
    engine = rollout()
    engine.add(requests(prompts(20)))
    assert engine.poll(600.0)
