"""Where pip put OpenBLAS: torchium._C asks when it starts, and names the file to the C library, which opens it when the
CPU is first used."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PACKAGE = "scipy_openblas32"


def find() -> bytes | None:
    """The library in the package scipy-openblas32, wherever Python would import it from, as C names files. The package
    is not imported: it would load the library, with unneeded threads."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # shadowed by something that is no package
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder).absolute() / "lib" / "libscipy_openblas.so"
        if library.is_file():
            return os.fsencode(library)
    return None
