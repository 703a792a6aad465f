"""The roles: each wraps an engine and states which columns it reads and writes."""

from flowrl.workers.actor import Actor
from flowrl.workers.critic import Critic
from flowrl.workers.reference import Reference
from flowrl.workers.reward import Reward, RewardModel, reward_worker
from flowrl.workers.rollout import Rollout

__all__ = ["Actor", "Critic", "Reference", "Reward", "RewardModel", "Rollout", "reward_worker"]
