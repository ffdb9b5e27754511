"""The pages of the Python interface. What is public is what `__all__` of a module names: a new name gets its place here
by itself. The words are the docstrings', read from the sources by mkdocstrings; nothing is imported or built.
"""

import ast

# A page for each module, made of this file.
MODULES = {
    "torchium": "__init__.py",
    "torchium.optim": "optim/__init__.py",
    "torchium.linalg": "linalg.py",
    "torchium.grad_sample": "grad_sample/__init__.py",
    "torchium.kernels": "kernels.py",
    "torchium.amp": "amp.py",
    "torchium.utils.cuda_kernels": "utils/cuda_kernels.py",
}
APART = "torchium.optim"  # a page for each of its classes, which have long lists of arguments
# Names of the top that are modules, or are shown with their module.
ELSEWHERE = {"__version__", "amp", "grad_sample", "linalg", "optim", "utils"}
ERRORS = ("KernelError", "NumericError", "OutOfMemoryError")  # of the extension, which has stubs and no sources


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
    """Where mkdocstrings puts the words about a name."""
    return f"::: {name}\n    options:\n      heading_level: {level}"


def about(module):
    """The docstring of a module alone."""
    options = ("show_root_heading: false", "show_root_toc_entry: false", "members: false")
    return f"::: {module}\n    options:\n" + "\n".join(f"      {option}" for option in options)


def pages(package):
    """(address, title, Markdown) of every page, the table of modules first."""
    made, rows = [], []
    for module, file in MODULES.items():
        path = package / file
        names = [name for name in public(path) if not (module == "torchium" and name in ELSEWHERE)]
        text = [f"# {module}", about(module)]
        if module == APART:
            listed = []
            for name in sorted(names, key=str.lower):
                page = f"api/python/optim/{name}.md"
                made.append((page, name, block(f"{module}.{name}", 1) + "\n"))
                listed.append(f"- [{name}](optim/{name}.md)")
            text.append("\n".join(listed))
        else:
            text += [block(f"torchium._C.{name}" if name in ERRORS else f"{module}.{name}") for name in names]
        address = f"api/python/{module.removeprefix('torchium.') if module != 'torchium' else 'torchium'}.md"
        made.append((address, module, "\n\n".join(text) + "\n"))
        rows.append(f"| [`{module}`]({address.removeprefix('api/python/')}) | {summary(path)} |")
    return made, "\n".join(rows)
