"""Sharded optimizers over gloo: bitwise equal to one process, in worlds of one to four ranks, sharded in every way,
with checkpoints between worlds. shared_cases.py has the ranks' functions."""

import cProfile
import itertools
import json
import math
import pickle
import random
import re
from pathlib import Path

import pytest
import shared_cases
import torch
import torchium
from processes import check_cases, run_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torchium.optim._shared.group import pack, unpack
from torchium.optim._shared.sharding import _placement


def test_worlds(tmp_path):
    for size, cases in shared_cases.CASES:
        check_cases(tmp_path, size, cases)


def test_host_memory_on_a_mesh_of_gpus(tmp_path):
    check_cases(tmp_path, 2, [shared_cases.on_a_mesh_of_gpus], "cuda:gloo")


def test_survivors_are_told(tmp_path):
    """kill -9 of one process during a step: the others get an error within the group's timeout that names the group and
    the operation, and their optimizer has failed from then on."""
    ranks = run_ranks(shared_cases.lose_a_rank, shared_cases.LOST_OF, str(tmp_path), seconds=60)
    assert ranks == [0, 0, -9]
    for told in (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(shared_cases.LOST)):
        assert "all_gather of ranks 0 to 2" in told["said"][0] and "resume from a checkpoint" in told["said"][0], told
        assert "failed" in told["said"][1], told  # without another collective
        assert told["seconds"] < shared_cases.TIMEOUT + 2, told


STRIDED = _StridedShard(0, split_factor=3)


@pytest.mark.parametrize(
    ("sides", "placements"),
    [
        ((5,), [Shard(0)]),
        ((5,), [Shard(1)]),
        ((3, 4), [Replicate(), Shard(0)]),
        ((3, 4), [Shard(0), Shard(1)]),
        ((4, 3), [STRIDED, Shard(0)]),
        ((2, 3, 2), [STRIDED, Shard(0), Shard(1)]),
    ],
)
def test_placements(sides, placements):
    """The rectangles of every rank have the elements that PyTorch's own division leaves there."""
    for _ in range(10):
        whole = torch.arange(10_000)[: (rows := random.randint(1, 40)) * (columns := random.randint(1, 20))]
        whole = whole.reshape(rows, columns)
        shape, shards = _placement(tuple(whole.shape), tuple(placements), (sides, tuple(range(math.prod(sides)))))
        for rank, at in enumerate(itertools.product(*map(range, sides))):
            local = whole
            for placement, parts, part in zip(placements, sides, at, strict=True):
                if not placement.is_replicate():
                    local = placement._split_tensor(local, parts, with_padding=False)[0][part]
            found = torch.full_like(local, -1)
            for start, size, offset in (rest for owner, *rest in shards if owner == rank and math.prod(rest[1])):
                there, here = (tuple(slice(a, a + n) for a, n in zip(f, size, strict=True)) for f in (start, offset))
                found[here] = whole[there]
            assert torch.equal(found, local), (shape, rank)


def test_work_of_a_placement():
    """A placement on 1024 ranks takes work for each rank, not for each of the elements."""
    profile = cProfile.Profile()
    profile.runcall(_placement, (128_256, 4096), (Shard(0),), ((1024,), tuple(range(1024))))
    assert sum(entry.callcount for entry in profile.getstats()) < 64 * 1024


def test_tensors_as_bytes():
    sent = {
        "a/b": torch.randn(3, 5).t(),
        "\u00e4": torch.tensor(7),
        "none": torch.zeros(0, 4, dtype=torch.int8),
        "half": torch.randn(3).bfloat16(),
    }
    got = unpack(pack(sent), 0)
    assert list(got) == list(sent)
    for name, value in sent.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value)


class Dangerous:
    def __reduce__(self):
        return pytest.fail, ("what a rank sent was run",)


def message(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        pickle.dumps(Dangerous()),
        message(pickle.dumps(Dangerous())),
        message(b"[" * 100_000),
        (1 << 63).to_bytes(8, "little") + b"[]",
        message([], b"x"),
        message([["a", "float32", [2]]], b"1234567"),
        message([["a", "float32", [2**62, 4]]]),
        message([["a", "float32", [0, 2**63]]]),
        message([["a", "float32", [-1, -4]]], b"1234" * 4),
        message([["a", "float32", [True]]], b"1234"),
        message([["a", "object", [1]]], b"1234"),
        message([[["a"], "int8", [1]]], b"1"),
        message([["a", "int8", [1]], ["a", "int8", [1]]], b"12"),
        message({"a": 1}),
    ],
)
def test_bytes_that_are_refused(sent):
    data = torch.tensor(list(sent), dtype=torch.uint8)
    with pytest.raises(ValueError, match="rank 3 sent a state that cannot be read"):
        unpack(data, 3)


def test_no_collective_unpickles():
    """PyTorch's object collectives unpickle, and so run, other ranks' data."""
    for file in Path(torchium.__file__).parent.rglob("*.py"):
        assert not re.search(r"_object(_list)?\(|pickle\.loads?\(", file.read_text()), file


@pytest.mark.gpu
def test_parameters_offloaded_from_a_gpu(gpu, tmp_path):
    """One GPU serves both ranks: gloo's collectives for it go through host memory."""
    check_cases(tmp_path, 2, [shared_cases.offloads_from_a_gpu], "cuda:gloo")
