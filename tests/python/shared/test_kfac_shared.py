"""KFAC whose layers processes have divided among them, over gloo in worlds of two and three: to the bit what one
process comes to with the same factors, also where what two have saved goes on in three or in one. What the ranks do is
in kfac_shared_cases.py."""

import kfac_shared_cases
import pytest
from processes import run_ranks


def test_worlds(tmp_path):
    for size in kfac_shared_cases.CASES:
        assert run_ranks(kfac_shared_cases.worker, size, str(tmp_path)) == [0] * size
        said = "\n".join((tmp_path / f"failures.{rank}").read_text() for rank in range(size))
        assert not said.strip(), said


def test_factors_that_nobody_averages_want_a_group():
    with pytest.raises(ValueError, match="average_factors=False needs a process_group"):
        kfac_shared_cases.fresh("eigen", average_factors=False)
