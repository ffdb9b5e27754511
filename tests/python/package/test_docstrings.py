"""Every public function and class documents each of its arguments, by its right name, for `help()`, editors and the
website. Undocumented arguments fail here, and so do entries for missing ones."""

import importlib
import inspect
import re

import pytest

MODULES = (
    "torchium",
    "torchium.amp",
    "torchium.grad_sample",
    "torchium.integrations",
    "torchium.kernels",
    "torchium.linalg",
    "torchium.optim",
    "torchium.utils.cuda_kernels",
)
# A base class for users.
NOT_CALLED = {"torchium.optim.TorchiumOptimizer"}


def public():
    """(name, object) of every function and class in a module's `__all__`, each once."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for word in module.__all__:
            value = getattr(module, word)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{name}.{word}", value


def methods(name, value):
    """(name, function) of the public methods defined by a class or its bases in torchium."""
    for base in value.__mro__:
        if not base.__module__.startswith("torchium"):
            continue
        for word, method in vars(base).items():
            method = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
            if inspect.isfunction(method) and (word[0] != "_" or word == "__call__"):
                yield f"{name}.{word}", method, base


def inherited(method, base):
    """Whether PyTorch documents the method."""
    theirs = [other for other in base.__mro__ if not other.__module__.startswith("torchium")]
    return any(method.__name__ in vars(other) for other in theirs)


def documented(docstring):
    """The entries under "Args:", in order."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    return re.findall(r"^    (\S.*?): *(.*)$", section[1], re.MULTILINE) if section else []


def arguments(value):
    return [name for name in inspect.signature(value).parameters if name != "self"]


def problem(value, wanted):
    """The error in the documentation of arguments, or None."""
    docstring = inspect.getdoc(value) if inspect.isclass(value) else value.__doc__
    if not docstring:
        return "has no docstring"
    found = [name for name, words in documented(inspect.cleandoc(docstring)) if words]
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted or found.count(name) > 1]
    said = [f"no words about {', '.join(missing)}"] if missing else []
    said += [f"words about {', '.join(surplus)}, which it has not, or twice"] if surplus else []
    return "; ".join(said) or None


@pytest.mark.parametrize(("name", "value"), [pytest.param(*item, id=item[0]) for item in public()])
def test_every_argument_is_documented(name, value):
    problems = []
    if name not in NOT_CALLED and not issubclass(value if inspect.isclass(value) else object, BaseException):
        problems.append((name, problem(value, arguments(value))))
    if inspect.isclass(value):
        for called, method, base in methods(name, value):
            if not (inherited(method, base) and not documented(inspect.cleandoc(method.__doc__ or ""))):
                problems.append((called, problem(method, arguments(method))))
    assert not [f"{called} {why}" for called, why in problems if why]


def test_a_gap_is_noticed():
    def renamed(first, second):
        """What it does.

        Args:
            frist: here.
            second: a number.
        """

    assert (
        problem(renamed, ["first", "second"]) == "no words about first; words about frist, which it has not, or twice"
    )


def test_the_website_has_every_public_module():
    """Its pages are generated from the same list."""
    from pathlib import Path

    text = (Path(__file__).resolve().parents[3] / "scripts/site/python_pages.py").read_text(encoding="utf-8")
    assert set(re.findall(r'^    "(torchium[\w.]*)": "', text, re.MULTILINE)) == set(MODULES)
