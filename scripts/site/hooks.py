"""What MkDocs does not do by itself for this site. The pages of docs/ are written for readers of the repository too, so
they are left as they are; what differs on the site is made here, while it is built:

- pages that exist only on the site: the Python and C references, lists of decisions and optimization logs, and a page
  for each linked file outside docs/, so that a version of the site shows the sources of that version;
- links out of docs/, rewritten to those pages;
- words behind "```python", which the tests read, as a title of the block;
- pictures, one for the light and one for the dark: in the repository a picture follows the reader's system, and here
  the reader may choose;
- formulas, which KaTeX sets in the reader's browser, from files of this site.
"""

import importlib.resources
import posixpath
import re
import subprocess
import sys
from html import escape
from pathlib import Path

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import headers  # noqa: E402
import python_pages  # noqa: E402

LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^( *```)(\w+)((?: [\w.-]+)+)$", re.MULTILINE)
LANGUAGES = {".c": "c", ".h": "c", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".cmake": "cmake", ".json": "json"}

# Repository files that are pages of the site under another name.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "README.md",
    "docs": "README.md",
    "docs/decisions": "decisions/index.md",
    "bench/logs": "logs/index.md",
    "include/torchium": "api/c/index.md",
    "include/torchium/backend": "api/c/index.md",
    "examples/python": "examples/python.md",
    "examples/python/README.md": "examples/python.md",
}
LIST = re.compile(r"(?:^- .*\n(?:  .*\n)*)+", re.MULTILINE)
# A formula of a docstring.
PLAIN = re.compile(r'<div class="highlight"><pre><span></span><code>[^<]*&lt;-[^<]*</code></pre></div>')
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\((\S*?)\.svg\)")
DARK = re.compile(r"@media \(prefers-color-scheme: ?dark\) *\{((?:[^{}]*\{[^{}]*\})*\s*)\}")
KATEX = importlib.resources.files("wagtailkatex") / "static/wagtailkatex/katex"
two_forms = set()  # pictures with a light and a dark version
wanted = set()  # files outside docs/ that pages link to


def tracked(folder):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if (ROOT / name).is_file()]


def place(path):
    """The site's address of a file or folder of the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if path.startswith("bench/logs/") and path.endswith(".md"):
        return "logs/" + posixpath.basename(path)
    if path.startswith("include/torchium/") and path.endswith(".h"):
        return "api/c/" + path.removeprefix("include/torchium/").removesuffix(".h") + ".md"
    return f"source/{path}.md"


def outside_code(text, change):
    """Applies a change to everything but fenced code."""
    done, at = [], 0
    for fence in FENCE.finditer(text):
        done += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join(done) + change(text[at:])


def relinked(text, origin, page):
    """Rewrites links relative to a file of the repository for a page of the site."""

    def link(match):
        target, mark, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        there = place(path)
        if there.startswith("source/"):
            wanted.add(path)
        return match[1] + posixpath.relpath(there, posixpath.dirname(page) or ".") + mark + anchor + match[3]

    return outside_code(text, lambda prose: LINK.sub(link, prose))


def title_of(name):
    """The first heading of a Markdown file."""
    return re.search(r"^# (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]


def section(names, page, heading, words):
    """A page that lists others."""
    links = [f"- [{title_of(name)}]({posixpath.relpath(place(name), posixpath.dirname(page))})" for name in names]
    return f"# {heading}\n\n{words}\n\n" + "\n".join(links) + "\n"


def source_page(path):
    """A page for a file, or for a folder with a list of its files."""
    full = ROOT / path
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if full.is_dir():
        names = [name for name in tracked(path) if posixpath.dirname(name) == path]
        below = {posixpath.relpath(name, path).partition("/")[0] for name in tracked(path)}
        folders = sorted(below - {posixpath.basename(name) for name in names})
        wanted.update(name for name in names if place(name).startswith("source/"))
        here = posixpath.dirname(place(path))
        lines = [f"- [{posixpath.basename(name)}]({posixpath.relpath(place(name), here)})" for name in names]
        return head + "\n".join([*lines, *(f"- {folder}/" for folder in folders)]) + "\n"
    text = full.read_text(encoding="utf-8")
    fence = "`" * (max(map(len, re.findall(r"`+", text)), default=2) + 1)
    fence = max(fence, "```", key=len)
    return f"{head}{fence}{LANGUAGES.get(full.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def opening(match):
    """The first line of a code block, with the words for the tests as its title: a file, or requirements."""
    fence, language, words = match[1], match[2], match[3].split()
    files = [word for word in words if "." in word]
    needs = ["a GPU" if word == "gpu" else word for word in words if word not in files and word != "python"]
    title = ", ".join(files) or (f"needs {', '.join(needs)}" if needs else "")
    return f'{fence}{language} title="{title}"' if title else f"{fence}{language}"


def pictures(match):
    """The link to a picture, or to both of its versions."""
    words, path = match[1], match[2]
    if posixpath.basename(path) not in two_forms:
        return match[0]
    return f"![{words}]({path}.svg#only-light)![{words}]({path}-dark.svg#only-dark)"


def add_dark_pictures(files, config):
    """Replaces a picture that follows the system's color scheme by one for each scheme."""
    for file in [file for file in files if file.src_uri.endswith(".svg")]:
        text = Path(file.abs_src_path).read_text(encoding="utf-8")
        if not DARK.search(text):
            continue
        two_forms.add(posixpath.basename(file.src_uri).removesuffix(".svg"))
        files.remove(file)
        files.append(File.generated(config, file.src_uri, content=DARK.sub("", text)))
        address = file.src_uri.removesuffix(".svg") + "-dark.svg"
        files.append(File.generated(config, address, content=DARK.sub(lambda match: match[1], text)))


def add_katex(files, config):
    for path in (KATEX / "katex.min.css", KATEX / "katex.min.js", *sorted((KATEX / "fonts").glob("*.woff2"))):
        address = path.relative_to(KATEX.parent).as_posix()
        files.append(File.generated(config, address, abs_src_path=str(path)))


def decisions():
    return sorted(tracked("docs/decisions"))


def optimization_logs():
    return sorted(tracked("bench/logs"))


def made_pages():
    """(address, file that links are relative to or None, Markdown) of the pages that exist on the site only."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", *optimization_logs()):
        yield place(name), name, (ROOT / name).read_text(encoding="utf-8")
    examples = "examples/python/README.md"
    yield place(examples), examples, (ROOT / examples).read_text(encoding="utf-8")
    words = "Design decisions: the question, the choice, measurements, and what would change it."
    yield "decisions/index.md", None, section(decisions(), "decisions/index.md", "Decisions", words)
    words = "Optimized kernels: baselines, alternatives, and the chosen variant, with measurements."
    yield "logs/index.md", None, section(optimization_logs(), "logs/index.md", "Optimization logs", words)
    c_pages, rows = headers.pages(ROOT / "include/torchium")
    words = "Reference of the C API, generated from the headers."
    yield "api/c/index.md", None, f"# C API\n\n{words}\n\n| header | contents |\n|---|---|\n{rows}\n"
    for address, _, text in c_pages:
        yield address, None, text
    py_pages, rows = python_pages.pages(ROOT / "python/torchium")
    words = "Made of the docstrings: what `help()` shows."
    yield "api/python/index.md", None, f"# Python API\n\n{words}\n\n| module | what it has |\n|---|---|\n{rows}\n"
    for address, _, text in py_pages:
        yield address, None, text


def home(pages):
    """The first page: README up to its second heading, and the list of pages as cards."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    halves = readme[: readme.index("\n## ")].replace("\n![", "\n</div><div markdown>\n\n![")
    top = f'<div class="hero" markdown><div markdown>\n\n{halves}\n\n</div></div>\n\n'
    cards = LIST.sub(r'<div class="grid cards" markdown>\n\n\g<0>\n</div>\n', pages[pages.index("\n## ") :])
    return relinked(top, "README.md", "README.md") + cards


# --- called by MkDocs ------------------------------------------------------------------------------------------------


def on_config(config):
    """Inserts generated lists into the navigation, where mkdocs.yml has a name in angle brackets."""
    c_pages, _ = headers.pages(ROOT / "include/torchium")
    py_pages, _ = python_pages.pages(ROOT / "python/torchium")
    backend = [{title: page} for page, title, _ in c_pages if "/backend" in page]
    optim = [{title: page} for page, title, _ in py_pages if "/optim/" in page]
    modules = [{title: page} for page, title, _ in py_pages if "/optim/" not in page]
    at = next(number for number, entry in enumerate(modules) if "torchium.optim" in entry)
    modules[at] = {"torchium.optim": [modules[at]["torchium.optim"], *optim]}
    lists = {
        "<decisions>": ["decisions/index.md", *({title_of(name): place(name)} for name in decisions())],
        "<logs>": ["logs/index.md", *({title_of(name): place(name)} for name in optimization_logs())],
        "<python>": ["api/python/index.md", *modules],
        "<c>": [
            "api/c/index.md",
            *({title: page} for page, title, _ in c_pages if "/backend" not in page),
            {"For authors of backends": backend},
        ],
    }

    def filled(entry):
        if isinstance(entry, str):
            return lists.get(entry, entry)
        if isinstance(entry, dict):
            return {title: filled(item) for title, item in entry.items()}
        return [filled(item) for item in entry]

    config.nav = filled(config.nav)
    return config


def on_files(files, config):
    add_dark_pictures(files, config)
    add_katex(files, config)
    for address, origin, text in made_pages():
        files.append(File.generated(config, address, content=relinked(text, origin, address) if origin else text))
    for path in [path for path in tracked("docs") if path.endswith(".md")]:
        relinked((ROOT / path).read_text(encoding="utf-8"), path, place(path))
    done = set()
    while wanted - done:
        for path in sorted(wanted - done):
            done.add(path)
            if (ROOT / path).exists():  # missing ones are found by the link check
                files.append(File.generated(config, place(path), content=source_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    address = page.file.src_uri
    if address.startswith(("logs/", "decisions/", "changelog")):
        page.meta["search"] = {"boost": 0.2}  # optimization log last
    if page.file.generated_by is None:
        markdown = relinked(markdown, f"docs/{address}", address)
    if address == "README.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = home(markdown)
    markdown = outside_code(markdown, lambda prose: PICTURE.sub(pictures, prose))
    return OPENING.sub(opening, markdown)


def on_page_content(html, page, config, files):
    """Adds a class to table cells: numbers, with at most one word, stay on one line, and sentences have room."""

    def cell(match):
        words = re.sub(r"<[^>]*>", "", match[2])
        kind = "number" if re.fullmatch(r"-?\d.{0,17}", words) else "prose" if len(words) > 45 else ""
        return f'<td{match[1]} class="{kind}">{match[2]}</td>' if kind else match[0]

    html = CELL.sub(cell, html)
    address = page.file.src_uri
    if address.startswith("api/python/optim/"):
        guide = (ROOT / "docs/python/optimizers.md").read_text(encoding="utf-8")
        tex = escape(python_pages.formula(guide, posixpath.basename(address).removesuffix(".md")))
        words = "with G the gradient, [gamma] the learning rate, [lambda] the weight decay, [mu] the momentum"
        words = re.sub(r"\[(\w+)\]", r'<span class="arithmatex">\\(\\\1\\)</span>', words)
        set_as_math = f'<div class="arithmatex">\\[{tex}\\]</div><p>{words}.</p>'
        html = PLAIN.sub(lambda match: set_as_math, html, count=1) if tex else html
    return html


def on_post_page(output, page, config):
    """Loads KaTeX on pages with formulas."""
    if 'class="arithmatex"' not in output:
        return output
    katex, own = get_relative_url("katex", page.url), get_relative_url("formulas.js", page.url)
    load = f'<link rel="stylesheet" href="{katex}/katex.min.css"><script defer src="{katex}/katex.min.js"></script>'
    return output.replace("</head>", f'{load}<script defer src="{own}"></script></head>', 1)
