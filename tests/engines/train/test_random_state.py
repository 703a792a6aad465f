import json
import random

import numpy as np
import torch

from flowrl.engines.train.random_state import random_state, restore_random_state


def draw() -> tuple:
    return random.random(), random.gauss(), float(np.random.random()), np.random.normal(), torch.rand(2).tolist()


def test_every_generator_continues_from_its_restored_state() -> None:
    draw()
    state = json.loads(json.dumps(random_state()))
    expected = draw()
    draw()
    restore_random_state(state)
    assert draw() == expected
