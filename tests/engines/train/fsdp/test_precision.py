"""Matrix products in half precision over float32 weights, in one process (test_strategies.py covers fsdp)."""

import subprocess
import sys

import pytest
import torch

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.devices.device import get_device
from flowrl.engines.parallel.gradients import ReplicatedGradients
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh
from flowrl.engines.parallel.sharding import EngineError
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.engines.closeness import FLOAT32_RTOL, assert_norm_close
from tests.engines.losses import LOGPROBS
from tests.engines.strategies import POLICY, norm_of_a_sum, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import qwen2

TINY_STEP = OptimizerConfig(lr=1e-6, max_grad_norm=None)


def engine(mesh: RankMesh = SINGLE_PROCESS, /, **settings: object) -> FsdpEngine:
    model = PolicyModel(qwen2(initializer_range=0.1))
    config = EngineConfig.model_validate({"max_tokens_per_microbatch": 40} | settings)
    return FsdpEngine(model, policy_outputs, TINY_STEP, config, mesh=mesh)


def weights(trained: FsdpEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 0.02), ("float16", 0.005)])
def test_half_precision_is_close_to_float32(dtype: str, rtol: float):
    values = [
        engine_under_test.forward(table(9), LOGPROBS)["logprobs"]
        for engine_under_test in (engine(), engine(compute_dtype=dtype))
    ]
    assert_norm_close(values[1], values[0], rtol)
    assert not torch.equal(*values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_too_small_for_half_precision_accumulate_in_the_master_weights(dtype: str):
    """A weight of 0.1 is known to 5e-4 in bfloat16; ten steps of 1e-6 are lost there."""
    trained = engine(compute_dtype=dtype)
    before = weights(trained)
    for seed in range(10):
        trained.update(table(9, seed), policy_loss, POLICY)
    for old, new in zip(before, weights(trained), strict=True):
        assert new.dtype == torch.float32
        assert 0 < (new - old).abs().max() <= 1.1e-5


def test_loss_scaling_does_not_change_the_step():
    plain, scaled = engine(compute_dtype="bfloat16"), engine(compute_dtype="float16")
    for trained in (plain, scaled):
        trained.update(table(9), policy_loss, POLICY)
    assert scaled.steps.loss_scale is not None and scaled.steps.loss_scale.good_steps == 1
    norms = [
        engine_under_test.update(table(9, 1), policy_loss, POLICY)["grad_norm"].result()
        for engine_under_test in (plain, scaled)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_a_float16_step_that_overflows_is_skipped_and_the_next_one_is_not():
    trained = engine(compute_dtype="float16")
    before = weights(trained)

    def huge(values, micro, counts):
        share, report = policy_loss(values, micro, counts)
        return share * 1e6, report

    report = trained.update(table(9), huge, POLICY)
    assert report["skipped_update"].result() == 1.0 and report["loss_scale"].result() == 2.0**16
    assert all(map(torch.equal, before, weights(trained))) and trained.steps.num_steps == 0
    report = trained.update(table(9), policy_loss, POLICY)
    assert report["skipped_update"].result() == 0.0 and report["loss_scale"].result() == 2.0**15
    assert trained.steps.num_steps == 1


def test_activation_checkpointing_recomputes_layers_in_the_backward_pass():
    counts = {}
    for settings in ({}, {"gradient_checkpointing": True}):
        trained = engine(max_tokens_per_microbatch=1000, **settings)
        layer = trained.model.get_submodule("language_model.model.layers.0.input_layernorm")
        runs = []
        layer.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        report = trained.update(table(9), policy_loss, POLICY)
        counts[len(settings)] = (len(runs), report["grad_norm"].result())
        assert not trained.model.training
    assert (counts[0][0], counts[1][0]) == (1, 2)
    assert counts[1][1] == pytest.approx(counts[0][1], rel=FLOAT32_RTOL)


def test_float32_is_rejected_for_half_precision_weights():
    with pytest.raises(EngineError, match=r"engine\.compute_dtype .*float32"):
        FsdpEngine(PolicyModel(qwen2(torch.bfloat16)), policy_outputs, TINY_STEP, EngineConfig(compute_dtype="float32"))


def test_compute_dtype_is_rejected_for_float64_weights():
    with pytest.raises(EngineError, match=r"engine\.compute_dtype"):
        FsdpEngine(PolicyModel(qwen2(torch.float64)), policy_outputs, TINY_STEP, EngineConfig(compute_dtype="bfloat16"))


def test_gradients_of_bfloat16_weights_are_summed_in_float32_over_micro_batches():
    """Each of the four weights has the gradient 256 + 20."""
    assert norm_of_a_sum("single", None) == 2 * 276.0


def test_the_optimizer_step_keeps_the_dtype_of_the_weights_and_moments():
    trained = FsdpEngine(PolicyModel(qwen2(torch.bfloat16)), policy_outputs, TINY_STEP, EngineConfig())
    trained.update(table(9), policy_loss, POLICY)
    assert trained.optimizer is not None
    moments = [state["exp_avg"] for state in trained.optimizer.state.values()]
    assert {tensor.dtype for tensor in [*weights(trained), *moments]} == {torch.bfloat16}
    assert all(parameter.grad is None for parameter in trained.model.parameters())


def test_deterministic_algorithms_support_a_training_step(default_algorithms: None):
    expected, trained = engine(), engine()
    expected.update(table(9), policy_loss, POLICY)
    get_device("cpu").make_deterministic()
    trained.update(table(9), policy_loss, POLICY)
    assert all(map(torch.equal, weights(trained), weights(expected)))


STEPS = """
import torch
from flowrl.devices.device import get_device
get_device("cuda").make_deterministic()
from flowrl.config import EngineConfig
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import policy_outputs
from flowrl.engines.train.fsdp.outputs import PolicyModel
from tests.engines.strategies import OPTIMIZER, POLICY, policy_loss
from tests.engines.tables import table
from tests.engines.tiny import qwen2

torch.manual_seed(0)
settings = EngineConfig(compute_dtype="bfloat16")
trained = FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, settings, device="cuda")
for seed in range(3):
    trained.update(table(64, seed), policy_loss, POLICY)
print(*(weight.double().sum().item() for weight in trained.model.parameters()))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_deterministic_steps_on_a_gpu_are_equal_in_two_processes():
    runs = [subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""


def test_the_norm_of_half_precision_gradients_is_not_rounded_to_half_precision():
    parameter = torch.nn.Parameter(torch.zeros(1001, dtype=torch.bfloat16))
    gradients = ReplicatedGradients([parameter], SINGLE_PROCESS)
    gradients.zero()
    assert parameter.grad is not None
    parameter.grad.fill_(1.0)
    assert gradients.norm() == pytest.approx(1001**0.5, rel=1e-6)


def test_flash_attention_is_rejected_if_it_is_unavailable():
    with pytest.raises(EngineError, match=r"engine\.attention .*flash_attention_2"):
        engine(attention="flash_attention_2")
