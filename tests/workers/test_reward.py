"""Reward workers of a run call functions of the user, which must not gain control over the run."""

import pytest

from flowrl import Batch
from flowrl.config import RewardConfig
from flowrl.data.folders.private_folder import private_folder
from flowrl.workers import Reward
from tests.conftest import ClusterMaker
from tests.rewards.test_pool import skip_without
from tests.user_code.attacks import reach


@pytest.mark.slow
def test_a_reward_function_cannot_reach_the_private_folder_of_its_run(
    open_cluster: ClusterMaker, ray_session: None
) -> None:
    """The folder contains the token of Ray and the socket of the fork server."""
    folder = private_folder()
    assert {"list", "token"} <= set(reach(folder)) and any(folder.glob("fork-*"))
    config = RewardConfig(function="tests.user_code.attacks:count_ways", workers=1)
    cluster = open_cluster("ray", {"main": [1]}, {"reward": "main"}, num_threads=1)
    reward = cluster.group("reward", Reward, config)
    (_, missing), *_ = reward.find_missing_protections()
    skip_without("private_folders", missing)
    row = {"prompt": "", "response": str(folder), "prompt_id": 0, "sample": 0}
    assert reward.score(Batch.from_rows([row])).get("scores").tolist() == [0.0]
