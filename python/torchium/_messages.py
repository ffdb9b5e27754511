"""Formatting of values in messages."""

from __future__ import annotations

from typing import Any

__all__ = ["shown"]


def shown(value: Any) -> str:
    """The value if it is of a plain type, else the type. Printing a tensor reads its memory, which may be freed."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        return f"({', '.join(shown(item) for item in value)})"
    if (type(value).__module__, type(value).__name__) in (("torch", "dtype"), ("torch", "device")):
        return str(value)
    return f"an object of type {type(value).__name__}"
