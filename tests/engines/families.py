"""Tiny models of every supported family, the rank processes of their tests, and the table of docs/models.md."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flowrl.config import EngineConfig, LoraConfig, OptimizerConfig, UserError
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.attention import packing_obstacle
from flowrl.engines.models.loading import has_attention_softcap
from flowrl.engines.parallel.pipeline_mesh import PipelineMesh, pipeline_mesh
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.pipeline.engine import PipelineEngine
from tests.engines.losses import LOGPROBS, bigram_loss
from tests.engines.tables import VOCABULARY, table
from tests.engines.tiny import END, SIZES

NUM_STEPS = 2
LONGEST = 128
WINDOW = 32
"""Tokens that a layer with a sliding window sees."""

_SIZES: dict[str, Any] = {**SIZES, "hidden_size": 32, "bos_token_id": END, "max_position_embeddings": LONGEST}
_HEADS: dict[str, Any] = {**_SIZES, "head_dim": 8}


@dataclass(frozen=True)
class Family:
    config: Callable[[], PreTrainedConfig]
    covers: str = ""
    """Others that are the same architecture."""


FAMILIES: Mapping[str, Family] = {
    "LLaMA": Family(lambda: LlamaConfig(**_SIZES), "LLaMA 2 and 3, Yi, Colossal-LLaMA-2, DeepSeek LLM"),
    "Qwen2": Family(lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True), "Qwen1.5, Qwen2.5"),
    "Qwen3": Family(lambda: Qwen3Config(**_HEADS)),
    "Mistral": Family(lambda: MistralConfig(**_SIZES, sliding_window=None), "Mistral 7B v0.2 and later"),
    "Mistral with a window": Family(lambda: MistralConfig(**_SIZES, sliding_window=WINDOW), "Mistral 7B v0.1"),
    "Gemma": Family(lambda: GemmaConfig(**_HEADS)),
    "Gemma 2": Family(
        # A low cap, so that a model without it has different results.
        lambda: Gemma2Config(**_HEADS, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=1.0),
    ),
    "GPT-2": Family(
        lambda: GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=LONGEST,
            eos_token_id=END,
            bos_token_id=END,
            initializer_range=0.3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "OPT": Family(
        lambda: OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            # Narrower than the layers, as in OPT 350M.
            word_embed_proj_dim=16,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
            dropout=0.0,
            init_std=0.3,
            eos_token_id=END,
            bos_token_id=END,
            pad_token_id=0,
        )
    ),
    "GLM": Family(lambda: GlmConfig(**_HEADS), "GLM-4-9B in transformers' own format (glm-4-9b-hf)"),
    "GLM 4": Family(lambda: Glm4Config(**_HEADS), "GLM-4-0414"),
    "Mixtral": Family(lambda: MixtralConfig(**_SIZES, num_local_experts=4)),
    "Qwen3-MoE": Family(
        lambda: Qwen3MoeConfig(**_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        "Qwen3-30B-A3B, Qwen3-235B-A22B",
    ),
    "DeepSeek-V3": Family(
        lambda: DeepseekV3Config(
            **{**_SIZES, "num_key_value_heads": 4},
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=32,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            num_mtp_layers=0,
        ),
        "DeepSeek-R1",
    ),
}

_OWN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": END,
    "eos_token_id": END,
    "initializer_range": 0.3,
}
_FALCON: dict[str, Any] = {**_OWN, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True}
_FALCON |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}

WITH_OWN_ATTENTION: Mapping[str, Family] = {
    "GPT-J": Family(
        lambda: GPTJConfig(
            **_OWN,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=LONGEST,
            rotary_dim=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "Bloom": Family(
        lambda: BloomConfig(**_OWN, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "Falcon": Family(
        lambda: FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True), "Falcon 40B, 180B"
    ),
    "Falcon with ALiBi": Family(
        lambda: FalconConfig(**_FALCON, multi_query=False, alibi=True, parallel_attn=False), "Falcon RW"
    ),
}
"""Families whose attention does not go through transformers' `AttentionInterface`. They run padded rows, and responses
come from vLLM.
"""

TRAINED = {**FAMILIES, **WITH_OWN_ATTENTION}
MIXTURES = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")
"""Families of mixtures of experts."""

LORA = LoraConfig(rank=4)

SHARED = {"tp": {"strategy": "fsdp"}, "sp": {"strategy": "ddp"}, "pp": {}}
"""Engine settings of each kind of parallelism."""

SPLIT = {"strategy": "fsdp", "sequence_parallel_norms": True}
"""Engine settings of tensor parallelism with sequence-parallel norms."""


def build(name: str) -> PreTrainedModel:
    """Returns a language model of a family, with the same weights in every process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TRAINED[name].config()).eval()
    for path, weight in model.named_parameters() if name in WITH_OWN_ATTENTION else ():
        if path.endswith(".bias"):  # initialized to zero
            torch.nn.init.normal_(weight, std=0.1)
    if has_attention_softcap(model):
        model.set_attn_implementation("eager")
    return model


