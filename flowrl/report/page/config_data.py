"""Settings of the report: the configs of runs as flat keys, and the keys with different values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by dotted key, in the order of the config. Lists and empty groups are values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{key}": inner for key, inner in flatten_settings(value).items()}
        else:
            flat[str(name)] = value
    return flat


def compare_settings(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns an entry per key of any config: `values` has the value of each config as text, None if it is absent.

    `differs` is true if the configs have different values.
    """
    flat = [flatten_settings(config) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    entries = []
    for key in keys:
        values = [_text(settings[key]) if key in settings else None for settings in flat]
        entries.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return entries


def _text(value: Any) -> str:  # Any: the value of a setting
    return value if isinstance(value, str) else json.dumps(value, default=str)
