"""`flowrl data`: prepares, checks and shows datasets."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from flowrl.cli.command_parser import Commands
from flowrl.config import CheckFailed, ConfigError, PreparationConfig, RowsConfig, load
from flowrl.data.console import write_printable

Settings = TypeVar("Settings", bound=RowsConfig)
_NUM_SHOWN_ROWS = 3


def add_data(commands: Commands) -> None:
    """Adds `data` and its sub-commands to the parser of the `flowrl` command."""
    parser = commands.add_parser("data", help="prepare, check or show datasets")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, run, text in (
        ("prepare", _prepare, "filter and tokenize rows, and store them in a folder that runs memory-map"),
        ("check", _check, "count the rows that would be dropped, per reason"),
        ("show", _show, "print rows as the template renders them, with trained tokens in color"),
        ("template", _template, "write the conversation template file of a tokenizer"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="FILE|CONFIG.yaml|KEY=VALUE",
            help="data files, a YAML file of settings, and settings such as tokenizer=FOLDER",
        )
        if name == "show":
            action.add_argument("--rows", type=int, default=_NUM_SHOWN_ROWS, metavar="N", help="number of rows")
            action.add_argument("--start", type=int, default=0, metavar="N", help="number of rows to skip")
        action.set_defaults(run=run)


def _load(words: Sequence[str], cls: type[Settings]) -> Settings:
    """Returns the settings of a command line. Arguments without `=` are data files or one YAML file of settings."""
    settings = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    configs = [path for path in paths if path.endswith((".yaml", ".yml"))]
    if len(configs) > 1:
        raise ConfigError(f"{configs[0]} and {configs[1]} are both files of settings: use only one")
    files = [path for path in paths if path not in configs]
    if files:
        settings.insert(0, f"files={json.dumps(files)}")
    return load(configs[0] if configs else None, settings, cls)


def _prepare(arguments: argparse.Namespace) -> None:
    config = _load(arguments.overrides, PreparationConfig)

    # imported here, because only these commands need transformers and rich
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    from flowrl.data.console import make_console  # noqa: PLC0415
    from flowrl.data.preparation.prepare import prepare, total_bytes  # noqa: PLC0415

    console = make_console()
    columns = (TextColumn("{task.fields[rows]:,} rows"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("prepare", total=total_bytes(config), rows=0)
        num_rows = 0

        def report(num_bytes: int, rows: int) -> None:
            nonlocal num_rows
            num_rows += rows
            progress.update(task, advance=num_bytes, rows=num_rows)

        manifest = prepare(config, report)
    lengths = manifest["lengths"]
    write_printable(
        f"{config.output}: {manifest['num_rows']:,} of {manifest['num_read']:,} rows for {manifest['kind']}, "
        f"{manifest['num_tokens']:,} tokens (median {lengths['p50']:,}, longest {lengths['max']:,})\n"
    )
    write_printable(_reasons(manifest["dropped"], manifest["first_dropped"]))


def _reasons(dropped: dict[str, int], first: dict[str, str]) -> str:
    return "".join(
        f"  dropped {count:,}: {reason} (first: {first[reason]})\n"
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
    )


def _check(arguments: argparse.Namespace) -> None:
    config = _load(arguments.overrides, RowsConfig)

    from flowrl.data.preparation.check_rows import check_rows  # noqa: PLC0415 (transformers)

    kind, counts = check_rows(config)
    write_printable(f"{counts.num_read - counts.num_dropped:,} of {counts.num_read:,} rows can be used for {kind}\n")
    write_printable(_reasons(counts.dropped, counts.first))
    if counts.num_dropped:
        raise CheckFailed(f"{counts.num_dropped:,} of {counts.num_read:,} rows would be dropped")


def _show(arguments: argparse.Namespace) -> None:
    for name in ("rows", "start"):
        if (value := getattr(arguments, name)) < 0:
            raise ConfigError(f"--{name} is {value}, but must be at least 0")
    config = _load(arguments.overrides, RowsConfig)

    from flowrl.data.console import make_console  # noqa: PLC0415
    from flowrl.data.preparation.check_rows import first_rows, render_rows  # noqa: PLC0415 (transformers)

    console = make_console()
    kind, rows, tokenizer = first_rows(config, start=arguments.start, count=arguments.rows)
    for text in render_rows(rows, kind, tokenizer, has_colors=console.is_terminal):
        console.print(text, highlight=False)


def _template(arguments: argparse.Namespace) -> None:
    words = dict(word.split("=", 1) for word in arguments.overrides if "=" in word)
    paths = [word for word in arguments.overrides if "=" not in word]
    if len(paths) != 1 or set(words) != {"tokenizer"}:
        raise ConfigError("usage: flowrl data template FILE tokenizer=FOLDER (FILE is the file to create or complete)")

    from flowrl.data.chat import ChatTokenizer  # noqa: PLC0415 (transformers)
    from flowrl.data.template import write_template  # noqa: PLC0415

    path = Path(paths[0])
    template = ChatTokenizer(words["tokenizer"], path if path.exists() else None).template
    write_template(path, template)
    stops = [list(ids) for ids in template.stop_ids]
    write_printable(f"{path}: a response ends with {template.end_of_assistant!r}, stop_ids {stops}\n")
