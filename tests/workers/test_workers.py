"""Workers of the roles on the inline backend, compared with the models themselves."""

import json
import math
import socket
import sys
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from flowrl import Batch, Cluster, Placement, WorkerGroup, make_tensordict
from flowrl.config import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
)
from flowrl.controller.errors import ContractError, WorkerUserError
from flowrl.data.chat import ChatTokenizer
from flowrl.data.metric import Mean
from flowrl.data.prompts import PromptStream, read_conversations
from flowrl.engines.checkpoint.export import export_model
from flowrl.engines.models.weights import to_tensors
from flowrl.engines.rollout.cuda_ipc import read_bucket
from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.row_scorer import RewardCall, RowScores
from flowrl.user_code.channel import RequestServer
from flowrl.workers import LANGUAGE_MODELING, Actor, Critic, Reference, Reward, Rollout
from flowrl.workers.losses.loss import MeanMetrics
from tests.engines.closeness import FLOAT32_RTOL, assert_norm_close
from tests.errors import rejects

IDS, LENGTHS = [2, 3, 12, 4, 14, 5, 6, 1, 7, 8, 12, 3], [8, 4]
MASK = [False] * 5 + [True] * 3 + [False] * 2 + [True] * 2

FLOAT32_BOUND = 1024 * 2**-24
"""Norm-wise relative bound of two float32 summation orders; no sum of the model is longer than 1024."""


