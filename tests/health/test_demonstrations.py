"""Each health check finds its problem in a real run that is made to have it, and a run without problems has no finding.

The runs train the untrained model of the quickstart's task.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flowrl import Placement
from flowrl.health import read_findings
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train as train_grpo
from recipes.ppo.train import train as train_ppo
from tests.recipes.conftest import build_ppo_config, settings
from tests.small_task import prepare_small

HERE = __name__
STEPS = 5
"""Number of steps of a median in these runs."""


def share_of_sevens(prompt: str, response: str, answer: str, **columns: object) -> float:
    """Returns the share of sevens: a reward with a degenerate optimum."""
    return response.count("7") / max(1, len(response))


def num_sevens(prompt: str, response: str, answer: str, **columns: object) -> float:
    """Returns the number of sevens: a reward for long loops."""
    return float(response.count("7"))


def diversity(prompt: str, response: str, answer: str, **columns: object) -> float:
    """Returns the number of different characters relative to the length."""
    return len(set(response)) / max(1, len(response))


def constant(prompt: str, response: str, answer: str, **columns: object) -> float:
    return 1.0


def rare_jackpot(prompt: str, response: str, answer: str, **columns: object) -> float:
    """Returns a huge reward for the answers to a few prompts."""
    return 1000.0 if answer == "137" else share_of_sevens(prompt, response, answer)


def reward(name: str, evaluation: str | None = None) -> dict[str, Any]:
    names = {"function": f"{HERE}:{name}"}
    return {"reward": names | ({"evaluation": f"{HERE}:{evaluation}"} if evaluation else {})}


def actor(lr: float, **more: Any) -> dict[str, Any]:
    return {"optimizer": {"lr": lr, "max_grad_norm": 1.0}, **more}


APART = Placement(
    device="cpu",
    pools={"a": [1], "b": [1]},
    roles={"actor": "a", "rollout": "a", "reward": "a", "critic": "a", "reference": "b"},
)
SEPARATE = Placement(
    device="cpu",
    pools={"train": [1], "make": [1]},
    roles={"actor": "train", "reference": "train", "reward": "train", "rollout": "make"},
)
DETACHED = Placement(
    device="cpu",
    pools={"train": [1], "make": [2]},
    roles={"actor": "train", "reference": "train", "reward": "train", "rollout": "make"},
)


class Demonstration(NamedTuple):
    recipe: str
    check: str
    settings: Mapping[str, Any]
    num_steps: int = 20


DEMONSTRATIONS = (
    Demonstration(
        "grpo",
        "held_out_fall",
        {
            **reward("share_of_sevens", evaluation="diversity"),
            "actor": actor(3e-3),
            "evaluate_every": 5,
            "evaluation": {"samples": 4, "temperature": 1.0},
        },
        40,
    ),
    Demonstration("grpo", "length_limit", {"rollout": {"max_response_tokens": 2}}),
    Demonstration("grpo", "truncation", {"rollout": {"max_response_tokens": 2}}),
    Demonstration("grpo", "entropy_collapse", {"actor": actor(3e-2, kl_loss_coef=0.0)}, 40),
    Demonstration("grpo", "kl_growth", {**reward("share_of_sevens"), "actor": actor(3e-3, kl_loss_coef=1e-9)}, 30),
    Demonstration(
        "grpo",
        "ratio_range",
        {
            **reward("share_of_sevens"),
            "actor": actor(1e-2, kl_loss_coef=0.0),
            "ppo_epochs": 4,
            "schedule": {"kind": "one_step_off"},
            "placement": SEPARATE,
            "health": {"steps": 3},
        },
        8,
    ),
    Demonstration("grpo", "logprob_gap", {"actor": actor(1e-3, temperature=2.0)}, 3),
    Demonstration(
        "ppo",
        "gradient_spike",
        {**reward("rare_jackpot"), "algorithm": {"estimator": "gae"}, "actor": actor(1e-3)},
        60,
    ),
    Demonstration("grpo", "no_signal", reward("constant")),
    Demonstration(
        "grpo",
        "stale_share",
        {
            "backend": "ray",
            "placement": DETACHED,
            "schedule": {"kind": "async", "max_staleness": 1, "overprovision": 8, "max_concurrent": 32},
        },
    ),
    Demonstration("ppo", "idle_devices", {"placement": APART}),
    Demonstration("grpo", "repetition", {**reward("num_sevens"), "rollout": {"max_response_tokens": 24}}, 40),
    Demonstration("ppo", "value_function", {"critic_lr": 1e-9}),
    Demonstration(
        "grpo",
        "skipped_updates",
        {
            "rollout": {"max_response_tokens": 1},
            "algorithm": {"estimator": "grpo", "mask_truncated": True},
            "batch_size": 8,
            "minibatch_size": 4,
        },
    ),
)


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task") / "data"
    prepare_small(folder)
    return folder


Train = Callable[..., set[str]]


@pytest.fixture
def train(task_folder: Path, tmp_path: Path) -> Train:
    """Returns a function that trains a recipe with changed settings, and returns the names of the checks that fired."""

    def run(recipe: str, num_steps: int, changes: Mapping[str, Any]) -> set[str]:
        output = tmp_path / "run"
        model = {"path": task_folder / "model"}
        changed = {"steps": num_steps, "batch_size": 64, "minibatch_size": 32, "health": {"steps": STEPS}, **changes}
        changed["actor"] = {"model": model, **changes.get("actor", actor(1e-3))}
        if recipe == "ppo":
            critic = {"model": model, "optimizer": {"lr": changed.pop("critic_lr", 1e-3)}}
            train_ppo(build_ppo_config(task_folder, output, critic=critic, **changed))
        else:
            changed["actor"].setdefault("kl_loss_coef", 0.02)
            base = settings(task_folder, output) | {"algorithm": {"estimator": "grpo"}, "samples_per_prompt": 4}
            train_grpo(GRPOConfig.model_validate(base | changed))
        summary = json.loads((output / "summary.json").read_text())
        assert [finding["check"] for finding in summary["health"]] == [f.check for f in read_findings(output)]
        return {finding["check"] for finding in summary["health"]}

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("demonstration", DEMONSTRATIONS, ids=lambda demonstration: demonstration.check)
def test_a_run_with_a_problem_has_its_finding(
    demonstration: Demonstration, train: Train, request: pytest.FixtureRequest
) -> None:
    recipe, check, changes, num_steps = demonstration
    if changes.get("backend") == "ray":
        request.getfixturevalue("ray_session")
    assert check in train(recipe, num_steps, changes)


def test_a_learning_rate_that_breaks_the_policy_is_found_before_medians_exist(train: Train) -> None:
    assert "ratio_range" in train("ppo", STEPS - 2, {"actor": actor(1.0)})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_problems_has_no_finding(train: Train) -> None:
    """The same task with enough response tokens and a small learning rate."""
    assert train("grpo", 30, {"rollout": {"max_response_tokens": 24}, "actor": actor(3e-4)}) == set()
