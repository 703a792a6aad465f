"""Reward functions for tests of `flowrl check`, in a module that is imported quickly in another process."""

import time


def always_one(prompt: str, response: str, answer: str) -> float:
    return 1.0


def exact_text(prompt: str, response: str, answer: object) -> float:
    return float(response.strip() == str(answer))


def hangs(prompt: str, response: str, answer: str) -> float:
    time.sleep(600)
    return 0.0


def fails_for_an_empty_response(prompt: str, response: str, answer: str) -> float:
    return float(response[0] == answer[0])
