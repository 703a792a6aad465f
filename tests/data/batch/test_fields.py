import re
from pathlib import Path

import pytest

from flowrl import workers
from flowrl.controller.worker import Worker, get_registered_methods
from flowrl.data.batch.fields import FIELDS

PAGE = Path(__file__).parents[3] / "docs" / "batch.md"


def test_the_example_of_the_page_runs():
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0], {})


def test_the_page_shows_the_table_of_columns():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [(name, *field) for name, field in FIELDS.items()]


def test_every_column_is_a_row_or_token_column():
    assert {field.kind.split(", ")[0] for field in FIELDS.values()} == {"row", "token"}


RENAMED = {"logprobs", "topk_logprobs"}
"""Columns that a recipe always stores under another name, such as `ref_logprobs`."""


@pytest.mark.parametrize("name", [name for name in workers.__all__ if name not in ("LANGUAGE_MODELING", "PTX", "Loss")])
def test_the_columns_that_a_worker_writes_are_standard_columns(name: str) -> None:
    worker = getattr(workers, name)
    assert issubclass(worker, Worker)
    written = {column for _, contract in get_registered_methods(worker).values() for column in contract.writes or ()}
    assert written - RENAMED <= set(FIELDS)
