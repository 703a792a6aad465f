"""The trained reward model and `measure` through worker groups, and rewards of models with another tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flowrl import Batch, Cluster, Placement
from flowrl.config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceActorConfig,
    RewardConfig,
    RewardModelConfig,
)
from flowrl.data.chat import ChatTokenizer, Message
from flowrl.workers import Actor, Reward, TrainedRewardModel
from recipes.quickstart.prepare import prepare
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close

IDS, LENGTHS = [2, 3, 12, 4, 14, 5, 6, 1, 7, 8, 12, 3, 2, 3, 9, 1, 5, 12, 3], [8, 4, 4, 3]
MASK = [False] * 5 + [True] * 3 + [False] * 2 + [True] * 2 + [False] + [True] * 3 + [False] + [True] * 2
OPTIMIZER = OptimizerConfig(lr=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards") / "data"
    prepare(folder, seed=0)
    return folder / "model"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    placement = Placement(pools={"main": [1]}, roles=dict.fromkeys(("actor", "reward", "judge"), "main"))
    with Cluster(placement, backend="inline", num_threads=1) as started:
        yield started


def pairs(**columns: Any) -> Batch:
    tokens = {"input_ids": IDS, "response_mask": MASK}
    return Batch.from_columns({"pair": [0, 0, 1, 1]} | columns, tokens, LENGTHS)


def config(folder: Path, **settings: Any) -> RewardModelConfig:
    model = ModelConfig(path=folder, dtype=settings.pop("dtype", "float64"))
    return RewardModelConfig(model=model, optimizer=OPTIMIZER, **settings)


def test_scores_are_those_of_transformers_at_the_last_token(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    reward = cluster.group("reward", TrainedRewardModel, config(folder, head_seed=3))
    scores = reward.scores(pairs()).get("scores")
    reward.save(tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    with torch.no_grad():
        rows = torch.tensor(IDS).split(LENGTHS)
        expected = torch.stack([model(row[None]).logits[0, 0] for row in rows])
    assert_norm_close(scores, expected)


def with_special_tokens(folder: Path, copy: Path, **tokens: str | None) -> Path:
    """Returns a copy of a model whose tokenizer has other special tokens. The copy's config has the same pad token."""
    copytree(folder, copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text()) | tokens
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((copy / "config.json").read_text())
    pad = None if tokens["pad_token"] is None else ChatTokenizer(copy).tokenizer.pad_token_id
    (copy / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    return copy


@pytest.mark.parametrize("pad", ["<eos>", None])
def test_transformers_scores_the_last_token_if_the_pad_token_is_the_end_token(
    cluster: Cluster, folder: Path, tmp_path: Path, pad: str | None
) -> None:
    start = with_special_tokens(folder, tmp_path / "start", pad_token=pad)
    reward = cluster.group("reward", TrainedRewardModel, config(start))
    reward.save(tmp_path / "saved")
    batch = rollouts(start, "46", "1", "-7")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = [f"12+34={answer}<eos>" for answer in ("46", "1", "-7")]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    with torch.no_grad():
        expected = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert_norm_close(reward.scores(batch).get("scores"), expected)
    judge = cluster.group("judge", Reward, reward_config(tmp_path / "saved", start))
    assert_norm_close(judge.score(batch.drop("conversation")).get("scores").double(), expected, rtol=1e-5)


def test_transformers_scores_the_end_of_a_turn_that_is_the_pad_token_of_the_policy(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    """`data.template` may end responses with another token than eos, here with the pad token of the tokenizer."""
    reward = cluster.group("reward", TrainedRewardModel, config(folder))
    reward.save(tmp_path / "saved")
    texts = ["12+34=46<pad>", "12+34=1<pad>"]
    rows = [ChatTokenizer(folder).encode(text) for text in texts]
    tokens = [token for row in rows for token in row]
    batch = Batch.from_columns(tokens={"input_ids": tokens}, lengths=[len(row) for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    with torch.no_grad():
        expected = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert_norm_close(reward.scores(batch).get("scores"), expected)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_an_update_is_a_step_on_the_closed_form_of_the_gradient(cluster: Cluster, folder: Path, lora: Any) -> None:
    """The gradient with respect to the head is the mean over pairs of -sigmoid(r_r - r_c) (h_c - h_r)."""
    reward = cluster.group("reward", TrainedRewardModel, config(folder, lora=lora))
    scores = reward.scores(pairs()).get("scores").double()
    before = reward.measure(pairs()).get()
    metrics = reward.update(pairs()).get()
    gaps = scores[::2] - scores[1::2]
    expected = {
        "loss": torch.nn.functional.softplus(-gaps).mean(),
        "accuracy": (gaps > 0).double().mean(),
        "margin": gaps.mean(),
        "chosen_reward": scores[::2].mean(),
        "rejected_reward": scores[1::2].mean(),
    }
    for name, value in expected.items():
        assert metrics[f"reward/{name}"].result() == pytest.approx(value.item(), rel=FLOAT64_RTOL), name
        assert before[f"reward/{name}"] == metrics[f"reward/{name}"]
    after = reward.measure(pairs()).get()
    assert after["reward/loss"].result() < metrics["reward/loss"].result()
    assert reward.measure(pairs()).get() == after, "measuring changes nothing"


def test_a_margin_of_the_data_raises_the_loss(cluster: Cluster, folder: Path) -> None:
    reward = cluster.group("reward", TrainedRewardModel, config(folder))
    losses = [
        reward.measure(batch).get()["reward/loss"].result() for batch in (pairs(), pairs(margin=[0.5, 0.5, 2.0, 2.0]))
    ]
    assert losses[1] > losses[0]


def test_the_head_has_the_variance_of_its_definition(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    reward = cluster.group("reward", TrainedRewardModel, config(folder))
    reward.save(tmp_path / "saved")
    head = load_file(tmp_path / "saved" / "model.safetensors")["score.weight"]
    assert head.shape == (1, 128)
    # The standard error of a variance of 128 draws is an eighth of it.
    assert head.var().item() == pytest.approx(1 / 129, rel=0.5)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_gradient_of_a_policy_is_its_closed_form(cluster: Cluster, folder: Path, kind: str) -> None:
    """The loss depends on each response through the sum of its log-probabilities, with the coefficients below."""
    model = ModelConfig(path=folder, dtype="float64")
    settings = PreferenceActorConfig.model_validate({"model": model, "optimizer": OPTIMIZER, "loss": kind})
    actor = cluster.group("actor", Actor, settings)
    references = torch.tensor([-9.0, -4.0, -8.0, -7.0], dtype=torch.float64)
    labels = {"desirable": [True, False, True, True], "reference_kl": [0.5] * 4}
    batch = pairs(ref_response_logprobs=references, **labels)
    ratio = actor.response_logprobs(batch).get("response_logprobs") - references
    if kind == "dpo":
        slope = -0.1 * torch.sigmoid(-0.1 * (ratio[::2] - ratio[1::2])) / 2
        coefficients = torch.stack([slope, -slope], 1).reshape(-1)
    else:
        sign = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
        inner = torch.sigmoid(0.1 * sign * (ratio - 0.5))
        coefficients = -0.1 * sign * inner * (1 - inner) / 4
    norms = []
    for role, rows, loss in (("actor", batch, None), ("judge", pairs(coefficient=coefficients), weighted)):
        worker = actor if role == "actor" else cluster.group(role, Actor, settings)
        worker.forward_backward(rows, loss)
        norms.append(worker.optim_step().get()[f"{role}/grad_norm"].result())
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_the_dummy_rows_of_a_rank_without_pairs_have_finite_losses(cluster: Cluster, folder: Path) -> None:
    reward = cluster.group("reward", TrainedRewardModel, config(folder))
    assert reward.measure(pairs().rows([])).get() == {}


# Reward models with another tokenizer.


def rollouts(folder: Path, *answers: str, **columns: Any) -> Batch:
    """Returns rows as a rollout returns them, with the tokens of the tokenizer in `folder`."""
    chat, prompt = ChatTokenizer(folder), Message("user", "12+34")
    rows = [chat.encode_example([prompt, Message("assistant", answer)])[0] for answer in answers]
    conversation = [{"role": "user", "content": "12+34"}]
    texts = {"prompt": ["12+34"] * len(rows), "response": list(answers), "conversation": [conversation] * len(rows)}
    return Batch.from_columns(
        texts | columns, {"input_ids": [token for row in rows for token in row]}, [len(row) for row in rows]
    )


@pytest.fixture
def scorer(folder: Path, cluster: Cluster, tmp_path: Path) -> Path:
    cluster.group("judge", TrainedRewardModel, config(folder, dtype="float32")).save(tmp_path / "scorer")
    return tmp_path / "scorer"


@pytest.fixture
def renamed(scorer: Path, tmp_path: Path) -> Path:
    """The same reward model with another order of its vocabulary."""
    copy = copytree(scorer, tmp_path / "renamed")
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    old, new = vocabulary["1"], vocabulary["="]
    vocabulary["1"], vocabulary["="] = new, old
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(copy / "model.safetensors")
    (name,) = (name for name in weights if "embed_tokens" in name)
    order = list(range(len(weights[name])))
    order[old], order[new] = new, old
    weights[name] = weights[name][order].contiguous()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def reward_config(scorer: Path, policy: Path) -> RewardConfig:
    return RewardConfig(model=ModelConfig(path=scorer), policy_tokenizer=policy)


def test_the_text_is_rendered_again_for_another_vocabulary(
    cluster: Cluster, folder: Path, scorer: Path, renamed: Path
) -> None:
    batch = rollouts(folder, "46", "1", "-7")
    scores = [
        cluster.group(role, Reward, reward_config(path, folder)).score(batch).get("scores")
        for role, path in (("reward", scorer), ("actor", renamed))
    ]
    assert_norm_close(scores[1], scores[0])


def test_the_chat_template_of_the_reward_model_is_used_and_a_truncated_response_has_no_end(
    cluster: Cluster, folder: Path, scorer: Path
) -> None:
    template = (scorer / "chat_template.jinja").read_text()
    (scorer / "chat_template.jinja").write_text(f"++{template}")
    chat = ChatTokenizer(scorer)
    batch = rollouts(folder, "46", "1", truncated=[False, True])
    scores = cluster.group("reward", Reward, reward_config(scorer, folder)).score(batch).get("scores")
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    for score, answer, num_dropped in zip(scores, ("46", "1"), (0, 1), strict=True):
        ids = chat.encode_prompt([Message("user", "12+34")]) + chat.tokenizer.encode(answer) + [chat.eos_id]
        assert ids[:2] == chat.tokenizer.encode("++")
        with torch.no_grad():
            expected = model(torch.tensor([ids[: len(ids) - num_dropped]])).logits[0, 0]
        assert score.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("after", ["", "+"])
def test_the_chat_template_of_the_reward_model_may_change_responses(
    cluster: Cluster, folder: Path, scorer: Path, after: str
) -> None:
    """The template keeps the part of a response after the last `-`, which the generation prompt opens."""
    (scorer / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('-')[-1] + eos_token + '"
        + after
        + "' }}"
        "{% else %}{{ m.content + '=' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '-' }}{% endif %}"
    )
    question, earlier = Message("user", "12+34"), [Message("user", "1+1"), Message("assistant", "3-2")]
    conversations = [[question], [*earlier, question], [question], [question]]
    turns = [[{"role": turn.role, "content": turn.content} for turn in turns] for turns in conversations]
    texts = ["12+34=46<eos>", f"1+1=2<eos>{after}12+34=46<eos>", "12+34=46", "12+34=46<eos>"]
    batch = rollouts(folder, "3-46", "3-46", "3-46", "46", truncated=[False, False, True, False])
    batch = batch.drop("conversation").union(Batch.from_columns({"conversation": turns}))
    scores = cluster.group("reward", Reward, reward_config(scorer, folder)).score(batch).get("scores")
    model, chat = AutoModelForSequenceClassification.from_pretrained(scorer), ChatTokenizer(folder)
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([chat.encode(text)])).logits[0, 0] for text in texts])
    assert_norm_close(scores, expected, rtol=1e-5)


def test_only_the_last_tokens_of_a_row_that_is_too_long_are_scored(
    cluster: Cluster, folder: Path, scorer: Path
) -> None:
    """The template adds 20 or 34 tokens to a prompt of 6, and the model supports 64."""
    template = (scorer / "chat_template.jinja").read_text()
    model, chat = AutoModelForSequenceClassification.from_pretrained(scorer), ChatTokenizer(folder)
    for role, num_added, answers in (("reward", 20, ["46", "1" * 38, "1" * 90]), ("actor", 34, ["1" * 20, "2" * 33])):
        (scorer / "chat_template.jinja").write_text(f"{'+' * num_added}{template}")
        result = cluster.group(role, Reward, reward_config(scorer, folder)).score(rollouts(folder, *answers))
        rows = [chat.encode("+" * num_added + f"12+34={answer}<eos>")[-64:] for answer in answers]
        with torch.no_grad():
            expected = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
        assert_norm_close(result.get("scores"), expected, rtol=1e-5)
        assert result.get("reward_truncated").tolist() == [False, *[True] * (len(answers) - 1)]


def test_tokens_of_the_policy_that_are_too_many_are_cut(cluster: Cluster, folder: Path, scorer: Path) -> None:
    reward = cluster.group("reward", Reward, reward_config(scorer, folder))
    ids = torch.arange(70) % 10 + 2
    rows = [ids, ids[-64:]]
    texts = {"prompt": ["0123-="] * 2, "response": ["1"] * 2}
    batch = Batch.from_columns(texts, {"input_ids": torch.cat(rows)}, [len(row) for row in rows])
    result = reward.score(batch)
    assert result.get("reward_truncated").tolist() == [True, False]
    assert_norm_close(result.get("scores")[:1], result.get("scores")[1:], rtol=1e-5)


def weighted(logprobs: torch.Tensor, mask: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """A loss per token whose sum over all tokens is the sum of coefficient times log-probability of each response."""
    return logprobs * coefficient[:, None] * sum(MASK)  # times the denominator of a mean over tokens
