"""Checks the library search paths of programs and libraries: python test_runpaths.py FOLDER...

The RUNPATH of every ELF file below the folders must contain only absolute folders or ones relative to the file. An
empty entry is the current folder, where anyone may have put a file.
"""

import os
import re
import subprocess
import sys

# CMake's compiler checks, and files that other tests create concurrently.
PASSED_OVER = {"CMakeFiles", "consumer", "kernel-cache"}


def elf_files(folder):
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in PASSED_OVER]
        for name in names:
            file = os.path.join(path, name)
            try:
                with open(file, "rb") as stream:
                    is_elf = stream.read(4) == b"\x7fELF"
            except OSError:  # a dangling link, or removed since it was listed
                continue
            if is_elf and not os.path.islink(file) and not name.endswith(".o"):
                yield file


def entries(file):
    """The folders of the file's RUNPATH or RPATH."""
    text = subprocess.run(["readelf", "-dW", file], capture_output=True, text=True, check=True).stdout
    for found in re.findall(r"\((?:RUNPATH|RPATH)\)[^\[]*\[(.*)\]", text):
        yield from found.split(":")


def is_safe(entry):
    return entry.startswith("/") or re.match(r"\$(ORIGIN|\{ORIGIN\})(/|$)", entry) is not None


def main(folders):
    files = sorted(file for folder in folders for file in elf_files(folder))
    wrong = [(file, entry) for file in files for entry in entries(file) if not is_safe(entry)]
    for file, entry in wrong:
        print(f'{file}: its RUNPATH has "{entry}", expected folders that begin with / or $ORIGIN')
    print(f"{len(files)} files")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
