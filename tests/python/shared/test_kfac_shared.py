"""Sharded KFAC over gloo in worlds of two and three: bitwise equal to one process with the same factors, also after two
ranks' checkpoint resumes in three or in one. kfac_shared_cases.py has the ranks' functions."""

import kfac_shared_cases
import pytest
from processes import check_cases


def test_worlds(tmp_path):
    for size, cases in kfac_shared_cases.CASES.items():
        check_cases(tmp_path, size, cases)


def test_factors_that_nobody_averages_want_a_group():
    with pytest.raises(ValueError, match="average_factors=False needs a process_group"):
        kfac_shared_cases.fresh("eigen", average_factors=False)
