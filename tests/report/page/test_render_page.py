import base64
import hashlib
import json
import math
import re
import zlib

from flowrl.report.page.render_page import compress, render_page
from tests.report.page.generated_run import HOSTILE


def decode(page: str, name: str) -> object:
    (text,) = re.findall(rf'id="data-{name}">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_parts_are_in_the_page_and_no_text_of_them_is_markup() -> None:
    page = render_page({"head": {"text": HOSTILE}, "rows-0": [1]}, f"run {HOSTILE}")
    assert decode(page, "head") == {"text": HOSTILE}
    assert decode(page, "rows-0") == [1]
    assert "hacked=1</script>" not in page and "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3


def test_the_policy_allows_only_the_script_and_the_style_of_the_page() -> None:
    page = render_page({"head": {}}, "run")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_the_page_names_no_other_file() -> None:
    page = render_page({"head": {}}, "run")
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|@import|https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_values_that_are_not_finite_are_null() -> None:
    text = zlib.decompress(base64.b64decode(compress({"a": [math.nan, math.inf, 1.5]})))
    assert json.loads(text) == {"a": [None, None, 1.5]}
