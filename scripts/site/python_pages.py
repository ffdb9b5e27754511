"""The pages of the Python interface: the names in each module's `__all__`, with docstrings that mkdocstrings reads from
the sources; nothing is imported or built. The page of an optimizer also has the arguments in groups and the inherited
methods."""

import ast
import re

import griffe

# A page for each module generated from this file.
MODULES = {
    "torchium": "__init__.py",
    "torchium.optim": "optim/__init__.py",
    "torchium.linalg": "linalg.py",
    "torchium.grad_sample": "grad_sample/__init__.py",
    "torchium.kernels": "kernels.py",
    "torchium.amp": "amp.py",
    "torchium.integrations": "integrations.py",
    "torchium.utils.cuda_kernels": "utils/cuda_kernels.py",
}
APART = "torchium.optim"  # a page for each of its classes, which have many arguments
# Top-level names that are modules, or are documented with their module.
ELSEWHERE = {"__version__", "amp", "grad_sample", "integrations", "linalg", "optim", "utils"}
ERRORS = ("KernelError", "NumericError", "OutOfMemoryError")  # of the extension, which has stubs and no sources
# Classes of grouped arguments, and the fields with another key in parameter groups.
GROUPED = {"adamw": "AdamWArguments", "memory": "MemoryArguments", "numerics": "NumericsArguments"}
KEYS = {"params": "use_adamw", "budget": "memory_budget", "damping": "relative_eps"} | {
    name: f"root_{name}" for name in ("tolerance", "method")
}
BASE = "TorchiumOptimizer"
# The guides with the formula and the state of a class.
GUIDES = {"MatrixOptimizer": "writing-an-optimizer.md", "KFAC": "../kfac.md"} | {
    name: f"optimizers.md#{name.lower()}"
    for name in ("Shampoo", "KLShampoo", "SOAP", "Muon", "NorMuon", "Lion", "AdamW", "SGD")
}


def public(path):
    """The names of a module's `__all__`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no __all__")


def summary(path):
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return text.split("\n\n")[0].replace("\n", " ")


def block(name, level=2):
    """The anchor of a name in mkdocstrings' pages."""
    return f"::: {name}\n    options:\n      heading_level: {level}"


def about(module):
    """The docstring of a module alone."""
    options = ("show_root_heading: false", "show_root_toc_entry: false", "members: false")
    return f"::: {module}\n    options:\n" + "\n".join(f"      {option}" for option in options)


def one_line(text):
    return " ".join(text.split()).replace("|", "\\|")


def sentence(text):
    return one_line(re.split(r"(?<=\.)\s", text)[0])


def grouped(optim, cls, group):
    """A table of a class's arguments in a group."""
    about, listed = optim[GROUPED[group]].final_target.docstring.parsed[:2]
    typed = (
        re.search(r"Unpack\[(\w+)\]", str(cls.parameters["options"].annotation))
        if "options" in cls.parameters
        else None
    )
    taken = optim[f"arguments.{typed[1]}"].all_members if typed else None
    rows = []
    for field in listed.value:
        key = KEYS.get(field.name, f"adamw_{field.name}" if group == "adamw" else field.name)
        if taken is None or key in taken:
            rows.append(f"| `{field.name}` | `{key}` | `{field.default}` | {one_line(field.description)} |")
    words = f"[`{GROUPED[group]}`]({GROUPED[group]}.md), or a dictionary. {sentence(about.value)}"
    head = f"## Arguments in `{group}=`\n\n{words}\n"
    return "\n".join([head, "| argument | key in groups | default | meaning |", "|---|---|---|---|", *rows])


def inherited(optim, cls):
    """A table of a class's inherited methods."""
    rows, base = [], optim[BASE].final_target.members
    for name, member in cls.inherited_members.items():
        method = member.final_target
        if name.startswith("_") or name == "profile_hook_step" or not (method.is_function and method.docstring):
            continue
        link = f"[`{name}()`]({BASE}.md#torchium.optim.{BASE}.{name})" if name in base else f"`{name}()`"
        rows.append(f"| {link} | {sentence(method.docstring.value)} |")
    head = "## Inherited methods\n\nAnd those of `torch.optim.Optimizer`: `zero_grad()`, hooks and so on."
    return "\n".join([head, "", "| method | |", "|---|---|", *rows])


def formula(guide, name):
    """The TeX of the first formula in a class's section of the guide, or an empty string."""
    section = re.search(rf"^## {name}\b.*?(?=^## |\Z)", guide, re.MULTILINE | re.DOTALL)
    found = (
        re.search(r"^(?:\$\$|```math\n)(.*?)(?:\$\$|\n```)$", section[0], re.MULTILINE | re.DOTALL) if section else None
    )
    return found[1] if found else ""


def optimizer(optim, name):
    """The sections after the docstring of an optimizer."""
    cls = optim[name].final_target
    if GUIDES.get(name):
        yield f"Formula, state, and differences from other implementations: [guide](../../../python/{GUIDES[name]})."
    if BASE not in [base.name for base in cls.mro()]:
        return
    yield from (grouped(optim, cls, group) for group in GROUPED if group in cls.parameters)
    common = re.findall(r"^- `(\w+)`: (.*\n(?:  .*\n?)*)", optim[BASE].final_target.docstring.value, re.MULTILINE)
    rest = [
        f"- `{word}`: {one_line(words)}" for word, words in common if word in cls.parameters and word not in GROUPED
    ]
    if rest:
        yield "## Arguments of all optimizers\n\n" + "\n".join(rest)
    yield inherited(optim, cls)


def pages(package):
    """(address, title, Markdown) of every page, the table of modules first."""
    made, rows = [], []
    optim = griffe.load("torchium", search_paths=[package.parent], docstring_parser="google", allow_inspection=False)[
        "optim"
    ]
    for module, file in MODULES.items():
        path = package / file
        names = [name for name in public(path) if not (module == "torchium" and name in ELSEWHERE)]
        text = [f"# {module}", about(module)]
        if module == APART:
            listed = []
            for name in sorted(names, key=str.lower):
                page = f"api/python/optim/{name}.md"
                further = optimizer(optim, name) if optim[name].is_class else ()
                made.append((page, name, "\n\n".join([block(f"{module}.{name}", 1), *further]) + "\n"))
                listed.append(f"- [{name}](optim/{name}.md)")
            text.append("\n".join(listed))
        else:
            text += [block(f"torchium._C.{name}" if name in ERRORS else f"{module}.{name}") for name in names]
        address = f"api/python/{module.removeprefix('torchium.') if module != 'torchium' else 'torchium'}.md"
        made.append((address, module, "\n\n".join(text) + "\n"))
        rows.append(f"| [`{module}`]({address.removeprefix('api/python/')}) | {summary(path)} |")
    return made, "\n".join(rows)
