"""Functions run by test_failing.py's processes: failures after the ranks have agreed on a step."""

import datetime
import time
from unittest import mock

import torch.distributed as dist
from shared_cases import Whitened, on, plain, run, train
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torchium.optim._shared.group import Group

TIMEOUT = 20  # seconds, of the process group


def fail_in(operation):
    """Without memory the next time this rank reaches the collective."""
    call = Group._call

    def failing(self, name, *rest):
        if name == operation:
            raise MemoryError("no memory left")
        call(self, name, *rest)

    return mock.patch.object(Group, "_call", failing)


def fail_in_direction(_):
    return mock.patch.object(Whitened, "direction", side_effect=MemoryError("no memory left"))


def gives_up(size):
    """One of two ranks fails within a step, and its script goes on: the other is told at once, and so is the next
    step of both. The third rank of the world is in another group."""
    cases = [
        ("Shampoo", "rows", fail_in, "all_to_all"),  # once: DTensor's caches keep the first of two equal meshes
        ("NorMuon", "plain", fail_in, "all_gather"),
        ("Whitened", "plain", fail_in_direction, ""),
    ]
    for name, way, fail, operation in cases:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT))
        if dist.get_rank() > 1:
            continue
        place, more = plain, {"process_group": group}
        if way == "rows":
            place, more = on(DeviceMesh.from_group(group, "cpu"), Shard(0)), {}
        optimizer, parameters = train(name, place, 2, **more)
        first, said = dist.get_rank() == 0, []
        for act in (None if first else fail, None):
            begin = time.monotonic()
            try:
                with act(operation) if act else mock.MagicMock():
                    run(optimizer, parameters, place, [3])
                said.append("nothing")
            except (RuntimeError, MemoryError) as error:
                said.append(f"{type(error).__name__}: {error}")
            assert time.monotonic() - begin < TIMEOUT / 2, f"{name} of {way}: {said}"
        expected = "RuntimeError" if first else "MemoryError: no memory left"
        assert said[0].startswith(expected) and "no memory left" in said[0], f"{name} of {way}: {said}"
        assert not first or "rank 1 gave up: " in said[0], f"{name} of {way}: {said}"
        assert "failed" in said[1] or "gave up" in said[1], f"{name} of {way}: {said}"


CASES = {3: [gives_up]}
