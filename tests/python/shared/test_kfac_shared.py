"""KFAC whose layers processes have divided among them, over gloo in worlds of two and three: to the bit what one
process comes to with the same factors. What the ranks do is in kfac_shared_cases.py."""

import multiprocessing

import kfac_shared_cases
import pytest


@pytest.mark.parametrize("size", [2, 3])
def test_worlds(size, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kfac_shared_cases"])
    ranks = [context.Process(target=kfac_shared_cases.worker, args=(rank, size, str(tmp_path))) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * size
    said = "\n".join((tmp_path / f"failures.{rank}").read_text() for rank in range(size))
    assert not said.strip(), said


def test_factors_that_nobody_averages_want_a_group():
    with pytest.raises(ValueError, match="average_factors=False wants a process_group"):
        kfac_shared_cases.fresh("eigen", average_factors=False)
