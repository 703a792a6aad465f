"""Determines the phases of a training step from the settings and the placement plan, and estimates their times.

`render_time` shows them as a table with their assumptions.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flowrl.config import (
    ActorConfig,
    ConfigError,
    CriticConfig,
    DatasetConfig,
    EngineConfig,
    JudgeConfig,
    OnPolicyConfig,
    PreferenceActorConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutRunConfig,
    RunConfig,
    ScoringModelConfig,
    TrainedConfig,
    VllmConfig,
    compiles,
    models_of,
    shards_model,
)
from flowrl.controller.placement.plan import Mesh, Plan
from flowrl.controller.placement.plan_table import aligned
from flowrl.controller.placement.weight_transport import choose_transports
from flowrl.data.dtypes import ITEMSIZE
from flowrl.devices.device_rates import (
    DECODE_WAIT,
    EAGER_DECODE_WAIT,
    GENERATION,
    LINK,
    MEMORY,
    PAGEABLE_COPY,
    TRAINING,
    WEIGHT_SYNC,
    AssumedRate,
    DeviceRates,
)
from flowrl.engines.train.model_flops import planned_flops
from flowrl.memory.device_settings import FittedRun
from flowrl.memory.memory_estimate import explain_unknown_sizes, read_role_models
from flowrl.memory.rollout_memory import weight_bytes
from flowrl.timing.phase_time import GenerationLoad, PassLoad, generation_time, pass_time

Stage = Literal["generation", "switch", "scoring", "update", "sync"]
"""Part of a step. Phases of one stage run at the same time if their devices differ."""

DeviceIndex = tuple[int, int]
"""Index of a node, and index of a device on this node."""


@dataclass(frozen=True)
class Lengths:
    """Assumed mean numbers of tokens. In a run without rollouts, `prompt` is the length of a row."""

    prompt: int
    response: int = 0
    longest_response: int = 0

    @property
    def row(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Phase:
    """A phase of a step."""

    name: str
    stage: Stage
    devices: frozenset[DeviceIndex]
    seconds: float
    details: str
    model_flops: float = 0.0
    """FLOPs over all devices, without recomputed FLOPs."""


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step."""

    phases: Sequence[Phase]
    lengths: Lengths
    num_rows: int
    """Sequences of a step."""
    is_overlapped: bool
    """Whether the responses of the next step are generated during the step."""
    rates: DeviceRates
    omitted: Sequence[str]
    """Parts of the step that are not estimated."""

    @property
    def seconds(self) -> float:
        return step_seconds(self.phases, is_overlapped=self.is_overlapped)

    @property
    def num_devices(self) -> int:
        return len(frozenset[DeviceIndex]().union(*(phase.devices for phase in self.phases)))

    @property
    def mfu(self) -> float:
        """Model FLOPs of all phases as a fraction of the peak of all devices during the step."""
        flops = sum(phase.model_flops for phase in self.phases)
        return flops / (self.seconds * self.num_devices * self.rates.flops)


def step_seconds(phases: Sequence[Phase], *, is_overlapped: bool) -> float:
    """Returns the time of a step.

    Stages run one after another. In a stage, phases on the same device add up, and the slowest device determines the
    time. With `is_overlapped`, generation and the other stages run at the same time, unless they share devices.
    """
    busy: defaultdict[DeviceIndex, float] = defaultdict(float)
    stages: defaultdict[Stage, defaultdict[DeviceIndex, float]] = defaultdict(lambda: defaultdict(float))
    for phase in phases:
        for device in phase.devices:
            busy[device] += phase.seconds
            stages[phase.stage][device] += phase.seconds
    slowest = {stage: max(seconds.values()) for stage, seconds in stages.items()}
    total = sum(slowest.values())
    if not is_overlapped:
        return total
    generation = slowest.get("generation", 0.0)
    return max(total - generation, generation + slowest.get("sync", 0.0), *busy.values())


