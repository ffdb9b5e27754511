"""kill -9 of one of three processes in the middle of a step over gloo: the others hear of it within the group's
timeout, by the names of the group and the operation, and their optimizer says from then on that it has failed."""

import lost_rank_cases
import torch
from lost_rank_cases import LAST, SIZE, TIMEOUT
from processes import run_ranks


def test_survivors_are_told(tmp_path):
    assert run_ranks(lost_rank_cases.worker, SIZE, str(tmp_path), seconds=60) == [0, 0, -9]
    survivors = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(SIZE) if rank != LAST]
    for told in survivors:
        assert "all_gather of ranks 0 to 2" in told["said"][0] and "resume from a checkpoint" in told["said"][0], told
        assert "failed" in told["said"][1], told  # without another collective
        assert told["seconds"] < TIMEOUT + 2, told
