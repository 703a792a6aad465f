"""The comparison of all policies: a summary, a table, a figure, and stories side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from flowrl.checkpoints.run_folder import replacing
from flowrl.report.plots import smooth
from recipes.pipeline.config import POLICIES, PipelineConfig
from recipes.pipeline.judge import WEIGHTS, mean_with_error, win_rate
from recipes.pipeline.sampling import MEANS, Row

LABELS = {"sft": "SFT", "ppo": "PPO with ptx", "ppo_without_ptx": "PPO without ptx", "dpo": "DPO"}
COLORS = {"sft": "#5b6470", "ppo": "#2a78b5", "ppo_without_ptx": "#c0562f", "dpo": "#2e8b57"}
COLUMNS = {
    "win_rate": ("win rate vs SFT", ".3f"),
    "true_score": ("true score", ".2f"),
    "reward": ("reward", ".2f"),
    "kl": ("KL to SFT (nats)", ".1f"),
    "perplexity": ("held-out perplexity", ".3f"),
}
"""Columns of the table: title and format. KL is per story."""

Summary = dict
Measures = Mapping[str, dict]
"""Results of `measure` (sampling.py) by policy."""


def compare(pipeline: PipelineConfig, measures: Measures, checkpoints: Mapping[str, Sequence[Row]]) -> Summary:
    """Returns the summary of the pipeline.

    `policies` has the columns of the table for each policy; `NAME_error` is half the width of a 95 % confidence
    interval. `sft` and `reward_model` have the held-out results of these stages. `ppo_checkpoints` has the measures of
    the checkpoints of both PPO stages (`checkpoints`). `equal_reward` has the perplexity of both stages at the same
    reward.
    """
    size, baseline = pipeline.num_samples, measures["sft"]["scores"]
    policies = {}
    for policy, values in measures.items():
        row: dict[str, float | None] = {"win_rate": None, "win_rate_error": None}
        if policy != "sft":
            row["win_rate"], row["win_rate_error"] = win_rate(values["scores"], baseline, size)
        for name, key in MEANS.items():
            # Stories with the same prompt depend on each other, so the error is computed from one mean per prompt.
            groups = [values[key][start : start + size] for start in range(0, len(values[key]), size)]
            row[name], row[f"{name}_error"] = mean_with_error([sum(group) / len(group) for group in groups])
        policies[policy] = row | {"perplexity": values["perplexity"], "aspects": dict(values["aspects"])}
    start = {name: policies["sft"][name] for name in (*MEANS, "perplexity")} | {"step": 0}
    curves = {name: [start, *rows] for name, rows in checkpoints.items()}
    stages = {name: _read(pipeline.output / name / "summary.json") for name in ("sft", "reward_model")}
    return {
        "policies": policies,
        "sft": {name: stages["sft"][name] for name in ("validation_loss_before", "validation_loss_after")},
        "reward_model": {
            "accuracy": stages["reward_model"]["accuracy_after"],
            "accuracy_of_the_true_score": _read(pipeline.output / "pairs" / "judge.json")["accuracy"],
        },
        "num_prompts": len(baseline) // size,
        "num_samples": size,
        "ppo_curves": {name: read_curve(pipeline.output / name) for name in curves},
        "ppo_checkpoints": curves,
        "equal_reward": compare_at_equal_reward(curves),
    }


def compare_at_equal_reward(curves: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Returns the highest reward that all runs reach, and the perplexity of each run when it first has this reward.

    Args:
        curves: measures of the checkpoints of each run, with `reward` and `perplexity`. Between two checkpoints both
            are interpolated linearly.
    """
    reward = min(max(row["reward"] for row in curve) for curve in curves.values())
    return {"reward": reward} | {name: _perplexity_at(reward, curve) for name, curve in curves.items()}


def _perplexity_at(reward: float, curve: Sequence[Row]) -> float:
    after = next(i for i, row in enumerate(curve) if row["reward"] >= reward)
    last = curve[after]
    if after == 0:
        return last["perplexity"]
    first = curve[after - 1]
    share = (reward - first["reward"]) / (last["reward"] - first["reward"])
    return first["perplexity"] + share * (last["perplexity"] - first["perplexity"])


def _read(path: Path) -> Summary:
    return json.loads(path.read_text(encoding="utf-8"))


