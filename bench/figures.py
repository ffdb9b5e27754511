"""JSON files of results, with one row of a list per line, for readable diffs. Numbers are rounded to five digits;
failures are null, since JSON has no infinity."""

import json
import math
import os
import re

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")  # what the pages show


def plain(value):
    """Rounds every number; non-finite ones become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def text(figures):
    """One line per field, one per row of a list; fields without fields of their own share a line."""
    return _fields(figures, " ") + "\n"


def _fields(fields, indent):
    lines = [f"{indent}{json.dumps(name)}: {_value(value, indent + ' ')}" for name, value in fields.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent[1:]}}}"


def _value(value, indent):
    if isinstance(value, dict) and any(isinstance(item, (dict, list)) for item in value.values()):
        return _fields(value, indent)
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(indent + json.dumps(row) for row in value) + f"\n{indent[1:]}]"
    return json.dumps(value)


def write(path, figures):
    """Atomically: an interrupted run leaves the figures of the last complete one."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text(plain(figures)))
    os.replace(path + ".part", path)


def device_name(device):
    """NVIDIA H200 becomes h200, for file names."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")
