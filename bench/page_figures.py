#!/usr/bin/env python3
"""Compares the numbers that pages show with bench/results, so that none goes stale.

PAGE.figures beside PAGE.md says where its numbers come from:

    # Optimizers                        a section of the page, by its heading
    table optim-h200 rows               its first table, and a list in bench/results/optim-h200.json
    | | | ours_ms | anchors_ms.~ |      a field for each column that shows one
    AdamW step @ GPT-2                  a row of the list for each row of the table
    text optim-h200 rows                the section's text without its tables
    0.69 = AdamW step @ GPT-2 -> with_check_ms

ROW is what its values are, or name=value, between `@`; with `min` or `max` before it, the least or the largest of
several rows; `ROW / ROW` is the ratio of two. FIELD is a path; `~` stands for the fastest of several (least, or with
the least ms), and `/` and `*` take a field or a number. A column with several numbers has `;` between their fields. A
row with columns of its own has them behind it, as in the line of columns; `-` skips a row; `each ROW` is for all rows
that follow, with {0} for the first cell. `NUMBER = ROW -> FIELD` is about any number of the table or text. `from FILE
LIST` begins at the top of the table again, with the rows of another list. A number is right when it is the measured one
in as many digits as the page has. `table none, REASON` says why a table has nothing to compare.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Pages on which every table of numbers must have its source.
PAGES = ("README.md", "docs/performance.md", "docs/python/performance.md")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)


class Wrong(Exception):
    """A number that differs from the measured one, or an invalid line."""


def rows_of(place):
    """The list named by "file list"."""
    file, _, name = place.partition(" ")
    path = ROOT / "bench" / "results" / f"{file}.json"
    if not path.is_file():
        raise Wrong(f"there is no bench/results/{file}.json")
    lists = json.loads(path.read_text(encoding="utf-8"))
    if name not in lists:
        raise Wrong(f"bench/results/{file}.json has no {name!r}")
    return lists[name]


def fits(row, part):
    name, equal, value = part.partition("=")
    if equal and name in row:
        return str(row[name]) == value
    return part in map(str, row.values())


def least(values):
    """The key of the fastest: the smallest number, or the entry with the smallest ms."""
    known = {key: value["ms"] if isinstance(value, dict) else value for key, value in values.items()}
    return min(known, key=known.get)


def field(row, path):
    """A number of a row, by its path."""
    if re.fullmatch(NUMBER, path):
        return float(path)
    value = row
    for name in path.split("."):
        key = least(value) if name == "~" else name
        if not isinstance(value, dict) or value.get(key) is None:
            raise Wrong(f"a row has no {path!r}")
        value = value[key]
    return value


def measured(row, expression):
    """Field, field / field or field * number, from left to right."""
    first, *rest = re.split(r" ([/*]) ", expression.strip())
    value = field(row, first)
    for operator, other in zip(rest[::2], rest[1::2], strict=True):
        by = field(row, other)
        value = value / by if operator == "/" else value * by
    return value


def chosen(rows, row, expression):
    """The measured number of a row, or the minimum or maximum of several."""
    which, _, others = row.strip().partition(" ")
    pick = {"min": min, "max": max}.get(which)
    wanted = [part.strip() for part in (others if pick else row).split("@")]
    found = [measured(r, expression) for r in rows if all(fits(r, part) for part in wanted)]
    if not found or (len(found) > 1 and not pick):
        raise Wrong(f"{len(found)} rows are {row.strip()!r}")
    return pick(found) if pick else found[0]


def compare(shown, rows, row, expression):
    """Whether a number in a page is the measured one, in its own digits."""
    value, *others = (chosen(rows, part, expression) for part in row.split(" / "))
    for other in others:
        value /= other
    shown = shown.replace(",", "")
    mantissa, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    if abs(float(shown) - value) > 0.5001 * unit:
        raise Wrong(f"the page has {shown}, measured: {value:.5g}")


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def plain(cell):
    """Formats a cell as in bench/results."""
    return cell.replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{CIRCLED TIMES}", "(x)").strip("*`")


def check_row(rows, line, columns, shown):
    """One row of a table."""
    row, own, rest = line.partition("|")
    row = row.format(*map(plain, shown))
    for column, cell in zip(cells("|" + rest) if own else columns, shown, strict=True):
        expressions, numbers = column.split(";") if column else [], NUMBER.findall(cell)
        if len(numbers) < len(expressions):
            raise Wrong(f"no number in the cell {cell!r}, for {column!r}")
        for number, expression in zip(numbers, expressions, strict=False):
            compare(number, rows, row, expression)


def check_line(rows, line, columns, body, text):
    """A line about a number, or about the next row of a table."""
    shown, arrow, expression = line.partition(" -> ")
    if arrow:
        shown, _, row = shown.partition(" = ")
        if shown not in [number.replace(",", "") for number in NUMBER.findall(text)]:
            raise Wrong(f"{shown} is not in the text")
        return compare(shown, rows, row, expression)
    if not body:
        raise Wrong("the table has no such row")
    for _ in range(len(body) if line.startswith("each ") else 1):
        cell = body.pop(0)
        if line != "-":
            check_row(rows, line.removeprefix("each "), columns, cell)


def check(lines, text):
    """All errors in the numbers of a table or text, by the lines about it."""
    if lines[0].startswith("none,"):
        return
    for one in "\n".join(lines).split("\nfrom "):
        place, *rest = one.split("\n")
        columns, body, by_row = [], [cells(line) for line in text.split("\n") if line.startswith("|")][2:], False
        try:
            rows = rows_of(place)
        except Wrong as problem:
            yield str(problem)
            continue
        for line in rest:
            if line.startswith("|"):
                columns = cells(line)
                continue
            by_row = by_row or " -> " not in line
            try:
                check_line(rows, line, columns, body, text)
            except Wrong as problem:
                yield f"{line}: {problem}"
        if by_row and body:
            yield f"{place}: the table has more rows than lines here"


def sections(page):
    """(text, tables) of each section, by its heading."""
    parts = re.split(r"^#+ (.*)\n", FENCE.sub("", page), flags=re.MULTILINE)
    return {
        name: (TABLE.sub("", text), TABLE.findall(text)) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def blocks(known, figures):
    """(lines about it, table or text) of everything with figures. Removes tables from `known`."""
    for part in re.split(r"^# ", figures, flags=re.MULTILINE)[1:]:
        name, *found = re.split(r"^(table|text) ", part.strip(), flags=re.MULTILINE)
        text, tables = known.get(name.strip(), ("", []))
        for kind, lines in zip(found[::2], found[1::2], strict=True):
            yield lines.strip().split("\n"), text if kind == "text" else tables.pop(0) if tables else ""


def problems(page, figures, whole=False):
    """Errors of a page; with `whole`, also tables of numbers without figures."""
    known = sections(page)
    for lines, text in blocks(known, figures):
        yield from check(lines, text)
    for table in (table for _, tables in known.values() for table in tables if whole):
        if re.search(r"\d\.\d|\d (?:ms|GB)", table.partition("\n|-")[2]):
            yield f"{table.partition(chr(10))[0]}: a table of numbers that does not say where they come from"


def read(path):
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def pages():
    """(name, text, figures, whether all of its tables need them) of each page that has figures, or must."""
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        name, figures = path.relative_to(ROOT).as_posix(), read(path.with_suffix(".figures"))
        if figures or name in PAGES:
            yield name, read(path), figures, name in PAGES


def main():
    bad = [f"{name}: {problem}" for name, *page in pages() for problem in problems(*page)]
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
