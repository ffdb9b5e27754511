"""Checks the hardening of released binaries: python test_hardened.py FILE...

Read-only relocations (full RELRO), a non-executable stack, position-independent executables, and calls inserted by the
stack protector and FORTIFY. SECURITY.md explains each.
"""

import re
import subprocess
import sys


def readelf(option, file):
    return subprocess.run(["readelf", option, "-W", file], capture_output=True, text=True, check=True).stdout


def problems(file):
    segments, dynamic, symbols = readelf("-l", file), readelf("-d", file), readelf("--dyn-syms", file)
    stack = re.search(r"GNU_STACK.*", segments)
    if "Elf file type is DYN" not in segments:
        yield "it runs at one address alone"
    if "GNU_RELRO" not in segments:
        yield "it has no RELRO"
    if "BIND_NOW" not in dynamic and not re.search(r"FLAGS_1.*NOW", dynamic):
        yield "its addresses are bound when they are used first, and stay writable until then"
    if stack is None or "RWE" in stack[0]:
        yield "its stack is executable"
    if "__stack_chk_fail" not in symbols:
        yield "it has no stack protector"
    if re.search(r"__\w+_chk\b", symbols) is None:
        yield "FORTIFY has checked nothing in it"
    if "(TEXTREL)" in dynamic:
        yield "its code is written to when it is loaded"


def main(files):
    wrong = [(file, problem) for file in files for problem in problems(file)]
    for file, problem in wrong:
        print(f"{file}: {problem}")
    print(f"{len(files)} files")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
