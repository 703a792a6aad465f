"""Prepared folders: contents, filters, counts, and corrupt input."""

import gzip
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from flowrl.config import PreparationConfig, RowsConfig
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.data.preparation.check_rows import check_rows, marked_text
from flowrl.data.preparation.duplicates import SeenKeys
from flowrl.data.preparation.prepare import prepare
from flowrl.data.preparation.prepared_folder import PreparedFolder, tokenizer_hash
from flowrl.data.reading.reader import read_conversations
from recipes.quickstart.prepare import save_tokenizer
from tests.errors import rejects
from tests.inference.byte_tokenizer import save_byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


def example(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"from": "human", "content": question}, {"from": "gpt", "value": answer}], **columns}


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def run(folder: Path, model: Path, path: Path | list[Path], output: str = "out", **settings: Any) -> PreparedFolder:
    files = path if isinstance(path, list) else [path]
    config = {"files": files, "tokenizer": model, "output": folder / output, **settings}
    prepare(PreparationConfig.model_validate(config))
    return PreparedFolder(folder / output)


def texts(folder: PreparedFolder, model: Path) -> list[str]:
    return ["|".join(marked_text(side, ChatTokenizer(model)) for side in row.sides) for row in folder]


def test_rows_have_tokens_masks_columns_and_locations(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, example("1+1", "2", level=3), example("2+3", "5"))
    folder = run(tmp_path, model, path, rows_per_shard=1)
    assert texts(folder, model) == ["1+1=[[2<eos>]]", "2+3=[[5<eos>]]"]
    assert folder[0].conversation.columns == {"level": 3} and folder[1].conversation.location == f"{path}, line 2"
    assert folder.kind == "sft" and folder.lengths.tolist() == [6, 6]
    assert {key: folder.manifest[key] for key in ("num_rows", "num_read", "num_tokens", "dropped", "columns")} == {
        "num_rows": 2, "num_read": 2, "num_tokens": 12, "dropped": {}, "columns": {"level": 1},
    }  # fmt: skip
    assert len(folder.manifest["shards"]) == 2
    lines = [line for file in sorted((tmp_path / "out/jsonl").iterdir()) for line in file.read_text().splitlines()]
    assert json.loads(lines[1])["messages"][0] == {"role": "user", "content": "2+3"}
    again = run(tmp_path, model, tmp_path / "out", output="again")  # from its JSON lines
    assert texts(again, model) == texts(folder, model)


