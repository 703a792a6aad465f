"""The page of all settings is current and complete."""

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from flowrl.cli.imports import included_recipes
from flowrl.cli.main import REFERENCE_COMMAND
from flowrl.config import ActorConfig, EngineConfig, OptimizerConfig, RolloutConfig
from flowrl.config.base import Config
from flowrl.config.placement import SINGLE, Placement
from flowrl.config.run import RunConfig
from flowrl.config.schedule import AsyncSchedule, SyncSchedule
from flowrl.config.setting_reference import default_of, render_reference, type_of, union_settings
from flowrl.config.setting_tree import config_classes, fields_of, meaning_of, setting_paths

PAGE = Path(__file__).parents[2] / "docs/config.md"


def test_the_page_is_current() -> None:
    is_current = PAGE.read_text(encoding="utf-8") == render_reference(included_recipes(), REFERENCE_COMMAND)
    assert is_current, f"docs/config.md is not current: run {REFERENCE_COMMAND}"
    assert REFERENCE_COMMAND in PAGE.read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """Returns the text of each section of the page by its title."""
    parts = re.split(r"^## `?(.*?)`?$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_setting_of_every_recipe_is_in_the_table_of_its_group() -> None:
    keys = {title: set(re.findall(r"`([\w.]+)`", text.partition("\n\n|")[0])) for title, text in sections().items()}
    for cls in included_recipes().values():
        for path in setting_paths(cls):
            named = re.sub(
                r"(^placement\.roles|^data\.tests|\.reasoning_gym|\.optimizer\.groups)(?=\.)", r"\1.NAME", path
            )
            group, _, name = named.rpartition(".")
            titles = [title for title, groups in keys.items() if group in groups] or ["Top-level settings"]
            assert [title for title in titles if f"| `{name}` |" in sections()[title]], path


def test_settings_that_a_recipe_does_not_accept_are_omitted() -> None:
    assert "environment" not in set(setting_paths(included_recipes()["distillation"]))
    top = sections()["Top-level settings"]
    (dynamic_sampling,) = re.findall(r"^\| `dynamic_sampling` .*\| (.*) \|$", top, re.MULTILINE)
    assert dynamic_sampling == "grpo, ppo, rejection_sampling"
    assert "reward.evaluation.model" not in PAGE.read_text(encoding="utf-8")
    assert "`reward.evaluation` does not accept `model`," in sections()["reward component"]


def test_a_group_of_several_roles_has_one_section() -> None:
    rows = re.findall(r"^\| `max_tokens_per_microbatch` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 1


def test_links_of_the_page_have_a_section() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert len(anchors) == len(headings)
    links = set(re.findall(r"\]\(#(.*?)\)", PAGE.read_text(encoding="utf-8")))
    assert links and links <= anchors


def test_every_row_has_the_columns_of_its_table() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(tables) > 20
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table[:200]


@pytest.mark.parametrize(
    ("cls", "name", "allowed"),
    [
        (RunConfig, "steps", "integer above 0"),
        (RunConfig, "address", "text or `null`"),
        (RunConfig, "devices", "list of integers at least 0 or `null`"),
        (RunConfig, "placement", "group"),
        (RolloutConfig, "top_p", "number above 0, at most 1"),
        (RolloutConfig, "engine", "`hf`, `vllm` or `module:Class`"),
        (RolloutConfig, "check", "`warn`, `strict` or `'off'`"),
        (OptimizerConfig, "betas", "list of 2 numbers"),
        (EngineConfig, "compile", "`true`, `false` or `auto`"),
        (ActorConfig, "kl_loss_kind", "`k1`, `k2`, `k3`, `abs` or `module:function`"),
        (Placement, "roles", "mapping of text or groups"),
    ],
)
def test_types_are_described_in_words(cls: type, name: str, allowed: str) -> None:
    assert type_of(cls.model_fields[name]) == allowed


def test_defaults_are_plain_values() -> None:
    fields = RunConfig.model_fields
    assert default_of(fields["checkpoint"]) == {} and default_of(ActorConfig.model_fields["loss"]) == {"kind": "ppo"}
    placement = default_of(fields["placement"])
    assert placement == {"pools": {"main": [1]}, "roles": dict.fromkeys(SINGLE.roles, "main")}


def test_settings_of_a_union_are_merged_if_they_are_equal() -> None:
    names = {setting.name: setting.members for setting in union_settings((SyncSchedule, AsyncSchedule))}
    assert names["max_staleness"] == ("async",) and "kind" not in names
    loss = union_settings(config_classes(ActorConfig.model_fields["loss"].annotation))
    clip_low = {setting.members: default_of(setting.info) for setting in loss if setting.name == "clip_low"}
    assert clip_low[("clip_cov", "ppo", "decoupled_ppo")] == 0.2 and clip_low[("gspo", "gspo_token")] == 3e-4


def test_a_redefined_field_without_a_docstring_has_that_of_the_base_class() -> None:
    class Base(Config):
        size: int = 1
        """Number
        of rows."""
        name: str = ""

    class Redefined(Base):
        size: int = 2
        name: str = "a"
        """Name of the file."""

    meanings = [{name: meaning_of(field) for name, field in cls.model_fields.items()} for cls in (Base, Redefined)]
    assert meanings == [
        {"size": "Number of rows.", "name": ""},
        {"size": "Number of rows.", "name": "Name of the file."},
    ]


@pytest.mark.parametrize("cls", included_recipes().values(), ids=included_recipes())
def test_every_setting_has_a_meaning(cls: type[RunConfig]) -> None:
    def missing(fields: dict[str, FieldInfo], prefix: str) -> list[str]:
        own = [prefix + name for name, info in fields.items() if not meaning_of(info) and name not in ("kind",)]
        groups = {name: fields_of(config_classes(info.annotation)) for name, info in fields.items()}
        return own + [key for name, inner in groups.items() for key in missing(inner, f"{prefix}{name}.")]

    assert missing(cls.model_fields, "") == []
