"""Public datasets, from small local copies in the layout and format of their publishers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl.config import ConfigError
from flowrl.data.preparation.prepared_folder import PreparedFolder
from recipes.data.prepare import DATASETS, SUFFIXES, main
from recipes.quickstart.prepare import save_tokenizer
from tests.errors import rejects

SHARED = "\n\nHuman: 1+1?\n\nAssistant:"
UF = {"prompt": "1", "prompt_id": "x", "score_chosen": 8.0, "score_rejected": 5.0}


def uf_turns(answer: str) -> list[dict[str, str]]:
    return [{"content": "1", "role": "user"}, {"content": answer, "role": "assistant"}]


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(path: Path, *rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def gsm8k(folder: Path, split: str) -> None:
    write(folder / f"{split}.jsonl", lines({"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}))


def math(folder: Path, split: str) -> None:
    row = {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
    write(folder / "MATH" / split / "algebra" / "1.json", json.dumps(row, indent=4).encode())


def hh_rlhf(folder: Path, split: str) -> None:
    row = {"chosen": f"{SHARED} 2", "rejected": f"{SHARED} 3"}
    write(folder / "helpful-base" / f"{split}.jsonl.gz", gzip.compress(lines(row)))


def rm_static(folder: Path, split: str) -> None:
    parquet(folder / f"data/{split}-00000-of-00001.parquet", {"prompt": SHARED, "response": " 2", "chosen": " 2",
                                                             "rejected": " 3"})  # fmt: skip


def ultrafeedback(folder: Path, split: str) -> None:
    rows = [UF | {"chosen": uf_turns("2"), "rejected": uf_turns("3"), "messages": uf_turns("2")}]
    parquet(folder / f"data/{split}_prefs-00000-of-00001.parquet", *rows)
    parquet(folder / f"data/{split}_sft-00000-of-00001.parquet", *rows, *rows)


COPIES = {"gsm8k": gsm8k, "math": math, "hh_rlhf": hh_rlhf, "rm_static": rm_static, "ultrafeedback": ultrafeedback}


@pytest.mark.parametrize("name", COPIES)
def test_a_local_copy_is_prepared(name: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    for split in ("train", "test"):
        COPIES[name](tmp_path / "copy", split)
    main([name, f"tokenizer={tmp_path}/model", f"output={tmp_path}/out", f"source={tmp_path}/copy"])
    for split in ("train", "test"):
        folder = PreparedFolder(tmp_path / "out" / split)
        assert len(folder) == folder.manifest["num_read"] == 1
        row = folder[0].conversation
        if folder.kind == "prompts":
            assert row.columns["answer"] == "2"
        else:
            assert [m.content for m in (*row.chosen, *row.rejected)] == ["2", "3"]


def test_unknown_names_and_missing_splits_are_rejected(tmp_path: Path) -> None:
    with rejects("gsm8", "gsm8k", error=ConfigError):
        main(["gsm8"])
    gsm8k(tmp_path / "copy", "train")
    save_tokenizer(tmp_path / "model")
    with rejects("test", tmp_path / "copy", error=ConfigError):
        main(["gsm8k", f"tokenizer={tmp_path}/model", f"output={tmp_path}/out", f"source={tmp_path}/copy"])
    assert not (tmp_path / "out").exists()


def test_the_documentation_has_the_names_of_local_files() -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    for name, dataset in DATASETS.items():
        (line,) = (line for line in page.splitlines() if f"run_{name}.sh" in line)
        assert line.endswith(f"| `{dataset.hub}` | `{dataset.train}`, `{dataset.test}` |")
    assert all(f"`{suffix}`" in page for suffix in SUFFIXES)
