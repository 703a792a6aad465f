"""Reports the batch sizes and the number of optimizer updates of a run, and warns if the learning rate is 0 or never
reaches its peak.
"""

from collections.abc import Callable, Iterator, Mapping

from flowrl.config import (
    EpochConfig,
    OnPolicyConfig,
    OptimizerConfig,
    PreferenceActorConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
    models_of,
)
from flowrl.data.reading.reader import count_rows


def describe_updates(config: RunConfig) -> list[str]:
    """Returns a line with the number of optimizer updates, and the warnings about learning rate schedules.

    Returns an empty list if the recipe does not define the number of updates.
    """
    total = config.num_updates
    if total is None:
        if not isinstance(config, EpochConfig):
            return []
        return [f"optimizer updates: derived from epochs ({config.epochs}) when data.train is read"]
    factors = ""
    if isinstance(config, RolloutRunConfig):
        num_full, last = divmod(config.trained_per_step, config.minibatch_size)
        rest = f" and 1 of {last}" if last else ""
        minibatches = "minibatch" if num_full == 1 else "minibatches"
        num_epochs = config.ppo_epochs if isinstance(config, OnPolicyConfig) else 1
        epochs = f" x {num_epochs} epochs" if num_epochs > 1 else ""
        factors = f" = {config.steps} steps x ({num_full} {minibatches} of {config.minibatch_size}{rest}){epochs}"
    limit = "at most " if config.can_end_early else ""
    return [
        f"optimizer updates: {limit}{total}{factors}",
        *_exceeded_schedules(config, total),
        *_long_warmups(config, total),
    ]


def describe_planned_updates(config: RunConfig) -> list[str]:
    """Returns the lines of `describe_updates`. Counts the rows of local files if the number of updates follows from
    `epochs`. Raises DataError if a file cannot be read.
    """
    if not isinstance(config, EpochConfig) or config.epochs is None:
        return describe_updates(config)
    roles = models_of(config).values()
    is_kto = any(isinstance(role, PreferenceActorConfig) and not role.loss.is_paired for role in roles)
    data = config.data
    num_rows = count_rows(data.training_files, "kto" if is_kto else None, data.ignored_message_keys)
    if not num_rows:
        return describe_updates(config)
    planned = config.with_steps(num_rows)
    _, *warnings = describe_updates(planned)
    limit = "" if data.strict and data.too_long == "refuse" else "at most "
    passes = "1 epoch" if config.epochs == 1 else f"{config.epochs} epochs"
    num_batches = -(-num_rows // config.batch_size)
    end = f", limited by steps ({config.steps})" if planned.steps < config.epochs * num_batches else ""
    factors = f"{passes} x {num_batches} batches of up to {config.batch_size} ({num_rows} rows in data.train){end}"
    return [f"optimizer updates: {limit}{planned.steps} = {factors}", *warnings]


def describe_batches(config: RunConfig, num_ranks: int) -> list[str]:
    """Returns the sizes of a step and of an optimizer update as equations, over all ranks and per rank.

    `num_ranks` is the number of data-parallel ranks of the actor. Returns an empty list for a recipe without rollouts.
    """
    if not isinstance(config, RolloutRunConfig):
        return []
    size, trained, minibatch = config.batch_size, config.trained_per_step, config.minibatch_size
    num_minibatches = -(-trained // minibatch)
    parts = (
        f"{num_minibatches} x {minibatch}" if trained % minibatch == 0 else f"{num_minibatches} of up to {minibatch}"
    )
    selected = "" if trained == size else f", of which up to {trained} are trained"
    own_rows, own_minibatch = (_share(number, num_ranks) for number in (size, minibatch))
    ranks = f"{num_ranks} data-parallel rank{'' if num_ranks == 1 else 's'} of actor"
    return [
        f"batch of a step: {config.prompts_per_step} prompts x {config.samples_per_prompt} samples_per_prompt = {size} "
        f"sequences (batch_size){selected} = {parts} (minibatch_size)",
        f"each of {ranks}: {own_rows} sequences per step, {own_minibatch} per optimizer update, in micro-batches of up "
        f"to {config.actor.engine.max_tokens_per_microbatch} tokens",
    ]


def _share(number: int, num_ranks: int) -> str:
    """Returns the number of rows per rank as text, such as `5 or 6`."""
    low, rest = divmod(number, num_ranks)
    return f"{low} or {low + 1}" if rest else str(low)


def _optimizers(config: RunConfig) -> Iterator[tuple[str, OptimizerConfig]]:
    """Yields (prefix of the key, settings) of every optimizer."""
    for name, role in models_of(config).items():
        if isinstance(role, TrainedConfig):
            yield f"{name}.", role.optimizer


def _exceeded_schedules(config: RunConfig, num_updates: int) -> Iterator[str]:
    if config.can_end_early:  # The recipe knows the number of updates only after it has read the data.
        return
    for prefix, optimizer in _optimizers(config):
        end = optimizer.total_steps
        if optimizer.schedule != "constant" and end is not None and end < num_updates:
            yield (
                f"warning: {prefix}optimizer.total_steps is {end}, but the run has {num_updates} updates, so the "
                f"learning rate is {optimizer.min_lr:g} in the last {num_updates - end}: remove total_steps, or raise "
                f"it"
            )


def _long_warmups(config: RunConfig, num_updates: int) -> Iterator[str]:
    for prefix, optimizer in _optimizers(config):
        if optimizer.warmup_steps > num_updates:
            yield (
                f"warning: {prefix}optimizer.warmup_steps is {optimizer.warmup_steps}, but the run has {num_updates} "
                "updates, so the learning rate does not reach lr: lower warmup_steps, or raise steps"
            )


class ZeroRateWatch:
    """Warns once if the learning rate of a role is 0 during a step.

    `describe_updates` already warns at the start if the config shows the problem. This class finds recipes that take
    more updates than their `count_updates` returns.
    """

    def __init__(self, config: RunConfig, report: Callable[[str], None]) -> None:
        self._report = report
        total = config.num_updates
        self._has_warned = total is not None and any(True for _ in _exceeded_schedules(config, total))

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics `lr` of a step, which are the largest learning rates of its updates."""
        zero = [name for name, value in values.items() if name.split("/")[-1] == "lr" and value == 0]
        if zero and not self._has_warned:
            self._has_warned = True
            self._report(
                f"warning: {zero[0]} is 0 from step {step}, because the number of updates exceeds "
                "optimizer.total_steps: raise it"
            )
