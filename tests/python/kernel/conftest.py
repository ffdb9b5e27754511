"""Kernels of these tests are compiled into a folder of the run, so that nothing depends on what was compiled before."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kernels")
        folder.chmod(0o700)
        patch.setenv("TORCHIUM_CACHE", str(folder))
        yield folder