def read_curve(run_folder: Path) -> list[tuple[float, float]]:
    """Returns (KL to the SFT model in nats per story, mean reward) of each step of a PPO run."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["kl"] * line["response_length"], line["reward"]) for line in lines if "kl" in line]


def _cells(summary: Summary, policy: str) -> list[str]:
    row, cells = summary["policies"][policy], [LABELS[policy]]
    for name, (_, form) in COLUMNS.items():
        value, error = row[name], row.get(f"{name}_error")
        cells.append("-" if value is None else f"{value:{form}}" + (f" ± {error:{form}}" if error is not None else ""))
    return cells


def _notes(summary: Summary) -> list[str]:
    model, equal = summary["reward_model"], summary["equal_reward"]
    return [
        f"{summary['num_prompts']} held-out prompts, {summary['num_samples']} stories each; ± is a 95 % interval.",
        f"Reward model: accuracy {model['accuracy']:.3f} on held-out pairs. The true score itself has "
        f"{model['accuracy_of_the_true_score']:.3f}, because labels are noisy.",
        f"At a reward of {equal['reward']:.2f}, PPO has a perplexity of {equal['ppo']:.3f} with ptx, and of "
        f"{equal['ppo_without_ptx']:.3f} without.",
    ]


def render_table(summary: Summary) -> Table:
    """Returns the table for the console."""
    table = Table("policy", title="Comparison", caption="\n".join(_notes(summary)), caption_justify="left")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right")
    for policy in summary["policies"]:
        table.add_row(*_cells(summary, policy))
    return table


def render_markdown(summary: Summary, measures: Measures) -> str:
    """Returns the table, and the stories of all policies for three prompts."""
    lines = ["# Comparison", "", "![comparison](comparison.png)", ""]
    lines += ["| policy | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines += ["|---|" + "---:|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(summary, policy)) + " |" for policy in summary["policies"]]
    lines += ["", *_notes(summary), ""]
    shown = measures["sft"]["stories"][:: summary["num_samples"]][:3]
    for i, row in enumerate(shown):
        lines += [f"## {row['prompt']}", ""]
        for policy, values in measures.items():
            lines += [f"**{LABELS[policy]}:** {values['stories'][i * summary['num_samples']]['story']}", ""]
    return "\n".join(lines)


def draw_comparison(output: Path, summary: Summary) -> None:
    """Draws `comparison.png`: win rates, reward against KL, perplexity against reward, and mean aspects."""
    figure = Figure(figsize=(12.5, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, gridspec_kw={"width_ratios": [1, 1.15]})
    policies = [policy for policy in POLICIES if policy in summary["policies"]]
    _draw_win_rates(axes[0, 0], summary, [policy for policy in policies if policy != "sft"])
    _draw_frontier(axes[0, 1], summary, policies)
    _draw_drift(axes[1, 0], summary, policies)
    _draw_aspects(axes[1, 1], summary, policies)
    with replacing(output / "comparison.png") as temporary:
        figure.savefig(temporary, format="png", dpi=130, facecolor="white")


def _style(axes: Axes, title: str, xlabel: str = "", grid: str = "x") -> None:
    axes.set_title(title, fontsize=11, loc="left", color="#222222", fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=9.5, color="#444444")
    axes.grid(axis=grid, color="#e3e3e3", linewidth=0.6)  # pyright: ignore[reportArgumentType] (a literal of matplotlib)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(labelsize=9.5, length=0, colors="#333333")


def _draw_win_rates(axes: Axes, summary: Summary, policies: list[str]) -> None:
    for y, policy in enumerate(policies):
        row = summary["policies"][policy]
        axes.errorbar(
            row["win_rate"], y, xerr=row["win_rate_error"], fmt="o", color=COLORS[policy], markersize=9, capsize=4,
            linewidth=2,
        )  # fmt: skip
        text = f"{row['win_rate']:.2f} ± {row['win_rate_error']:.2f}"
        axes.annotate(text, (row["win_rate"], y), (0, 9), textcoords="offset points", ha="center", color=COLORS[policy])
    axes.axvline(0.5, color="#222222", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(policies)), [LABELS[policy] for policy in policies])
    axes.set_ylim(len(policies) - 0.5, -0.6)
    axes.set_xlim(min(0.4, *(summary["policies"][policy]["win_rate"] - 0.1 for policy in policies)), 1.0)
    _style(axes, "Win rate against SFT under the true preference", "fraction of comparisons won (95 % interval)")


def _draw_frontier(axes: Axes, summary: Summary, policies: list[str]) -> None:
    for name, curve in summary["ppo_curves"].items():
        kl, reward = (smooth(values, weight=0.6) for values in zip(*curve, strict=True))
        axes.plot(kl, reward, color=COLORS[name], linewidth=1, alpha=0.55, marker=".", markersize=4)
    for policy in policies:
        row = summary["policies"][policy]
        axes.errorbar(
            row["kl"], row["reward"], xerr=row["kl_error"], yerr=row["reward_error"], fmt="o", color=COLORS[policy],
            markersize=9, linewidth=1.5, label=LABELS[policy], zorder=3,
        )  # fmt: skip
    axes.legend(fontsize=9, frameon=False, loc="lower right")
    axes.set_ylabel("score of the reward model", fontsize=9.5, color="#444444")
    _style(axes, "Reward against KL (lines: steps of PPO)", "KL to the SFT model (nats per story)", grid="both")


def _draw_drift(axes: Axes, summary: Summary, policies: list[str]) -> None:
    for name, curve in summary["ppo_checkpoints"].items():
        rewards, perplexities = ([row[key] for row in curve] for key in ("reward", "perplexity"))
        axes.plot(rewards, perplexities, color=COLORS[name], linewidth=1.2, alpha=0.7, marker=".", markersize=6)
    for policy in policies:
        row = summary["policies"][policy]
        axes.plot(row["reward"], row["perplexity"], "o", color=COLORS[policy], markersize=9, zorder=3)
    axes.set_ylabel("perplexity of held-out stories", fontsize=9.5, color="#444444")
    title = "Drift against reward (lines: checkpoints of PPO)"
    _style(axes, title, "score of the reward model", grid="both")


def _draw_aspects(axes: Axes, summary: Summary, policies: list[str]) -> None:
    for y, aspect in enumerate(WEIGHTS):
        values = [summary["policies"][policy]["aspects"][aspect] for policy in policies]
        axes.plot([min(values), max(values)], [y, y], color="#cccccc", linewidth=2, zorder=1)
        for policy, value in zip(policies, values, strict=True):
            axes.plot(value, y, "o", color=COLORS[policy], markersize=8, zorder=2)
    labels = [f"{aspect} (weight {weight:g})" for aspect, weight in WEIGHTS.items()]
    axes.set_yticks(range(len(WEIGHTS)), labels)
    axes.invert_yaxis()
    _style(axes, "Aspects of the true preference", "mean value (colors as above)")
