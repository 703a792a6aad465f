"""`flowrl data`, with the commands and the output of docs/data.md."""

import json
import re
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.data.reading.raw_rows import MANIFEST
from flowrl.data.reading.row_problems import REASONS
from recipes.quickstart.prepare import save_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the commands on the page."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "model")
    turns = [{"from": "human", "content": "1+1"}, {"from": "gpt", "content": "2"}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in (turns, turns[:1]))
    )
    return tmp_path


def test_the_documented_commands_print_the_documented_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```\n(\$ flowrl data check.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for part in block.removeprefix("$ ").split("\n$ "):
        command, _, expected = part.partition("\n")
        main(command.split()[1:])
        printed = capsys.readouterr()
        assert (printed.out + printed.err).strip() == expected.strip()


def test_every_reason_is_documented() -> None:
    section = PAGE.partition("## Invalid rows")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert {reason: rows.get(reason) for reason in REASONS} == dict(REASONS)


def test_check_has_an_exit_code_and_verifies_a_prepared_folder(folder: Path) -> None:
    assert main(["data", "check", "rows.jsonl"]) == 1
    assert main(["data", "check", "rows.jsonl", "strict=true"]) == 2
    assert main(["data", "prepare", "rows.jsonl", "tokenizer=model", "output=out"]) == 0
    assert main(["data", "check", "out"]) == 0
    shard = folder / "out/arrow/part-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    assert main(["data", "check", "out"]) == 2
    (folder / "out" / MANIFEST).write_text("{")
    assert main(["data", "check", "out"]) == 2


def test_ignored_keys_of_turns_are_a_setting_of_check_prepare_and_show(folder: Path) -> None:
    turns = [{"role": role, "content": "1", "language": "en"} for role in ("user", "assistant")]
    (folder / "own.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    ignored = ["tokenizer=model", "ignored_message_keys=[language]"]
    assert main(["data", "check", "own.jsonl", "tokenizer=model"]) != 0
    assert main(["data", "check", "own.jsonl", *ignored]) == main(["data", "show", "own.jsonl", *ignored]) == 0
    assert main(["data", "prepare", "own.jsonl", "output=out", *ignored]) == 0


def test_check_reports_a_turn_whose_tool_calls_the_model_would_not_receive(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "tool_calls": [{"name": "f"}]}]
    rows = (folder / "rows.jsonl").read_text() + json.dumps({"messages": turns}) + "\n"
    (folder / "rows.jsonl").write_text(rows)
    assert main(["data", "check", "rows.jsonl", "kind=sft"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 3" in printed
    assert re.search(r"unknown_key \(first: rows.jsonl, line 3: .*'tool_calls'", printed)


def test_settings_may_be_in_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prepare.yaml").write_text("tokenizer: model\noutput: out\nfiles: [rows.jsonl]\nmin_tokens: 3\n")
    assert main(["data", "prepare", "prepare.yaml", "kind=prompts", "trailing_assistant=drop"]) == 0
    assert "1 of 2 rows for prompts" in capsys.readouterr().out  # without its response, the first equals the second
    assert json.loads((folder / "out" / MANIFEST).read_text())["dropped"] == {"duplicate": 1}
    assert main(["data", "prepare", "rows.jsonl", "output=out2"]) == 2


@pytest.mark.parametrize("option", ["--rows", "--start"])
def test_show_rejects_negative_numbers(folder: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "rows.jsonl", "tokenizer=model", option, "-1"]) == 2
    assert option in capsys.readouterr().err


def test_a_template_file_is_filled_in(folder: Path) -> None:
    (folder / "t.json").write_text(json.dumps({"system_message": "1"}))
    assert main(["data", "template", "t.json", "tokenizer=model"]) == 0
    values = json.loads((folder / "t.json").read_text())
    assert (values["system_message"], values["end_of_assistant"], values["stop_ids"]) == ("1", "<eos>", [[1]])
    assert main(["data", "template", "t.json"]) == 2


@pytest.mark.slow
def test_generated_rows_are_checked_shown_and_prepared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.yaml").write_text(
        "tokenizer: model\nkind: prompts\nfiles: [{reasoning_gym: {chain_sum: 1}, rows: 20, split: test}]\n"
    )
    assert main(["data", "check", "rows.yaml"]) == 0
    assert "20 of 20" in capsys.readouterr().out
    assert main(["data", "show", "rows.yaml", "--rows", "2"]) == 0
    assert "reasoning_gym:chain_sum, line 2" in capsys.readouterr().out
    assert main(["data", "prepare", "rows.yaml", "output=out"]) == 0
    assert main(["data", "check", "out"]) == 0


def test_an_unknown_task_of_generated_rows_is_rejected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.yaml").write_text("files: [{reasoning_gym: {chain_sums: 1}}]\n")
    assert main(["data", "check", "rows.yaml"]) == 2
    assert "chain_sums" in capsys.readouterr().err
