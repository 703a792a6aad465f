"""A reward function whose module does not finish its import in a minute."""

import time

time.sleep(60)


def score(response: str) -> float:
    return 0.0
