#!/usr/bin/env python3
"""Compares the kernels of the sources with those that ran: count_kernels.py LOGS EXCEPTIONS SOURCE...

LOGS is a folder of files in which the emulator has noted the name of every kernel it ran, one file for each test.
EXCEPTIONS has in every line a kernel's name and the reason why no emulated test runs it. A kernel that is in neither is
an error, and so is an exception that has no kernel, or that runs after all. At least four fifths of all must run.
"""

import sys
from pathlib import Path

import translate

LEAST = 0.8


def read_exceptions(path):
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def main(logs, exceptions, *sources):
    excused = read_exceptions(Path(exceptions))
    known = {name for path in sources for name, _, _ in translate.kernels(Path(path).read_text())}
    files = sorted(Path(logs).glob("*.log"))
    if not files:
        print("skipped: no emulated test has run in this build")
        return 77
    ran = {name for path in files for name in path.read_text().split()} & known
    problems = [
        f"{name}: no emulated test runs it; give it a test, or a reason in {exceptions}"
        for name in sorted(known - ran - excused.keys())
    ]
    problems += [f"{name}: in {exceptions}, but no kernel has this name" for name in sorted(excused.keys() - known)]
    problems += [f"{name}: in {exceptions}, but it runs: take it out" for name in sorted(excused.keys() & ran)]
    if len(ran) < LEAST * len(known):
        problems.append(f"{len(ran)} of {len(known)} kernels ran, fewer than {LEAST:.0%}")
    print("\n".join(problems))
    print(f"{len(ran)} of {len(known)} kernels ran in {len(files)} emulated tests, {len(excused)} are excused")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