def assume_lengths(config: RunConfig, prompt: int | None = None, response: int | None = None) -> Lengths:
    """Returns the mean lengths. If an argument is None, its length is the largest length that the settings allow.

    Raises ConfigError if an argument exceeds this largest length, or if the run has no data or no responses.
    """
    if not isinstance(config, DatasetConfig):
        raise ConfigError(f"--time needs the length of the rows, but {type(config).__name__} has no data: remove it")
    longest = config.rollout.max_response_tokens if isinstance(config, RolloutRunConfig) else 0
    if response is not None and not longest:
        raise ConfigError(f"--response-tokens is {response}, but {type(config).__name__} has no rollout: remove it")
    for option, value, setting, limit in (
        ("--prompt-tokens", prompt, "data.max_prompt_tokens", config.data.max_prompt_tokens),
        ("--response-tokens", response, "rollout.max_response_tokens", longest),
    ):
        if value is not None and value > limit:
            raise ConfigError(f"{option} is {value}, but {setting} is {limit}: set at most {limit}")
    return Lengths(prompt or config.data.max_prompt_tokens, response or longest, longest)


def estimate_step(fitted: FittedRun, planned: Plan, rates: DeviceRates, lengths: Lengths) -> StepTime:
    """Returns the estimated time of a step.

    Args:
        fitted: settings and memory of the run.
        planned: placement plan of the run, whose devices are GPUs.
        rates: rates of each device.
        lengths: assumed lengths, from `assume_lengths`.
    Raises ConfigError if the size of a model is unknown.
    """
    config = fitted.config
    assert planned.kind == "cuda", "the rates are those of GPUs"
    if unknown := explain_unknown_sizes(config):
        raise ConfigError(f"--time needs the size of every model, but {unknown[0].partition(': ')[2]}")
    estimator = _StepEstimator(fitted, planned, rates, lengths)
    phases = list(estimator.phases())
    is_overlapped = isinstance(config, RolloutRunConfig) and config.schedule.staleness > 0
    return StepTime(phases, lengths, estimator.num_rows, is_overlapped, rates, list(_find_omitted(config, planned)))


def _find_omitted(config: RunConfig, planned: Plan) -> Iterator[str]:
    """Yields the parts of a step that are not estimated."""
    eager = [
        role
        for role, value in models_of(config).items()
        if role in planned.roles and not _is_compiled(value.engine, planned.roles[role].mesh, config)
    ]
    if eager:
        yield f"the slower steps of {' and '.join(eager)} without compiled layers"
    if any(isinstance(value, JudgeConfig) for value in config.role_settings.values()):
        yield "judges"
    engines = [value.engine for value in models_of(config).values()]
    if any(engine.offload_activations for engine in engines):
        yield "engine.offload_activations"
    if isinstance(config, RolloutRunConfig):
        if config.rollout.vllm is not None and config.rollout.vllm.async_scheduling:
            yield "vllm.async_scheduling"
        if config.rollout.transfer.senders == "all":
            yield "transfer.senders all"
        if config.environment is not None:
            yield "the environment and its turns"
        if config.dynamic_sampling is not None:
            yield "further rounds of dynamic_sampling"
        yield "reward functions"
    if isinstance(config, OnPolicyConfig) and config.ptx is not None:
        yield "the text of ptx"
    yield "evaluations"
    yield "checkpoints"


def _is_compiled(engine: EngineConfig, mesh: Mesh, config: RunConfig) -> bool:
    is_parallel = shards_model(engine, mesh.tp) or mesh.sp > 1 or mesh.pp > 1
    return compiles(engine, on_gpu=True, is_parallel=is_parallel, is_deterministic=config.deterministic)


