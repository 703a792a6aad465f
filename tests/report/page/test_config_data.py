from flowrl.report.page.config_data import compare_settings, flatten_settings


def test_settings_have_dotted_keys() -> None:
    config = {"steps": 3, "actor": {"optimizer": {"lr": 0.1}, "lora": None, "options": {}}, "devices": [1, 2]}
    assert flatten_settings(config) == {
        "steps": 3,
        "actor.optimizer.lr": 0.1,
        "actor.lora": None,
        "actor.options": {},
        "devices": [1, 2],
    }


def test_differences_include_absent_settings() -> None:
    entries = {entry["key"]: entry for entry in compare_settings([{"a": 1, "b": {"c": "x"}}, {"a": 1, "d": None}])}
    assert entries["a"] == {"key": "a", "values": ["1", "1"], "differs": False}
    assert entries["b.c"] == {"key": "b.c", "values": ["x", None], "differs": True}
    assert entries["d"] == {"key": "d", "values": [None, "null"], "differs": True}
