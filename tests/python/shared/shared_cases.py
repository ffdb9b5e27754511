"""What processes of a group do for test_optim_shared.py, and what one process does with the same gradients."""

import datetime
import functools
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist
import torchium.optim as optim
from processes import join_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchium.optim._shared.group import Group

STEPS = 5
# Matrices of several shapes, one too small for most groups, a convolution, a vector, experts.
SHAPES = [(24, 17), (24, 17), (40, 9), (31,), (10, 3, 3, 2), (2, 6), (6, 5, 8), (1, 12)]

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01},
    "Lion": {"lr": 0.01},
    "Shampoo": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 16},
    "SOAP": {"lr": 0.01, "precondition_frequency": 2, "packed_factors": True},
    "Muon": {"lr": 0.02},
    "NorMuon": {"lr": 0.02},
}


def numbers(step):
    """Gradients of a step, or the parameters before the first one."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(name, parameters, **more):
    return getattr(optim, name)(parameters, **OPTIONS[name], **more)


def run(optimizer, parameters, place, steps, dtype=torch.float32):
    for step in steps:
        for p, gradient in zip(parameters, numbers(step), strict=True):
            p.grad = place(gradient.to(dtype))
        optimizer.step()


def run_model(net, optimizer, steps, device="cpu"):
    """Steps with losses of a model that is to give its input back."""
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()


def small_net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16))


def go_on(name, values, state, place, **more):
    """The parameters after another STEPS with a new optimizer that has loaded the state."""
    parameters = [torch.nn.Parameter(place(value.clone())) for value in values]
    optimizer = make(name, parameters, **more)
    optimizer.load_state_dict(state)
    run(optimizer, parameters, place, range(STEPS + 1, 2 * STEPS + 1))
    return parameters


# --- placements


def on(mesh, *placements):
    """Distributes along dimensions that a tensor has; others lie whole on the mesh."""

    def place(value):
        fitting = [Replicate() if isinstance(p, Shard) and p.dim >= value.ndim else p for p in placements]
        return distribute_tensor(value, mesh, fitting, src_data_rank=None)

    return place


def ways(size):
    """Every way to place parameters on a world of this size."""
    line = init_device_mesh("cpu", (size,))
    yield "by rows", on(line, Shard(0))
    yield "by columns", on(line, Shard(1))
    yield "whole on every rank", on(line, Replicate())
    if size == 4:
        square = init_device_mesh("cpu", (2, 2))
        yield "in replicas", on(square, Replicate(), Shard(0))
        yield "by rows and columns", on(square, Shard(0), Shard(1))
        yield "by rows twice", on(square, Shard(0), Shard(0))


def whole(p):
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


def differing(expected, parameters):
    return [k for k, (a, p) in enumerate(zip(expected, parameters, strict=True)) if not torch.equal(a, whole(p))]


def plain(value):
    """A place that is no mesh."""
    return value


def train(name, place, steps=STEPS, dtype=torch.float32, **more):
    parameters = [torch.nn.Parameter(place(value.to(dtype))) for value in numbers(-1)]
    optimizer = make(name, parameters, **more)
    run(optimizer, parameters, place, range(1, steps + 1), dtype)
    return optimizer, parameters


# --- what is tried in each world


@functools.cache
def alone(name, steps=STEPS, dtype=torch.float32, **more):
    """What one process comes to."""
    return [p.detach() for p in train(name, plain, steps, dtype, **more)[1]]


def equal_bits(size):
    half = {"dtype": torch.bfloat16, "master_weights": True}
    for name, more in [*((name, {}) for name in OPTIONS), *((name, half) for name in ("AdamW", "Shampoo", "Muon"))]:
        expected = alone(name, **more)
        places = [(way, place, {}) for way, place in ways(size)]
        for way, place, group in [*places, ("as replicas", plain, {"process_group": dist.group.WORLD})]:
            _, parameters = train(name, place, **more, **group)
            assert not differing(expected, parameters), f"{name} {way}: parameters {differing(expected, parameters)}"


def states_divided(size):
    """Moments that lie like their parameter are DTensors; of factors each rank has its share."""
    place = dict(ways(size))["by rows"]
    optimizer, parameters = train("Muon", place)
    assert isinstance(optimizer.state[parameters[0]]["momentum_buffer"], DTensor)
    assert optimizer.state[parameters[0]]["momentum_buffer"].shape == parameters[0].shape
    optimizer, parameters = train("Shampoo", place)
    mine = {(i, key) for i, p in enumerate(parameters) for key in optimizer.state[p] if key.startswith("factor.")}
    every = [None] * size
    dist.all_gather_object(every, mine)
    assert sum(map(len, every)) == len(set().union(*every)), "a factor has two owners"
    assert max(map(len, every)) - min(map(len, every)) <= 6


def goes_on_from_state(size):
    """From the state_dict of one process into any number of them, and from one of the same world."""
    rows = dict(ways(size))["by rows"]
    for name in OPTIONS:
        expected = alone(name, 2 * STEPS)
        for trained, places in ((plain, ways(size)), (rows, [("by rows", rows)])):
            optimizer, parameters = train(name, trained)
            for way, place in places:
                others = go_on(name, map(whole, parameters), optimizer.state_dict(), place)
                assert not differing(expected, others), f"{name} {way}: parameters {differing(expected, others)}"


def refused_together(size):
    """A NaN in the gradient of one rank, or no gradient there: nobody takes the step, and all get the same error."""
    place = dict(ways(size))["by rows"]
    for policy, message in (("skip", ""), ("raise", "nothing was changed"), ("missing", "of different parameters")):
        more = {} if policy == "missing" else {"nonfinite": policy}
        optimizer, parameters = train("Muon", place, **more)
        before = [whole(p).clone() for p in parameters]
        for p, gradient in zip(parameters, numbers(50), strict=True):
            p.grad = place(gradient)
        if dist.get_rank() == 0 and policy == "missing":
            parameters[2].grad = None
        elif dist.get_rank() == 0:
            parameters[0].grad.to_local()[0, 0] = float("nan")
        try:
            optimizer.step()
            assert policy == "skip"
        except RuntimeError as error:
            assert message and message in str(error), error
        assert not differing(before, parameters)
        assert policy == "missing" or optimizer.stats()["skipped"] == 1


def really_trains(size):
    """fully_shard, backward, clipping and a loss scaler, beside the same on one process with the averaged loss."""
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Tanh())

    def steps(net, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale((net(x) - x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    # Norms of shards are rounded otherwise than one of the whole: eight samples leave factors singular, and with less
    # damping their roots would make 2 % of a last bit.
    for name, more in (("Muon", {}), ("Shampoo", {"relative_eps": 1e-3}), ("AdamW", {})):
        one, many = model(), model()
        steps(one, make(name, one.parameters(), **more))
        mesh = init_device_mesh("cpu", (size,))
        for layer in many:
            fully_shard(layer, mesh=mesh)
        fully_shard(many, mesh=mesh)
        steps(many, make(name, many.parameters(), **more))
        for a, b in zip(one.parameters(), many.parameters(), strict=True):
            assert torch.allclose(a, whole(b), rtol=1e-4, atol=1e-5), name


def save(size, folder):
    import torch.distributed.checkpoint as dcp

    for name in OPTIONS:
        optimizer, parameters = train(name, dict(ways(size))["by rows"])
        dcp.save({"model": named(parameters), "optim": flat(optimizer, parameters)}, checkpoint_id=f"{folder}/{name}")


def load(size, folder):
    """A checkpoint of another world goes on as one process would have."""
    import torch.distributed.checkpoint as dcp

    for name in OPTIONS:
        expected = alone(name, 2 * STEPS)
        place = dict(ways(size))["by columns"]
        optimizer, parameters = train(name, place, 1)  # so that there is state to load into
        state = {"model": named(parameters), "optim": flat(optimizer, parameters)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        restored = [torch.nn.Parameter(state["model"][str(i)]) for i in range(len(parameters))]
        second = make(name, restored)
        second.load_state_dict(nested(state["optim"], optimizer))
        run(second, restored, place, range(STEPS + 1, 2 * STEPS + 1))
        assert not differing(expected, restored), f"{name}: parameters {differing(expected, restored)}"


def consolidates(size, folder):
    """The last rank has the state of all; one process, replicas and shards go on from it to the bit. The others, and
    all of them after another step, are told what to do."""
    to = size - 1
    for name in OPTIONS:
        optimizer, parameters = train(name, plain, process_group=dist.group.WORLD)
        refuses_to_save(name, optimizer)
        with mock.patch.object(dist, "gather_object", side_effect=AssertionError("it unpickles what others send")):
            optimizer.consolidate_state_dict(to=to)
        if dist.get_rank() == to:
            saved = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}
            torch.save(saved, f"{folder}/{name}.{size}.pt")
        else:
            refuses_to_save(name, optimizer)
        run(optimizer, parameters, plain, [STEPS + 1])
        refuses_to_save(name, optimizer)
        dist.barrier()
        goes_on_from(f"{folder}/{name}.{size}.pt", name, size)


def refuses_to_save(name, optimizer):
    """Elementwise state is whole on every rank."""
    try:
        optimizer.state_dict()
        assert name in ("SGD", "AdamW", "Lion"), f"{name} gave a part of the state"
    except RuntimeError as error:
        assert "consolidate_state_dict" in str(error) and "torch.distributed.checkpoint" in str(error), error


def goes_on_from(file, name, size):
    saved = torch.load(file)
    expected = alone(name, 2 * STEPS)
    for way, place, more in [
        ("in one process", plain, {}),
        ("as replicas", plain, {"process_group": dist.group.WORLD}),
        ("by rows", dict(ways(size))["by rows"], {}),
    ]:
        others = go_on(name, saved["parameters"], saved["optimizer"], place, **more)
        assert not differing(expected, others), f"{name} {way}: parameters {differing(expected, others)}"


def failures_travel(size):
    """Failed refreshes of factors, which one process counts in a row, go to the owners of their tiles and come back."""
    optimizer, parameters = train("Shampoo", plain, 1)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["counts"][3:] = torch.arange(len(state["counts"]) - 3) % 3
    second = make("Shampoo", [torch.nn.Parameter(p.detach()) for p in parameters], process_group=dist.group.WORLD)
    second.load_state_dict(saved)
    second.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        for key, state in second.state_dict()["state"].items():
            assert torch.equal(state["counts"], saved["state"][key]["counts"]), f"parameter {key}"


def goes_on_with_more(size, folder):
    """What two ranks have saved."""
    for name in OPTIONS:
        goes_on_from(f"{folder}/{name}.2.pt", name, size)


def replicas_by_checkpoint(size, folder):
    """get_state_dict calls state_dict() on every rank, and gets each rank's part of replicas."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    for name in ("Shampoo", "Muon"):
        nets, optimizers = [small_net(5), small_net(5)], []
        for net in nets:
            optimizers.append(make(name, net.parameters(), process_group=dist.group.WORLD))
        run_model(nets[0], optimizers[0], range(3))
        net_state, state = get_state_dict(nets[0], optimizers[0])
        dcp.save({"net": net_state, "optimizer": state}, checkpoint_id=f"{folder}/replicas/{name}")
        net_state, state = get_state_dict(nets[1], optimizers[1])
        dcp.load({"net": net_state, "optimizer": state}, checkpoint_id=f"{folder}/replicas/{name}")
        set_state_dict(nets[1], optimizers[1], model_state_dict=net_state, optim_state_dict=state)
        for net, optimizer in zip(nets, optimizers, strict=True):
            run_model(net, optimizer, range(3, 6))
        assert not differing([p.detach() for p in nets[0].parameters()], nets[1].parameters()), name


