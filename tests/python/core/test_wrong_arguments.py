"""No argument crashes the interpreter, and what comes out is an exception of a natural type: see wrong_arguments.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CALLS = 4000


@pytest.mark.parametrize(("seed", "alone"), [(1, ()), (2, ()), (3, ("--alone", "a tensor whose memory is gone"))])
def test_wrong_arguments(seed, alone, tmp_path):
    program = Path(__file__).with_name("wrong_arguments.py")
    log = tmp_path / "call.txt"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program, "--seed", str(seed), "--calls", str(CALLS), "--log", log, *alone],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    if done.returncode not in (0, 1) or "wrong exceptions" not in done.stdout:
        pytest.fail(f"the interpreter ended with {done.returncode} in {log.read_text()}\n{done.stderr[-3000:]}")
    assert done.returncode == 0, done.stdout
