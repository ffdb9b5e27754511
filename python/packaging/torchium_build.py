"""The build backend for pip and its like: scikit-build-core's, and on a terminal a line that tells how far it is.

pip keeps what a build says to itself until something fails, so minutes would pass without a word. Here the output goes
through a pipe on its way to pip: what is built, what is left out and the number of files compiled are shown on the
terminal too. Without a terminal nothing is added.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_SUMMARY = re.compile(r"--\s+(builds .*)")  # cmake/Summary.cmake
_COUNT = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")  # Ninja's, or make's


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _progress():
        return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _progress():
        return _build.build_editable(wheel_directory, config_settings, metadata_directory)


def _told(line: str) -> str | None:
    """What the terminal is shown for a line of the build's output."""
    if summary := _SUMMARY.match(line):
        return f"\rtorchium {summary[1].rstrip()}\n"
    if count := _COUNT.match(line):
        return f"\rtorchium: {count[1]} of {count[2]} compiled " if count[2] else f"\rtorchium: {count[1]} % compiled "
    return None


def _pass_on(source: int, destination: int, terminal: TextIO) -> None:
    with open(source, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            os.write(destination, line.encode("utf-8", "replace"))
            if text := _told(line):
                terminal.write(text)
                terminal.flush()


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    try:
        terminal = open("/dev/tty", "w")  # noqa: SIM115 - closed below
    except OSError:
        yield
        return
    sys.stdout.flush()
    out = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    thread = threading.Thread(target=_pass_on, args=(read, out, terminal), daemon=True)
    terminal.write("\n")
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)  # closes the last writer of the pipe, which ends the thread
        thread.join(10)
        os.close(out)
        terminal.write("\n")
        terminal.close()
