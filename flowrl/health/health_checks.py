"""The health checks: pure functions that measure a window of steps, with the meaning and the remedy of each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from statistics import median

from flowrl.health.measurement import Check, EvaluationPoint, Measurement, RunFacts, StepWindow, spread

# Held-out evaluations.

HELD_OUT = {"accuracy": "reward", "validation_loss": "actor/loss"}
"""Prefix of a held-out metric -> training metric that it corresponds to."""

_IMPROVES_BY_FALLING = {"validation_loss"}

_COLLAPSE = 0.5
"""Fall of a held-out metric and of its training metric, as a fraction of their earlier values, that counts although the
training metric has not improved.
"""

_SMALLEST_COLLAPSE = 0.1
"""Smallest fall of a held-out reward that counts as a collapse, as a fraction of the largest reward of any response so
far. A smaller fall may be noise, because the mean reward is noisy if few responses have a reward.
"""


def measure_held_out_fall(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the largest fall of a held-out metric below its best value, as a fraction of the best value.

    The fall is 0 unless the training metric has improved since the best value, or both metrics have collapsed, that is,
    have lost more than half. The held-out metric is compared with its best value, and the training metric with the
    better one of its values in the first step and at that evaluation. A held-out reward must also have lost at least a
    tenth of the largest reward of any response so far. A single noisy evaluation has little effect: the fall is the
    smaller one of the last two evaluations, and two adjacent evaluations must reach the best value. With only two
    evaluations, half of the fall counts. If rewards failed in an evaluation, its best value assumes the worst
    score for them, and its last value the best score, so that failures alone cause no fall.
    """
    if not window.is_evaluated:
        return None
    falls = [fall for name in window.evaluations for fall in _falls(window, name)]
    largest = max(falls, key=lambda fall: fall.value, default=None)
    if largest is None or facts.trains_on_scores:
        return largest
    return replace(
        largest,
        meaning="the policy overfits, or what it is trained on makes it worse at the task",
        remedy="compare saved responses of the best and the last evaluation, lower the learning rate, or end the run "
        "earlier",
        settings=("actor.optimizer.lr", "steps"),
    )


def _falls(window: StepWindow, name: str) -> Iterator[Measurement]:
    prefix = name.split("/")[0]
    sign = -1 if prefix in _IMPROVES_BY_FALLING else 1
    *earlier, last = window.evaluations[name]
    if len(earlier) > 1:
        earlier, previous = earlier[:-1], earlier[-1]
    else:
        previous = None
    if not earlier:
        return
    best = _best(earlier, sign)
    scale = abs(best.low) or 1.0
    fall = sign * (best.low - last.high) / scale
    if previous is not None:
        fall = min(fall, sign * (best.low - previous.high) / scale)
    value = fall / 2 if previous is None else fall
    training = HELD_OUT[prefix]
    direction, better, worse = ("below", "rises", "falls") if sign > 0 else ("above", "falls", "rises")
    at_most, at_least = "at most " * (last.low < last.high), "of at least " * (best.low < best.high)
    observation = (
        f"{name} is {at_most}{last.high:.3g}, {abs(last.high - best.low) / scale:.0%} {direction} its best value "
        f"{at_least}{best.low:.3g}"
    )
    if fall > 0 and _has_improved(window, training, best, last, sign):
        yield Measurement(value, f"{observation}, while {training} {better}")
    elif fall > _COLLAPSE and _has_collapsed(window, training, best, last, sign):
        meaning, remedy = "training makes the policy worse", "lower the learning rate, or check the reward"
        observation = f"{observation}, and {training} {worse} as well"
        yield Measurement(value, observation, meaning=meaning, remedy=remedy, settings=("actor.optimizer.lr",))
    else:
        yield Measurement(0.0, observation)


def _best(points: list[EvaluationPoint], sign: int) -> EvaluationPoint:
    """Returns the best point whose value an adjacent point reaches as well. Returns a single point as it is."""
    if len(points) == 1:
        return points[0]
    confirmed = (min(pair, key=lambda point: sign * point.low) for pair in pairwise(points))
    return max(confirmed, key=lambda point: sign * point.low)