class _StepEstimator:
    """Estimates each phase of a run."""

    def __init__(self, fitted: FittedRun, planned: Plan, rates: DeviceRates, lengths: Lengths) -> None:
        assert isinstance(fitted.config, DatasetConfig), "`assume_lengths` has read the data settings"
        self._fitted, self._config, self._planned = fitted, fitted.config, planned
        self._rates, self._lengths = rates, lengths
        self._models = read_role_models(self._config, planned)
        self._settings = models_of(self._config)

    @property
    def num_rows(self) -> int:
        """Sequences of a step. A preference pair has two sequences."""
        is_paired = any(
            isinstance(value, RewardModelConfig) or (isinstance(value, PreferenceActorConfig) and value.loss.is_paired)
            for value in self._settings.values()
        )
        return self._config.batch_size * (2 if is_paired else 1)

    def phases(self) -> Iterator[Phase]:
        if isinstance(self._config, RolloutRunConfig):
            yield self._generation(self._config)
        if (switch := self._switch()) is not None:
            yield switch
        for role, name in self._scoring_passes():
            yield self._pass(role, name, "scoring", self.num_rows, num_updates=0)
        for role, value in self._settings.items():
            if isinstance(value, TrainedConfig) and role in self._models:
                rows, num_updates = self._updates()
                yield self._pass(role, f"update of {role}", "update", rows, num_updates)
        if isinstance(self._config, RolloutRunConfig) and (sync := self._sync(self._config)) is not None:
            yield sync

    def _scoring_passes(self) -> Iterator[tuple[str, str]]:
        """Yields role and name of each forward pass over the rows of a step."""
        for role, value in self._settings.items():
            if role not in self._models or role in self._config.precomputed_roles:
                continue
            if isinstance(value, ActorConfig) and value.old_logprobs == "recompute":
                yield role, "old log-probabilities"
            elif isinstance(value, CriticConfig):
                yield role, f"values of {role}"
            elif isinstance(value, ReferenceConfig):
                yield role, f"log-probabilities of {role}"
            elif isinstance(value, ScoringModelConfig):
                yield role, f"scores of {role}"

    def _updates(self) -> tuple[int, int]:
        """Returns the rows of an update, and the number of updates of a step."""
        config = self._config
        if not isinstance(config, RolloutRunConfig):
            return self.num_rows, 1
        epochs = config.ppo_epochs if isinstance(config, OnPolicyConfig) else 1
        return config.minibatch_size, epochs * math.ceil(config.trained_per_step / config.minibatch_size)

    def _devices(self, role: str) -> frozenset[DeviceIndex]:
        return frozenset(device for slot in self._planned.slots(role) for device in slot.node_devices)

    def _link(self, *roles: str, num_devices: int) -> float:
        """Returns the bytes per second between `num_devices` devices of some roles: NVLink if one node has all of them,
        and otherwise the network.
        """
        nodes = Counter(node for node, _ in frozenset[DeviceIndex]().union(*map(self._devices, roles)))
        return self._rates.nvlink if num_devices <= min(nodes.values()) else self._rates.network

    def _pass(self, role: str, name: str, stage: Stage, rows: int, num_updates: int) -> Phase:
        model, lengths = self._models[role], self._lengths
        load = PassLoad(
            rows=math.ceil(rows / model.mesh.dp),
            length=lengths.row,
            targets=lengths.response or lengths.row,
            num_updates=num_updates,
        )
        ranks = model.num_shards if model.is_sharded else model.mesh.dp * model.mesh.sp
        # The ranks of a stage are adjacent, and stages may be on different nodes.
        link, stage_link = (
            self._link(role, num_devices=ranks * model.mesh.tp * stages) for stages in (1, model.mesh.pp)
        )
        flops = planned_flops(model.size.config, has_head=model.is_policy, lora=model.lora)
        assert flops is not None, "models of known size have matrices of known kinds"
        time = pass_time(model, flops, load, self._rates, link, stage_link)
        details = f"compute {time.compute_s:.1f}"
        details += f" (idle {time.idle_share:.0%})" if model.mesh.pp > 1 else ""
        details += f", overlapped {time.overlapped_s:.1f}" if time.overlapped_s else ""
        details += f", exposed {time.exposed_s:.1f}" if time.exposed_s else ""
        details += f"; {num_updates} x {rows:,} rows" if num_updates else ""
        devices = self._devices(role)
        return Phase(name, stage, devices, time.seconds, details, time.model_flops * model.mesh.size)

    def _generation(self, config: RolloutRunConfig) -> Phase:
        role, rollout, actor = self._planned.roles["rollout"], config.rollout, self._models["actor"]
        memory = next(device.roles["rollout"] for device in self._fitted.devices if "rollout" in device.roles)
        assert memory is not None, "the size of the model is known"
        # While one stage of a pipeline computes a batch, the others compute other batches. So a replica of pp stages
        # takes the time of pp replicas without stages that have 1 / pp of the sequences and of the KV cache's tokens.
        tp, pp = role.replica.tp, role.replica.pp
        size, num_replicas = actor.size, role.mesh.dp * pp
        element = ITEMSIZE[rollout.sent_dtype or config.actor.model.dtype]
        settings, is_vllm = rollout.vllm or VllmConfig(), rollout.engine == "vllm"
        rows = math.ceil(config.batch_size / num_replicas)
        shares_prefixes = not is_vllm or settings.prefix_caching
        # A decode step does not read the input embeddings, unless the head shares them.
        unread = 0 if size.tied else size.embedding * element
        if size.experts:
            # With equal routes, an expert has no token of a step with this probability.
            num_tokens = min(math.ceil(rollout.num_seqs / pp), rows)
            idle = (1 - size.experts_per_token / size.num_experts) ** num_tokens
            unread += idle * size.layers * size.experts * element
        load = GenerationLoad(
            num_rows=rows,
            num_prefills=math.ceil(rows / config.samples_per_prompt) if shares_prefixes else rows,
            prompt_tokens=self._lengths.prompt,
            response_tokens=self._lengths.response,
            longest_response=self._lengths.longest_response,
            num_seqs=math.ceil(rollout.num_seqs / pp),
            weight_bytes=(weight_bytes(size, element, rollout.quantization) - unread) / tp,
            token_bytes=size.cached_values * element / tp,
            cache_bytes=memory.kv_cache or math.inf,
            num_devices=tp,
            step_s=(DECODE_WAIT if is_vllm and settings.graphs else EAGER_DECODE_WAIT).value,
            summed_bytes=size.layers * 2 * size.hidden * element * 2 * (tp - 1) / tp,
        )
        flops = planned_flops(size.config, has_head=True)
        assert flops is not None, "models of known size have matrices of known kinds"
        time = generation_time(flops, load, self._rates)
        details = (
            f"prefill {time.prefill_s:.1f}, decode {time.decode_s:.1f}; {time.num_concurrent * pp:,} of {rows * pp:,} "
            f"sequences per replica at a time"
        )
        devices = self._devices("rollout")
        return Phase("generation", "generation", devices, time.seconds, details, time.model_flops * num_replicas)

    def _switch(self) -> Phase | None:
        """Returns the phase in which roles are offloaded to host memory and onloaded, or None without such copies."""
        seconds: defaultdict[DeviceIndex, float] = defaultdict(float)
        moved = 0
        for device in self._fitted.devices:
            for role, memory in device.roles.items():
                if memory is None or not memory.offloads or len(device.roles) == 1:
                    continue
                num_bytes = memory.weights * self._weight_copies(role) + 2 * memory.optimizer
                seconds[device.node, device.device] += num_bytes / (self._rates.host * LINK.value)
                moved = max(moved, num_bytes)
        if not seconds:
            return None
        details = f"up to {moved / 1e9:.1f} GB of a role per GPU"
        return Phase("switch", "switch", frozenset(seconds), max(seconds.values()), details)

    def _weight_copies(self, role: str) -> int:
        """Returns the number of copies of a role's weights in a step: to host memory if the weights have changed, and
        back.

        A rollout may drop its weights instead, because the weight sync replaces them.
        """
        config, settings = self._config, self._settings.get(role)
        if isinstance(config, RolloutRunConfig) and role == "rollout":
            return 0 if config.rollout.transfer.drop_weights else 2
        return 1 if settings is not None and not isinstance(settings, TrainedConfig) else 2

    def _sync(self, config: RolloutRunConfig) -> Phase | None:
        transport, rates = choose_transports(config, self._planned)["rollout"], self._rates
        element = ITEMSIZE[config.rollout.sent_dtype or config.actor.model.dtype]
        actor = self._models["actor"]
        num_bytes = actor.size.parameters * element
        devices = self._devices("actor") | self._devices("rollout")
        link = self._link("actor", "rollout", num_devices=len(devices))
        # A copy within a GPU reads and writes each weight, and CUDA IPC copies it twice.
        is_alone = self._planned.roles["actor"].mesh.size == 1
        rate: Mapping[str, float] = {
            "local": rates.memory / 2 * MEMORY.value,
            "cuda_ipc": WEIGHT_SYNC.value * (rates.memory / 4 if is_alone else link),
            "nccl": WEIGHT_SYNC.value * link,
            "object_store": PAGEABLE_COPY.value / 2,
            # The rollout reads the base model from files, and copies all merged weights to its device.
            "adapter": PAGEABLE_COPY.value / 2,
        }
        if transport == "shared":
            return None
        seconds = num_bytes / rate[transport]
        sent = actor.adapter if transport == "adapter" else num_bytes
        return Phase("weight sync", "sync", devices, seconds, f"{sent / 1e9:.1f} GB, transport {transport}")


