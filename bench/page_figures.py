#!/usr/bin/env python3
"""Compares the numbers that pages show with bench/results, so that none goes stale.

Behind a table or a paragraph stands a comment that says where its numbers come from. Its first line names a file and a
list in it; a line `NUMBER = ROW -> FIELD` is about a number of the text, and for a table a line of columns is followed
by a line for each row:

    | a step of | model | ours, ms | compared with, ms | speedup |
    |---|---|---|---|---|
    | AdamW | GPT-2 | 0.590 | 0.724 (torch fused) | **1.2** |

    <!-- figures: optim-h200 rows
    | | | ours_ms | anchors_ms.~ | anchors_ms.~ / ours_ms |
    AdamW step @ GPT-2
    -->

    Looking for gradients that are not finite takes 0.69 ms in all.

    <!-- figures: optim-h200 rows
    0.69 = AdamW step @ GPT-2 -> with_check_ms
    -->

ROW is what its values are, or name=value, between `@`; with `min` or `max` before it, the least or the largest of
several rows. FIELD is a path; `~` stands for the fastest of several (least, or with the least ms), and `/` and `*` take
a field or a number. A column with several numbers has `;` between their fields. A row with columns of its own has them
behind it, as in the line of columns; `-` skips a row; `each ROW` is for all rows that follow, with {0} for the first
cell. A second line of columns begins at the top of the table again, and `from FILE LIST` goes on with other rows. A
number is right when it is the measured one in as many digits as the page has. `<!-- figures: none, REASON -->` says why
a table has nothing to compare.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where every table of numbers has to say where they come from.
PAGES = ("README.md", "docs/performance.md", "docs/python/performance.md")
COMMENT = re.compile(r"^<!-- figures: (.*?)-->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Wrong(Exception):
    """A number that is not the measured one, or a comment that cannot be followed."""


def rows_of(place):
    """The list that "file list" names."""
    file, _, name = place.strip().partition(" ")
    path = ROOT / "bench" / "results" / f"{file}.json"
    if not path.is_file():
        raise Wrong(f"there is no bench/results/{file}.json")
    lists = json.loads(path.read_text(encoding="utf-8"))
    if name.strip() not in lists:
        raise Wrong(f"bench/results/{file}.json has no {name.strip()!r}")
    return lists[name.strip()]


def fits(row, part):
    name, equal, value = part.partition("=")
    if equal and name in row:
        return str(row[name]) == value
    return part in map(str, row.values())


def chosen(rows, row):
    """Those whose values are what is between `@`."""
    wanted = [part.strip() for part in row.split("@")]
    found = [r for r in rows if all(fits(r, part) for part in wanted)]
    if not found:
        raise Wrong(f"no row is {row.strip()!r}")
    return found


def least(values):
    """The key of the fastest: of the least number, or of what has the least ms."""
    known = {key: value["ms"] if isinstance(value, dict) else value for key, value in values.items()}
    return min(known, key=known.get)


def field(row, path):
    """A number of a row, by the names on the way to it."""
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
    value = field(row, first.strip())
    for operator, other in zip(rest[::2], rest[1::2], strict=True):
        by = field(row, other.strip())
        value = value / by if operator == "/" else value * by
    return value


def compare(shown, value):
    """Whether a number in a page is the measured one, in its own digits."""
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - digits)
    if abs(float(shown) - value) > 0.5001 * unit:
        raise Wrong(f"{shown} stands there, {value:.5g} was measured")


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def check_row(rows, line, columns, shown):
    """One row of a table."""
    row, own, rest = line.partition("|")
    columns = cells("|" + rest) if own else columns
    found = chosen(rows, row)
    if len(found) > 1:
        raise Wrong(f"{len(found)} rows are {row.strip()!r}")
    for column, cell in zip(columns, shown, strict=True):
        expressions = column.split(";") if column else []
        numbers = NUMBER.findall(cell)
        if len(numbers) < len(expressions):
            raise Wrong(f"no number in the cell {cell!r}, for {column!r}")
        for number, expression in zip(numbers, expressions, strict=False):
            compare(number, measured(found[0], expression))


def check_claim(rows, line, text):
    """`NUMBER = [min|max] ROW -> FIELD`."""
    shown, _, rest = line.strip().partition(" = ")
    row, _, expression = rest.partition(" -> ")
    if shown not in NUMBER.findall(text):
        raise Wrong(f"{shown} is not in the text above")
    which, _, others = row.partition(" ")
    values = [measured(r, expression) for r in chosen(rows, others if which in ("min", "max") else row)]
    if which in ("min", "max"):
        values = [min(values) if which == "min" else max(values)]
    if len(values) > 1:
        raise Wrong(f"{len(values)} rows are {row.strip()!r}")
    compare(shown, values[0])


def plain(cell):
    """A cell as bench/results writes it."""
    return cell.replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{CIRCLED TIMES}", "(x)").strip("*`")


def expanded(lines, count):
    """The lines with `each` written out for the rows that are left."""
    used = 0
    for line in lines:
        if line.startswith("|"):
            used = 0
        elif line.startswith("each "):
            yield from [line.removeprefix("each ")] * (count - used)
            continue
        elif not line.startswith("from ") and " -> " not in line:
            used += 1
        yield line


def check(comment, text):
    """Everything that is wrong with the numbers of a text, by its comment."""
    place, *lines = [line for line in comment.strip().split("\n") if line.strip()]
    if place.startswith("none,"):
        return
    rows, columns, table = [], [], [cells(line) for line in text.split("\n") if line.startswith("|")][2:]
    body = iter(table)
    for line in expanded([f"from {place}", *lines], len(table)):
        try:
            if line.startswith("from "):
                rows = rows_of(line.removeprefix("from "))
            elif " -> " in line:
                check_claim(rows, line, text)
            elif line.startswith("|"):
                columns, body = cells(line), iter(table)
            elif (shown := next(body, None)) is None:
                raise Wrong("the table has no such row")
            elif line.strip() != "-":
                check_row(rows, line.format(*map(plain, shown)) if "{" in line else line, columns, shown)
        except Wrong as problem:
            yield f"{line.strip()}: {problem}"
    if columns and next(body, None) is not None:
        yield f"{place}: the table has more rows than the comment"


def texts(page):
    """(text, comment or None) of every table and paragraph, in order."""
    blocks = re.split(r"\n{2,}(?=\S)", page)
    for number, block in enumerate(blocks):
        after = COMMENT.match(blocks[number + 1].strip()) if number + 1 < len(blocks) else None
        if not COMMENT.match(block.strip()):
            yield block, after[1] if after else None


def problems(text, whole=False):
    """What is wrong with a page; with `whole`, a table of numbers without a comment too."""
    for block, comment in texts(text):
        if comment is not None:
            yield from check(comment, block)
        elif whole and block.startswith("|") and re.search(r"\d\.\d|\d (?:ms|GB)", block.partition("\n|-")[2]):
            yield f"{block.partition(chr(10))[0]}: a table of numbers that does not say where they come from"


def pages():
    """Those that must say it, and those that do."""
    written = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [path for path in written if name_of(path) in PAGES or COMMENT.search(path.read_text(encoding="utf-8"))]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def main():
    bad = 0
    for path in pages():
        for problem in problems(path.read_text(encoding="utf-8"), name_of(path) in PAGES):
            bad += 1
            print(f"{name_of(path)}: {problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
