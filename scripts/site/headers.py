"""Pages of the C interface, generated from include/torchium: the comment above a declaration becomes the prose below
it.

The headers have a fixed structure: an introductory comment, titles between rows of `=`, and a comment above each
declaration. So only clang-format's layout is parsed: comments that start in the first column, and declarations that end
at an empty line outside braces.
"""

import posixpath
import re
import textwrap
from pathlib import PurePosixPath

SKIPPED = re.compile(
    r"#(ifndef TORCHIUM_\w+_H|define TORCHIUM_\w+_H|include|if|ifdef|else|elif|endif|undef)\b|TCH_(BEGIN|END)_DECLS"
)
TITLE = re.compile(r"^(?:===|---) (.*?) (?:=+|-+)$")
FUNCTION = re.compile(r"\b(tch_\w+)\(")
ENUMERATOR = re.compile(r"^\s*(?:X\()?(TCH_[A-Z0-9_]+)\b", re.MULTILINE)
IDENTIFIER = re.compile(r"\b(?:tch_\w+|TCH_\w+|TORCHIUM_\w+)\b(?:\(\))?|\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b|\b\w+\.h\b")


def comment_text(lines):
    """The lines of a comment without its stars."""
    text = "\n".join(lines).strip()
    text = text.removeprefix("/*").removesuffix("*/")
    first, *rest = text.split("\n")
    return [first.strip(), *(re.sub(r"^ ?\* ?", "", line).rstrip() for line in rest)]


def items(text):
    """The contents of a header in order: ("comment", lines), ("code", lines), and ("gap", []) for an empty line."""
    kind, lines, depth = None, [], 0
    for line in text.split("\n"):
        if kind is None:
            if line.startswith("/*"):
                kind = "comment"
            elif not line:
                yield "gap", []
                continue
            elif SKIPPED.match(line):
                continue
            else:
                kind = "code"
        lines.append(line)
        if kind == "comment" and "*/" in line:
            yield kind, comment_text(lines)
            kind, lines = None, []
        elif kind == "code":
            bare = re.sub(r"/\*.*?\*/", "", line)
            depth += bare.count("{") - bare.count("}")
            ended = not line.endswith("\\") if lines[0].startswith("#") else re.search(r"[;}]\s*$", bare)
            if depth == 0 and ended:
                yield kind, lines
                kind, lines = None, []


def chunks(text):
    """The header as (comment lines, code lines): a comment belongs to the declarations that follow it without a gap."""
    comment, code = [], []
    for kind, lines in items(text):
        if kind == "code":
            code += lines
            continue
        if comment or code:
            if kind == "comment" and not code:
                yield comment, []
            elif kind == "comment" or kind == "gap":
                yield comment, code
            comment, code = [], []
        if kind == "comment":
            comment = lines
    if comment or code:
        yield comment, code


def unexported(match):
    """A function declaration without the export macro, broken at commas to fit a page."""
    words = re.sub(r"(?<!,) ", "\0", " ".join(match[1].split()))
    return textwrap.fill(words, 84, subsequent_indent=" " * 8).replace("\0", " ")


def without_bodies(code):
    """Declarations without the export macro and bodies of inline functions."""
    text = re.sub(r"^TCH_API ([^;]*;)", unexported, "\n".join(code), flags=re.MULTILINE)
    text = re.sub(r"^(static inline [^{;]*?\))\n\{\n.*?^\}", r"\1;", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r" +\\$", " \\\\", text, flags=re.MULTILINE)


def names_of(code):
    """The declared names of a chunk, in order."""
    found = []
    bare = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    for pattern in (
        r"^#define (\w+)",
        r"^typedef (?:struct|enum|union) (\w+)",
        r"^typedef [^{;]*?\(\*?(\w+)\)\(|^typedef [^{;(]*?\b(tch_\w+)\(|^typedef [^{;(]*?\b(\w+);",
        r"^(?:static const|extern) [\w ]*?\b(\w+)(?: =|;)",
        r"^(?:static inline )?(?:const )?\w+ \*?\**(tch_\w+)\(",
    ):
        for match in re.finditer(pattern, bare, re.MULTILINE):
            name = next(group for group in match.groups() if group)
            found.append((match.start(), name))
    names = list(dict.fromkeys(name for _, name in sorted(found)))
    return names or (ENUMERATOR.findall(bare)[:1] if bare.startswith("enum") else FUNCTION.findall(bare)[:1])


class Header:
    """One header, split into the parts of its page."""

    def __init__(self, name, text):
        self.name = name  # "linalg.h", "backend/matrix.h"
        self.page = "api/c/" + str(PurePosixPath(name).with_suffix(".md"))
        parts = list(chunks(text))
        self.about = parts[0][0] if parts and not parts[0][1] else []
        self.parts = [(comment, without_bodies(code)) for comment, code in (parts[1:] if self.about else parts)]
        self.parts = [(comment, code) for comment, code in self.parts if comment or code.strip()]

    def declared(self):
        """(name, anchor) of everything that other pages may link to."""
        for _, code in self.parts:
            names = names_of(code)
            for name in names:
                yield name, name
            if names and re.match(r"typedef enum|enum|#define \w+\(X\)", code):
                for name in ENUMERATOR.findall(code):
                    yield name, names[0]


