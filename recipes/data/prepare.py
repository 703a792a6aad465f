"""Prepares a public dataset for training, from a local copy or from the Hugging Face Hub.

Usage: `python -m recipes.data.prepare NAME tokenizer=MODEL output=FOLDER [source=FOLDER] [KEY=VALUE ...]`

Creates `FOLDER/train` and `FOLDER/test`. All settings of `flowrl data prepare` are accepted.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.cli import exit_code
from flowrl.config import ConfigError, DataFile, PreparationConfig, load
from flowrl.data.preparation.prepare import prepare

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet", ".arrow")
"""Ends of the names of files that are read from a local copy."""


@dataclass(frozen=True)
class PublicDataset:
    """A dataset on the Hub, and the names of its splits."""

    hub: str
    kind: str
    subsets: tuple[str | None, ...] = (None,)
    train: str = "train"
    """Training split. The names of its local files begin with this name, or the files are in a folder of this name."""
    test: str = "test"


DATASETS = {
    "gsm8k": PublicDataset("openai/gsm8k", "prompts", ("main",)),
    "math": PublicDataset(
        "EleutherAI/hendrycks_math",
        "prompts",
        (
            "algebra",
            "counting_and_probability",
            "geometry",
            "intermediate_algebra",
            "number_theory",
            "prealgebra",
            "precalculus",
        ),
    ),
    "hh_rlhf": PublicDataset("Anthropic/hh-rlhf", "preference"),
    "rm_static": PublicDataset("Dahoas/rm-static", "preference"),
    "ultrafeedback": PublicDataset(
        "HuggingFaceH4/ultrafeedback_binarized", "preference", train="train_prefs", test="test_prefs"
    ),
}


def find_files(dataset: PublicDataset, split: str, source: Path | None) -> list[DataFile]:
    """Returns the files of a split in a local copy, or the dataset on the Hub. Raises ConfigError if there is none."""
    if source is None:
        return [DataFile(path=Path(dataset.hub), subset=subset, split=split) for subset in dataset.subsets]
    files = [
        path
        for path in sorted(source.rglob("*"))
        if path.name.endswith(SUFFIXES)
        and (path.name.startswith(split) or split in path.relative_to(source).parts[:-1])
    ]
    if not files:
        raise ConfigError(
            f"source is {source}, but it has no file whose name begins with {split!r}, and no folder {split}: download "
            f"{dataset.hub}, or omit source to read it from the Hub"
        )
    return [DataFile(path=path) for path in files]


def main(arguments: Sequence[str]) -> None:
    """Prepares both splits of a dataset."""
    name, *words = arguments or [""]
    if name not in DATASETS:
        raise ConfigError(f"unknown dataset {name!r}; available: {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    settings: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        settings[key] = value
    if "tokenizer" not in settings:
        raise ConfigError("tokenizer is not set: set tokenizer=FOLDER to the folder or the Hub name of the model")
    source = Path(settings.pop("source")) if "source" in settings else None
    output = Path(settings.pop("output", f"data/{name}"))
    settings.setdefault("kind", dataset.kind)
    splits = (("train", dataset.train), ("test", dataset.test))
    # Find all files first, so that a missing split leaves no folder.
    files_of_parts = {part: find_files(dataset, split, source) for part, split in splits}
    for part, files in files_of_parts.items():
        overrides = [f"{key}={value}" for key, value in settings.items()]
        config = load(None, [*overrides, "files=[-]", f"output={output / part}"], PreparationConfig)
        manifest = prepare(config.model_copy(update={"files": tuple(files)}))
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in manifest["dropped"].items())
        sys.stdout.write(
            f"{output / part}: {manifest['num_rows']:,} of {manifest['num_read']:,} rows"
            f"{f' (dropped: {dropped})' if dropped else ''}\n"
        )


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
