#!/usr/bin/env python3
"""Translates CUDA C++ to C++ where macros cannot, line by line, so that debuggers and sanitizers report the source's
lines.

    translate.py SOURCES INSTEAD TARGET NAME...    writes TARGET/NAME from INSTEAD/NAME, or else from SOURCES/NAME
    translate.py --list FILE...                    the names of all kernels

Four things change: launches by <<<...>>> become calls, shared variables become references to the block's memory, a
__grid_constant__ becomes a reference to the launch's copy, and every kernel begins with a call that logs it.
cuda/emulator.h handles the rest of CUDA.
"""

import re
import sys
from pathlib import Path

OPEN, CLOSE = "([{", ")]}"


def closing(text, at):
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        if text[i] in OPEN:
            depth += 1
        elif text[i] in CLOSE:
            depth -= 1
            if depth == 0:
                return i
    raise SystemExit(f"translate.py: no end of {text[at : at + 40]!r}")


def without_comments(text):
    """The text with comments and string contents replaced by blanks."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())

    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def kernels(text):
    """Of each kernel its name, the text of its launch bounds, and the index after the opening brace of its body."""
    plain = without_comments(text)
    for found in re.finditer(r"__global__\s+void\b", plain):
        at = found.end()
        bounds = ""
        while True:
            word = re.compile(r"\s*(\w+)\s*").match(plain, at)
            end = closing(plain, word.end())
            if word.group(1) != "__launch_bounds__":
                break
            bounds = plain[word.end() + 1 : end]
            at = end + 1
        brace = re.compile(r"\s*\{").match(plain, end + 1)
        if brace:
            yield word.group(1), bounds, brace.end()


def note_kernels(text):
    for name, bounds, at in reversed(list(kernels(text))):
        # Launch bounds may contain commas and comparisons: only the first bound is used, in parentheses.
        text = text[:at] + f' EMULATOR_KERNEL("{name}", {one_line(first_argument(bounds))});' + text[at:]
    return text


def one_line(text):
    return " ".join(text.split())


def first_argument(text):
    depth = 0
    for i, c in enumerate(text):
        depth += (c in OPEN + "<") - (c in CLOSE + ">")
        if c == "," and depth == 0:
            return f"({text[:i]})"
    return f"({text})" if text.strip() else ""


SHARED = re.compile(
    r"(?P<extern>extern\s+)?__shared__\s+(?:__align__\((?P<align>\d+)\)\s*)?(?P<type>[\w:]+(?:<[^;]*>)?)\s+"
    r"(?P<name>\w+)(?P<dims>(?:\[[^\]]*\])*);"
)


def shared_variable(match):
    kind, name, dims = match["type"], match["name"], match["dims"]
    lines = "\n" * match.group().count("\n")
    if match["extern"]:
        return f"{kind} *{name} = ({kind} *)emulator_dynamic();{lines}"
    align = match["align"] or f"alignof({name}_kind)"
    return (
        f"static char {name}_key; typedef {kind} {name}_kind{dims}; {name}_kind &{name} = "
        f'*({name}_kind *)emulator_shared(&{name}_key, sizeof({name}_kind), {align}, "{name}");{lines}'
    )


GRID_CONSTANT = re.compile(r"const __grid_constant__ (\w+(?:<[^<>]*>)?) (?=\w+\s*[,)])")


def translate_grid_constants(text, kinds):
    """Parameters become references, also in the types of pointers to kernels."""
    text = GRID_CONSTANT.sub(r"const \1 &", text)
    return re.sub(r"(void \(\*\w+\)\()(\w+)\b", lambda m: f"{m[1]}const {m[2]} &" if m[2] in kinds else m[0], text)


def launched(text, end):
    """The start of the launched expression before <<<: an identifier, with template arguments or without."""
    at = end
    while text[at - 1].isspace():
        at -= 1
    if text[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += (text[at] == ">") - (text[at] == "<")
            if depth == 0:
                break
    return re.search(r"\w+$", text[:at]).start()


def translate_launches(text):
    while True:
        place = without_comments(text).find("<<<")
        if place < 0:
            return text
        begin = launched(text, place)
        what = text[begin:place]
        shape_end = re.compile(r">>>\s*(?=\()").search(text, place)
        bracket = shape_end.end()
        end = closing(without_comments(text), bracket)
        shape, arguments = text[place + 3 : shape_end.start()], text[bracket + 1 : end]
        call = one_line(what)
        comma = ", " if arguments.strip() else ""
        text = (
            f'{text[:begin]}tchi::launch_kernel("{call}", tchi::shape_of({shape}), '
            f"[=](const auto &... a) {{ {what}(a...); }}{comma}{arguments}){text[end + 1 :]}"
        )


def translate(text, kinds):
    return translate_launches(SHARED.sub(shared_variable, translate_grid_constants(note_kernels(text), kinds)))


def write_if_new(path, text):
    """An unchanged file keeps its time, and is not recompiled."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def translate_all(sources, instead, target, names):
    read = [Path(instead, name) if Path(instead, name).exists() else Path(sources, name) for name in names]
    texts = [source.read_text() for source in read]
    kinds = {kind for text in texts for kind in GRID_CONSTANT.findall(text)}
    for name, source, text in zip(names, read, texts, strict=True):
        suffix = ".cpp" if name.endswith(".cu") else ""
        write_if_new(Path(target, name + suffix), f'#line 1 "{source}"\n{translate(text, kinds)}')


def main(arguments):
    if arguments[0] == "--list":
        names = {name for path in arguments[1:] for name, _, _ in kernels(Path(path).read_text())}
        print("\n".join(sorted(names)))
    else:
        translate_all(*arguments[:3], arguments[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
