"""Settings of the pipeline, and of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config import Config, ConfigError, EpochConfig, FilePath, OnPolicyConfig, load
from recipes.dpo.config import DPOConfig
from recipes.pipeline.stories import all_prompts
from recipes.ppo.config import PPOConfig
from recipes.reward_model.config import RewardModelRunConfig
from recipes.sft.config import SFTConfig

FOLDER = Path(__file__).parent

MAX_STORY_TOKENS, MAX_TOKENS = 80, 112
"""Limits of a generated story, and of a prompt with a story, in tokens, as in the YAML files of the stages."""


class PipelineConfig(Config):
    """Settings of the pipeline (recipes/pipeline/run.py). Settings of a stage begin with its name, as in
    `ppo.steps=40`.
    """

    output: FilePath = Path("runs/pipeline")
    """Folder with the results of all stages. A finished stage in this folder is not repeated."""

    seed: NonNegativeInt = 0
    """Seed of the stories, the initial weights, and all stages."""

    num_stories: PositiveInt = 5_000
    """Number of stories for SFT and for ptx."""

    num_pairs: PositiveInt = 6_000
    """Number of prompts for which the SFT model tells two stories, which form a pair. PPO uses the same prompts."""

    num_held_out: PositiveInt = 300
    """Number of held-out prompts for evaluations of SFT, the reward model and DPO, and for the comparison."""

    num_samples: PositiveInt = 2
    """Number of stories per held-out prompt in the comparison of the policies."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "PipelineConfig":
        used, total = self.num_held_out + self.num_pairs, len(all_prompts(self.seed))
        if used >= total:
            raise ValueError(
                f"num_held_out + num_pairs is {used}, but there are {total} prompts, and SFT needs some of them: lower "
                "one of them"
            )
        return self


@dataclass(frozen=True)
class Stage:
    """A training stage: a YAML file of this folder, and the recipe that trains it."""

    file: str
    config: type[EpochConfig] | type[OnPolicyConfig]
    train: str
    """Training function as `module:function`. It is imported after all settings are validated."""


STAGES: Mapping[str, Stage] = {
    "sft": Stage("sft.yaml", SFTConfig, "recipes.sft.train:train"),
    "reward_model": Stage("reward_model.yaml", RewardModelRunConfig, "recipes.reward_model.train:train"),
    "ppo": Stage("ppo.yaml", PPOConfig, "recipes.ppo.train:train"),
    "ppo_without_ptx": Stage("ppo.yaml", PPOConfig, "recipes.ppo.train:train"),
    "dpo": Stage("dpo.yaml", DPOConfig, "recipes.dpo.train:train"),
}
"""Training stages, in order."""

PPO_STAGES = ("ppo", "ppo_without_ptx")
"""Stages that differ only in ptx."""

POLICIES = ("sft", "ppo", "ppo_without_ptx", "dpo")
"""Stages whose model is a policy."""


def read_settings(words: Sequence[str]) -> tuple[PipelineConfig, dict[str, EpochConfig | OnPolicyConfig]]:
    """Returns the settings of the pipeline and of each stage. Raises ConfigError if a setting is invalid."""
    own: list[str] = []
    of_stage: dict[str, list[str]] = {name: [] for name in STAGES}
    for word in words:
        stage, dot, setting = word.partition(".")
        if dot and stage in STAGES and "=" in setting:
            of_stage[stage].append(setting)
        else:
            own.append(word)
    pipeline = load(None, own, PipelineConfig)
    # PPO without ptx has the same settings, so that ptx is the only difference.
    of_stage["ppo_without_ptx"] = [*of_stage["ppo"], "ptx=null", *of_stage["ppo_without_ptx"]]
    configs = {}
    for name, stage in STAGES.items():
        try:
            overrides = [*_inputs(pipeline)[name], f"output={pipeline.output / name}", f"seed={pipeline.seed}"]
            configs[name] = load(FOLDER / stage.file, [*overrides, *of_stage[name]], stage.config)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    return pipeline, configs


def _inputs(pipeline: PipelineConfig) -> dict[str, list[str]]:
    """Returns the settings that connect the stages: each stage reads the outputs of earlier stages."""
    output, data = pipeline.output, pipeline.output / "data"
    sft, pairs = output / "sft" / "model", output / "pairs"
    trained_pairs = [f"data.train={pairs}/train.jsonl", f"data.test={pairs}/test.jsonl"]
    ppo = [
        f"actor.model.path={sft}",
        f"critic.model.path={sft}",
        f"reward.model.path={output}/reward_model/model",
        f"data.train={data}/prompts.jsonl",
    ]
    return {
        "sft": [f"actor.model.path={data}/model", f"data.train={data}/sft.jsonl", f"data.test={data}/sft_test.jsonl"],
        "reward_model": [f"reward.model.path={sft}", *trained_pairs],
        "ppo": [*ppo, f"ptx.data={data}/sft.jsonl"],
        "ppo_without_ptx": ppo,
        "dpo": [f"actor.model.path={sft}", *trained_pairs],
    }
