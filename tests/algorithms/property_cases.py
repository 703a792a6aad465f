"""Functions on [B, T] with common columns and their NumPy formulas, for tests of shared properties."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl import algorithms as a
from tests.algorithms.policy_cases import columns as policy_columns

Columns = dict[str, Tensor]
Arrays = dict[str, np.ndarray]


def columns(seed: int, num_rows: int = 6, num_positions: int = 7) -> Columns:
    """Returns columns of policy losses, scores, logits, hidden states and groups; the first row is fully masked."""
    generator = torch.Generator().manual_seed(seed + 1000)
    rows, tokens = (num_rows,), (num_rows, num_positions)
    shapes = {"scores": rows, "greedy_scores": rows, "logits": (*tokens, 5), "ref_logits": (*tokens, 5)}
    shapes |= {"hidden": (*tokens, 3), "weight": (5, 3)}
    drawn = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    drawn["tokens"] = torch.randint(5, tokens, generator=generator)
    drawn["groups"] = torch.arange(num_rows) % 2 * 10**9 - 3
    drawn["lengths"] = torch.randint(1, 9, rows, generator=generator)
    drawn["correct"] = drawn["scores"] > 0
    return policy_columns(seed, num_rows, num_positions) | drawn


@dataclass(frozen=True)
class Case:
    """Function of columns, and its NumPy formula from the paper."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    formula: Callable[[Arrays], Any]

    def __call__(self, table: Columns) -> tuple[Tensor, ...]:
        """Returns the results as tensors, without named metrics."""
        actual = self.function(*(table[name] for name in self.inputs))
        actual = actual[0] if isinstance(actual, tuple) and isinstance(actual[-1], dict) else actual
        if isinstance(actual, dict):
            actual = torch.tensor([metric.result() for metric in actual.values()], dtype=torch.float64)
        if isinstance(actual, a.WeightSums):
            actual = torch.tensor([actual.mean(), actual.effective_sample_size(), actual.result()], dtype=torch.float64)
        return actual if isinstance(actual, tuple) else (actual,)


def masked(values: np.ndarray, table: Arrays) -> np.ndarray:
    return np.where(table["mask"], values, 0.0)


def whitened(values: np.ndarray, mask: np.ndarray, mean: bool = True) -> np.ndarray:
    x = values[mask]
    scaled = (values - x.mean()) / np.sqrt(np.sum((x - x.mean()) ** 2) / (len(x) - 1) + 1e-8)
    return np.where(mask, scaled if mean else scaled + x.mean(), 0.0)


def returns_to_go(table: Arrays, gamma: float) -> np.ndarray:
    actual = np.zeros(table["mask"].shape)
    for row, mask in enumerate(table["mask"]):
        chosen = np.flatnonzero(mask)
        for start, t in enumerate(chosen):
            later = table["advantages"][row, chosen[start:]]
            actual[row, t] = np.sum(gamma ** np.arange(len(later)) * later)
    return actual


def covariances(table: Arrays) -> np.ndarray:
    x, y, mask = table["logprobs"], table["advantages"], table["mask"]
    return masked((x - x[mask].mean()) * (y - y[mask].mean()), table)