def test_every_kind_is_stored_and_read(model: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    kto = {"prompt": "1+1", "completion": "2", "label": True}
    for number, (row, kind, expected) in enumerate(
        [
            (pair, "preference", "1+1=[[2<eos>]]|1+1=[[3<eos>]]"),
            (kto, "kto", "1+1=[[2<eos>]]"),
            ({"source": "1=", "Target": "1"}, "text", "1=[[1<eos>]]"),
            ({"prompt": "1+1", "answer": "2"}, "prompts", "1+1="),
            (pair, "sft", "1+1=[[2<eos>]]"),
        ]
    ):
        settings = {"kind": kind} if number == 4 else {}
        folder = run(tmp_path, model, write(tmp_path, row), output=f"out{number}", **settings)
        assert (folder.kind, texts(folder, model)) == (kind, [expected])
    assert PreparedFolder(tmp_path / "out1")[0].conversation.label is True
    assert PreparedFolder(tmp_path / "out3")[0].conversation.columns == {"answer": "2"}


MALFORMED: list[tuple[Any, str]] = [
    (b"", "invalid_json"),
    (b'{"messages": [', "invalid_json"),
    (b'{"messages": ' + b"[" * 100_000, "invalid_json"),
    (b'{"n": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"messages": "\xff"}', "invalid_utf8"),
    (example("1\ud800", "2"), "invalid_utf8"),
    ({"messages": [{"from": "robot", "content": "1"}]}, "unknown_role"),
    (example("1+1", ""), "empty_turn"),
    (example("", "2"), "empty_turn"),
    (example("1+1", 2), "content_not_text"),  # type: ignore[arg-type]
    ({"messages": [None, {"a": None}]}, "content_not_text"),
    ({"messages": [*example("1", "2")["messages"], {"from": "gpt", "value": "3"}]}, "wrong_order"),
    ({"messages": [{"from": "human", "content": "1"}]}, "no_answer"),
    ({"key": None}, "unknown_shape"),
    (example("1+1", "2", advantages=1), "reserved_column"),
    (example("1+1", "2", note={"text": ["\ud800"]}), "invalid_utf8"),
    (b'{"messages": "' + b"1" * 10_000_000 + b'"}', "row_too_large"),
]


def test_malformed_rows_are_counted_and_the_others_are_correct(model: Path, tmp_path: Path) -> None:
    good = [example(f"{i}+1", str(i + 1)) for i in range(20, 20 + len(MALFORMED))]
    path = write(tmp_path, *(row for pair in zip(good, (row for row, _ in MALFORMED), strict=True) for row in pair))
    folder = run(tmp_path, model, path)
    reasons = [reason for _, reason in MALFORMED]
    assert folder.manifest["dropped"] == {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    assert folder.manifest["num_read"] == 2 * len(MALFORMED)
    assert texts(folder, model) == [f"{i}+1=[[{i + 1}<eos>]]" for i in range(20, 20 + len(MALFORMED))]
    first = folder.manifest["first_dropped"]["unknown_role"]
    assert first.startswith(f"{path}, line {2 * reasons.index('unknown_role') + 2}: ")


def test_columns_with_dates_and_bytes_become_json_values(model: Path, tmp_path: Path) -> None:
    table = pa.table({
        "prompt": ["1+1", "1+2"],
        "date": [date(2024, 5, 6), None],
        "time": [datetime(2024, 5, 6, 7, 8), None],
        "number": [Decimal("1.5"), Decimal("2.0")],
        "data": [b"ab", b"\xff"],
        "nested": [{"bytes": b"\xff", "path": "p", "date": [date(2024, 5, 6)]}] * 2,
    })  # fmt: skip
    path = tmp_path / "rows.parquet"
    parquet.write_table(table, path)
    folder = run(tmp_path, model, path, kind="prompts")
    nested = {"bytes": None, "path": "p", "date": ["2024-05-06"]}
    first = {"date": "2024-05-06", "time": "2024-05-06T07:08:00", "number": 1.5, "data": "ab", "nested": nested}
    second = {"date": None, "time": None, "number": 2, "data": None, "nested": nested}
    assert [row.conversation.columns for row in folder] == [first, second]
    assert [row.columns for row in read_conversations(path)] == [first, second]  # raw rows are equal
    (line, _) = (tmp_path / "out/jsonl/part-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["date"] == "2024-05-06"


def test_a_message_that_is_a_date_or_bytes_is_counted(model: Path, tmp_path: Path) -> None:
    for number, value in enumerate((date(2024, 5, 6), b"\xff")):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"prompt": ["1+1"], "completion": [value]}), path)
        with rejects("content_not_text", error=DataError):
            run(tmp_path, model, path, kind="sft")


@pytest.mark.parametrize(("row", "reason"), MALFORMED, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(MALFORMED)])
def test_strict_stops_at_the_first_malformed_row(row: Any, reason: str, model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, example("1+1", "2"), row, example("2+2", "4"))
    with pytest.raises(DataError) as caught:
        run(tmp_path, model, path, strict=True)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert not (tmp_path / "out").exists()


