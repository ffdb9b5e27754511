"""Ranks that fail within a step, over gloo; failing_cases.py has the ranks' functions."""

import failing_cases
from processes import check_cases


def test_worlds(tmp_path):
    for size, cases in failing_cases.CASES.items():
        check_cases(tmp_path, size, cases)