def _has_improved(window: StepWindow, name: str, best: EvaluationPoint, last: EvaluationPoint, sign: int) -> bool:
    """Returns whether the training metric has improved between two evaluations by more than two standard errors."""
    before = best.training.get(name, window.first_median(name))
    now, values = last.training.get(name), window.recent_values(name)
    if before is None or now is None or values is None:
        return False
    return sign * (now - before) > 2 * spread(values) / len(values) ** 0.5


def _has_collapsed(window: StepWindow, name: str, best: EvaluationPoint, last: EvaluationPoint, sign: int) -> bool:
    """Returns whether the training metric has lost more than half of the better one of its values in the first step and
    at the best evaluation. Returns False if a held-out reward has fallen by too little (`_SMALLEST_COLLAPSE`).
    """
    if sign > 0 and best.low - last.high < _SMALLEST_COLLAPSE * max(0.0, window.largest_reward):
        return False
    candidates = [value for value in (window.first_value(name), best.training.get(name)) if value is not None]
    now = last.training.get(name)
    if not candidates or now is None:
        return False
    before = max(candidates, key=lambda value: sign * value)
    return sign * (before - now) > _COLLAPSE * (abs(before) or 1.0)


# Responses.


def measure_length_limit(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median response length, including tokens of an environment, as a fraction of the limit."""
    length = window.recent_median("response_length")
    if length is None or facts.max_response_tokens is None:
        return None
    length += window.recent_median("environment_length") or 0.0
    limit = facts.max_response_tokens
    return Measurement(length / limit, f"responses have {length:.4g} of at most {limit} tokens on average")


_NEVER_ENDS = 0.95
"""Smallest share of truncated responses, in the first steps and now, of a model that probably cannot end a response."""


def measure_truncation(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median share of truncated responses."""
    share = window.recent_median("truncated_fraction")
    if share is None:
        return None
    observation = f"{share:.0%} of the responses are truncated"
    never_ended = min((record.get("truncated_fraction", 0.0) for record in window.first), default=0.0) >= _NEVER_ENDS
    if facts.has_frozen_head and share >= _NEVER_ENDS and never_ended:
        return Measurement(
            share,
            observation,
            meaning="responses have never ended: perhaps the base model has not learned its end token, whose weights "
            "LoRA does not train",
            remedy="train the head and the embeddings, too, with actor.lora.modules_to_save (in most models [lm_head, "
            "embed_tokens]), or raise rollout.max_response_tokens",
            settings=("actor.lora.modules_to_save",),
        )
    remedy = "raise rollout.max_response_tokens"
    if facts.can_mask_truncated:
        remedy += ", or exclude truncated responses with algorithm.mask_truncated"
    return Measurement(share, observation, remedy=remedy)


def measure_repetition(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median share of repeated n-grams."""
    share = window.recent_median("repetition")
    return None if share is None else Measurement(share, f"{share:.0%} of the n-grams of responses are repeated")


# Policy.

_SOLVED = 0.9
"""Smallest progress (`_progress`) of a solved task. A policy that has solved its task may have a low entropy, and equal
scores in most groups, without a finding.
"""


def _progress(window: StepWindow, now: float | None) -> float:
    """Returns how far a mean reward is on the way from its initial value (0) to the largest reward of any response so
    far (1). Returns 0 without rewards.

    The initial value is that of the first step, because the reward may rise within a few steps, or the median of the
    first steps if that is smaller, because the first step may be better by chance.
    """
    initial = [value for value in (window.first_value("reward"), window.first_median("reward")) if value is not None]
    before = min(initial, default=None)
    if now is None or before is None or window.largest_reward <= before:
        return 0.0
    return min(1.0, max(0.0, (now - before) / (window.largest_reward - before)))


def measure_entropy_collapse(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median entropy as a fraction of the expected entropy, and 1 if the task is solved.

    The expected entropy is that in the first step, times the unsolved share of the task (1 - progress), because a
    policy may be deterministic on the prompts that it has learned. The entropy may collapse within a few steps, so
    those after the first do not count.
    """
    return _entropy_fraction(
        window, window.recent_median("actor/entropy"), _progress(window, window.recent_median("reward"))
    )


def measure_extreme_entropy_collapse(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the entropy of the last step as a fraction of the expected entropy, and 1 if the task is solved."""
    return _entropy_fraction(window, window.last.get("actor/entropy"), _progress(window, window.last.get("reward")))


def _entropy_fraction(window: StepWindow, now: float | None, progress: float) -> Measurement | None:
    before = window.first_value("actor/entropy")
    if now is None or not before:
        return None
    observation = f"actor/entropy is {now:.3g} nats per token, in the first step {before:.3g}"
    if progress > 0:
        observation += f", and the reward has made {progress:.0%} of its way to the largest reward"
    return Measurement(1.0 if progress >= _SOLVED else now / before / (1 - progress), observation)


def measure_kl_growth(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median KL to the reference. It is 0 if the KL is not larger than in the first step.

    The KL of a policy that breaks in a few steps is constant afterwards, so the steps just before do not count.
    """
    return _kl_above_first(window, window.recent_median)


def measure_extreme_kl_growth(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the smaller KL of the last two steps. It is 0 if the KL is not larger than in the first step.

    A single step does not count, because a few tokens that the policy almost never samples can dominate its estimate.
    """

    def measure_now(name: str) -> float | None:
        last = window.values(name)[-2:]
        return min(last) if len(last) == 2 else None

    return _kl_above_first(window, measure_now)


def _kl_above_first(window: StepWindow, measure_now: Callable[[str], float | None]) -> Measurement | None:
    for name in ("kl", "actor/kl"):
        now, before = measure_now(name), window.first_value(name)
        if now is not None and before is not None:
            observation = f"{name} is {now:.3g} nats per token, in the first step {before:.3g}"
            return Measurement(now if now > before else 0.0, observation)
    return None


_RATIOS = ("actor/ratio", "correction/weight")


def measure_ratio_range(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the largest median distance from 1 of a mean probability ratio, or the median KL of a step's updates.

    The KL counts because the mean ratio is close to 1 for any change of the policy: its expectation under the old
    policy is 1.
    """
    ratios = _mean_ratios(window.recent_median)
    measurements = [Measurement(abs(ratio - 1), f"{name} is {ratio:.3g} on average") for name, ratio in ratios.items()]
    if (kl := window.recent_median("actor/approx_kl")) is not None:
        measurements.append(Measurement(kl, f"actor/approx_kl is {kl:.3g} nats per token"))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


def measure_extreme_ratio_range(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Measures the updates of the last step alone, with values that a few tokens barely affect.

    Returns the largest of these values: 1 - r for each mean probability ratio r, and m^2 / 2 for the mean absolute
    change m of log-probabilities. If all tokens change by m, their KL is about m^2 / 2. The estimate `approx_kl` and
    ratios above 1 do not count, because a single token can dominate them.
    """
    ratios = _mean_ratios(window.last.get)
    measurements = [Measurement(1 - ratio, f"{name} is {ratio:.3g} on average") for name, ratio in ratios.items()]
    if (change := window.last.get("actor/logprob_change")) is not None:
        observation = f"actor/logprob_change is {change:.3g} nats per token, as with a KL of {change**2 / 2:.3g}"
        measurements.append(Measurement(change**2 / 2, observation))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


def _mean_ratios(measure_now: Callable[[str], float | None]) -> dict[str, float]:
    return {name: ratio for name in _RATIOS if (ratio := measure_now(name)) is not None}


def measure_logprob_gap(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the gap of the last step as a multiple of the limit.

    Returns None for stale responses, because other weights sampled them.
    """
    gap = window.last.get("rollout_gap", window.last.get("actor/rollout_gap"))
    if facts.gap_limit is None or gap is None or window.last.get("staleness_max", 0.0) > 0:
        return None
    observation = f"rollout and trainer log-probabilities differ by {gap:.3g} nats per token on average"
    return Measurement(gap / facts.gap_limit, f"{observation} (rollout.gap_warning {facts.gap_limit:g})")


# Updates.


def measure_gradient_spike(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the largest gradient norm of a role in the last step as a multiple of its norm in the steps before.

    The norm in the steps before is their 90 % quantile, and at least the median of the first steps. The quantile
    ignores earlier spikes. The median prevents findings after convergence, when gradients are rare.
    """
    measurements = []
    for name, norm in window.last.items():
        role, _, metric = name.rpartition("/")
        if metric != "grad_norm" or "/" in role:
            continue
        before = window.values(name)[:-1]
        if len(before) < window.steps:
            continue
        usual = max(sorted(before)[int(0.9 * (len(before) - 1))], window.first_median(name) or 0.0)
        if usual > 0:
            observation = f"{name} is {norm:.3g}, {norm / usual:.3g} times its value in the steps before"
            measurements.append(Measurement(norm / usual, observation, role))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


def measure_skipped_updates(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the largest share of the last steps in which a role skipped an update."""
    measurements = []
    for name in window.last:
        role, _, metric = name.rpartition("/")
        if metric == "skipped_update" and (values := window.recent_values(name)) is not None:
            share = sum(values) / len(values)
            measurements.append(Measurement(share, f"{name} is 1 in {share:.0%} of the steps", role))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


def measure_value_function(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median explained variance of the critic, or None in the first 3 x `health.steps` - 1 steps, in which
    a new critic is still inaccurate.
    """
    variance = window.recent_median("explained_variance")
    if variance is None or window.num_steps < 3 * window.steps:
        return None
    return Measurement(variance, f"explained_variance is {variance:.3g}", "critic")


def measure_dead_experts(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the share of experts that receive no token: the median over recent steps, of the role where it is
    largest. Returns None if no role has experts.
    """
    measurements = []
    for name in window.last:
        role, _, metric = name.rpartition("/")
        if metric == "dead_experts" and (share := window.recent_median(name)) is not None:
            observation = f"{share:.0%} of the experts of {role} receive no token"
            loads = {key: load for key, load in window.last.items() if key.startswith(f"{role}/expert_load/")}
            if loads:
                most = max(loads, key=lambda key: loads[key])
                expert = most.rpartition("/")[2]
                observation += f"; in the last step, expert {expert} receives {loads[most]:.1f} times the mean load"
            measurements.append(Measurement(share, observation, role))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


# Data flow.


def measure_no_signal(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median share of groups with equal scores among the trained and the dropped groups.

    Without groups of several responses, returns the share of steps in which all scores are equal. Returns 0 if the task
    is solved, because most groups then have only correct responses. Returns None if the policy is not trained on the
    scores.
    """
    if not facts.trains_on_scores:
        return None
    records = list(window.records)[-window.steps :]
    shares = [share for record in records if (share := _share_without_signal(record, facts)) is not None]
    if len(shares) < window.steps:
        return None
    share = 0.0 if _progress(window, window.recent_median("reward")) >= _SOLVED else median(shares)
    return Measurement(share, f"{share:.0%} of the groups have equal scores")


def _share_without_signal(record: Mapping[str, float], facts: RunFacts) -> float | None:
    equal, dropped = record.get("equal_scores_fraction"), record.get("dropped_equal_scores")
    trained = record.get("trained_groups", facts.prompts_per_step)
    if trained and (equal is not None or dropped is not None):
        return ((equal or 0.0) * trained + (dropped or 0.0)) / (trained + (dropped or 0.0))
    if "reward" not in record or "reward_max" not in record:
        return None
    return float(record["reward_max"] - record["reward"] <= 1e-6 * max(1.0, abs(record["reward_max"])))


def measure_stale_share(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the share of stale groups among the groups that were trained or dropped as stale in the last steps."""
    stale, trained = window.recent_values("dropped_stale"), window.recent_values("trained_groups")
    if stale is None or trained is None or not sum(stale) + sum(trained):
        return None
    share = sum(stale) / (sum(stale) + sum(trained))
    return Measurement(share, f"{share:.0%} of the generated groups are dropped because they are stale")


def measure_idle_devices(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median idle time of the device with the longest idle time, as a fraction of a step.

    A device runs one call at a time, so the busy times of its roles are added.
    """
    measurements = []
    records = [record for record in window.records if any(name.startswith("idle_") for name in record)]
    if len(records) < window.steps:
        return None
    for roles, pool in facts.devices.items():
        idle = median(
            max(0.0, 1 - sum(1 - record.get(f"idle_{role}", 1.0) for role in roles))
            for record in records[-window.steps :]
        )
        observation = f"a device of pool {pool} ({', '.join(roles)}) is idle for {idle:.0%} of the time"
        measurements.append(Measurement(idle, observation))
    return max(measurements, key=lambda measurement: measurement.value, default=None)


# Devices.


def _extreme_usage(window: StepWindow, name: str, choose: Callable[..., tuple[float, str]]) -> tuple[float, str] | None:
    """Returns the median of `usage/ROLE/NAME` and the role, for the role that `choose` (min or max) selects.

    Returns None if no role has this metric.
    """
    roles = dict.fromkeys(
        metric.split("/")[1] for metric in window.last if metric.startswith("usage/") and metric.endswith(f"/{name}")
    )
    medians = ((window.recent_median(f"usage/{role}/{name}"), role) for role in roles)
    known = [(value, role) for value, role in medians if value is not None]
    return choose(known, key=itemgetter(0)) if known else None


def measure_device_memory(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median share of a GPU's memory in use at the peak of the role with the largest share."""
    if (largest := _extreme_usage(window, "memory_fraction", max)) is None:
        return None
    share, role = largest
    return Measurement(share, f"{share:.0%} of a GPU's memory is in use at the peak of {role}", role)


def measure_preemptions(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median number of interruptions per response."""
    if (largest := _extreme_usage(window, "preemptions", max)) is None:
        return None
    number, role = largest
    return Measurement(number, f"vLLM interrupts a response of {role} {number:.2g} times on average", role)


def measure_low_mfu(window: StepWindow, facts: RunFacts) -> Measurement | None:
    """Returns the median model FLOPs utilization of the role with the smallest one."""
    if (smallest := _extreme_usage(window, "mfu", min)) is None:
        return None
    fraction, role = smallest
    return Measurement(fraction, f"{role} uses {fraction:.1%} of the peak FLOP/s of its devices", role)


CHECKS: tuple[Check, ...] = (
    Check(
        "skipped_updates",
        measure_skipped_updates,
        "updates have no token to train on, or float16 gradients overflow",
        "check masks and corrections, or use bfloat16",
        ("algorithm.correction", "ROLE.engine.compute_dtype"),
    ),
    Check(
        "logprob_gap",
        measure_logprob_gap,
        "rollout and trainer do not compute the same policy",
        "",
        ("rollout.check_weights",),
    ),
    Check(
        "gradient_spike",
        measure_gradient_spike,
        "a batch has extreme advantages or ratios, or the training is unstable",
        "lower the learning rate, or set max_grad_norm of the optimizer",
        ("ROLE.optimizer.lr", "ROLE.optimizer.max_grad_norm"),
    ),
    Check(
        "ratio_range",
        measure_ratio_range,
        "the updates of a step change the policy too much, or responses are too stale",
        "lower the learning rate, the number of updates per step, or the staleness",
        ("actor.optimizer.lr",),
        measure_extreme=measure_extreme_ratio_range,
    ),
    Check(
        "value_function",
        measure_value_function,
        "the critic predicts no better than a constant, so that advantages are noisy",
        "raise the learning rate of the critic, train it longer before the actor, or use an estimator without a critic",
        ("critic.optimizer.lr",),
        is_lower_bound=True,
    ),
    Check(
        "dead_experts",
        measure_dead_experts,
        "the routers have collapsed to few experts, so that the weights of the others are not trained",
        "raise the coefficient of the auxiliary loss, or lower the learning rate",
        ("ROLE.router_loss_coef", "ROLE.optimizer.lr"),
    ),
    Check(
        "kl_growth",
        measure_kl_growth,
        "the policy drifts away from the reference",
        "strengthen the KL penalty, or lower the learning rate",
        ("algorithm.kl_coef", "actor.kl_loss_coef", "actor.optimizer.lr"),
        measure_extreme=measure_extreme_kl_growth,
    ),
    Check(
        "entropy_collapse",
        measure_entropy_collapse,
        "the policy is almost deterministic and no longer explores",
        "lower the learning rate, or raise actor.entropy_coef",
        ("actor.entropy_coef", "actor.optimizer.lr"),
        is_lower_bound=True,
        measure_extreme=measure_extreme_entropy_collapse,
    ),
    Check(
        "repetition",
        measure_repetition,
        "responses repeat the same text",
        "inspect saved responses, correct the reward, or strengthen the KL penalty",
        ("algorithm.kl_coef", "actor.kl_loss_coef", "reward"),
    ),
    Check(
        "length_limit",
        measure_length_limit,
        "most responses end only because of the limit",
        "check the stop tokens of the template, raise rollout.max_response_tokens, or penalize long responses",
        ("rollout.max_response_tokens",),
    ),
    Check(
        "truncation",
        measure_truncation,
        "the reward sees incomplete responses",
        "",
        ("rollout.max_response_tokens",),
    ),
    Check(
        "no_signal",
        measure_no_signal,
        "groups with equal scores have no advantage, so that the policy learns nothing from them",
        "use prompts of medium difficulty, raise samples_per_prompt, or check the reward",
        ("samples_per_prompt", "reward"),
    ),
    Check(
        "held_out_fall",
        measure_held_out_fall,
        "the policy overfits or exploits the reward",
        "compare saved responses of the best and the last evaluation, correct the reward, strengthen the KL penalty, "
        "or end the run earlier",
        ("actor.kl_loss_coef", "algorithm.kl_coef", "steps"),
    ),
    Check(
        "device_memory",
        measure_device_memory,
        "longer rows than so far may not fit into the memory",
        "use fewer tokens per micro-batch, a smaller KV cache, more shard ranks, or offload",
        ("ROLE.engine.max_tokens_per_microbatch", "ROLE.vllm.kv_cache_gb", "placement"),
    ),
    Check(
        "preemptions",
        measure_preemptions,
        "the KV cache is too small for the sequences that run at once, whose keys and values are computed again",
        "use a larger KV cache, or fewer sequences at once",
        ("ROLE.vllm.kv_cache_gb", "ROLE.max_num_seqs"),
    ),
    Check(
        "stale_share",
        measure_stale_share,
        "generation is faster than training, so that rollout time is wasted",
        "lower schedule.overprovision, raise schedule.max_staleness, or use fewer rollout devices",
        ("schedule.overprovision",),
    ),
    Check(
        "idle_devices",
        measure_idle_devices,
        "the placement does not match the work of the roles",
        "colocate these roles with others, give the pool fewer devices, or overlap generation and training with a "
        "schedule",
        ("placement",),
    ),
    Check(
        "low_mfu",
        measure_low_mfu,
        "micro-batches are too small, or the precision is higher than bfloat16",
        "use more tokens per micro-batch, compute in bfloat16, or record a profile with report.profile",
        ("ROLE.engine.max_tokens_per_microbatch", "ROLE.engine.compute_dtype"),
        is_lower_bound=True,
    ),
)
"""All checks, causes before their effects: the problem of an earlier check tends to cause those of later checks. For
example, too large an update causes a large KL, a low entropy and a low reward. The last four checks concern speed only.
The findings that begin in one step have this order.
"""
