"""Finds the OpenBLAS installed by pip. torchium._C calls this at import and passes the path to the C library, which
opens it when the CPU is first used."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PACKAGE = "scipy_openblas32"


def find() -> bytes | None:
    """The library in the package scipy-openblas32, as bytes. The package is not imported: it would load the library,
    with unneeded threads."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # shadowed by a module that is not a package
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder).absolute() / "lib" / "libscipy_openblas.so"
        if library.is_file():
            return os.fsencode(library)
    return None
