"""The files of figures that every benchmark here writes: JSON in which each row of a list stands on a line of its own,
so that a diff of two runs shows rows. Numbers keep five digits, and what failed has null, since JSON has no infinity.
"""

import json
import math
import os
import re

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")  # what the pages show


def plain(value):
    """The same with every number rounded, and null for those that are not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def text(figures):
    """A field a line, a row of a list a line."""
    return _fields(figures, " ") + "\n"


def _fields(fields, indent):
    lines = [f"{indent}{json.dumps(name)}: {_value(value, indent + ' ')}" for name, value in fields.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent[1:]}}}"


def _value(value, indent):
    if isinstance(value, dict) and value:
        return _fields(value, indent)
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(indent + json.dumps(row) for row in value) + f"\n{indent[1:]}]"
    return json.dumps(value)


def write(path, figures):
    """All at once: a run that is stopped leaves the figures of the last whole one."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w", encoding="ascii") as file:
        file.write(text(plain(figures)))
    os.replace(path + ".part", path)


def device_name(device):
    """NVIDIA H200 as h200, for the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")
