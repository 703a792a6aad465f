"""Settings in YAML files and overrides are read. A file that is not a valid config file is rejected with its line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import ConfigError, Placement, PolicyLossConfig, load, load_located, recipe_class, to_yaml
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.config.ppo_file import error_of, rewrite
from tests.errors import missing_facts, rejects


def test_a_number_with_an_exponent_and_no_dot_is_a_number(ppo: Path) -> None:
    assert load(ppo, [], PPOConfig).actor.optimizer.lr == 1e-4


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(ppo: Path) -> None:
    config = load(ppo, ["steps=3", "actor.optimizer.lr=1e-5", "steps=4", "rollout.stop_ids=[[1, 2]]"], PPOConfig)
    assert (config.steps, config.actor.optimizer.lr, config.rollout.stop_ids) == (4, 1e-5, ((1, 2),))


def test_a_written_config_reads_back_equal(ppo: Path, tmp_path: Path) -> None:
    config = load(
        ppo, ["placement.pools={a: [1], b: 1/2}", "placement.roles={actor: a, critic: {pool: b, tp: 2}}"], PPOConfig
    )
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert load(written, [], PPOConfig) == config


def test_a_written_config_with_a_list_of_files_reads_back_equal(ppo: Path, tmp_path: Path) -> None:
    config = load(ppo, ["data.train=[{path: a.jsonl, weight: 2}]"], PPOConfig)
    (written := tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(written, [], PPOConfig) == config


def test_a_disabled_setting_is_logged_with_its_location(ppo: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_located(ppo, ["checkpoint.every=0", "checkpoint.keep_last=5"], PPOConfig)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("checkpoint.keep_last=5 and checkpoint.every=0: checkpoint.keep_last is 5")


def test_a_config_without_disabled_settings_logs_nothing(ppo: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_located(ppo, ["checkpoint.every=1", "checkpoint.keep_last=5"], PPOConfig)
    assert not caplog.records


def test_the_recipe_key_leads_to_the_config_class(ppo: Path) -> None:
    assert recipe_class(ppo) is PPOConfig


def test_a_file_of_another_recipe_is_rejected(ppo: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: .*recipes\.ppo\.train"):
        load(ppo, [], GRPOConfig)


@pytest.mark.parametrize("name", ["recipes.pqo.config:PPOConfig", "recipes.ppo.config:Nothing", "PPOConfig", "3"])
def test_a_missing_recipe_is_reported_with_its_line(ppo: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: recipe"):
        recipe_class(rewrite(ppo, "recipes.ppo.config:PPOConfig", name))


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("a: [1, 2\nb: 3\n", "bad.yaml:2: "),
        ("a: 1\nb: 2\na: 3\n", "bad.yaml:3: a "),
        ("1: 2\n", "bad.yaml:1: key '1' "),
        ("- 1\n", "bad.yaml: "),
        ("", "bad.yaml: "),
        ("a: !!int x\n", "bad.yaml: "),
        ("# nothing\n", "bad.yaml: "),
    ],
)
def test_yaml_that_is_not_a_mapping_is_rejected(tmp_path: Path, text: str, location: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert error_of(path).startswith(location)


@pytest.mark.parametrize(
    ("text", "line"), [("steps: 3\nactor:\n\tmodel: x\n", 3), ("steps:\t3\n", 1), ("a:\n  b: 1\n\tc: 2\n", 3)]
)
def test_a_tab_is_explained(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = error_of(path)
    assert message.startswith(f"bad.yaml:{line}: ") and not missing_facts(message, "tab", "spaces")


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml").startswith("none.yaml: ")
    (tmp_path / "one.yaml").write_text("steps: 1")
    (tmp_path / "another.yaml").write_text("steps: 2")
    assert not missing_facts(error_of(tmp_path / "none.yaml"), "another.yaml", "one.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", ".steps=3", "actor..model=x"])
def test_an_argument_that_is_not_an_override_is_rejected(ppo: Path, override: str) -> None:
    assert error_of(ppo, override).startswith(f"{override!r} ")


def test_the_error_of_an_override_that_is_no_yaml_has_an_override_that_is_read_as_text(ppo: Path) -> None:
    message = error_of(ppo, "address=[::1]:70000")
    assert load(ppo, [shlex.split(message)[-1]], PPOConfig).address == "[::1]:70000"


def test_an_override_below_a_plain_value_is_rejected(ppo: Path) -> None:
    message = error_of(ppo, "steps.x=1")
    assert message.startswith("steps.x=1: steps ") and not missing_facts(message, 2)


LISTED = "data: {max_prompt_tokens: 8, train: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]}"


def test_an_override_sets_an_entry_of_a_list_by_its_index(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(f"recipe: recipes.sft.config:SFTConfig\nactor: {{model: {{path: m}}}}\nsteps: 1\n{LISTED}\n")
    overrides = ["data.train.0.weight=3", "data.train.1.columns.prompt=text", "output=out"]
    overrides += ["actor.optimizer.lr=1e-3", "batch_size=2", "placement=single"]
    first, second = load(path, overrides, SFTConfig).data.training_files
    assert (first.path, first.weight, second.path) == (Path("a.jsonl"), 3, Path("b.jsonl"))
    assert second.columns == {"prompt": "text"}
    for index in ("2", "-1", "x"):
        with pytest.raises(ConfigError) as raised:
            load(path, [*overrides, f"data.train.{index}.weight=3"], SFTConfig)
        assert str(raised.value).startswith(f"data.train.{index}.weight=3: data.train ")
    with pytest.raises(ConfigError, match=r"^data\.train\.1\.weight=0: data\.train\.1\.weight "):
        load(path, [*overrides, "data.train.1.weight=0"], SFTConfig)


def test_an_override_below_null_creates_the_group(ppo: Path) -> None:
    rewrite(ppo, "{max_response_tokens: 8}", "{max_response_tokens: 8, engine: vllm, vllm: null}")
    vllm = load(ppo, ["rollout.vllm.max_model_len=16"], PPOConfig).rollout.vllm
    assert vllm is not None and vllm.max_model_len == 16


def test_a_placement_can_be_a_file_next_to_the_config(ppo: Path) -> None:
    (ppo.parent / "two.yaml").write_text("pools: {main: [2]}\nroles: {actor: main}\n")
    config = load(ppo, ["placement=two.yaml", "placement.device=cpu"], PPOConfig)
    assert config.placement == Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})


def test_an_included_placement_is_found_by_its_name(ppo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    config = load(ppo, ["placement=split", "placement.device=cpu"], PPOConfig)
    assert set(config.placement.pools) == {"policy", "judges"}
    assert not missing_facts(
        error_of(ppo, "placement=placement/none.yaml"), "split", "standalone", "project", "mapping"
    )


def test_an_error_for_a_missing_file_names_the_searched_folders(
    ppo: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    message = error_of(ppo, "placement=none")
    assert not missing_facts(message, Path.cwd(), ppo.parent) and missing_facts(message, "ppo.yaml")
    folder = tmp_path_factory.mktemp("placements")
    (folder / "two.yaml").touch()
    for setting in ("placement", "rollout"):
        message = error_of(ppo, f"{setting}={folder}/none.yaml")
        assert not missing_facts(message, "two.yaml", folder) and missing_facts(message, Path.cwd())


def test_an_error_in_an_included_file_names_that_file_and_line(ppo: Path) -> None:
    (ppo.parent / "bad.yaml").write_text("roles: {actor: main}\npools:\n  main: 3\n")
    assert error_of(ppo, "placement=bad.yaml").startswith("bad.yaml:3: placement.pools.main: ")


def test_a_missing_included_file_is_rejected(ppo: Path) -> None:
    assert not missing_facts(error_of(ppo, "placement=none.yaml"), "placement", "none.yaml", "ppo.yaml")
    assert not missing_facts(error_of(ppo, "schedule=async"), "schedule.kind", "async")


def test_a_setting_of_a_bare_name_can_be_overridden(ppo: Path) -> None:
    rewrite(ppo, "optimizer: {lr: 1e-4}\ncritic", "optimizer: {lr: 1e-4}\n  loss: gspo\ncritic")
    loss = load(ppo, ["actor.loss.clip_high=0.01"], PPOConfig).actor.loss
    assert loss == PolicyLossConfig.select("gspo", clip_high=0.01)


def test_reading_a_config_does_not_load_torch_or_ray() -> None:
    code = "import sys, recipes.ppo.config, flowrl.cli; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_aliases_that_expand_to_many_settings_are_rejected_with_their_line(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with rejects(f"{tmp_path}/bomb.yaml:5", "a4", error=ConfigError):
        load(tmp_path / "bomb.yaml", [], SFTConfig)


@pytest.mark.parametrize("text", ["steps: &a [*a]", "steps: " + "[" * 3000 + "]" * 3000])
def test_endless_and_deep_groups_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    with rejects(f"{tmp_path}/deep.yaml", error=ConfigError):
        load(tmp_path / "deep.yaml", [], SFTConfig)
    with rejects(error=ConfigError):
        load(None, [text.replace(": ", "=")], SFTConfig)


def test_an_alias_is_replaced_by_its_settings(ppo: Path) -> None:
    actor, critic = ppo.read_text().split("critic:")
    actor, critic = actor.replace("{lr:", "&optimizer {lr:"), critic.replace("{lr: 1e-4}", "*optimizer")
    ppo.write_text(f"{actor}critic:{critic}")
    config = load(ppo, [], PPOConfig)
    assert config.actor.optimizer.lr == config.critic.optimizer.lr == 1e-4


def test_a_config_that_is_a_pipe_or_too_large_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "large.yaml").write_text("# " + "x" * 2_000_000)
    for name in ("pipe", "zero", "large"):
        with rejects(tmp_path / f"{name}.yaml", error=ConfigError):
            load(tmp_path / f"{name}.yaml", [], SFTConfig)


@pytest.mark.parametrize("text", [r'output: "a\0b"', r'output: "a\udcff"'])
def test_a_path_with_an_invalid_character_is_rejected_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with rejects(f"{tmp_path}/a.yaml:1", "output", error=ConfigError):
        load(tmp_path / "a.yaml", [], SFTConfig)