def inline_cluster() -> Cluster:
    roles = ("actor", "critic", "reference", "reward", "rollout")
    return Cluster(Placement(pools={"main": [1]}, roles=dict.fromkeys(roles, "main")), backend="inline", num_threads=1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with inline_cluster() as started:
        yield started


def batch(**columns: list[float]) -> Batch:
    tokens = {"input_ids": IDS, "response_mask": MASK}
    floats = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
    return Batch.from_columns(tokens=tokens | floats, lengths=LENGTHS)


def actor_of(cluster: Cluster, model: ModelConfig, **settings: Any) -> WorkerGroup:
    config = ActorConfig(model=model, optimizer=OptimizerConfig(lr=0.01), temperature=0.5, **settings)
    return cluster.group("actor", Actor, config)


def as_scores(value: float) -> RowScores:
    return RowScores({"scores": value}, {"reward": RewardCall(value)})


def test_logprobs_are_those_of_the_model_at_the_rollout_temperature(cluster: Cluster, model: ModelConfig) -> None:
    network = AutoModelForCausalLM.from_pretrained(model.path)
    expected = torch.zeros(12)
    for start, length in ((0, 8), (8, 4)):
        ids = torch.tensor(IDS[start : start + length])
        with torch.no_grad():
            table = (network(ids[None]).logits[0] / 0.5).log_softmax(-1)
        expected[start + 1 : start + length] = table[:-1].gather(-1, ids[1:, None])[:, 0]
    actor, rows = actor_of(cluster, model), batch()
    assert_norm_close(actor.logprobs(rows.select("input_ids")).get("logprobs"), expected)
    # With a response mask, only the tokens of the mask are computed.
    mask = rows.get("response_mask")
    assert_norm_close(actor.logprobs(rows).get("logprobs"), expected.masked_fill(~mask, 0))


def test_an_actor_shares_its_weights_without_vllm(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    num_buckets = actor.num_buckets(0.05).get()
    (weights,) = actor.run(read_shared_weights, num_buckets)
    expected = to_tensors(actor.weights().get())
    assert num_buckets > 2 and list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "vllm" not in sys.modules


def test_no_other_process_can_take_the_port_of_the_transfer_group(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    address = (group := actor.open_transfer_group(1, all_send=False)).host, group.port
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    with socket.create_connection(address):
        actor.run(close_listener)


def close_listener(worker: Actor) -> None:
    assert worker._listener is not None
    worker._listener.close()


def read_shared_weights(worker: Actor, num_buckets: int) -> dict[str, torch.Tensor]:
    weights = dict[str, torch.Tensor]()
    for bucket in range(num_buckets):
        shared = worker.share_weights(bucket, 0.05)
        assert worker.describe_weights(bucket, 0.05) == shared.metadata
        weights |= read_bucket(shared, torch.device("cpu"))
    worker.release_weights()
    return weights


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_rollout_returns_the_logprobs_of_the_actor_in_its_process(
    cluster: Cluster, model: ModelConfig, is_trained: bool
) -> None:
    """Justifies the rollout's log-probabilities as old log-probabilities of the first update."""
    actor = actor_of(cluster, model)
    rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=24, temperature=0.5), model, seed=0)
    if is_trained:
        actor.update(batch(old_logprobs=[-1.0] * 12, advantages=[1.0] * 12)).get()
    prompts = [[2 + (row + i) % 10 for i in range(1 + row % 7)] for row in range(8)]
    rows = [{"prompt_ids": prompts[row // 4], "prompt_id": row // 4, "sample": row % 4} for row in range(32)]
    responses = rollout.generate(Batch.from_rows(rows))
    mask = responses.get("response_mask")
    expected = actor.logprobs(responses).get("logprobs")[mask]
    assert len(expected) > 200 and expected.std() > 0.1
    difference = responses.get("rollout_logprobs")[mask] - expected
    assert difference.norm() < 1e-6 * expected.norm()


def test_reference_and_actor_agree_before_training_and_differ_after(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model, temperature=0.5))
    old = actor.logprobs(batch()).get("logprobs")
    assert torch.equal(reference.logprobs(batch()).get("logprobs"), old)
    actor.update(batch(old_logprobs=old.tolist(), advantages=[1.0] * 12)).get()
    assert torch.equal(reference.logprobs(batch()).get("logprobs"), old)
    assert not torch.equal(actor.logprobs(batch()).get("logprobs"), old)


def test_no_role_reads_the_file_of_its_model_after_its_start(
    cluster: Cluster, model: ModelConfig, tmp_path: Path
) -> None:
    own = ModelConfig(path=copytree(model.path, tmp_path / "model"))
    actor_of(cluster, own)
    cluster.group("critic", Critic, CriticConfig(model=own, optimizer=OptimizerConfig(lr=0.01)))
    cluster.group("reference", Reference, ReferenceConfig(model=own, temperature=0.5))
    cluster.group("reward", Reward, RewardConfig(model=own, head="fresh"))
    cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=4), own, seed=0)
    assert str(own.path) not in Path("/proc/self/maps").read_text()


def test_an_update_raises_the_probability_of_tokens_with_positive_advantage(
    cluster: Cluster, model: ModelConfig
) -> None:
    actor = actor_of(cluster, model)
    old = actor.logprobs(batch()).get("logprobs")
    metrics = actor.update(batch(old_logprobs=old.tolist(), advantages=[1.0] * 12)).get()
    assert metrics["actor/ratio"].result() == pytest.approx(1, abs=FLOAT32_RTOL)
    assert metrics["actor/loss"].result() == pytest.approx(-1, abs=FLOAT32_RTOL)
    gain = (actor.logprobs(batch()).get("logprobs") - old)[torch.tensor(MASK)]
    assert gain.mean() > 0


def test_a_kl_loss_without_reference_logprobs_is_rejected(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model, kl_loss_coef=0.1)
    with rejects("ref_logprobs", "old_logprobs", "advantages", "actor.kl_loss_coef", error=ContractError):
        actor.update(batch(old_logprobs=[0.0] * 12, advantages=[1.0] * 12))


class Waits(TorchFunctionMode):
    """Counts the calls that synchronize with the device, because they return Python numbers."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__ in ("tolist", "item", "__float__", "__int__", "__bool__")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "tests.algorithms.own_functions:squared"])
@pytest.mark.parametrize("junk", [float("nan"), -math.inf])
def test_reference_logprobs_of_masked_tokens_do_not_change_the_update(
    model: ModelConfig, kind: str, junk: float
) -> None:
    reference = [-1.0 if chosen else junk for chosen in MASK]
    actual = []
    for values in (reference, [-1.0] * 12):
        with inline_cluster() as cluster:
            gradient = "k2" if kind == "k1" else None
            actor = actor_of(cluster, model, kl_loss_coef=0.5, kl_loss_kind=kind, kl_loss_gradient=gradient)
            metrics = actor.update(batch(old_logprobs=[-1.0] * 12, advantages=[1.0] * 12, ref_logprobs=values)).get()
            actual.append((metrics["actor/kl_loss"].result(), actor.logprobs(batch()).get("logprobs").tolist()))
    assert actual[0] == actual[1] and math.isfinite(actual[0][0]) and all(map(math.isfinite, actual[0][1]))


def test_metrics_of_a_micro_batch_wait_for_the_device_when_they_are_read() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    values = {"loss": torch.tensor([[1.0, math.nan], [2.0, 6.0]]), "ratio": torch.tensor([[0.5, 9.0], [1.5, 1.0]])}
    with Waits() as waits:
        actual = MeanMetrics(values, mask)
        assert waits.count == 0
        assert len(actual) == 4
    assert waits.count == 1
    assert {name: metric.result() for name, metric in actual.items()} == {
        "loss": 3.0,
        "ratio": 1.0,
        "ratio_min": 0.5,
        "ratio_max": 1.5,
    }


def test_a_micro_batch_without_tokens_has_no_ratio_range() -> None:
    actual = MeanMetrics({"ratio": torch.ones(2, 3)}, torch.zeros(2, 3, dtype=torch.bool))
    assert actual == {"ratio": Mean(0.0, 0.0)}


def test_a_loss_without_its_columns_is_rejected(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model, loss="decoupled_ppo")
    with rejects("behavior_logprobs", "decoupled_ppo", error=ContractError):
        actor.update(batch(old_logprobs=[0.0] * 12, advantages=[1.0] * 12))


def test_loss_weights_and_loss_mask_change_the_loss(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    old = actor.logprobs(batch()).get("logprobs")
    rows = batch(old_logprobs=old.tolist(), advantages=[1.0] * 12, loss_weights=[0.5] * 10 + [2.0] * 2)
    rows["loss_mask"] = Batch.from_columns(
        tokens={"kept": [False] * 7 + [True] + [False] * 2 + [True] * 2}, lengths=LENGTHS
    )
    # One token of weight 1/2 and two of weight 2, each with a ratio of 1: -(0.5 + 2 + 2) / 3.
    metrics = actor.update(rows).get()
    assert metrics["actor/loss"].result() == pytest.approx(-1.5, abs=FLOAT32_RTOL)
    assert metrics["actor/ratio_min"].result() == pytest.approx(1, abs=FLOAT32_RTOL)


def test_supervised_steps_lower_the_cross_entropy(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model))
    cross_entropy = -reference.logprobs(batch()).get("logprobs")[torch.tensor(MASK)].mean().item()
    losses = [actor.update(batch(), LANGUAGE_MODELING).get()["actor/loss"].result() for _ in range(4)]
    assert losses[0] == pytest.approx(cross_entropy, rel=FLOAT32_RTOL)
    assert losses[-1] < losses[0] - 0.5


def test_a_token_without_an_embedding_has_a_fixed_logprob(cluster: Cluster, model: ModelConfig) -> None:
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model))
    unknown = [1, 6, 8, 10]  # prompt and response of each row
    ids = [9999 if i in unknown else token for i, token in enumerate(IDS)]
    known = [0 if i in unknown else token for i, token in enumerate(IDS)]
    rows, replaced = (
        Batch.from_columns(tokens={"input_ids": tokens, "response_mask": MASK}, lengths=LENGTHS)
        for tokens in (ids, known)
    )
    expected = reference.logprobs(replaced).get("logprobs")
    assert (expected[[6, 10]] > -20).all()
    expected[[6, 10]] = -20  # the tokens of the mask
    assert torch.equal(reference.logprobs(rows).get("logprobs"), expected)
    sums = reference.response_logprobs(rows).get("response_logprobs")
    assert sums.tolist() == pytest.approx([expected[:8].sum().item(), expected[8:].sum().item()])
    topk = reference.topk(rows, 2)
    assert torch.equal(topk.get("topk_ids"), reference.topk(replaced, 2).get("topk_ids"))
    without_mask = reference.logprobs(rows.drop("response_mask")).get("logprobs")
    assert [i for i, value in enumerate(without_mask.tolist()) if value == -20] == [1, 6, 10]
    assert without_mask[8] == 0  # the first token of a row


def test_a_critic_starts_at_zero_and_learns_its_returns(cluster: Cluster, model: ModelConfig) -> None:
    config = CriticConfig(model=model, optimizer=OptimizerConfig(lr=0.01), value_clip=None)
    critic = cluster.group("critic", Critic, config)
    assert critic.values(batch()).get("values").tolist() == [0.0] * 12
    rows = batch(values=[0.0] * 12, returns=[1.0] * 12)
    losses = [critic.update(rows).get()["critic/loss"].result() for _ in range(20)]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.1


def test_a_colocated_rollout_shares_the_actors_weights(cluster: Cluster, model: ModelConfig) -> None:
    actor = actor_of(cluster, model)
    rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=4, temperature=0.5), model, seed=0)
    prompts = Batch.from_rows([{"prompt_ids": [2, 3, 12, 4, 14], "prompt_id": i, "sample": 0} for i in range(4)])
    for version in (1, 2):
        responses = rollout.generate(prompts)
        mask = responses.get("response_mask")
        assert relative_gap(actor, responses) <= FLOAT32_BOUND
        assert set(responses.get("weight_version")[mask].tolist()) == {version - 1}
        responses["old_logprobs"] = actor.logprobs(responses)
        actor.update(responses.apply(ones, ["input_ids"], ["advantages"])).get()
        rollout.set_version(version)


def relative_gap(actor: WorkerGroup, responses: Batch) -> float:
    """Returns the norm of the difference of rollout and actor log-probabilities, relative to the norm of either."""
    mask = responses.get("response_mask")
    expected = actor.logprobs(responses).get("logprobs")[mask]
    return float((responses.get("rollout_logprobs")[mask] - expected).norm() / expected.norm())


def ones(table: TensorDict) -> TensorDict:
    return make_tensordict(
        tokens={"advantages": torch.ones(len(table["tokens", "input_ids"]))}, lengths=table["rows", "length"]
    )


LORA = LoraConfig(rank=4, alpha=8.0)


def test_rollout_and_reference_share_the_model_of_an_actor_with_an_adapter(
    cluster: Cluster, model: ModelConfig
) -> None:
    actor = actor_of(cluster, model, lora=LORA)
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model, temperature=0.5))
    rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=4, temperature=0.5), model, seed=0)
    assert reference.run(shares_the_actors_engine) == [True]
    prompts = Batch.from_rows([{"prompt_ids": [2, 3, 12, 4, 14], "prompt_id": i, "sample": 0} for i in range(4)])
    before = actor.logprobs(batch()).get("logprobs")
    for version in (1, 2):
        responses = rollout.generate(prompts)
        assert relative_gap(actor, responses) <= FLOAT32_BOUND
        responses["old_logprobs"] = actor.logprobs(responses)
        actor.update(responses.apply(ones, ["input_ids"], ["advantages"])).get()
        rollout.set_version(version)
        assert torch.equal(reference.logprobs(batch()).get("logprobs"), before)
    assert (actor.logprobs(batch()).get("logprobs") - before).abs().max() > 1e-3


def shares_the_actors_engine(reference: Reference) -> bool:
    actor = reference.peer("actor")
    return isinstance(actor, Actor) and reference.engine is actor.engine


@pytest.mark.parametrize("change", ["another process", "another model", "no adapter"])
def test_a_reference_otherwise_loads_its_own_model(change: str, model: ModelConfig, tmp_path: Path) -> None:
    roles = {"actor": "a", "rollout": "b", "reference": "b" if change == "another process" else "a"}
    pools = Placement(pools={"a": [1], "b": [1]}, roles=roles)
    other = ModelConfig(path=copytree(model.path, tmp_path / "model")) if change == "another model" else model
    with Cluster(pools, backend="inline", num_threads=1) as cluster:
        actor = actor_of(cluster, model, lora=None if change == "no adapter" else LORA)
        reference = cluster.group("reference", Reference, ReferenceConfig(model=other, temperature=0.5))
        assert reference.run(shares_the_actors_engine) == [False]
        before = reference.logprobs(batch()).get("logprobs")
        assert torch.equal(actor.logprobs(batch()).get("logprobs"), before)
        actor.update(batch(), LANGUAGE_MODELING).get()
        assert torch.equal(reference.logprobs(batch()).get("logprobs"), before)


def test_a_critic_with_an_adapter_trains_it_and_its_head(cluster: Cluster, model: ModelConfig) -> None:
    config = CriticConfig(model=model, optimizer=OptimizerConfig(lr=0.01), value_clip=None, lora=LORA)
    critic = cluster.group("critic", Critic, config)
    rows = batch(values=[0.0] * 12, returns=[1.0] * 12)
    losses = [critic.update(rows).get()["critic/loss"].result() for _ in range(20)]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.1


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_saved_and_an_exported_critic_have_the_values_of_the_trained_one(
    cluster: Cluster, model: ModelConfig, tmp_path: Path, lora: LoraConfig | None
) -> None:
    config = CriticConfig(model=model, optimizer=OptimizerConfig(lr=0.01), value_clip=None, lora=lora)
    critic = cluster.group("critic", Critic, config)
    for _ in range(2):
        critic.update(batch(values=[0.0] * 12, returns=[1.0] * 12)).get()
    expected = critic.values(batch()).get("values")
    assert expected.abs().max() > 0.01
    critic.save(tmp_path / "saved")
    (tmp_path / "checkpoint").mkdir()
    critic.save_checkpoint(tmp_path / "checkpoint").get()
    critic.checkpoint_saved()
    export_model(tmp_path / "checkpoint", tmp_path / "exported")
    for name in ("saved", "exported"):
        with inline_cluster() as other:
            own = ModelConfig(path=tmp_path / name)
            loaded = other.group("critic", Critic, CriticConfig(model=own, optimizer=OptimizerConfig(lr=0.01)))
            values = loaded.values(batch()).get("values")
        assert_norm_close(values, expected)  # an adapter is merged into the weights
        assert lora is not None or torch.equal(values, expected)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_rollout_in_another_process_loads_the_sent_weights(model: ModelConfig, lora: LoraConfig | None) -> None:
    pools = Placement(pools={"a": [1], "b": [1]}, roles={"actor": "a", "rollout": "b"})
    with Cluster(pools, backend="inline", num_threads=1) as cluster:
        actor = actor_of(cluster, model, lora=lora)
        rollout = cluster.group(
            "rollout", Rollout, RolloutConfig(max_response_tokens=4, temperature=0.5), model, seed=0
        )
        prompts = Batch.from_rows([{"prompt_ids": [2, 3, 12], "prompt_id": i, "sample": 0} for i in range(4)])
        actor.update(batch(), LANGUAGE_MODELING).get()
        rollout.load_weights(actor.weights(), 6).get()
        rollout.load_weights(actor.weights(), 7).get()
        responses = rollout.generate(prompts)
        assert relative_gap(actor, responses) <= FLOAT32_BOUND
        assert set(responses.get("weight_version").tolist()) == {-1, 7}


def test_calls_of_generate_share_a_connection_to_the_reward(cluster: Cluster, model: ModelConfig) -> None:
    connections: list[Hashable] = []
    results = [as_scores(0.5), as_scores(0.5), RewardError("no number for this row"), as_scores(1.5)]

    def handle(row: dict[str, Any], connection: Hashable) -> Future[RowScores]:
        connections.append(connection)
        result, future = results[len(connections) - 1], Future[RowScores]()
        future.set_exception(result) if isinstance(result, RewardError) else future.set_result(result)
        return future

    rollout = cluster.group("rollout", Rollout, RolloutConfig(max_response_tokens=4), model, seed=0)
    prompts = Batch.from_rows([{"prompt_ids": [2, 3], "prompt_id": 0}])
    with closing(RequestServer("127.0.0.1", 0, b"k" * 32, handle)) as server:
        rollout.connect_reward([server.address], server.key)
        for _ in range(2):
            assert rollout.generate(prompts, score=("scores",)).get("scores").tolist() == [0.5]
        with pytest.raises(WorkerUserError, match="no number for this row"):
            rollout.generate(prompts, score=("scores",)).get("scores")
        # Other rows of the failed call may be in flight on its connection.
        assert rollout.generate(prompts, score=("scores",)).get("scores").tolist() == [1.5]
    assert connections[0] == connections[1] == connections[2] != connections[3]


FUNCTIONS = "tests.workers.reward_functions"
"""Their processes import a module without torch, which takes seconds."""


def rows_with(**columns: list) -> Batch:
    return Batch.from_columns(rows={"prompt": ["p", "q"], "response": ["1", "2"], "answer": ["1", "1"]} | columns)


def test_a_reward_function_receives_the_columns_of_the_dataset(cluster: Cluster) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:weighted", evaluation=f"{FUNCTIONS}:exact")
    reward = cluster.group("reward", Reward, config)
    assert reward.score(rows_with(weight=[0.25, 9.0])).get("scores").tolist() == [0.25, 0.0]
    assert reward.score(rows_with(), evaluation=True).get("scores").tolist() == [1.0, 0.0]


def test_a_reward_function_may_name_only_the_columns_that_it_needs(cluster: Cluster) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:of_columns")
    reward = cluster.group("reward", Reward, config)
    assert reward.score(rows_with(weight=[0.25, 9.0])).get("scores").tolist() == [0.25, 9.0]


def prompt_rows(folder: Path, model: ModelConfig) -> Batch:
    """Returns rows of two prompts from a JSON file, one of them with several turns, with a response."""
    turns = [("system", "add"), ("human", "1+1"), ("assistant", "2"), ("human", "2+2")]
    lines = [
        {"messages": [{"from": role, "content": text} for role, text in chosen], "answer": "4", "data_source": source}
        for chosen, source in ((turns, "sums"), (turns[-1:], "arithmetic"))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    conversations = read_conversations(folder / "prompts.jsonl")
    stream = PromptStream(conversations, ChatTokenizer(model.path), seed=0, max_prompt_tokens=64, order="file")
    return Batch.from_rows([row | {"response": "4"} for row in stream.take(2)])


@pytest.mark.parametrize(
    ("function", "expected"), [("num_messages", [4.0, 1.0]), ("source_length", [4.0, 10.0]), ("exact", [1.0, 1.0])]
)
def test_a_reward_function_gets_conversation_and_data_source(
    function: str, expected: list[float], cluster: Cluster, model: ModelConfig, tmp_path: Path
) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:{function}")
    reward = cluster.group("reward", Reward, config)
    assert reward.score(prompt_rows(tmp_path, model)).get("scores").tolist() == expected


def test_a_reward_function_without_further_parameters_gets_prompt_response_and_answer(cluster: Cluster) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:minimal")
    reward = cluster.group("reward", Reward, config)
    rows = rows_with(data_source=["sums"] * 2, conversation=[[{"role": "user", "content": "p"}]] * 2)
    assert reward.score(rows).get("scores").tolist() == [1.0, 0.0]


def test_a_reward_function_for_tags_gets_those_of_the_prompt(cluster: Cluster) -> None:
    config = RewardConfig.model_validate({"function": "flowrl.rewards.text:has_tags", "options": {"tags": ["think"]}})
    rows = rows_with(response=["a</think>", "<think>a</think>"], tagged_response=["<think>\na</think>", None])
    assert cluster.group("reward", Reward, config).score(rows).get("scores").tolist() == [1.0, 1.0]


def test_a_reward_that_is_not_finite_is_rejected(cluster: Cluster) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:broken")
    with pytest.raises(WorkerUserError, match=r"broken .*\bnan\b"):
        cluster.group("reward", Reward, config).score(rows_with())


def test_the_failures_of_rows_are_columns(cluster: Cluster) -> None:
    """Functions that fail for the first row or are not finite cost only their rows."""
    parts = [{"name": name, "function": f"{FUNCTIONS}:{name}", "weight": 2.0} for name in ("exact", "needs_digit")]
    config = RewardConfig.model_validate({"components": parts, "on_failure": "zero"})
    result = cluster.group("reward", Reward, config).score(rows_with(response=["x", "1"]))
    assert result.get("exact").tolist() == [0.0, 1.0] and result.get("needs_digit").tolist() == [0.0, 1.0]
    assert result.get("scores").tolist() == [0.0, 4.0] and result.get("reward_failed").tolist() == [True, False]
    calls = result.get("reward_calls")
    assert [row["needs_digit"]["failure"] for row in calls] == ["raised", None]
    assert [row["needs_digit"]["score"] for row in calls] == [None, 1.0] and calls[0]["exact"]["failure"] is None
    assert "ValueError" in calls[0]["needs_digit"]["message"]


def test_a_reward_model_scores_rows_at_their_last_token(cluster: Cluster, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification  # noqa: PLC0415 (only here)

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    settings = {"vocab_size": 16, "num_labels": 1, "pad_token_id": 0} | shape | heads
    scorer = Qwen2ForSequenceClassification(Qwen2Config.from_dict(settings)).eval()
    scorer.save_pretrained(tmp_path / "scorer")
    config = RewardConfig(model=ModelConfig(path=tmp_path / "scorer"))
    reward = cluster.group("reward", Reward, config)
    actual = reward.score(batch().union(rows_with())).get("scores")
    with torch.no_grad():
        expected = [scorer(torch.tensor([ids])).logits.item() for ids in (IDS[:8], IDS[8:])]
    assert_norm_close(actual, torch.tensor(expected), FLOAT32_RTOL)


def test_the_failures_of_a_function_for_evaluations_of_a_reward_model_are_columns(
    cluster: Cluster, model: ModelConfig
) -> None:
    evaluation = [{"name": "needs_digit", "function": f"{FUNCTIONS}:needs_digit"}]
    settings = {"model": model, "head": "fresh", "evaluation": evaluation, "on_failure": "zero"}
    reward = cluster.group("reward", Reward, RewardConfig.model_validate(settings))
    rows = batch().union(rows_with(response=["x", "1"]))
    assert set(reward.score(rows).columns) == {"scores", "reward_truncated"}
    result = reward.score(rows, evaluation=True)
    assert set(result.columns) == {"scores", "needs_digit", "reward_failed", "reward_calls"}
    assert result.get("reward_failed").tolist() == [True, False]
