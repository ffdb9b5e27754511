"""Where kernels of these tests are kept. Tests of kernels themselves have a folder of the run, so that nothing depends
on what was compiled before. What is built on kernels uses the folder of the build, where ctest names one: a second run
compiles what has changed, which an entry's key knows.
"""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def cache(request, tmp_path_factory):
    if request.path.name != "test_kernel.py" and "TORCHIUM_CACHE" in os.environ:
        yield Path(os.environ["TORCHIUM_CACHE"])
        return
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kernels")
        folder.chmod(0o700)
        patch.setenv("TORCHIUM_CACHE", str(folder))
        yield folder
