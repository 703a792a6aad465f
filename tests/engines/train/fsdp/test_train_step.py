"""The two halves of an optimizer step: forward_backward and optim_step."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowrl.config import EngineConfig, OptimizerConfig, UserError
from flowrl.data.metric import Mean
from flowrl.devices import device as devices
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import Groups, MicroBatch
from tests.devices.recorded_device import RecordedDevice
from tests.engines.closeness import assert_norm_close
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import VOCABULARY, table
from tests.engines.tiny import qwen2
from tests.errors import rejects

OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=None)
GPU = pytest.param(
    "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def bigram_engine(max_tokens: int = 20, **settings: object) -> FsdpEngine:
    config = EngineConfig.model_validate({"max_tokens_per_microbatch": max_tokens} | settings)
    return FsdpEngine(Bigram(VOCABULARY, 8).double(), bigram_outputs, OPTIMIZER, config)


def weights(engine: FsdpEngine) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in engine.model.parameters()]


def gradients(engine: FsdpEngine) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}


def failing_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
    """Fails in the second micro-batch, after the first has added its gradient."""
    if micro.input_ids.shape[1] > 4:
        raise RuntimeError("out of memory")
    return bigram_loss(values, micro, counts)


def test_an_update_is_bitwise_its_two_halves():
    both, halves = bigram_engine(), bigram_engine()
    for seed in range(3):
        expected = both.update(table(9, seed), bigram_loss, LOGPROBS)
        metrics = halves.forward_backward(table(9, seed), bigram_loss, LOGPROBS)
        assert set(metrics) == {"loss"}
        assert metrics | halves.optim_step() == expected
    assert all(map(torch.equal, weights(both), weights(halves)))


def test_the_gradients_of_two_batches_are_summed_with_their_weights():
    """A model of one weight w with loss w x: the gradients are the means of x over the tokens of each batch."""

    def products(model: nn.Module, micro: MicroBatch, _: Outputs) -> dict[str, Tensor]:
        return {"values": model(micro.tokens["weight"].float()[..., None]).squeeze(-1)}

    def mean(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
        return values["values"].sum() / counts.tokens, {"loss": Mean(values["values"].sum().item(), 1)}

    outputs, settings = Outputs(("values",), "response_mask"), EngineConfig(max_tokens_per_microbatch=2)
    engine = FsdpEngine(nn.Linear(1, 1, bias=False), products, OPTIMIZER, settings)

    first, second = table(3, 0), table(2, 1)
    for batch, numbers in ((first, [1.0, 2.0, 3.0]), (second, [10.0])):
        mask = torch.zeros_like(batch["tokens", "response_mask"])
        mask[: len(numbers)] = True
        batch["tokens", "response_mask"] = mask
        batch["tokens", "weight"] = torch.zeros(len(mask), dtype=torch.float64)
        batch["tokens", "weight"][: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    engine.forward_backward(first, mean, outputs, weight=0.5)  # 0.5 * (1 + 2 + 3) / 3 = 1
    engine.forward_backward(second, mean, outputs, weight=-0.25)  # -0.25 * 10 / 1 = -2.5
    assert gradients(engine)["weight"].item() == pytest.approx(1 - 2.5, rel=1e-6)
    assert engine.optim_step()["grad_norm"].result() == pytest.approx(1.5, rel=1e-6)


def test_each_loss_has_its_own_denominators():
    seen: list[Denominators] = []

    def spy(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
        seen.append(counts)
        return bigram_loss(values, micro, counts)

    engine = bigram_engine(max_tokens=1000)
    engine.forward_backward(table(9), spy, LOGPROBS)
    engine.forward_backward(table(2, 5), spy, LOGPROBS)
    expected = [int(table(*size)["tokens", "response_mask"].sum()) for size in ((9,), (2, 5))]
    assert [counts.tokens for counts in seen] == expected and expected[0] != expected[1]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_step_without_a_gradient_is_an_error(has_stepped: bool):
    engine = bigram_engine()
    if has_stepped:
        engine.update(table(4), bigram_loss, LOGPROBS)
    with rejects("optim_step", "forward_backward"):
        engine.optim_step()


def test_a_batch_without_trained_tokens_adds_nothing():
    combined, single = bigram_engine(), bigram_engine()
    empty = table(4, 7)
    empty["tokens", "response_mask"].zero_()
    assert combined.forward_backward(empty, bigram_loss, LOGPROBS) == {}
    combined.forward_backward(table(9), bigram_loss, LOGPROBS)
    assert combined.forward_backward(empty, bigram_loss, LOGPROBS) == {}
    assert combined.optim_step()["skipped_update"].result() == 0.0
    single.update(table(9), bigram_loss, LOGPROBS)
    assert all(map(torch.equal, weights(combined), weights(single)))


def test_a_step_of_batches_without_trained_tokens_is_skipped():
    engine, empty = bigram_engine(), table(4)
    empty["tokens", "response_mask"].zero_()
    for _ in range(2):
        engine.forward_backward(empty, bigram_loss, LOGPROBS)
    assert {name: metric.result() for name, metric in engine.optim_step().items()} == {"skipped_update": 1.0}
    assert engine.steps.num_steps == 0


def test_a_failure_drops_all_gradients_of_the_step():
    engine, single = bigram_engine(), bigram_engine()
    engine.forward_backward(table(9, 1), bigram_loss, LOGPROBS)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.forward_backward(table(9), failing_loss, LOGPROBS)
    assert gradients(engine) == {}
    with rejects("optim_step", "forward_backward"):
        engine.optim_step()
    engine.forward_backward(table(9), bigram_loss, LOGPROBS)
    engine.optim_step()
    single.update(table(9), bigram_loss, LOGPROBS)
    assert all(map(torch.equal, weights(engine), weights(single)))
    assert not engine.model.training


def test_a_non_finite_gradient_leaves_weights_and_the_next_step_unchanged():
    engine, single = bigram_engine(), bigram_engine()
    before = weights(engine)
    engine.forward_backward(table(4), bigram_loss, LOGPROBS)
    engine.forward_backward(table(4), lambda values, *_: (values["logprobs"].sum() * math.inf, {}), LOGPROBS)
    with pytest.raises(FloatingPointError):
        engine.optim_step()
    assert all(map(torch.equal, before, weights(engine))) and gradients(engine) == {}
    for trained in (engine, single):
        trained.update(table(9), bigram_loss, LOGPROBS)
    assert all(map(torch.equal, weights(engine), weights(single)))


def test_two_losses_in_float16_are_scaled_once():
    norms = []
    for dtype in ("bfloat16", "float16"):
        model = qwen2(initializer_range=0.1)
        from_policy = FsdpEngine(PolicyModel(model), policy_outputs, OPTIMIZER, EngineConfig(compute_dtype=dtype))
        from_policy.forward_backward(table(9), policy_loss, POLICY, weight=0.25)
        from_policy.forward_backward(table(5, 1), policy_loss, POLICY, weight=0.5)
        norms.append(from_policy.optim_step()["grad_norm"].result())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_an_overflow_of_one_of_two_losses_skips_the_step():
    engine = FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, EngineConfig(compute_dtype="float16"))
    before = weights(engine)
    engine.forward_backward(table(9), policy_loss, POLICY)
    engine.forward_backward(table(9), policy_loss, POLICY, weight=1e6)
    assert engine.optim_step()["skipped_update"].result() == 1.0
    assert all(map(torch.equal, before, weights(engine)))
    assert engine.steps.loss_scale is not None and engine.steps.loss_scale.factor == 2.0**15


def test_activation_checkpointing_gives_the_gradient_of_two_losses():
    found = []
    for is_checkpointed in (False, True):
        settings = EngineConfig(gradient_checkpointing=is_checkpointed, max_tokens_per_microbatch=20)
        engine = FsdpEngine(PolicyModel(qwen2(initializer_range=0.1)), policy_outputs, OPTIMIZER, settings)
        engine.forward_backward(table(9), policy_loss, POLICY, weight=0.5)
        engine.forward_backward(table(5, 1), policy_loss, POLICY)
        found.append(gradients(engine))
    assert_norm_close(found[1], found[0])


def test_a_checkpoint_between_the_halves_is_refused(tmp_path: Path):
    engine = bigram_engine()
    engine.forward_backward(table(4), bigram_loss, LOGPROBS)
    checkpoints = EngineCheckpoints(engine)
    with rejects("forward_backward", "optim_step"):
        checkpoints.save(tmp_path)
    engine.optim_step()
    checkpoints.save(tmp_path)
    assert checkpoints.result() is not None


def test_loading_a_checkpoint_drops_the_gradient(tmp_path: Path):
    engine, single = bigram_engine(), bigram_engine()
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(tmp_path)
    checkpoints.result()
    engine.forward_backward(table(4), bigram_loss, LOGPROBS)
    load(engine, tmp_path)
    with pytest.raises(UserError, match="forward_backward"):
        engine.optim_step()
    for trained in (engine, single):
        trained.update(table(9), bigram_loss, LOGPROBS)
    assert all(map(torch.equal, weights(engine), weights(single)))


def test_an_evaluation_between_the_halves_changes_nothing():
    engine, single = bigram_engine(), bigram_engine()
    engine.forward_backward(table(9), bigram_loss, LOGPROBS)
    engine.forward(table(5, 3), LOGPROBS)["logprobs"]
    engine.optim_step()
    single.update(table(9), bigram_loss, LOGPROBS)
    assert all(map(torch.equal, weights(engine), weights(single)))


def test_split_groups_are_rejected_and_drop_the_gradient():
    engine, batch = bigram_engine(), table(4)
    batch["rows", "pair"] = torch.tensor([0, 0, 1, 2])
    with rejects("1", "2", "pair", "batch.minibatches"):
        engine.forward_backward(batch, bigram_loss, LOGPROBS, groups=Groups("pair", 2))
    with rejects("optim_step", "forward_backward"):
        engine.optim_step()


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A GPU, or a CPU with a memory of its own, which stands for it."""
    own = devices._CPU
    devices._CPU = RecordedDevice(own, lambda _: None)  # pyright: ignore
    yield request.param
    devices._CPU = own


