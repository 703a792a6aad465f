"""Judges with scripted verdicts, whose scores are computed by hand, and with a random model."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flowrl import Batch, WorkerGroup
from flowrl.config import ConfigError, JudgeConfig, ModelConfig
from flowrl.controller.errors import WorkerUserError
from flowrl.workers import Judge
from tests.conftest import BackendName, ClusterMaker
from tests.slow_cases import one_of
from tests.workers.judges import save_judge

JUDGES = "tests.workers.judges"
PAIRWISE = {"kind": "pairwise", "prompt": "A={response_a};B={response_b};", "engine": f"{JUDGES}:LengthEngine"}

MakeJudge = Callable[..., WorkerGroup]


@pytest.fixture(scope="session")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return save_judge(tmp_path_factory.mktemp("judge") / "model")


@pytest.fixture
def make_judge(open_cluster: ClusterMaker, judge_model: ModelConfig) -> MakeJudge:
    """Starts a judge: `make_judge(backend, num_ranks, **settings)`."""

    def make(backend: BackendName = "inline", num_ranks: int = 1, *, seed: int = 0, **settings: Any) -> WorkerGroup:
        cluster = open_cluster(backend, {"main": [num_ranks]}, {"judge": "main"}, num_threads=1)
        config = JudgeConfig.model_validate({"model": judge_model, "max_response_tokens": 8} | settings)
        return cluster.group("judge", Judge, config, seed=seed)

    return make


def batch(responses: Sequence[str], *, samples: int = 1, **columns: list[Any]) -> Batch:
    num_rows = len(responses)
    rows = [
        {"prompt": "p", "response": response, "prompt_id": index // samples, "sample": index % samples}
        | {name: values[index] for name, values in columns.items()}
        for index, response in enumerate(responses)
    ]
    assert num_rows % samples == 0
    return Batch.from_rows(rows)


def columns_of(judged: Batch) -> tuple[list[float], list[bool], list[str]]:
    return judged.get("scores").tolist(), judged.get("failed").tolist(), list(judged.get("judgment"))


# Pointwise.


def test_the_prompt_has_the_system_message_the_columns_and_the_judges_chat_template(make_judge: MakeJudge) -> None:
    judge = make_judge(
        engine=f"{JUDGES}:EchoEngine",
        prompt="{response}, not {answer}: {rubric}",
        system="Be fair.",
        verdict=f"{JUDGES}:score_text",
    )
    _, failed, texts = columns_of(judge.score(batch(["Größe", "2"], answer=["3", None], rubric=["r1", "r2"])))
    assert texts == [
        "(system)Be fair.(eos)(user)Größe, not 3: r1(eos)(judge)",
        "(system)Be fair.(eos)(user)2, not None: r2(eos)(judge)",
    ]
    assert failed == [False, False]


def test_ratings_are_scores_and_texts_without_a_rating_fail(make_judge: MakeJudge) -> None:
    judge = make_judge(engine=f"{JUDGES}:EchoEngine", prompt="{response}")
    ratings = ["Rating: [[1]]", "Rating: [[10]]", "Rating: [[99]]", "good", "Rating: [[5.5]]"]
    scores, failed, texts = columns_of(judge.score(batch(ratings)))
    assert scores == [0.0, 1.0, 0.0, 0.0, 0.5]
    assert failed == [False, False, True, True, False]
    assert texts[3] == "(user)good(eos)(judge)"


def test_a_parser_that_raises_an_exception_fails_its_rows(make_judge: MakeJudge) -> None:
    judge = make_judge(engine=f"{JUDGES}:EchoEngine", verdict=f"{JUDGES}:fail")
    assert columns_of(judge.score(batch(["a", "b"])))[:2] == ([0.0, 0.0], [True, True])


def test_a_column_that_the_rows_lack_is_an_error(make_judge: MakeJudge) -> None:
    with pytest.raises(WorkerUserError, match="rubric"):
        make_judge(engine=f"{JUDGES}:EchoEngine", prompt="{response} {rubric}").score(batch(["a"])).get("scores")


# Pairwise.


def test_the_score_of_a_pairwise_judge_is_the_share_of_wins(make_judge: MakeJudge) -> None:
    judge = make_judge(**PAIRWISE)
    # In the second group, responses with x have no verdict, so only two responses are compared.
    rows = batch(["aaa", "a", "aa", "a", "bx", "b", "bx", "bb"], samples=4)
    scores, failed, texts = columns_of(judge.score(rows))
    assert scores == pytest.approx([1.0, 0.5 / 3, 2 / 3, 0.5 / 3, 0.0, 0.0, 0.0, 1.0])
    assert failed == [False] * 4 + [True, False, True, False]
    assert texts[7].count("as A, with sample 1 as B: First I thought [[B]], but the verdict is [[A]]") == 1
    assert texts[7].count("as B, with sample 1 as A: First I thought [[B]], but the verdict is [[B]]") == 1


def test_a_preference_for_the_first_position_cancels(make_judge: MakeJudge) -> None:
    judge = make_judge(**PAIRWISE | {"engine": f"{JUDGES}:BiasedEngine"})
    assert columns_of(judge.score(batch(["aaa", "a", "bb", "b"], samples=2)))[0] == [0.5] * 4


def test_the_number_of_comparisons_is_bounded(make_judge: MakeJudge) -> None:
    judge = make_judge(**PAIRWISE, max_comparisons=2)
    scores, _, texts = columns_of(judge.score(batch(["a", "aa", "aaa", "aaaa", "aaaaa"], samples=5)))
    # Neighbors in the circle: 5 and 2, 1 and 3, ...
    assert scores == [0.0, 0.5, 0.5, 0.5, 1.0]
    assert [text.count("verdict") for text in texts] == [4] * 5


def test_responses_are_compared_with_a_column(make_judge: MakeJudge) -> None:
    judge = make_judge(**PAIRWISE, compare_with="answer")
    scores, failed, _ = columns_of(judge.score(batch(["a", "aa", "aaa"], samples=3, answer=["bb", "bb", "bx"])))
    assert scores == [0.0, 0.5, 0.0]
    assert failed == [False, False, True]


def test_a_response_without_others_fails(make_judge: MakeJudge) -> None:
    assert columns_of(make_judge(**PAIRWISE).score(batch(["a", "b"])))[1] == [True, True]


def test_the_order_of_rows_does_not_change_the_scores(make_judge: MakeJudge) -> None:
    judge, rows = make_judge(**PAIRWISE, max_comparisons=2), batch(["a", "aa", "aaa", "aaaa"] * 2, samples=4)
    order = [5, 0, 7, 2, 4, 1, 6, 3]
    reordered = judge.score(rows.rows(order)).get("scores")
    assert torch.equal(reordered, judge.score(rows).get("scores")[order])


@pytest.mark.slow
def test_groups_stay_together_on_two_ranks(make_judge: MakeJudge, ray_session: None) -> None:
    rows = batch(["a", "aa", "aaa"] * 3, samples=3)
    scores = columns_of(make_judge("ray", 2, **PAIRWISE).score(rows))[0]
    assert scores == [0.0, 0.5, 1.0] * 3


# A random model.


@pytest.mark.parametrize("backend", one_of("inline", "ray"), indirect=True)
def test_a_model_judges_the_same_on_both_backends(
    make_judge: MakeJudge, backend: BackendName, judge_model: ModelConfig
) -> None:
    settings = {"prompt": "Rate {response}", "verdict": f"{JUDGES}:score_text", "temperature": 1.0}
    rows = batch(["a", "b", "c", "a"], samples=2)
    judged = columns_of(make_judge(backend, 2 if backend == "ray" else 1, **settings).score(rows))
    assert judged == columns_of(make_judge(**settings).score(rows))
    assert len(set(judged[2])) == 4


def test_verdicts_depend_only_on_the_seed_the_prompt_and_the_sample(make_judge: MakeJudge) -> None:
    settings = {"prompt": "Rate {response}", "verdict": f"{JUDGES}:score_text", "temperature": 1.0}
    judge, rows = make_judge(**settings), batch(["a"] * 4, samples=2)
    texts = columns_of(judge.score(rows))[2]
    assert columns_of(judge.score(rows.rows([2, 0])))[2] == [texts[2], texts[0]]
    assert len(set(texts)) == 4
    assert columns_of(make_judge(seed=1, **settings).score(rows))[2] != texts
    greedy = make_judge(**settings | {"temperature": 0.0})
    assert len(set(columns_of(greedy.score(rows))[2])) == 1


def test_a_prompt_that_is_too_long_fails_only_its_row(make_judge: MakeJudge) -> None:
    judge = make_judge(verdict=f"{JUDGES}:score_text", prompt="{response}")
    rows = batch(["short", "long" * 1000, "short"])
    _, failed, texts = columns_of(judge.score(rows))
    assert failed == [False, True, False]
    assert texts[0] and "2048" in texts[1]


def test_an_invalid_prompt_file_ends_the_start(make_judge: MakeJudge, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Rate it.")
    with pytest.raises((ConfigError, WorkerUserError), match="response"):
        make_judge(prompt_file=tmp_path / "prompt.txt")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_and_transformers_judge_alike(
    make_judge: MakeJudge, open_cluster: ClusterMaker, judge_model: ModelConfig, ray_session: None
) -> None:
    settings = {
        "model": judge_model,
        "max_response_tokens": 4,
        "prompt": "Rate {response}",
        "verdict": f"{JUDGES}:score_text",
    }
    rows = batch(["a", "b", "long" * 1000, "c"])
    expected = columns_of(make_judge(**settings).score(rows))
    config = JudgeConfig.model_validate(settings | {"engine": "vllm", "vllm": {"kv_cache_gb": 0.1}, "max_num_seqs": 4})
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, dedicated=("judge",))
    scores, failed, texts = columns_of(cluster.group("judge", Judge, config, seed=0).score(rows))
    assert (scores, failed) == expected[:2]
    assert failed == [False, False, True, False]
    assert [texts[i] for i in (0, 1, 3)] == [expected[2][i] for i in (0, 1, 3)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_and_transformers_compare_alike(
    make_judge: MakeJudge, open_cluster: ClusterMaker, judge_model: ModelConfig, ray_session: None
) -> None:
    settings = {
        "kind": "pairwise",
        "model": judge_model,
        "max_response_tokens": 4,
        "prompt": "A={response_a};B={response_b};",
        "verdict": f"{JUDGES}:score_text",
    }
    rows = batch(["a", "bb", "c", "dd", "a", "ee"], samples=3)
    expected = columns_of(make_judge(**settings).score(rows))
    config = JudgeConfig.model_validate(settings | {"engine": "vllm", "vllm": {"kv_cache_gb": 0.1}, "max_num_seqs": 4})
    cluster = open_cluster("ray", {"main": [1]}, {"judge": "main"}, dedicated=("judge",))
    assert columns_of(cluster.group("judge", Judge, config, seed=0).score(rows)) == expected
    assert len(set(expected[0])) > 1


# The page.


def blocks(language: str) -> list[str]:
    page = Path("docs/rewards.md").read_text().partition("## Judges")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_the_settings_of_the_page_are_valid() -> None:
    (example,) = blocks("yaml")
    config = JudgeConfig.model_validate(yaml.safe_load(example))
    assert config.needs_own_process and config.max_judgments == 1


def test_the_example_of_the_page_runs(judge_model: ModelConfig) -> None:
    (example,) = blocks("python")
    names: dict[str, Any] = {"model_path": judge_model.path}
    exec(example, names)
    # A random model does not rate.
    assert names["failed"].tolist() == [True, True] and names["scores"].tolist() == [0, 0]
    assert all(names["texts"])


def test_a_judge_ignores_unknown_weights_and_rejects_missing_ones(make_judge: MakeJudge, tmp_path: Path) -> None:
    file = save_judge(tmp_path).path / "model.safetensors"
    weights, settings = load_file(file), {"model": {"path": tmp_path, "strict": False}, "max_response_tokens": 1}
    save_file(weights | {"other": torch.ones(2)}, file, metadata={"format": "pt"})
    assert make_judge(engine="hf", **settings).weight_differences().unexpected == ("other",)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(WorkerUserError, match=r"model\.norm\.weight"):
        make_judge(engine="hf", **settings).score(batch(["a"]))