def render_time(step: StepTime) -> str:
    """Returns a table with one line per phase, the sum, and the assumed rates with their sources."""
    lengths, rates = step.lengths, step.rates
    rows = [["phase", "devices", "parts in seconds", "seconds", "MFU"]]
    for phase in step.phases:
        peak = phase.seconds * len(phase.devices) * rates.flops
        mfu = f"{phase.model_flops / peak:.0%}" if phase.model_flops else "."
        rows.append([phase.name, _describe_devices(sorted(phase.devices)), phase.details, f"{phase.seconds:.1f}", mfu])
    how = "generation overlaps with training" if step.is_overlapped else "stages run one after another"
    rows.append(["step", "", how, f"{step.seconds:.1f}", f"{step.mfu:.0%}"])
    tokens = f"{lengths.prompt:,} prompt tokens and {lengths.response:,} response tokens per sequence"
    trained = "response tokens"
    if not lengths.response:
        tokens, trained = f"{lengths.prompt:,} tokens per sequence", "tokens"
    speed = step.num_rows * (lengths.response or lengths.prompt) / step.seconds
    return "\n".join(
        [
            f"estimated time of a step in seconds, not measured: {step.num_devices} x {rates.name}, {step.num_rows:,} "
            f"sequences",
            *aligned(rows, 3),
            f"{speed:,.0f} {trained}/s, {speed / step.num_devices:,.0f} per GPU",
            f"assumed mean lengths: {tokens}",
            f"not estimated: {', '.join(step.omitted)}",
            "assumed rates:",
            *(f"  {each.meaning} ({each.source})" for each in (_ROLLOUT if lengths.response else _TRAINING)),
        ]
    )


_TRAINING: tuple[AssumedRate, ...] = (TRAINING, MEMORY, LINK)
_ROLLOUT = (*_TRAINING, GENERATION, DECODE_WAIT, EAGER_DECODE_WAIT, WEIGHT_SYNC, PAGEABLE_COPY)
"""Assumed rates of every run (`_TRAINING`), and of runs with a rollout."""


def _describe_devices(devices: Sequence[DeviceIndex]) -> str:
    first, *others = (f"{node}:{device}" for node, device in devices)
    return f"{first} to {others[-1]}" if others else first
