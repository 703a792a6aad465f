import re
from pathlib import Path

from flowrl.data.batch.fields import FIELDS

PAGE = Path(__file__).parents[3] / "docs" / "batch.md"


def test_the_page_shows_the_dictionary_of_columns_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [(name, *field) for name, field in FIELDS.items()]


def test_every_kind_of_column_is_a_table_and_a_type():
    assert {field.kind.split(", ")[0] for field in FIELDS.values()} == {"row", "token"}
