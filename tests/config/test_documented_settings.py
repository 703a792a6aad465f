"""The example of docs/algorithms.md runs, and its links to sections of docs/config.md exist."""

import re
from pathlib import Path
from typing import Any


def test_the_links_to_the_settings_exist():
    headings = re.findall(r"(?m)^## (.*)$", Path("docs/config.md").read_text())
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"\(config\.md#([\w-]+)\)", Path("docs/algorithms.md").read_text()))
    assert linked and linked <= anchors


def test_the_example_runs():
    text = Path("docs/algorithms.md").read_text()
    example = re.search(r"```python\n(import torch.*?)```", text, flags=re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    assert names["logprobs"].grad.abs().sum() > 0
