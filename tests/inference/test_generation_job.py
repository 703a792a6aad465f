"""`flowrl generate`: formats of prompts, resumed files, best of N, and wrong input."""

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.cli import main
from flowrl.config import ModelConfig
from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.data.messages import Message
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.loading import load_reward_model
from flowrl.inference.bulk_generation import _select_best
from flowrl.inference.model_source import resolve_model
from flowrl.inference.response_file import ResumableFile, StreamOutput
from flowrl.inference.text_generator import GeneratedText, TextRequest, open_chat
from flowrl.memory.model_fit import read_max_positions
from tests.errors import missing_facts, rejects

ROOT = Path(__file__).parents[2]
REWARD = f"{Path(__file__).parent}/length_reward.py:count_letters"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("12+34=\n\n7-5=\n80+19=\n")
    rows = [{"prompt": "12+34=", "answer": "46", "id": 7}, {"messages": [{"role": "user", "content": "7-5="}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def generate(model: Path, *options: str | int | Path) -> int:
    return main(["generate", str(model), "--max-tokens", "6", *map(str, options)])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_the_columns_of_the_input_in_its_order(run_folder: Path, folder: Path) -> None:
    assert generate(run_folder, "--prompts", "prompts.jsonl", "--samples", 2, "--output", "out.jsonl") == 0
    rows = read(folder / "out.jsonl")
    assert [(row["prompt_index"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.get("id") for row in rows] == [7, 7, None, None] and rows[0]["answer"] == "46"
    assert all(row["response_tokens"] <= 6 and row["logprob"] < 0 for row in rows)
    assert [row["prompt"] for row in rows[::2]] == ["12+34=", "7-5="]
    assert not (folder / "out.jsonl.partial").exists()


def test_the_default_length_of_a_response_fits_each_prompt(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = read_max_positions(run_folder / "model")
    assert limit is not None and limit < 256
    (folder / "prompts.txt").write_text("1+2=\n" + "1+" * (limit // 2 - 2) + "1=\n")
    assert main(["generate", str(run_folder), "--prompts", "prompts.txt", "--samples", "8", "--output", "out"]) == 0
    rows = read(folder / "out")
    assert not missing_facts(capsys.readouterr().err, 2, 256)
    assert len(rows) == 16 and all(row["prompt_tokens"] + row["response_tokens"] <= limit for row in rows)
    assert {row["prompt_tokens"] for row in rows[8:]} <= set(range(limit - 4, limit))
    assert max(row["response_tokens"] for row in rows[:8]) > 4  # the long prompt does not shorten other responses


def test_a_prompt_that_leaves_no_token_for_a_response_is_rejected(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "long.txt").write_text("1+1=\n" + "1+" * 500 + "1=\n")
    assert main(["generate", str(run_folder), "--prompts", "long.txt"]) == 2
    message = capsys.readouterr().err
    assert message.count("error: ") == 1 and "line 2" in message and "shorten" in message


def test_the_default_length_of_a_response_is_that_of_the_run(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run_folder, folder / "run")
    with (run / "config.yaml").open("a") as file:
        file.write("\nrollout: {max_response_tokens: 3}\n")
    assert resolve_model(str(run / "checkpoints" / "step-000002")).max_response_tokens == 3
    assert resolve_model(str(run), step=1).max_response_tokens == 3
    assert resolve_model(str(run / "model")).max_response_tokens is None
    assert main(["generate", str(run), "--prompts", "prompts.txt", "--samples", "8", "--output", "out"]) == 0
    assert max(row["response_tokens"] for row in read(folder / "out")) == 3
    assert "together" not in capsys.readouterr().err
    assert generate(run, "--prompts", "prompts.txt", "--samples", 8, "--output", "longer") == 0
    assert max(row["response_tokens"] for row in read(folder / "longer")) > 3


def test_text_and_standard_input_give_the_same_responses(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate(run_folder, "--prompts", "prompts.txt") == 0
    texts = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO((folder / "prompts.txt").read_bytes())))
    assert generate(run_folder, "--prompts", "-", "--max-num-seqs", 1) == 0
    assert capsys.readouterr().out == texts and len(texts.splitlines()) == 3


def test_the_best_response_is_that_of_the_samples(run_folder: Path, folder: Path) -> None:
    assert generate(run_folder, "--prompts", "prompts.txt", "--samples", 4, "--output", "all.jsonl") == 0
    assert generate(run_folder, "--prompts", "prompts.txt", "--best-of", 4, "--reward", REWARD, "--output", "b") == 0
    samples, best = read(folder / "all.jsonl"), read(folder / "b")
    assert len(best) == 3
    for index, row in enumerate(best):
        responses = [sample["response"] for sample in samples if sample["prompt_index"] == index]
        assert row["score"] == max(map(len, responses))
        assert row["response"] == responses[row["candidate"]] == max(responses, key=len)


@pytest.mark.slow
def test_a_killed_command_continues_and_gives_the_same_file(run_folder: Path, folder: Path) -> None:
    (folder / "many.txt").write_text("".join(f"{i}+{i}=\n" for i in range(10, 90)))
    options = ("--prompts", "many.txt", "--samples", 4, "--output")
    assert generate(run_folder, *options, "straight.jsonl") == 0
    command = [sys.executable, "-m", "flowrl.cli", "generate", str(run_folder), "--max-tokens", "6", "--max-num-seqs"]
    process = subprocess.Popen(
        [*command, "1", *map(str, options), "killed.jsonl"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    partial, deadline = folder / "killed.jsonl.partial", time.monotonic() + 300
    while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_done = partial.read_bytes().count(b"\n") - 1
    assert 0 < num_done < 320
    with partial.open("ab") as file:
        file.write(b'{"prompt_index": 3, "resp')  # as if the program was killed while it wrote
    assert generate(run_folder, *options, "killed.jsonl", "--seed", 1) == 2
    assert generate(run_folder, *options, "killed.jsonl") == 0
    assert (folder / "killed.jsonl").read_bytes() == (folder / "straight.jsonl").read_bytes()


def test_a_changed_input_is_rejected_when_a_file_is_continued(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"--seed": 0, "the checksum of the prompts": "1"}
    output = ResumableFile(folder / "o.jsonl", settings)
    output.write({"prompt_index": 0, "sample": 0})
    with pytest.raises(Exception, match="in use by another program"):
        ResumableFile(folder / "o.jsonl", settings)
    output.close(is_complete=False)
    assert generate(run_folder, "--prompts", "prompts.txt", "--output", "o.jsonl") == 2
    assert "remove the file" in capsys.readouterr().err
    (folder / "x.partial").write_text("notes of a user")
    assert generate(run_folder, "--prompts", "prompts.txt", "--output", "x") == 2
    assert (folder / "x.partial").read_text() == "notes of a user"


def test_changed_stop_sequences_are_rejected_when_a_file_is_continued(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, stop in (("first", "7"), ("second", "8")):
        (folder / f"{name}.json").write_text(json.dumps({"stop_strings": [stop]}))
    (folder / "own_reward.py").write_text("def score(response):\n    raise ValueError('of the test')\n")
    options = ("--prompts", "prompts.txt", "--best-of", 2, "--reward", "own_reward.py:score", "--output", "o.jsonl")
    assert generate(run_folder, *options, "--template", "first.json") == 2
    with (folder / "o.jsonl.partial").open("a") as file:
        file.write('{"prompt_index": 0, "sample": 0}\n')  # as if the first prompt had been scored
    capsys.readouterr()
    assert generate(run_folder, *options, "--template", "first.json") == 2
    assert "of the test" in capsys.readouterr().err  # the same stop sequences are not rejected
    assert generate(run_folder, *options, "--template", "second.json") == 2
    assert not missing_facts(capsys.readouterr().err, "stop", "o.jsonl.partial")


def test_a_stream_that_is_not_utf_8_gets_escaped_characters() -> None:
    rows = [{"prompt_index": i, "sample": 0, "response": text} for i, text in enumerate(("é→", "😀"))]
    for encoding, expected in (("latin-1", True), ("utf-8", False)):
        buffer = BytesIO()
        stream = TextIOWrapper(buffer, encoding=encoding)
        output = StreamOutput(stream, [(0, 0), (1, 0)])
        for row in rows:
            output.write(row)
        assert buffer.getvalue().isascii() == expected
        assert [json.loads(line) for line in buffer.getvalue().decode(encoding).splitlines()] == rows


def test_a_changed_reward_is_rejected_when_a_file_is_continued(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = folder / "own_reward.py"
    reward.write_text("def score(response):\n    raise ValueError('of the test')\n")
    options = ("--prompts", "prompts.txt", "--best-of", 2, "--reward", f"{reward}:score", "--output", "best.jsonl")
    assert generate(run_folder, *options) == 2
    partial = folder / "best.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"prompt_index": 0, "sample": 0}\n')  # as if the first prompt had been scored
    before = partial.read_bytes()
    capsys.readouterr()
    assert generate(run_folder, *options) == 2
    assert "of the test" in capsys.readouterr().err  # the same reward is not rejected
    reward.write_text("def score(response):\n    return 0.0\n")
    assert generate(run_folder, *options) == 2
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1 and "checksum of the reward" in printed and partial.name in printed
    assert partial.read_bytes() == before


@pytest.mark.slow
def test_the_processes_of_the_reward_are_closed_if_the_engine_cannot_start(run_folder: Path, folder: Path) -> None:
    options = ("--prompts", "prompts.txt", "--best-of", 2, "--reward", REWARD, "--quantization", "int4")
    generate(run_folder, *options)  # imports
    gc.collect()
    gc.disable()
    try:
        before = num_sockets()
        assert generate(run_folder, *options) == 2
        assert num_sockets() == before
    finally:
        gc.enable()


def num_sockets() -> int:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(descriptor.readlink().name)
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.slow
def test_the_output_of_an_imported_reward_is_not_among_the_rows(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "printing.py").write_text("print('imported')\ndef score(response):\n    return float(len(response))\n")
    assert generate(run_folder, "--prompts", "prompts.txt", "--best-of", 2, "--reward", "printing.py:score") == 0
    assert [json.loads(line)["prompt_index"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]


def test_raw_prompts_need_no_chat_template(run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(run_folder / "model", folder / "model")
    for name in ("chat_template.jinja", TEMPLATE_FILE):
        (model / name).unlink()
    assert generate(model, "--prompts", "prompts.txt") == 2
    assert "--raw" in capsys.readouterr().err
    assert generate(model, "--prompts", "prompts.txt", "--raw", "--stop", "0") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_of_a_reward_model_that_is_no_finite_number_selects_no_response(score: float) -> None:
    rows = []
    for sample, value in enumerate((1.0, score)):
        future: Future[float] = Future()
        future.set_result(value)
        rows.append((GeneratedText(TextRequest(7, sample, [1]), [2], "a", "a", "stop", -0.5), future))
    with rejects("--reward", score, 7):
        _select_best(rows)


def test_a_reward_model_selects_the_response_with_its_best_score(
    run_folder: Path, task_folder: Path, folder: Path
) -> None:
    model = load_reward_model(ModelConfig(path=task_folder / "model"), head="fresh")
    save_model(model, task_folder / "model", folder / "scorer")
    options = ("--prompts", "prompts.txt", "--best-of", 3, "--reward", folder / "scorer", "--output", "best.jsonl")
    assert generate(run_folder, *options) == 0
    assert generate(run_folder, "--prompts", "prompts.txt", "--samples", 3, "--output", "all.jsonl") == 0
    chat, samples = open_chat(resolve_model(str(run_folder))), read(folder / "all.jsonl")
    for row in read(folder / "best.jsonl"):
        own = [sample for sample in samples if sample["prompt_index"] == row["prompt_index"]]
        assert own[row["candidate"]]["response"] == row["response"]
        ids = chat.encode_prompt([Message("user", row["prompt"])])
        ids += chat.encode(row["response"]) + ([chat.eos_id] if row["finish_reason"] == "stop" else [])
        if len(ids) == row["prompt_tokens"] + row["response_tokens"]:
            with torch.no_grad():
                score = model(torch.tensor([ids]), torch.tensor([len(ids)]))
            assert row["score"] == pytest.approx(float(score), abs=1e-4)


WRONG: Sequence[tuple[Sequence[str], Sequence[str]]] = [
    (["--prompts", "missing.txt"], ["missing.txt", "correct the path"]),
    (["--prompts", "missing.jsonl"], ["missing.jsonl", "no such file"]),
    (["--prompts", "empty.txt"], ["empty.txt", "no prompts"]),
    (["--prompts", "broken.jsonl"], ["broken.jsonl", "line 2"]),
    (["--prompts", "column.jsonl"], ["line 1", "'score'", "rename"]),
    (["--prompts", "long.txt"], ["line 2", "--max-tokens", "shorten"]),
    (["--prompts", "prompts.txt", "--output", "prompts.txt"], ["prompts.txt", "already exists"]),
    (["--prompts", "prompts.txt", "--output", "none/out.jsonl"], ["none/out.jsonl", "cannot be written"]),
    (["--prompts", "prompts.txt", "--best-of", "4"], ["--best-of", "--reward"]),
    (["--prompts", "prompts.txt", "--best-of", "4", "--samples", "2", "--reward", "a:b"], ["--samples", "remove"]),
    (["--prompts", "prompts.txt", "--best-of", "2", "--reward", "nothing"], ["nothing", "module:function"]),
    (["--prompts", "prompts.txt", "--best-of", "2", "--reward", "none.py:score"], ["none.py", "correct the path"]),
    (
        ["--prompts", "prompts.txt", "--best-of", "2", "--reward", "no_model", "--output", "prompts.txt"],
        ["prompts.txt", "already exists"],
    ),
    (["--prompts", "prompts.txt", "--samples", "2", "--temperature", "0"], ["--samples", "--temperature"]),
    (["--prompts", "prompts.txt", "--quantization", "int4"], ["int4", "hf", "vllm"]),
    (["--prompts", "prompts.txt", "--stop", ""], ["--stop", "empty"]),
    (["--prompts", "prompts.txt", "--template", "none.json"], ["none.json", "chatml"]),
    (["--prompts", "prompts.txt", "--adapter", "none"], ["none", "adapter_config.json"]),
    (["--prompts", "prompts.txt", "--step", "9"], ["step 9", "available: 1, 2"]),
]


@pytest.mark.parametrize(("options", "facts"), WRONG, ids=[" ".join(options[2:] or options) for options, _ in WRONG])
def test_wrong_input_is_rejected_in_one_sentence(
    run_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str], facts: Sequence[str]
) -> None:
    (folder / "empty.txt").write_text("\n \n")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (folder / "column.jsonl").write_text('{"prompt": "1+1=", "score": 1}\n')
    (folder / "long.txt").write_text("1+1=\n" + "1+" * 500 + "1=\n")
    (folder / "no_model").mkdir()
    before = set(folder.iterdir())
    assert generate(run_folder, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("error: ") == 1
    assert [fact for fact in facts if fact not in printed.err] == []
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("option", ["--top-p=2", "--samples=0", "--temperature=-1", "--max-tokens=x", "--engine=tgi"])
def test_an_invalid_value_of_an_option_is_a_usage_error(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "model", "--prompts", "-", option])