def test_rows_before_the_corrupt_part_of_a_file_are_kept(model: Path, tmp_path: Path) -> None:
    lines = b"".join(json.dumps(example(f"{i}+1", "2")).encode() + b"\n" for i in range(3000))
    path = tmp_path / "rows.jsonl.gz"
    packed = gzip.compress(lines, 1)
    path.write_bytes(packed[: len(packed) // 2])
    folder = run(tmp_path, model, path)
    assert folder.manifest["dropped"] == {"unreadable_file": 1}
    assert 0 < len(folder) == folder.manifest["num_read"] - 1 < 3000
    with rejects(path, error=DataError):
        run(tmp_path, model, path, output="strict", strict=True)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl.gz", b"text", "unreadable_file"),
        ("a.parquet", b"PAR1", "unreadable_file"),
        ("a.jsonl", b"\xff\n", "invalid_utf8"),
        ("a.jsonl", b'{"messages": 1}', "content_not_text"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "rows"),
    ],
)
def test_a_file_without_a_usable_row_is_rejected_with_the_reason(
    name: str, content: bytes, reason: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with rejects(reason, error=DataError) as caught:
        run(tmp_path, model, path)
    assert str(path) in str(caught.value) and not (tmp_path / "out").exists()


def test_a_changed_prepared_folder_is_rejected(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, example("1+1", "2"), example("2+3", "5"))
    folder = run(tmp_path, model, path).path
    check = RowsConfig.model_validate({"files": [folder]})
    assert check_rows(check)[1].num_read == 2
    shard, manifest = folder / "arrow/part-00000.arrow", folder / "manifest.json"
    content, values = shard.read_bytes(), json.loads(manifest.read_text())
    shard.write_bytes(content.replace(b"2+3", b"2+4"))  # only its checksum shows this
    with rejects(shard, error=DataError):
        check_rows(check)
    for damaged in (content[:-8], content[: len(content) // 2], content + bytes(8), b""):
        shard.write_bytes(damaged)
        with rejects(folder, error=DataError):
            PreparedFolder(folder)
    shard.write_bytes(content)
    (tmp_path / "private.arrow").write_bytes(content)
    private = values | {"shards": [values["shards"][0] | {"file": "../private.arrow"}]}
    for changed in ({}, [], {"version": values["version"]}, values | {"shards": [{"file": "none.arrow"}]}, private):
        manifest.write_text(json.dumps(changed))
        with rejects(folder, error=DataError):
            PreparedFolder(folder)


def test_an_interrupted_preparation_leaves_no_folder_that_looks_complete(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, *(example(f"{i}+1", "2") for i in range(1200)))

    def interrupt(num_bytes: int, num_rows: int) -> None:
        raise KeyboardInterrupt

    settings = {"files": [path], "tokenizer": model, "output": tmp_path / "out", "rows_per_shard": 100}
    with pytest.raises(KeyboardInterrupt):
        prepare(PreparationConfig.model_validate(settings), interrupt)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    (tmp_path / "out.partial/arrow").mkdir(parents=True)  # as after SIGKILL
    assert len(run(tmp_path, model, path)) == 1200


def test_duplicates_lengths_and_near_duplicates_are_counted(model: Path, tmp_path: Path) -> None:
    rows = [example("1+1", "2"), example("1+1", "2", level=1), example("1+1", "3"), example("1", "2222"),
            example("12345678", "2"), example("1+1", "2")]  # fmt: skip
    folder = run(tmp_path, model, write(tmp_path, *rows), max_tokens=9, max_response_tokens=4, processes=1)
    assert folder.manifest["dropped"] == {"duplicate": 2, "long_response": 1, "too_long": 1}
    assert texts(folder, model) == ["1+1=[[2<eos>]]", "1+1=[[3<eos>]]"]
    assert len(run(tmp_path, model, write(tmp_path, *rows), output="kept", duplicates="keep")) == len(rows)
    long = " ".join(str(i) for i in range(100))
    near = write(tmp_path, example(long, "1"), example(f"{long} 5", "1"), example(long[::-1], "1"), name="near.jsonl")
    folder = run(tmp_path, model, near, output="near", near_duplicates=0.8)
    assert folder.manifest["dropped"] == {"near_duplicate": 1} and folder[1].conversation.line == 3


def test_long_rows_are_refused_dropped_or_truncated(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, example("1", "2"), example("1", "23456"), example("1234567", "2"))
    with rejects("8", "5", error=DataError):
        run(tmp_path, model, path, max_tokens=5, too_long="refuse")
    assert run(tmp_path, model, path, "drop", max_tokens=5).manifest["dropped"] == {"too_long": 2}
    folder = run(tmp_path, model, path, "cut", max_tokens=5, too_long="truncate")
    assert texts(folder, model) == ["1=[[2<eos>]]", "1=[[234]]"]
    assert (folder.manifest["dropped"], folder.manifest["num_truncated"]) == ({"too_long": 1}, 1)


def test_a_long_prompt_loses_its_first_turns(model: Path, tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "11"), ("assistant", "2"), ("user", "33"))]
    path = write(tmp_path, {"messages": turns})
    folder = run(tmp_path, model, path, max_tokens=5, too_long="truncate", kind="prompts")
    assert texts(folder, model) == ["33="] and folder.manifest["num_truncated"] == 1
    with rejects(path, 1, "max_tokens", error=DataError) as caught:
        run(tmp_path, model, path, "refused", max_tokens=2, too_long="refuse", kind="prompts")
    assert "max_prompt_tokens" not in str(caught.value)


@pytest.mark.slow
def test_two_processes_write_the_same_files(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, *(example(f"{i}+1", str(i % 7)) for i in range(1700)), b"{", example("1+1", "1"))
    one, two = (run(tmp_path, model, path, f"out{n}", processes=n, rows_per_shard=700) for n in (1, 2))
    assert [s["crc32"] for s in one.manifest["shards"]] == [s["crc32"] for s in two.manifest["shards"]]
    assert one.manifest["dropped"] == two.manifest["dropped"] == {"duplicate": 1, "invalid_json": 1}


def test_a_folder_is_for_one_tokenizer_and_template(model: Path, tmp_path: Path) -> None:
    folder = run(tmp_path, model, write(tmp_path, example("1+1", "2")))
    folder.check_tokenizer(ChatTokenizer(model))
    (tmp_path / "t.json").write_text(json.dumps({"system_message": "1"}))
    with rejects("template", tmp_path / "out", error=DataError):
        folder.check_tokenizer(ChatTokenizer(model, tmp_path / "t.json"))
    with rejects(tmp_path / "out", error=DataError):
        run(tmp_path, model, tmp_path / "rows.jsonl")


def test_a_folder_of_another_version_is_not_reported_as_corrupt(model: Path, tmp_path: Path) -> None:
    run(tmp_path, model, write(tmp_path, example("1+1", "2")))
    manifest = tmp_path / "out/manifest.json"
    values = json.loads(manifest.read_text())
    for version in (1, values["version"] + 1):
        manifest.write_text(json.dumps(values | {"version": version}))
        with rejects(tmp_path / "out", "version", error=DataError) as caught:
            PreparedFolder(tmp_path / "out")
        assert "corrupt" not in str(caught.value)


def as_version_2(folder: Path) -> None:
    """Changes the manifest to that of a version 2 of the format, whose hash excludes the tokens before plain text."""
    manifest = folder / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["largest_id"]
    tokenizer = ChatTokenizer(values["tokenizer"])
    own = {"version": 2, "tokenizer_hash": tokenizer_hash(tokenizer, has_text_prefix=False)}
    manifest.write_text(json.dumps(values | own))


def test_version_2_is_read_except_plain_text(tmp_path: Path) -> None:
    model = save_byte_tokenizer(tmp_path / "model", text_template="<begin> $A")
    template = "{% for m in messages %}{{ m['content'] }}{{ '<end>' if m['role'] == 'assistant' else '=' }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = write(tmp_path, example("1+1", "2"), example("2+3", "5"))
    as_version_2(run(tmp_path, model, write(tmp_path, {"text": "1+1"}, name="text.jsonl"), "text").path)
    with rejects(tmp_path / "text", "version", error=DataError):
        PreparedFolder(tmp_path / "text")

    as_version_2(run(tmp_path, model, rows).path)
    folder = PreparedFolder(tmp_path / "out")
    folder.check_tokenizer(ChatTokenizer(model))
    largest = max(int(side.ids.max()) for row in folder for side in row.sides)
    config = {"model_type": "qwen2"}
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": largest + 1}))
    folder.check_ids(ChatTokenizer(model))
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": largest}))
    with rejects(rows, largest, error=DataError):
        folder.check_ids(ChatTokenizer(model))


def test_a_key_that_an_earlier_version_accepted_stays_a_column(model: Path, tmp_path: Path) -> None:
    shard = run(tmp_path, model, write(tmp_path, example("1+1", "2", imagx="1"))).path / "arrow/part-00000.arrow"
    shard.write_bytes(shard.read_bytes().replace(b"imagx", b"image"))
    (row,) = PreparedFolder(tmp_path / "out")
    assert row.conversation.columns == {"image": "1"}


def test_the_hash_of_a_tokenizer_does_not_depend_on_earlier_calls(model: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model)
    expected = tokenizer_hash(tokenizer)
    backend: Any = tokenizer.tokenizer
    backend(["1", "1+1"], truncation=True, max_length=2, padding=True)
    assert backend.backend_tokenizer.truncation is not None
    backend.chat_template, backend.padding_side = "{{ messages }}", "left"
    assert tokenizer_hash(tokenizer) == expected
    backend.save_pretrained(tmp_path)  # its files contain the truncation
    assert tokenizer_hash(ChatTokenizer(tmp_path)) == expected
    backend.add_tokens(["new"])
    assert tokenizer_hash(tokenizer) != expected


def test_the_hash_of_a_tokenizer_includes_the_tokens_before_plain_text(tmp_path: Path) -> None:
    hashes = set()
    for template in (None, "<begin> $A", "<end> $A"):
        folder = save_byte_tokenizer(tmp_path / str(len(hashes)), text_template=template)
        hashes.add(tokenizer_hash(ChatTokenizer(folder)))
    assert len(hashes) == 3


def test_a_template_file_is_created_from_the_tokenizer(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.json"
    run(tmp_path, model, write(tmp_path, example("1+1", "2")), template=template)
    values = json.loads(template.read_text())
    assert values == json.loads((tmp_path / "out/conversation_template.json").read_text())
    assert (values["end_of_assistant"], values["stop_ids"]) == ("<eos>", [[1]]) and "messages" in values[
        "chat_template"
    ]


def test_seen_keys_find_every_earlier_key() -> None:
    rng, seen, known = np.random.default_rng(0), SeenKeys(), set()
    for size in (1, 50, 3, 200, 1, 70):
        keys = rng.integers(0, 300, size).astype(np.uint64)
        expected = []
        for key in keys.tolist():
            expected.append(key not in known)
            known.add(key)
        assert seen.add(keys).tolist() == expected
