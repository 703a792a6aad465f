"""Stories that trained policies tell: labeled pairs, and the measures that compare the policies."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from flowrl import Cluster, Placement
from flowrl.checkpoints.checkpoints import Checkpoints
from flowrl.checkpoints.run_folder import replacing, write_json
from flowrl.config import DataConfig, ModelConfig, ReferenceConfig, RewardConfig, RolloutConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.checkpoint.export import export_model
from flowrl.run.datasets import SftExamples
from flowrl.run.datasets.prompt_data import read_stream
from flowrl.run.evaluation import mean_loss
from flowrl.workers import Reference, Reward, Rollout
from recipes.pipeline.config import MAX_STORY_TOKENS, MAX_TOKENS, POLICIES, PipelineConfig
from recipes.pipeline.judge import WEIGHTS, count_win, prefers_first, rate_aspects, score
from recipes.pipeline.prepare import answer
from recipes.pipeline.stories import Prompt
from recipes.quickstart.prepare import write_lines

NUM_SHOWN = 20
"""Number of stories that are saved with the measures of a policy."""

MEANS = {"true_score": "scores", "reward": "rewards", "kl": "log_ratios"}
"""Column of the comparison -> measure whose mean is in this column."""

Row = dict


def write_pairs(pipeline: PipelineConfig) -> None:
    """Creates the folder `pairs` atomically, unless it exists: pairs of stories of the SFT model, with labels.

    `train.jsonl` has pairs for the prompts of PPO, and `test.jsonl` for the held-out prompts. `judge.json` has the
    accuracy of the hidden score on the held-out pairs, which no reward model can exceed much.
    """
    folder = pipeline.output / "pairs"
    if folder.exists():
        return
    generator = random.Random(f"labels {pipeline.seed}")
    rows = {}
    for name, prompts in (("train", "prompts"), ("test", "prompts_test")):
        with _open_cluster(("rollout",)) as cluster:
            batch = _generate_stories(
                cluster, pipeline, _model(pipeline, "sft"), f"{prompts}.jsonl", num_samples=2, seed=pipeline.seed
            )
            texts, stories = batch.get("prompt"), batch.get("response")
        drawn = [label(*row, generator) for row in zip(texts[::2], stories[::2], stories[1::2], strict=True)]
        rows[name] = [pair for pair in drawn if pair is not None]
    with replacing(folder) as temporary:
        temporary.mkdir()
        for name, pairs in rows.items():
            write_lines(temporary / f"{name}.jsonl", pairs)
        write_json(temporary / "judge.json", {"accuracy": judge_accuracy(rows["test"]), "pairs": len(rows["test"])})


def label(prompt: str, first: str, second: str, generator: random.Random) -> Row | None:
    """Returns a pair, labeled by a draw from the true preference. None if a story is empty or the stories are equal."""
    subject, texts = Prompt.parse(prompt), [first, second]
    if not first.strip() or not second.strip() or first == second:
        return None
    if not prefers_first(score(subject, first), score(subject, second), generator):
        texts.reverse()
    context = [{"from": "human", "content": prompt}]
    return {"context": context, "chosen": answer(texts[0]), "rejected": answer(texts[1])}


def judge_accuracy(pairs: Sequence[Row]) -> float:
    """Returns the fraction of pairs whose chosen story has the higher hidden score. Equal scores count half."""
    total = 0.0
    for pair in pairs:
        subject = Prompt.parse(pair["context"][0]["content"])
        chosen, rejected = (score(subject, pair[side][0]["content"]) for side in ("chosen", "rejected"))
        total += count_win(chosen, rejected)
    return total / len(pairs)


def measure(pipeline: PipelineConfig, policy: str) -> Row:
    """Returns the measures of a stage's model (`measure_model`). Reads them from a file if it exists."""
    # Each policy has its own seed. With a common seed, similar policies would tell many equal stories.
    seed = pipeline.seed + 1 + POLICIES.index(policy)
    return _read_or_compute(
        pipeline.output / "comparison" / f"{policy}.json",
        lambda: measure_model(pipeline, _model(pipeline, policy), num_samples=pipeline.num_samples, seed=seed),
    )


