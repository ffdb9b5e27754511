"""KFAC whose layers processes have divided among them, over gloo in worlds of two and three: to the bit what one
process comes to with the same factors. What the ranks do is in kfac_shared_cases.py."""

import kfac_shared_cases
import pytest
from processes import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_worlds(size, tmp_path):
    assert run_ranks(kfac_shared_cases.worker, size, str(tmp_path)) == [0] * size
    said = "\n".join((tmp_path / f"failures.{rank}").read_text() for rank in range(size))
    assert not said.strip(), said


def test_factors_that_nobody_averages_want_a_group():
    with pytest.raises(ValueError, match="average_factors=False wants a process_group"):
        kfac_shared_cases.fresh("eigen", average_factors=False)
