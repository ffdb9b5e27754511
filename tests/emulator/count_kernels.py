#!/usr/bin/env python3
"""Compares the kernels in the sources with those that ran: count_kernels.py LOGS EXCEPTIONS SOURCE...

LOGS is a folder with one file per test, in which the emulator has logged the name of every kernel that ran. Each line
of EXCEPTIONS has the name of a kernel and the reason why no emulated test runs it. It is an error if a kernel is in
neither, or if an exception does not exist or does run. At least four fifths of all kernels must run.
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
