"""Optimizers that processes share, over gloo: bit for bit what one process comes to, in worlds of two to four ranks,
sharded in every way, with checkpoints that go from one world to another. What the ranks do is in shared_cases.py."""

import pytest
import shared_cases
import torch
from processes import run_ranks


def start(folder, size, cases, *backend):
    names = [case.__name__ for case in cases]
    assert run_ranks(shared_cases.worker, size, str(folder), names, *backend) == [0] * size
    said = "\n".join((folder / f"failures.{rank}").read_text() for rank in range(size))
    assert not said.strip(), said
    (folder / "store").unlink(missing_ok=True)


def test_worlds(tmp_path):
    for size, cases in shared_cases.CASES.items():
        start(tmp_path, size, cases)


def test_host_memory_on_a_mesh_of_gpus(tmp_path):
    start(tmp_path, 2, [shared_cases.on_a_mesh_of_gpus], "cuda:gloo")


@pytest.mark.gpu
def test_parameters_offloaded_from_a_gpu(tmp_path):
    """One GPU serves both ranks: gloo's collectives for it go through host memory."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    start(tmp_path, 2, [shared_cases.offloads_from_a_gpu], "cuda:gloo")