def measure_checkpoints(pipeline: PipelineConfig, policy: str) -> list[Row]:
    """Returns the means (`MEANS`) and the perplexity of each checkpoint of a PPO stage, with its step.

    Each checkpoint generates one story per held-out prompt, with the same seed. Reads the results of a checkpoint from
    a file if it exists.
    """
    checkpoints = Checkpoints(pipeline.output / policy)

    def measure_checkpoint(step: int) -> Row:
        with TemporaryDirectory(dir=pipeline.output) as folder:
            model = ModelConfig(path=Path(folder) / "model")
            export_model(checkpoints.read(step).role("actor"), model.path)
            measures = measure_model(pipeline, model, num_samples=1, seed=pipeline.seed)
        means = {key: mean(measures[name]) for key, name in MEANS.items()}
        return {"step": step, **means, "perplexity": measures["perplexity"]}

    folder = pipeline.output / "comparison"
    return [
        _read_or_compute(folder / f"{policy}-step-{step:06d}.json", partial(measure_checkpoint, step))
        for step in checkpoints.require_steps()
    ]


def _read_or_compute(path: Path, compute: Callable[[], Row]) -> Row:
    """Returns the content of a JSON file. If it does not exist, first writes the result of `compute` to it."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_json(path, compute())
    return json.loads(path.read_text(encoding="utf-8"))


def measure_model(pipeline: PipelineConfig, model: ModelConfig, *, num_samples: int, seed: int) -> Row:
    """Returns the measures of a policy on the held-out prompts and stories.

    `scores` (hidden scores), `rewards` (of the reward model) and `log_ratios` (to the SFT model; their mean is the KL)
    have one value per story. Stories with the same prompt are adjacent. `aspects` has the mean of each aspect, and
    `perplexity` is the perplexity of the held-out stories.
    """
    with _open_cluster(("rollout", "policy", "sft", "reward")) as cluster:
        batch = _generate_stories(cluster, pipeline, model, "prompts_test.jsonl", num_samples=num_samples, seed=seed)
        reward = cluster.group("reward", Reward, RewardConfig(model=_model(pipeline, "reward_model")))
        own = cluster.group("policy", Reference, ReferenceConfig(model=model))
        sft = cluster.group("sft", Reference, ReferenceConfig(model=_model(pipeline, "sft")))
        batch["rewards"] = reward.score(batch).select("scores")
        batch["own"], batch["sft"] = own.response_logprobs(batch), sft.response_logprobs(batch)
        held_out = SftExamples(pipeline.output / "data" / "sft_test.jsonl", model, max_tokens=MAX_TOKENS).batch()
        held_out["logprobs"] = own.logprobs(held_out)
        loss = held_out.reduce(mean_loss, ("logprobs", "response_mask")).get()
        prompts, stories = batch.get("prompt"), batch.get("response")
        rewards, log_ratios = batch.get("rewards").tolist(), (batch.get("own") - batch.get("sft")).tolist()
    subjects = [Prompt.parse(prompt) for prompt in prompts]
    rated = [rate_aspects(subject, story) for subject, story in zip(subjects, stories, strict=True)]
    return {
        "scores": [score(subject, story) for subject, story in zip(subjects, stories, strict=True)],
        "rewards": rewards,
        "log_ratios": log_ratios,
        "aspects": {name: mean(row[name] for row in rated) for name in WEIGHTS},
        "perplexity": math.exp(loss),
        "stories": [{"prompt": p, "story": s} for p, s in zip(prompts, stories, strict=True)][:NUM_SHOWN],
    }


@contextmanager
def _open_cluster(roles: Sequence[str]) -> Iterator[Cluster]:
    """Yields a cluster with all roles in this process."""
    placement = Placement(device="cpu", pools={"main": [1]}, roles=dict.fromkeys(roles, "main"))
    with Cluster(placement, backend="inline", num_threads=1) as cluster:
        yield cluster


def _generate_stories(
    cluster: Cluster, pipeline: PipelineConfig, model: ModelConfig, prompts: str, *, num_samples: int, seed: int
) -> Batch:
    """Returns `num_samples` adjacent stories of a policy for each prompt of a file."""
    config = RolloutConfig(max_response_tokens=MAX_STORY_TOKENS)
    rollout = cluster.group("rollout", Rollout, config, model, seed=seed)
    file = pipeline.output / "data" / prompts
    data = DataConfig(train=file, max_prompt_tokens=MAX_TOKENS)
    stream = read_stream(data.training_files, data, ChatTokenizer(model.path), seed=seed)
    batch = Batch.from_rows(stream.evaluation_rows()).with_samples(num_samples)
    return batch.union(rollout.generate(batch))


def _model(pipeline: PipelineConfig, stage: str) -> ModelConfig:
    return ModelConfig(path=pipeline.output / stage / "model")
