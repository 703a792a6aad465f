"""Trains with plain torch and transformers, one step per turn. `tests.benchmarks.regress` runs this file.

python -m tests.benchmarks.plain_steps {grpo,ppo} FOLDER SOCKET STEPS

A step has the passes of a step of `tests.benchmarks.step`, and nothing else: sampling with `generate`, the passes
without gradient, and one update of each trained model with AdamW. FOLDER has the models and the prompts that
`tests.benchmarks.step` has written. Its time is a lower bound for a step with the same matrix products.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from flowrl.algorithms import gae
from tests.benchmarks.step import RESPONSE, ROWS, SAMPLES
from tests.benchmarks.turns import TurnClient

KL_COEF, LEARNING_RATE, GAMMA, LAM = 0.04, 1e-4, 1.0, 0.95


def prompt_batches(folder: Path, samples: int) -> Iterator[Tensor]:
    """Yields the tokens of the prompts of each step, [ROWS, prompt tokens]."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder / "policy")(texts)["input_ids"])
    while True:
        for rows in ids.split(ROWS // samples):
            yield rows.repeat_interleave(samples, 0)


def load_policies(folder: Path) -> tuple[Any, Any]:
    """Returns the policy and its reference. Their responses have no end token."""
    policy, reference = (Qwen2ForCausalLM.from_pretrained(folder / "policy") for _ in range(2))
    policy.generation_config.eos_token_id = None
    return policy, reference


def sample(policy: Any, prompts: Tensor) -> Tensor:
    """Returns the prompts with responses of `RESPONSE` tokens."""
    mask = torch.ones_like(prompts)
    return policy.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=RESPONSE)


def logprobs_of(policy: Any, ids: Tensor) -> Tensor:
    """Returns the log-probabilities of the response tokens, [ROWS, RESPONSE]."""
    logits = policy(ids).logits[:, -RESPONSE - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -RESPONSE:, None])[..., 0]


def scores_of(scorer: Any, ids: Tensor) -> Tensor:
    """Returns the outputs of the scalar head after the prompt and after each token but the last, [ROWS, RESPONSE]."""
    return scorer.score(scorer.model(ids).last_hidden_state)[:, -RESPONSE - 1 : -1, 0]


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def train_grpo(folder: Path, turns: TurnClient, steps: int) -> None:
    policy, reference = load_policies(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    capitals = torch.arange(policy.config.vocab_size) % 2 == 0  # a reward that costs nothing
    for _, prompts in zip(range(steps), prompt_batches(folder, SAMPLES), strict=False):
        turns.wait()
        ids = sample(policy, prompts)
        with torch.no_grad():
            reference_logprobs = logprobs_of(reference, ids)
        groups = capitals[ids[:, -RESPONSE:]].float().mean(1).view(-1, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        logprobs = logprobs_of(policy, ids)
        log_ratio = reference_logprobs - logprobs
        kl = (log_ratio.exp() - 1 - log_ratio).mean()
        update(optimizer, policy_loss(logprobs, logprobs.detach(), advantages) + KL_COEF * kl)


def train_ppo(folder: Path, turns: TurnClient, steps: int) -> None:
    policy, reference = load_policies(folder)
    critic, scorer = (Qwen2ForSequenceClassification.from_pretrained(folder / "scorer") for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in (policy, critic)]
    mask = torch.ones(ROWS, RESPONSE, dtype=torch.bool)
    for _, prompts in zip(range(steps), prompt_batches(folder, 1), strict=False):
        turns.wait()
        ids = sample(policy, prompts)
        with torch.no_grad():
            old, reference_logprobs = logprobs_of(policy, ids), logprobs_of(reference, ids)
            values = scores_of(critic, ids)
            rewards = KL_COEF * (reference_logprobs - old)
            rewards[:, -1] += scorer(ids).logits[:, 0]
        advantages, returns = gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
        update(optimizers[1], 0.5 * (scores_of(critic, ids) - returns).square().mean())
        update(optimizers[0], policy_loss(logprobs_of(policy, ids), old, advantages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=["grpo", "ppo"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("socket")
    parser.add_argument("steps", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = train_grpo if arguments.algorithm == "grpo" else train_ppo
    train(arguments.folder, TurnClient(arguments.socket), arguments.steps)


if __name__ == "__main__":
    main()