# --- parameters in host memory


def offloads(size, device="cpu"):
    """fully_shard with CPUOffloadPolicy, beside the same without: equal bits on a CPU, on a GPU up to rounding."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torchium.optim._shared.sharding import local_tensor

    def trained(name, policy, steps=3):
        net = small_net(7).to(device)
        mesh = init_device_mesh(device, (size,))
        for layer in net:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(net, mesh=mesh, offload_policy=policy)
        optimizer = make(name, net.parameters())
        run_model(net, optimizer, range(steps), device)
        if device == "cpu" and steps:  # PyTorch's own all_gather of DTensors on a GPU over gloo ends the process
            optimizer.consolidate_state_dict()
        return [local_tensor(p).detach().cpu() for p in net.parameters()]

    for name in ("Muon", "Shampoo", "AdamW"):
        start = trained(name, OffloadPolicy(), steps=0)
        expected = trained(name, OffloadPolicy())
        got = trained(name, CPUOffloadPolicy(pin_memory=False))
        if device == "cpu":
            assert not differing(expected, got), name
        # On a GPU Muon takes other polynomials, which leave singular values between 0.85 and 1.12 too.
        most = 0.3 if name == "Muon" else 0.02
        for a, b, before in zip(expected, got, start, strict=True):
            way, off = (a - before).norm(), (a - b).norm()
            assert off <= most * way, f"{name}: off by {off} of a way of {way}"


def offloads_from_a_gpu(size):
    torch.cuda.set_device(0)
    offloads(size, "cuda")


def on_a_mesh_of_gpus(size):
    """Shards in host memory on a mesh of GPUs whose group has no backend for it, as under NCCL with CPUOffloadPolicy:
    equal bits, and state in the same memory that the steps write to. No GPU is used."""
    from torch.distributed.device_mesh import DeviceMesh
    from torchium.optim._shared.sharding import wrap_like

    assert "cpu" not in dist.get_backend_config()
    mesh, rank = DeviceMesh("cuda", torch.arange(size)), dist.get_rank()

    class Like:
        device_mesh, placements = mesh, (Shard(0),)

        def __init__(self, value):
            self.shape, self.ndim = value.shape, value.ndim

    def part(value):
        parts = value.chunk(size)
        return parts[rank].clone() if rank < len(parts) else value[:0].clone()

    def place(value):
        return wrap_like(part(value), Like(value))

    for name in ("Muon", "Shampoo", "AdamW"):
        optimizer, parameters = train(name, place)
        for a, p in zip(alone(name), parameters, strict=True):
            assert p.to_local().device.type == "cpu" and torch.equal(part(a), p.to_local()), name
        views = next(iter(optimizer._engines.values())).states()
        for p, state in zip(parameters, views, strict=True):
            for key, value in state.items():
                if isinstance(value, DTensor):
                    assert optimizer.state[p][key].to_local().data_ptr() == value.to_local().data_ptr(), key


def named(parameters):
    return {str(i): p.detach() for i, p in enumerate(parameters)}


def flat(optimizer, parameters):
    state = optimizer.state_dict()["state"]
    return {f"{i}/{key}": value for i in state for key, value in state[i].items()}


def nested(loaded, optimizer):
    result = optimizer.state_dict()
    result["state"] = {}
    for path, value in loaded.items():
        index, key = path.split("/")
        result["state"].setdefault(int(index), {})[key] = value
    return result


CASES = {
    2: [
        equal_bits,
        states_divided,
        goes_on_from_state,
        refused_together,
        really_trains,
        save,
        consolidates,
        failures_travel,
        replicas_by_checkpoint,
        offloads,
    ],
    3: [equal_bits, states_divided, load, goes_on_with_more, consolidates],
    4: [equal_bits, really_trains],
}


# --- a rank that dies in the middle of a step

LOST_OF, LOST, TIMEOUT = 3, 2, 4  # ranks, the one that dies, seconds


def die_in(operation):
    """This process ends without a word the next time that it comes to the operation."""
    call = Group._call

    def deadly(self, name, *rest):
        if name == operation:
            os.kill(os.getpid(), signal.SIGKILL)
        call(self, name, *rest)

    Group._call = deadly


def lose_a_rank(rank, size, folder):
    """Writes what a survivor was told, after how many seconds, and whether it may go on."""
    join_group(rank, size, folder, timeout=datetime.timedelta(seconds=TIMEOUT))
    optimizer, parameters = train("Shampoo", plain, 3, process_group=dist.group.WORLD)
    dist.barrier()
    if rank == LOST:
        die_in("all_gather")
    begin, said = time.monotonic(), []
    for _ in range(2):
        try:
            run(optimizer, parameters, plain, [4])
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    torch.save({"said": said, "seconds": time.monotonic() - begin}, f"{folder}/rank{rank}.pt")
    os._exit(0)  # the group cannot be taken down without the rank that is gone