def step_memory(engine: FsdpEngine) -> tuple[int, int, int]:
    """Returns the bytes of the weights, of the accumulated gradient and of Adam's moments."""
    weights = list(engine.model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    moments = [x for state in engine.steps.optimizer.state.values() for x in state.values() if x.ndim]
    parts = ({x.untyped_storage()._cdata: x.untyped_storage() for x in part} for part in (weights, gradients, moments))
    held, accumulated, adam = (sum(storage.nbytes() for storage in part.values()) for part in parts)
    return held, accumulated, adam


@pytest.mark.parametrize("settings", [{}, {"compute_dtype": "bfloat16"}, {"compute_dtype": "float16"}])
def test_an_idle_engine_releases_its_memory_and_trains_on(device: str, settings: dict) -> None:
    found = []
    for is_idle in (False, True):
        config = EngineConfig.model_validate({"offload": "idle"} | settings)
        engine = FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, config, device=device)
        for step in range(3):
            for seed in (step, step + 1):
                engine.forward_backward(table(9, seed), policy_loss, POLICY)
                if is_idle:
                    engine.offload()
                    assert step_memory(engine) == (0, 0, 0)
                    engine.onload()
                    held, accumulated, adam = step_memory(engine)
                    assert held and accumulated and not adam
            engine.optim_step()
        found.append(weights(engine))
    assert all(map(torch.equal, *found))