def escaped(text):
    """Escapes Markdown markup."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    return re.sub(r"([\\*_\[\]])", r"\\\1", text)


def prose(text, links, here):
    """A paragraph as Markdown: names as code, and as links if their page is known; the rest unchanged."""

    def name(match):
        word = match[0]
        target = links.get(word.removesuffix("()"))
        if target is None:
            return f"`{word}`"
        page, anchor = target
        place = relative(page, here)
        return f"[`{word}`]({place}{'#' + anchor if anchor else ''})"

    parts = text.split("`")
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = IDENTIFIER.sub(name, part) if IDENTIFIER.fullmatch(part) else f"`{part}`"
            continue
        done, at = [], 0
        for match in IDENTIFIER.finditer(part):
            done += [escaped(part[at : match.start()]), name(match)]
            at = match.end()
        parts[number] = "".join(done) + escaped(part[at:])
    return "".join(parts)


def relative(page, here):
    """The link from one page of the site to another."""
    if page == here:
        return ""
    return posixpath.relpath(page, posixpath.dirname(here) or ".")


def body(lines, links, here):
    """A comment as Markdown: paragraphs, lists and indented code."""
    blocks, open_list = [[]], False
    for line in lines:
        if not line.strip():
            blocks.append([])
            open_list = False
        elif line.startswith("    ") and not open_list:
            if blocks[-1] and not blocks[-1][0].startswith("    "):
                blocks.append([])
            blocks[-1].append(line)
        elif line.startswith("- "):
            blocks.append([line])
            open_list = True
        elif blocks[-1] and blocks[-1][0].startswith("    "):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    out = []
    for block in filter(None, blocks):
        if block[0].startswith("    "):
            out.append("```c\n" + "\n".join(line[4:] for line in block) + "\n```")
        elif block[0].startswith("- "):
            out.append("- " + prose(" ".join(line.strip() for line in block)[2:], links, here))
        else:
            text = prose(" ".join(line.strip() for line in block), links, here)
            out.append(re.sub(r"^(\d+)\. ", r"\1\\. ", text))
    return "\n\n".join(out)


def page(header, links):
    """The Markdown of a header's page."""
    here = header.page
    out = [f"# {header.name}", f"`#include <torchium/{header.name}>`"]
    if header.about:
        out.append(body(header.about, links, here))
    for comment, code in header.parts:
        title = TITLE.match(comment[0]) if comment else None
        if title:
            out.append(f"## {escaped(title[1][0].upper() + title[1][1:])}")
            comment = comment[1:]
        names = names_of(code) if code else []
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:3]) + (" …" if len(names) > 3 else "")
            out.append(f"### {shown} {{ #{names[0]} }}")
            out += ["".join(f'<span id="{name}"></span>' for name in names[1:])] if names[1:] else []
        if code.strip():
            out.append(f"```c\n{code.strip()}\n```")
        if comment:
            out.append(body(comment, links, here))
    return "\n\n".join(out) + "\n"


def first_sentence(header):
    """The entry of a header in the table of headers."""
    text = " ".join(line.strip() if line.strip() else "   " for line in header.about)
    return re.split(r"(?<=\.)\s|:\s{4}", text)[0] if text else ""


def missing(text, header):
    """Exported functions of a header missing on its page: a layout that `chunks` does not support."""
    exported = re.findall(r"^TCH_API [^;(]*?\b(tch_\w+)\(", text, re.MULTILINE)
    return set(exported) - {name for name, _ in header.declared()}


def read(folder):
    """Every header of a folder, the library's before those for backend authors."""
    files = sorted(folder.rglob("*.h"), key=lambda path: (len(path.relative_to(folder).parts), path))
    headers = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        header = Header(path.relative_to(folder).as_posix(), text)
        if missing(text, header):
            raise ValueError(f"{header.name}: no place in its page for {', '.join(sorted(missing(text, header)))}")
        headers.append(header)
    return headers


def pages(folder):
    """For every header (address in the site, title, Markdown); and the table at the start of the chapter."""
    headers = read(folder)
    links = {header.name: (header.page, "") for header in headers}
    for header in headers:
        for name, anchor in header.declared():
            links.setdefault(name, (header.page, anchor))
    index = "api/c/index.md"
    rows = [
        f"| [{header.name}]({relative(header.page, index)}) | {prose(first_sentence(header), links, index)} |"
        for header in headers
    ]
    return [(header.page, header.name, page(header, links)) for header in headers], "\n".join(rows)
