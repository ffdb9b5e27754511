"""Runs pytest for ctest: the same arguments, and exit status 77, ctest's "skipped", if no test ran.

GPU tests are not even collected if the library finds no GPU: loading PyTorch only to skip them takes seconds.
"""

import importlib.util
import os
import sys

NOTHING_RAN = 77


class Count:
    def __init__(self):
        self.ran = 0

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call" and not report.skipped


def main():
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed here; scripts/setup test puts it into .venv")
        return NOTHING_RAN
    from torchium import _C

    required = "TORCHIUM_TEST_REQUIRE_DEVICE" in os.environ
    if sys.argv[-2:] == ["-m", "gpu"] and not required and _C.device_count("cuda") == 0:
        print(next(b["reason"] for b in _C.backends() if b["name"] == "cuda"))
        return NOTHING_RAN
    import pytest

    count = Count()
    status = pytest.main(sys.argv[1:], plugins=[count])
    return NOTHING_RAN if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and count.ran == 0 else status


if __name__ == "__main__":
    sys.exit(main())
