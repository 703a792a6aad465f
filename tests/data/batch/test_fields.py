import re
from pathlib import Path

from flowrl.data.batch.fields import FIELDS

PAGE = Path(__file__).parents[3] / "docs" / "batch.md"


def test_the_example_of_the_page_runs():
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0], {})


def test_the_page_shows_the_table_of_columns():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [(name, *field) for name, field in FIELDS.items()]


def test_every_column_is_a_row_or_token_column():
    assert {field.kind.split(", ")[0] for field in FIELDS.values()} == {"row", "token"}
