"""Every family of docs/models.md, on one process and on two with tensor, sequence or pipeline parallelism."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.config import ModelConfig, RolloutConfig
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.loading import (
    ModelError,
    load_critic,
    load_policy,
    load_reward_model,
)
from flowrl.engines.parallel.sharding import EngineError
from flowrl.engines.rollout.hf.engine import HfRollout, RolloutError
from flowrl.engines.rollout.response_tensors import Responses, make_requests, stack_responses
from flowrl.engines.train.fsdp.outputs import PolicyModel
from tests.engines.closeness import assert_norm_close
from tests.engines.families import (
    FAMILIES,
    LONGEST,
    MIXTURES,
    SHARED,
    TRAINED,
    WITH_OWN_ATTENTION,
    adapted,
    build,
    main,
    markdown,
    train,
)
from tests.engines.losses import logprobs, policy_logits
from tests.engines.tables import VOCABULARY
from tests.engines.tiny import save, tokenizer
from tests.processes import run_ranks
from tests.slow_cases import selected_values

IDS = torch.randint(2, VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(0))
"""Rows that are longer than every sliding window."""

REJECTED = {
    ("Mistral with a window", "sp"): "32 tokens",
    ("Gemma 2", "sp"): "sliding_attention",
    ("GPT-2", "split norms"): "transformer.wpe",
    ("OPT", "split norms"): "model.decoder",
    **{(name, kind): "custom attention" for name in WITH_OWN_ATTENTION for kind in ("sp", "split norms")},
    **{(name, "pp"): "remove pp" for name in (*WITH_OWN_ATTENTION, "GPT-2", "OPT", *MIXTURES)},
    **{(name, "split norms"): "sequence_parallel_norms" for name in ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")},
}


@pytest.fixture(scope="module")
def two_rank_results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict]:
    """Runs two processes; returns one mapping from (family, kind) to results per process."""
    folder: Path = tmp_path_factory.mktemp("families")
    requested = selected_values(request, "split_adapter")
    run_ranks(main, (folder, [name for name in TRAINED if name in requested]), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """Returns results of one process with padded rows; ranks run packed rows."""
    return {name: train(build(name), packing="never") for name in TRAINED}


@pytest.fixture(params=TRAINED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def generate(model: torch.nn.Module, prompts: list[list[int]], **settings: int) -> Responses:
    rollout = HfRollout(model, tokenizer(), RolloutConfig(**{"max_response_tokens": 8, **settings}))  # pyright: ignore[reportArgumentType] (a family's model)
    samples = torch.zeros(len(prompts), dtype=torch.int64)
    return stack_responses(rollout.generate(make_requests(prompts, torch.arange(len(prompts)), samples, seed=3)))


def test_log_probabilities_are_those_of_the_models_own_logits(name: str):
    model = build(name)
    results = PolicyModel(model)(IDS, torch.ones_like(IDS, dtype=torch.bool))[0]
    assert_norm_close(results, logprobs(policy_logits(model, IDS), IDS))


def test_two_optimizer_steps_lower_the_loss(alone: dict[str, dict], name: str):
    first, second = alone[name]["losses"]
    assert second < first


def test_a_saved_model_has_the_same_logits_in_transformers(name: str, tmp_path: Path):
    policy = load_policy(ModelConfig(path=save(build(name), tmp_path / "start")))
    train(policy)
    save_model(policy, tmp_path / "start", tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "end", attn_implementation=policy.config._attn_implementation
    )
    assert torch.equal(loaded(IDS, use_cache=False).logits, policy_logits(policy, IDS))


@pytest.mark.parametrize("name", FAMILIES)
def test_responses_have_the_trainers_log_probabilities(name: str):
    model, prompts = build(name), [[5], list(range(2, 20)), [7, 8, 9], IDS[0].tolist()]
    responses = generate(model, prompts)
    for i, (prompt, ids) in enumerate(zip(prompts, responses.token_lists(), strict=True)):
        row = torch.tensor([prompt + ids])
        expected = logprobs(policy_logits(model, row), row)[0, len(prompt) :]
        results = responses.logprobs.split(responses.lengths.tolist())[i]
        assert_norm_close(results, expected)


@pytest.mark.parametrize("name", WITH_OWN_ATTENTION)
def test_engine_hf_rejects_models_with_their_own_attention(name: str):
    with pytest.raises(RolloutError, match=rf"engine hf .*{type(build(name)).__name__}.*vllm"):
        generate(build(name), [[5]])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_of_maximal_length_is_generated_and_a_longer_one_is_rejected(name: str):
    responses = generate(build(name), [[5] * (LONGEST - 1)], max_response_tokens=1)
    assert responses.lengths.tolist() == [1]
    with pytest.raises(RolloutError, match=rf"\b{LONGEST}\b"):
        generate(build(name), [[5] * LONGEST], max_response_tokens=1)


def test_a_critic_starts_from_its_backbone(name: str, tmp_path: Path):
    critic = load_critic(ModelConfig(path=save(build(name), tmp_path / "start")))
    assert torch.equal(critic(IDS), torch.zeros(IDS.shape))
    torch.nn.init.normal_(critic.value_head.weight)
    save_model(critic, tmp_path / "start", tmp_path / "critic")
    assert torch.equal(load_critic(ModelConfig(path=tmp_path / "critic"))(IDS), critic(IDS))


def test_a_reward_model_starts_from_its_backbone(name: str, tmp_path: Path):
    reward = load_reward_model(ModelConfig(path=save(build(name), tmp_path / "start")), head="fresh")
    lengths = torch.tensor([50, 1, 20])
    save_model(reward, tmp_path / "start", tmp_path / "reward")
    again = load_reward_model(ModelConfig(path=tmp_path / "reward"))
    assert torch.equal(again(IDS, lengths), reward(IDS, lengths))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SHARED, "split norms"])
def test_two_ranks_train_the_weights_of_one_or_reject_the_model(
    two_rank_results: list[dict], alone: dict[str, dict], name: str, kind: str
):
    for results in two_rank_results:
        if (name, kind) in REJECTED:
            assert REJECTED[name, kind] in results[name, kind]
        else:
            # The first pipeline stage returns only the weights.
            assert_norm_close(results[name, kind], {part: alone[name][part] for part in results[name, kind]})
    if kind == "pp" and (name, kind) not in REJECTED:
        assert [len(results[name, kind]) for results in two_rank_results] == [1, len(alone[name])]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
def test_two_ranks_that_divide_experts_train_the_weights_of_one(
    two_rank_results: list[dict], alone: dict[str, dict], mixture: str
):
    for results in two_rank_results:
        assert_norm_close(results[mixture, "divided experts"], alone[mixture])


def check_adapter(results_by_rank: list[dict], name: str, kind: str) -> None:
    """Asserts that two ranks train the same adapter as one process, or reject the model."""
    expected, case = train(adapted(name)), f"{kind} of an adapter"
    for results in results_by_rank:
        if (name, kind) in REJECTED:
            assert REJECTED[name, kind] in results[name, case]
        else:
            assert_norm_close(results[name, case], expected)


@pytest.mark.slow
def test_tensor_parallel_ranks_train_the_adapter_of_one_or_reject_the_model(two_rank_results: list[dict], name: str):
    check_adapter(two_rank_results, name, "tp")


@pytest.mark.slow
@pytest.mark.parametrize("split_adapter", TRAINED)
def test_ranks_with_split_norms_train_the_adapter_of_one_or_reject_the_model(
    two_rank_results: list[dict], split_adapter: str
):
    check_adapter(two_rank_results, split_adapter, "split norms")


@pytest.mark.slow
def test_the_documented_table_equals_the_measured_support(two_rank_results: list[dict]):
    assert markdown(two_rank_results[0]) in Path("docs/models.md").read_text()


def test_an_attention_softcap_is_applied(tmp_path: Path):
    loaded, capped = load_policy(ModelConfig(path=save(build("Gemma 2"), tmp_path))), build("Gemma 2")
    uncapped = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(policy_logits(loaded, IDS), policy_logits(capped, IDS))
    assert (policy_logits(loaded, IDS) - policy_logits(uncapped, IDS)).abs().max() > 0.01


def test_kernels_without_softcap_are_rejected():
    with pytest.raises(EngineError, match=r"engine\.attention .*sdpa.*Gemma2ForCausalLM"):
        train(build("Gemma 2"), attention="sdpa")


def test_a_model_with_custom_code_is_rejected(tmp_path: Path):
    code = {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}
    settings = {"model_type": "baichuan", "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"} | code}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="custom code"):  # the reason is the feature: transformers would run the code
        load_policy(ModelConfig(path=tmp_path))
