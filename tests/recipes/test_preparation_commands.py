"""The programs that prepare data and models of recipes reject wrong options like `flowrl`: in one sentence."""

import importlib

import pytest

from tests.errors import missing_facts


@pytest.mark.parametrize(
    "module",
    ["quickstart.prepare", "quickstart.pairs", "reasoning.prepare", "tools.prepare", "games.prepare"],
)
def test_a_misspelled_option_is_one_sentence(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prepare.py", "--outptu", "folder"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"recipes.{module}").main()
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1
    assert not missing_facts(message, "--outptu", f"recipes.{module}", "--help")