def k3(logprobs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return np.exp(reference) / np.exp(logprobs) - 1 - (reference - logprobs)


def shaped(table: Arrays) -> np.ndarray:
    rewards = masked(-0.3 * k3(table["logprobs"], table["old_logprobs"]), table)
    for row, mask in enumerate(table["mask"]):
        if mask.any():
            rewards[row, np.flatnonzero(mask)[-1]] += table["scores"][row]
    return rewards


def ratios(table: Arrays, level: str) -> np.ndarray:
    actual = np.ones(table["mask"].shape)
    for row, mask in enumerate(table["mask"]):
        each = np.exp(table["logprobs"][row] - table["old_logprobs"][row])
        total = np.prod(each[mask])
        actual[row] = {"token": each, "sequence": total, "geometric": total ** (1 / max(1, mask.sum()))}[level]
    return masked(actual, table)


def sums(table: Arrays, level: str) -> np.ndarray:
    w = table["advantages"][table["mask"]]
    if level != "token":
        w = np.array(
            [row[mask][-1] for row, mask in zip(table["advantages"], table["mask"], strict=True) if mask.any()]
        )
    return np.array([w.mean(), w.sum() ** 2 / (w**2).sum(), w.sum() ** 2 / (w**2).sum() / len(w)])


def mismatch(table: Arrays) -> np.ndarray:
    mask = table["mask"]
    x, y = table["logprobs"][mask], table["old_logprobs"][mask]
    rows = [(table["logprobs"][i][m], table["old_logprobs"][i][m]) for i, m in enumerate(mask) if m.any()]
    actual = {
        "logprob_gap_mean": np.abs(x - y).mean(),
        "prob_gap_mean": np.abs(np.exp(x) - np.exp(y)).mean(),
        "kl_k1": (y - x).mean(),
        "kl_k3": k3(y, x).mean(),
        "chi_square_token": (np.exp(x - y) ** 2 - 1).mean(),
        "perplexity": np.mean([np.exp(-r.mean()) for r, _ in rows]),
        "rollout_perplexity": np.mean([np.exp(-s.mean()) for _, s in rows]),
        "perplexity_ratio": np.mean([np.exp(s.mean() - r.mean()) for r, s in rows]),
        "chi_square_sequence": np.mean([np.exp((r - s).sum()) ** 2 - 1 for r, s in rows]),
        "logprob_gap_max": np.abs(x - y).max(),
        "prob_gap_max": np.abs(np.exp(x) - np.exp(y)).max(),
        "prob_correlation": np.corrcoef(np.exp(x), np.exp(y))[0, 1],
    }
    return np.array(list(actual.values()))


def row_totals(table: Arrays, mean: bool) -> np.ndarray:
    each = [row[mask] for row, mask in zip(table["logprobs"], table["mask"], strict=True)]
    return np.array([x.sum() / (max(1, len(x)) if mean else 1) for x in each])


def reduced(table: Arrays, mode: str) -> float:
    rows = [row[mask] for row, mask in zip(table["advantages"], table["mask"], strict=True) if mask.any()]
    total = sum(r.mean() if mode == "seq_mean_token_mean" else r.sum() for r in rows)
    return float(total / 7 / (9 if mode == "seq_mean_token_sum_norm" else 1))


def gspo_token(table: Arrays) -> np.ndarray:
    s, adv = ratios(table, "geometric"), table["advantages"]
    return masked(np.maximum(-adv * s, -adv * np.clip(s, 0.8, 1.3)), table)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def chosen(logits: np.ndarray, table: Arrays) -> np.ndarray:
    """Returns softmax of the logits at t - 1 for column t, at temperature 0.7."""
    actual = np.zeros(table["tokens"].shape)
    for row, t in np.ndindex(*actual.shape):
        if t > 0:
            actual[row, t] = np.log(softmax(logits[row, t - 1] / 0.7)[table["tokens"][row, t]])
    return actual


def before(values: np.ndarray) -> np.ndarray:
    """Shifts values of each position to the next token."""
    return np.pad(values[:, :-1], ((0, 0), (1, 0)))


def entropy(logits: np.ndarray) -> np.ndarray:
    p = softmax(logits / 0.7)
    return before(-(p * np.log(p)).sum(-1))


def grouped(table: Arrays) -> np.ndarray:
    """GPG with the deviation: B / (B - M) (r - mean) / (std + eps)."""
    r, actual, silent = table["scores"], np.zeros(len(table["scores"])), 0
    for group in np.unique(table["groups"]):
        members = table["groups"] == group
        x = r[members]
        silent += len(x) if np.ptp(x) == 0 else 0
        actual[members] = (x - x.mean()) / (x.std(ddof=1) + 1e-4)
    return masked((actual * len(r) / (len(r) - silent))[:, None], table)


def short_and_correct(table: Arrays) -> np.ndarray:
    actual = np.zeros(len(table["lengths"]))
    for i, (length, group) in enumerate(zip(table["lengths"], table["groups"], strict=True)):
        peers = table["lengths"][table["groups"] == group]
        if np.ptp(peers):
            x = 0.5 - (length - peers.min()) / np.ptp(peers)
            actual[i] = x if table["correct"][i] else min(0, x)
    return actual


MOMENTS = a.RewardMoments(count=5, mean=0.25, sum_of_squares=9.0)
HEAD = ("hidden", "weight", "tokens", "mask")
ROW_INPUTS = ("lengths", "correct", "groups")
POLICY = ("logprobs", "old_logprobs", "advantages", "mask")
GAP = ("logprobs", "old_logprobs", "mask")

CASES: dict[str, Case] = {
    "whiten": Case(a.whiten, ("advantages", "mask"), lambda t: whitened(t["advantages"], t["mask"])),
    "whiten, mean kept": Case(
        partial(a.whiten, shift_mean=False),
        ("advantages", "mask"),
        lambda t: whitened(t["advantages"], t["mask"], mean=False),
    ),
    "reinforce_plus_plus": Case(
        partial(a.reinforce_plus_plus, gamma=0.9),
        ("advantages", "mask"),
        lambda t: whitened(returns_to_go(t, 0.9), t["mask"]),
    ),
    "remax": Case(
        a.remax, ("scores", "greedy_scores", "mask"), lambda t: masked((t["scores"] - t["greedy_scores"])[:, None], t)
    ),
    "gpg, std": Case(partial(a.gpg, normalize_std=True), ("scores", "groups", "mask"), grouped),
    "token_covariances": Case(a.token_covariances, ("logprobs", "advantages", "mask"), covariances),
    "kl_shaped_rewards": Case(
        partial(a.kl_shaped_rewards, coef=0.3, kind="k3"), ("scores", "logprobs", "old_logprobs", "mask"), shaped
    ),
    "kl_loss": Case(partial(a.kl_loss, kind="k3"), GAP, lambda t: masked(k3(t["logprobs"], t["old_logprobs"]), t)),
    "kl_loss, straight-through": Case(
        partial(a.kl_loss, kind="k3", gradient="k2"), GAP, lambda t: masked(k3(t["logprobs"], t["old_logprobs"]), t)
    ),
    "kl_loss, abs": Case(
        partial(a.kl_loss, kind="abs"), GAP, lambda t: masked(np.abs(t["logprobs"] - t["old_logprobs"]), t)
    ),
    **{
        f"truncated_weights without bounds, {level}": Case(
            partial(a.truncated_weights, level=level, max_weight=math.inf),
            GAP,
            lambda t, level=level: masked(ratios(t, level), t),
        )
        for level in ("token", "sequence", "geometric")
    },
    "truncated_weights": Case(
        partial(a.truncated_weights, level="sequence", min_weight=0.8, max_weight=1.5),
        GAP,
        lambda t: masked(np.clip(ratios(t, "sequence"), 0.8, 1.5), t),
    ),
    "masked_weights": Case(
        partial(a.masked_weights, level="token", min_weight=0.8, max_weight=1.5),
        GAP,
        lambda t: ratios(t, "token") * ((ratios(t, "token") >= 0.8) & (ratios(t, "token") <= 1.5)),
    ),
    "normalized_weights": Case(
        partial(a.normalized_weights, mean=1.7), ("advantages", "mask"), lambda t: masked(t["advantages"] / 1.7, t)
    ),
    **{
        f"weight_sums, {level}": Case(
            partial(a.weight_sums, level=level), ("advantages", "mask"), lambda t, level=level: sums(t, level)
        )
        for level in ("token", "sequence")
    },
    "mismatch_metrics": Case(a.mismatch_metrics, GAP, mismatch),
    **{
        f"sequence_logprobs, {mode}": Case(
            partial(a.sequence_logprobs, mode=mode),
            ("logprobs", "mask"),
            lambda t, mode=mode: row_totals(t, mode == "mean"),
        )
        for mode in ("sum", "mean")
    },
    **{
        f"aggregate, {mode}": Case(
            partial(a.aggregate, mode=mode, denominator=7.0, scale=9.0 if mode.endswith("norm") else None),
            ("advantages", "mask"),
            lambda t, mode=mode: reduced(t, mode),
        )
        for mode in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
    },
    "gspo_token": Case(partial(a.gspo_token_loss, clip_low=0.2, clip_high=0.3), POLICY, gspo_token),
    "reinforce": Case(a.reinforce_loss, POLICY, lambda t: masked(-t["advantages"] * t["logprobs"], t)),
    "gpg_loss": Case(a.gpg_loss, POLICY, lambda t: masked(-t["advantages"] * t["logprobs"], t)),
    "token_logprobs": Case(
        partial(a.token_logprobs, temperature=0.7), ("logits", "tokens"), lambda t: chosen(t["logits"], t)
    ),
    "token_entropy": Case(partial(a.token_entropy, temperature=0.7), ("logits",), lambda t: entropy(t["logits"])),
    "logprobs_from_hidden": Case(
        partial(a.logprobs_from_hidden, temperature=0.7),
        HEAD,
        lambda t: masked(chosen(t["hidden"] @ t["weight"].T, t), t),
    ),
    "logprobs_and_entropy_from_hidden": Case(
        partial(a.logprobs_and_entropy_from_hidden, temperature=0.7),
        HEAD,
        lambda t: (
            masked(chosen(t["hidden"] @ t["weight"].T, t), t),
            masked(entropy(t["hidden"] @ t["weight"].T), t),
        ),
    ),
    "normalize_rewards": Case(
        partial(a.normalize_rewards, moments=MOMENTS, shift_mean=True),
        ("scores",),
        lambda t: (t["scores"] - 0.25) / 1.5,
    ),
    "length_penalty": Case(a.length_penalty, ("lengths", "correct", "groups"), short_and_correct),
    "kto_reference_kl": Case(
        a.kto_reference_kl, ("scores", "greedy_scores"), lambda t: max(0, (t["scores"] - t["greedy_scores"]).mean())
    ),
}
"""Functions by name, with their inputs and formulas."""

UNORDERED = {name for name in CASES if name.startswith(("weight_sums", "mismatch", "aggregate", "kto_reference"))}
"""Functions whose results are not per row."""

ROWS_ALONE = {name for name, case in CASES.items() if set(case.inputs) <= {"scores", "greedy_scores", *ROW_INPUTS}}
"""Functions without token inputs."""
