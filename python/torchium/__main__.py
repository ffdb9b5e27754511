"""`python -m torchium`, the diagnosis, and the command `torchium`, the C program of that name. Exit status: 0 no
problems, 1 problems, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

_WIDTH = 100


def main(arguments: list[str] | None = None) -> int:
    """The diagnosis. `arguments`: the command line without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python -m torchium",
        description="Tells what Torchium found on this machine, what is missing, and what to do about it.",
        epilog="The command `torchium` trains, times and compares: see torchium --help.",
    )
    parser.add_argument("word", nargs="?", choices=["doctor"], default="doctor", help="may be left out")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    options = parser.parse_args(arguments)
    from torchium import doctor

    report = doctor.examine()
    try:
        print(json.dumps(report, indent=2) if options.json else text_of(report), flush=True)
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if report["problems"] else 0


def command() -> None:
    """The entry point `torchium` of the wheel: replaces this process by the C program."""
    program = Path(__file__).parent / "bin" / "torchium"
    if not program.is_file():  # an editable installation has its binaries elsewhere
        from torchium import get_library_dir

        program = Path(get_library_dir()).parent / "bin" / "torchium"
    try:
        os.execv(program, ["torchium", *sys.argv[1:]])
    except OSError as error:
        print(f"torchium: {program} cannot be run ({error.strerror}); install the package again", file=sys.stderr)
        sys.exit(1)


def text_of(report: dict[str, Any]) -> str:
    """The report as plain text."""
    parts = ["\n".join([title, *(_row(*row) for row in rows)]) for title, rows in _sections(report).items()]
    return "\n\n".join(parts)


def _row(name: str, value: str) -> str:
    wrapper = textwrap.TextWrapper(
        _WIDTH,
        initial_indent=f"  {name:<13} ",
        subsequent_indent=" " * 16,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return wrapper.fill(value) or f"  {name}"


def _sections(report: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    library = report["library"]
    version = library["version"] if library else report["package"]["installed_version"] or "(version unknown)"
    sections = {f"Torchium {version}": _files(report)}
    if library:
        sections["Devices"] = _devices(library)
    sections["Python packages"] = _packages(report)
    if report["environment"]:
        sections["Environment"] = [(f"{name} =", value) for name, value in report["environment"].items()]
    if library:
        sections["Self-test"] = [_test_row(test) for test in report["tests"]]
        sections["Custom kernels"] = list(report["kernels"].items())
    problems = [(f"{i}.", f"{p['what']}. {_sentence(p['remedy'])}") for i, p in enumerate(report["problems"], 1)]
    sections["Problems"] = problems or [("none", "")]
    return sections


def _sentence(text: str) -> str:
    text = text or "no remedy is known"
    return text[0].upper() + text[1:] + "."


def _files(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("package", report["package"]["folder"])]
    library = report["library"]
    if library:
        rows += [("extension", library["extension"]), ("library", library["file"])]
    names = {
        "OpenBLAS": ("libopenblas", "libscipy_openblas"),  # the latter also those of NumPy and SciPy
        "OpenMP": ("libgomp",),
        "cuBLAS": ("libcublas",),
        "cuSOLVER": ("libcusolver",),
        "NVRTC": ("libnvrtc",),
    }
    found = {title: [file for key in keys for file in report["loaded"].get(key, [])] for title, keys in names.items()}
    return rows + [(title, ", ".join(files)) for title, files in found.items() if files]


def _devices(library: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for backend in library["backends"]:
        name = backend["name"]
        if not backend["available"]:
            rows.append((name, f"not available: {backend['reason']}"))
            continue
        rows += [(d["device"], _device(d)) for d in library["devices"] if d["device"].partition(":")[0] == name]
        rows.append(("", backend["details"] if name == "cpu" else f"{backend['library']}: {backend['details']}"))
    return rows


def _device(device: dict[str, Any]) -> str:
    gib = [device[key] / 2**30 for key in ("total_memory", "free_memory")]
    return f"{device['name']}, {device['features']}; {gib[0]:.1f} GiB, {gib[1]:.1f} free"


def _packages(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("Python", f"{report['python']['version']}, {report['python']['executable']}")]
    torch, numpy = report["torch"], report["numpy"]
    if torch is None:
        rows.append(("PyTorch", "not installed: torchium.optim, .amp and .utils need it (pip install torch)"))
    elif torch["cuda"] is None:
        rows.append(("PyTorch", f"{torch['version']}, without CUDA"))
    else:
        gpus = ", ".join(torch["gpus"]) or "it sees no GPU"
        rows.append(("PyTorch", f"{torch['version']}, CUDA {torch['cuda']}; {gpus}"))
    rows.append(("NumPy", numpy["version"] if numpy else "not installed"))
    return rows


def _test_row(test: dict[str, Any]) -> tuple[str, str]:
    verdict = {True: "good", False: "FAILED", None: "not tried"}[test["passed"]]
    return test["device"], f"{test['name']}: {verdict}, {test['result']}"


if __name__ == "__main__":
    sys.exit(main())