def adapted(name: str) -> PreTrainedModel:
    """Returns the model of a family with an adapter."""
    model = build(name)
    add_adapter(model, LORA)
    return model


def train(
    model: PreTrainedModel, mesh: RankMesh | PipelineMesh = SINGLE_PROCESS, **settings: str | bool
) -> dict[str, Any]:
    """Takes two steps; returns log-probabilities before and after, losses and weights. A stage before the last one
    returns only the weights.
    """
    optimizer, engine_settings = OptimizerConfig(lr=1e-2, eps=1e-1), EngineConfig.model_validate(settings)
    arguments = (PolicyModel(model), policy_outputs, optimizer, engine_settings)
    is_divided = isinstance(mesh, PipelineMesh)
    engine = (
        PipelineEngine(*arguments, mesh=mesh)
        if is_divided
        else FsdpEngine(*arguments, mesh=mesh, router_loss_coef=0.01)  # dense models have no router
    )
    rows = table(6)
    before = engine.forward(rows, LOGPROBS)["logprobs"]
    steps = [engine.update(rows, bigram_loss, LOGPROBS) for _ in range(NUM_STEPS)]
    after = engine.forward(rows, LOGPROBS)["logprobs"]
    weights = {"weights": {name: weight.clone() for name, weight in engine.export_weights()}}
    if is_divided and mesh.stage < mesh.num_stages - 1:
        return weights
    return {"before": before, "after": after, "losses": [step["loss"].result() for step in steps]} | weights


def main(rank: int, folder: Path, split_adapters: Collection[str]) -> None:
    """Trains every family on two ranks, with and without an adapter, and writes the results.

    Only the families `split_adapters` train an adapter with sequence-parallel norms.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    kinds = [(kind, kind, build, settings) for kind, settings in SHARED.items()]
    kinds.append(("tp", "tp of an adapter", adapted, SHARED["tp"]))
    kinds += [("tp", "split norms", build, SPLIT), ("tp", "split norms of an adapter", adapted, SPLIT)]
    names = {"split norms of an adapter": split_adapters}
    for kind, case, build_model, settings in kinds:
        group = distributed.group.WORLD
        assert isinstance(group, distributed.ProcessGroup)
        create: Any = pipeline_mesh if kind == "pp" else rank_mesh
        mesh = create(group, device="cpu", **{kind: 2})
        for name in names.get(case, TRAINED):
            try:
                results[name, case] = train(build_model(name), mesh, **settings)
            except UserError as error:
                results[name, case] = str(error)
    mesh = rank_mesh(distributed.group.WORLD, device="cpu", expert_parallel=True)
    for name in MIXTURES:
        results[name, "divided experts"] = train(build(name), mesh, strategy="fsdp", expert_parallel=True)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def markdown(results: Mapping[tuple[str, str], dict | str]) -> str:
    """Returns the table of docs/models.md from the results of one rank."""
    rows = [["family", "class", "also", "`tp`", "`sp`", "`pp`", "packed", "`hf`"], ["---"] * 8]
    for name, family in TRAINED.items():
        shared = ["no" if isinstance(results[name, kind], str) else "yes" for kind in SHARED]
        model = build(name)
        packed = "yes" if packing_obstacle(model) is None else "no"
        generates = "yes" if name in FAMILIES else "no"
        rows.append([name, f"`{type(model).__name__}`", family.covers, *shared, packed, generates])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
