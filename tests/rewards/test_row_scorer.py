"""The scores of a row do not depend on the order in which its reward functions end."""

import asyncio
from contextlib import closing

from flowrl.config import RewardConfig
from flowrl.rewards.row_scorer import RowScorer


async def late(response: str) -> float:
    await asyncio.sleep(0.05)
    return 1.0


async def early(response: str) -> float:
    return 2.0


def test_the_calls_of_a_row_are_in_the_order_of_its_rewards() -> None:
    components = [{"name": name, "function": f"{__name__}:{name}"} for name in ("late", "early")]
    with closing(RowScorer(RewardConfig.model_validate({"components": components}), workers=1)) as scorer:
        scores = scorer.submit({"prompt": "1+1", "response": "2"}).result(60)
    assert [(name, call.score) for name, call in scores.calls.items()] == [("late", 1.0), ("early", 2.0)]
