"""Functions run by test_failing.py's processes: failures after the ranks have agreed on a step."""

import contextlib
import datetime
import itertools
import time
from unittest import mock

import torch
import torch.distributed as dist
from shared_cases import Whitened, differing, make, on, plain, refused, run, train, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torchium.optim._shared.group import Group
from torchium.optim._shared.sharding import local_tensor

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


def decides_over_a_chain(size):
    """Rank 1 shares parameters with rank 0 and others with rank 2: a NaN on one end skips on the other, or raises."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    for name, policy, bad in itertools.product(("Muon", "Whitened"), ("skip", "raise"), (0, 2)):
        places = {str(mesh.mesh.tolist()): on(mesh, Shard(0)) for mesh in here} | {"own": plain}
        named = {each: torch.nn.Parameter(place(torch.ones(12, 10))) for each, place in places.items()}
        optimizer, parameters = make(name, named.items(), nonfinite=policy), list(named.values())
        for spoils in (False, True, False):
            before = [whole(p).clone() for p in parameters]
            for p, place in zip(parameters, places.values(), strict=True):
                p.grad = place(torch.randn(12, 10, generator=torch.Generator().manual_seed(1)))
            if spoils and dist.get_rank() == bad:
                local_tensor(parameters[0].grad)[0, 0] = float("nan")
            what = f"{name}, {policy}, rank {bad}"
            with refused(what, "nothing was changed") if spoils and policy == "raise" else contextlib.nullcontext():
                optimizer.step()
            assert differing(before, parameters) == ([] if spoils else list(range(len(places)))), what


CASES = {3: [gives_up, decides_over_a_chain]}