def test_an_owner_of_shared_weights_keeps_them(device: str) -> None:
    engine = FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, EngineConfig(offload="idle"), device=device)
    engine.update(table(9), policy_loss, POLICY)
    before = weights(engine)
    engine.offload(keep_weights=True)
    held, _, adam = step_memory(engine)
    assert held and not adam
    assert all(map(torch.equal, weights(engine), before))


def test_offloaded_optimizer_state_is_in_device_memory_only_during_a_step(device: str) -> None:
    settings = [EngineConfig(offload="optimizer"), EngineConfig()]
    offloaded, kept = (FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, s, device=device) for s in settings)
    for seed in range(3):
        for engine in (offloaded, kept):
            engine.update(table(9, seed), policy_loss, POLICY)
        held, _, adam = step_memory(offloaded)
        assert held and not adam
    assert step_memory(kept)[2]
    assert all(map(torch.equal, weights(offloaded), weights(kept)))


@pytest.mark.parametrize("offload", ["optimizer", "idle"])
def test_a_checkpoint_has_the_state_that_is_in_host_memory(device: str, tmp_path: Path, offload: str) -> None:
    config = EngineConfig.model_validate({"offload": offload})
    saved, restored = (FsdpEngine(PolicyModel(qwen2()), policy_outputs, OPTIMIZER, config, device=device) for _ in "ab")
    saved.update(table(9), policy_loss, POLICY)
    restored.update(table(9, seed=5), policy_loss, POLICY)
    for engine in (saved, restored):
        engine.offload()
        engine.onload()
    checkpoints = EngineCheckpoints(saved)
    for number, asynchronous in enumerate((True, False)):
        (folder := tmp_path / str(number)).mkdir()
        checkpoints.save(folder, asynchronous=asynchronous)
        checkpoints.result()
        load(restored, folder)
    for engine in (saved, restored):
        engine.update(table(9, seed=1), policy_loss, POLICY)
    assert all(map(torch.equal, weights(saved), weights(restored)))
