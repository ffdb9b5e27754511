"""Optimizers that processes share, over gloo: bit for bit what one process comes to, in worlds of two to four ranks,
sharded in every way, with checkpoints that go from one world to another. What the ranks do is in shared_cases.py: each
world is started once, since loading PyTorch takes longer than the tests."""

import shared_cases
from processes import run_ranks


def test_worlds(tmp_path):
    for size, cases in shared_cases.CASES.items():
        run_ranks(shared_cases.worker, (size, str(tmp_path), [case.__name__ for case in cases]), size)
        said = "\n".join((tmp_path / f"failures.{rank}").read_text() for rank in range(size))
        assert not said.strip(), said
        (tmp_path / "store").unlink()
