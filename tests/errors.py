"""Assertions on the facts of error messages (setting names, values, locations), independent of their wording."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl.config import UserError

_TOKEN = re.compile(r"[\w./-]+(?::\d+)*")


def facts_of(message: str) -> set[str]:
    """Returns the words, dotted setting names, numbers, paths and file:line locations of a message."""
    return {token.rstrip(".:") for token in _TOKEN.findall(message)}


def missing_facts(message: str, *expected: object) -> set[str]:
    """Returns the expected facts that the message does not contain as whole tokens."""
    assert not any(re.search(r"\s", str(fact)) for fact in expected), "a fact is one token, not prose"
    return {str(fact) for fact in expected} - facts_of(message)


@contextmanager
def rejects(*expected: object, error: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that the block raises `error` with all expected facts in its message."""
    with pytest.raises(error) as caught:
        yield caught
    assert not (missing := missing_facts(str(caught.value), *expected)), f"{missing} not in: {caught.value}"
