"""No argument crashes the interpreter, and exceptions have appropriate types: see wrong_arguments.py."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(("calls", "alone"), [(700, ()), (200, ("--alone", "a tensor whose memory is gone"))])
def test_wrong_arguments(calls, alone, tmp_path):
    """With a random seed, which the output contains; scripts/fuzz runs more calls."""
    program = Path(__file__).with_name("wrong_arguments.py")
    log, seed = tmp_path / "call.txt", random.SystemRandom().randrange(2**31)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program, "--seed", str(seed), "--calls", str(calls), "--log", log, *alone],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    if done.returncode not in (0, 1) or "wrong exceptions" not in done.stdout:
        pytest.fail(f"the interpreter ended with {done.returncode} in {log.read_text()}\n{done.stderr[-3000:]}")
    assert done.returncode == 0, done.stdout
