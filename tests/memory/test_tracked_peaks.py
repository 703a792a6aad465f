"""Estimated activations and optimizer state equal the peak that torch's memory tracker measures for published models.

The tracker sees a complete training step under fake tensors, which have shapes but no data. Unlike the estimate, the
step runs all layers, the head and the optimizer.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flowrl.algorithms import hidden_logprobs
from flowrl.config import EngineConfig
from flowrl.config.source import read_json
from flowrl.controller.placement.plan import Mesh
from flowrl.engines.models.attention import ROWS
from flowrl.engines.parallel.gradients import ReplicatedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.memory.model_size import PUBLISHED, model_size_from_config
from flowrl.memory.role_memory import RoleModel, training_role

ROW_TOKENS = 256
SIZES = read_json(PUBLISHED)
RTOL = 0.1
MODELS = {
    "Qwen/Qwen2.5-0.5B": 24,
    "Qwen/Qwen2.5-1.5B": 4,
    "Qwen/Qwen2.5-7B": 4,
    "deepseek-ai/deepseek-llm-7b-chat": 4,
}
"""Model -> number of its layers that the tracker sees: all, or one more than the plan measures. It needs a CPU second
per layer."""
ENGINES = {
    "bfloat16 weights": ("bfloat16", {}),
    "bfloat16 weights, checkpointing": ("bfloat16", {"gradient_checkpointing": True}),
    "bfloat16 compute, checkpointing": ("float32", {"gradient_checkpointing": True, "compute_dtype": "bfloat16"}),
}


def tracked_peak(settings: dict, engine: EngineConfig, dtype: str) -> tuple[int, int]:
    """Returns the peak bytes of a training step, and the bytes of its weights, gradients and optimizer state.

    Attention has padded rows of equal length, which save what packed rows save on a GPU.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**settings), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    model.set_attn_implementation(ROWS)
    if engine.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        gradients = ReplicatedGradients(parameters, SINGLE_PROCESS)
        gradients.zero()
        gradients.cast()
        optimizer.step()  # creates the state
        gradients.zero()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *(parameter.grad for parameter in parameters))
        (start,) = tracker.get_tracker_snapshot("current").values()
        with tracker:
            sum_of_logprobs(model, engine).backward()
            gradients.cast()
            optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"], start["Total"]


def sum_of_logprobs(model: PreTrainedModel, engine: EngineConfig) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=engine.compute_dtype is not None):
        ids = torch.zeros((engine.max_tokens_per_microbatch // ROW_TOKENS, ROW_TOKENS), dtype=torch.int64)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        states, weight, _ = hidden_logprobs._autocast(hidden, model.lm_head.weight, None)
        # Rows of the mask are selected by index, because the result of a mask has no fixed shape.
        states_NH = states.flatten(0, 1).index_select(0, torch.arange(ids.numel()))
        logprobs, _ = hidden_logprobs._HiddenLogprobs.apply(
            states_NH, weight, None, ids.flatten()[:, None], (1.0, None), True
        )
        return logprobs.sum()


def planned_peak(settings: dict, engine: EngineConfig, dtype: str) -> tuple[int, int]:
    """Returns what `tracked_peak` returns, as the plan estimates it."""
    size = model_size_from_config(settings)
    assert size is not None
    param_bytes = 4 if dtype == "float32" else 2
    model = RoleModel(size, engine, Mesh(1, 1, 1, 1), "cpu", param_bytes, is_policy=True, max_length=ROW_TOKENS)
    memory = training_role(model, None, "value", copies_checkpoints=False)
    state = memory.resident + memory.calls[0].gradients
    peak = memory.resident + memory.calls[0].total
    # Autograd adds the two gradients of a tied weight in place, except for fake tensors, which need a third tensor.
    return max(peak, state + 3 * param_bytes * size.embedding) if size.tied else peak, state


def compare(settings: dict, case: str, num_tokens: int) -> None:
    dtype, values = ENGINES[case]
    engine = EngineConfig(max_tokens_per_microbatch=num_tokens, packing="never", **values)
    tracked, tracked_state = tracked_peak(settings, engine, dtype)
    planned, planned_state = planned_peak(settings, engine, dtype)
    print(f"{case}: tracked {tracked / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")  # noqa: T201 (shown if it fails)
    assert planned_state == pytest.approx(tracked_state, rel=0.01)
    assert planned == pytest.approx(tracked, rel=RTOL)
    assert planned - planned_state == pytest.approx(tracked - tracked_state, rel=RTOL)


@pytest.mark.parametrize("case", ENGINES)
@pytest.mark.parametrize(("tied", "vocabulary"), [(True, 8192), (False, 16384)])
def test_a_step_in_which_the_head_dominates_agrees_with_the_memory_tracker(
    tied: bool, vocabulary: int, case: str
) -> None:
    """The head of the untied model has as many parameters as its two layers."""
    settings = {"num_hidden_layers": 2, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    compare(SIZES["Qwen/Qwen2.5-0.5B"] | settings, case, num_tokens=1024)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENGINES)
@pytest.mark.parametrize(("model", "num_layers"), MODELS.items())
def test_a_step_of_a_published_model_agrees_with_the_memory_tracker(model: str, num_layers: int, case: str) -> None:
    compare(SIZES[model] | {"num_hidden_layers": num_layers}, case, num_tokens=4096)
