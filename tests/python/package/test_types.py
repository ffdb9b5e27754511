"""Type checkers accept a user's program, and find mistakes in one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchium

PROGRAM = Path(__file__).with_name("user_program.py")
PACKAGES = str(Path(torchium.__file__).parents[1])
CHECKERS = {
    "mypy": ["mypy", "--strict", "--follow-imports=silent", "."],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}
MISTAKES = """from torch import nn
from torchium.optim import Shampoo

model = nn.Linear(3, 3)
Shampoo(model, lr=1e-3, grafting="adams")
Shampoo(model, lr=1e-3, stager=True)
Shampoo(model, lr=1e-3, momentum="much").step(3)
"""


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_is_clean_and_mistakes_are_found(checker, tmp_path):
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    settings = {"typeCheckingMode": "strict", "extraPaths": [PACKAGES]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    environment = {**os.environ, "MYPYPATH": PACKAGES, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    environment["MYPY_CACHE_DIR"] = str(Path(os.environ["TORCHIUM_CACHE"], "mypy"))  # of PyTorch's files, mostly
    command = [sys.executable, "-m", *CHECKERS[checker]]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    problems = [line for line in ran.stdout.splitlines() if "error:" in line or "- error" in line]
    assert [line for line in problems if "mistakes.py:" not in line] == [], ran.stderr
    assert [number for number in (5, 6, 7) if f"mistakes.py:{number}:" not in "".join(problems)] == [], ran.stdout
