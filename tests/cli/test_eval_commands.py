"""Arguments of `flowrl eval` that are rejected before a model is loaded."""

import pytest

from flowrl.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ["--samples", "0"],
        ["--samples", "many"],
        ["--limit", "-1"],
        ["--temperature", "hot"],
        ["--temperature", "-0.5"],
        ["--temperature", "inf"],
        ["--seed", "x"],
        ["--step", "last"],
        ["--devices", "0"],
        ["--shots", "3"],
    ],
)
def test_an_invalid_option_ends_with_code_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "model", *words])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and words[0] in output.err


@pytest.mark.parametrize("words", [[], ["rollout.top_p=0.5"]])
def test_a_command_without_a_model_is_one_error(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["eval", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "MODEL" in output.err


def test_settings_may_follow_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--samples", "2", "rollout.top_p=0.5"]) == 2
    assert "MODEL" in capsys.readouterr().err
