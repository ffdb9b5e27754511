"""Tries an installed torchium with the packages named on the command line: scripts/wheel runs it in fresh environments,
and so can users."""

import ctypes
import subprocess
import sys
import sysconfig
from pathlib import Path

import torchium
from torchium import _C


def has(name):
    return any(argument.startswith(name) for argument in sys.argv[1:])


def try_alone():
    """Standard library only: the C library through ctypes, and the command."""
    library = ctypes.CDLL(_C.library_path())
    library.tch_version.restype = ctypes.c_char_p
    assert library.tch_version().decode() == torchium.__version__
    command = Path(sysconfig.get_path("scripts")) / "torchium"
    if not command.exists():  # found by a path, as with `pip install --target`
        command = Path(torchium.__file__).parent / "bin" / "torchium"
    text = subprocess.run([command, "info"], check=True, capture_output=True, text=True).stdout
    assert "Backend cpu: available" in text, text


def try_numpy():
    import numpy as np

    a = np.random.default_rng().standard_normal((3, 40, 40))
    a = a @ a.transpose(0, 2, 1) + np.eye(40)
    x = torchium.linalg.inverse_root(a, 2)
    error = np.abs(x @ x @ a - np.eye(40)).max()
    assert error < 1e-9, error


def try_torch():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    x = torch.randn(200, 12)
    y = torch.randint(3, (200,))
    optimizer = torchium.optim.Shampoo(model.parameters(), lr=0.03, precondition_frequency=2, grafting="adam")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


if __name__ == "__main__":
    try_alone()
    if has("numpy"):
        try_numpy()
    if has("torch"):
        try_torch()
    print(f"torchium {torchium.__version__} works with {' and '.join(sys.argv[1:]) or 'nothing else'}")
