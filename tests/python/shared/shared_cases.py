"""What processes of a group do for test_optim_shared.py, and what one process does with the same gradients."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
import torchium.optim as optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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


@functools.cache
def alone(name, steps=STEPS, dtype=torch.float32, **more):
    """What one process comes to."""
    parameters = [torch.nn.Parameter(value.to(dtype)) for value in numbers(-1)]
    optimizer = make(name, parameters, **more)
    run(optimizer, parameters, lambda gradient: gradient, range(1, steps + 1), dtype)
    return [p.detach() for p in parameters]


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


def train(name, place, steps=STEPS, dtype=torch.float32, **more):
    parameters = [torch.nn.Parameter(place(value.to(dtype))) for value in numbers(-1)]
    optimizer = make(name, parameters, **more)
    run(optimizer, parameters, place, range(1, steps + 1), dtype)
    return optimizer, parameters


# --- what is tried in each world


def equal_bits(size):
    for name in OPTIONS:
        expected = alone(name)
        for way, place in ways(size):
            _, parameters = train(name, place)
            assert not differing(expected, parameters), f"{name} {way}: parameters {differing(expected, parameters)}"
        _, parameters = train(name, lambda value: value, process_group=dist.group.WORLD)
        assert not differing(expected, parameters), f"{name} as replicas"


def half_precision(size):
    for name in ("AdamW", "Shampoo", "Muon"):
        expected = alone(name, dtype=torch.bfloat16, master_weights=True)
        for _, place in ways(size):
            _, parameters = train(name, place, dtype=torch.bfloat16, master_weights=True)
            assert not differing(expected, parameters), name


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


def resumes(size):
    """From a state_dict of the same world: bit for bit."""
    for name in OPTIONS:
        expected = alone(name, 2 * STEPS)
        place = dict(ways(size))["by rows"]
        optimizer, parameters = train(name, place)
        others = go_on(name, map(whole, parameters), optimizer.state_dict(), place)
        assert not differing(expected, others), name


def takes_state_of_one(size):
    """The state of one process, into any number of them."""
    for name in OPTIONS:
        expected = alone(name, 2 * STEPS)
        parameters = [torch.nn.Parameter(value) for value in numbers(-1)]
        optimizer = make(name, parameters)
        run(optimizer, parameters, lambda gradient: gradient, range(1, STEPS + 1))
        for way, place in ways(size):
            others = go_on(name, map(whole, parameters), optimizer.state_dict(), place)
            assert not differing(expected, others), f"{name} {way}: parameters {differing(expected, others)}"


def skips_together(size):
    """A NaN on one rank: nobody takes the step; with "raise", everybody gets the error."""
    place = dict(ways(size))["by rows"]
    for policy in ("skip", "raise"):
        optimizer, parameters = train("Muon", place, nonfinite=policy)
        before = [whole(p).clone() for p in parameters]
        for p, gradient in zip(parameters, numbers(50), strict=True):
            p.grad = place(gradient)
        if dist.get_rank() == 0:
            parameters[0].grad.to_local()[0, 0] = float("nan")
        try:
            optimizer.step()
            assert policy == "skip"
        except RuntimeError as error:
            assert policy == "raise" and "nothing was changed" in str(error), error
        assert not differing(before, parameters)
        assert optimizer.stats()["skipped"] == 1


def disagrees(size):
    """A gradient that one rank lacks: the same error for all, and nothing is changed."""
    place = dict(ways(size))["by rows"]
    optimizer, parameters = train("AdamW", place)
    before = [whole(p).clone() for p in parameters]
    for p, gradient in zip(parameters, numbers(50), strict=True):
        p.grad = place(gradient)
    if dist.get_rank() == size - 1:
        parameters[2].grad = None
    try:
        optimizer.step()
        raise AssertionError("ranks with other gradients took a step")
    except RuntimeError as error:
        assert "gradients of different parameters" in str(error), error
    assert not differing(before, parameters)


def other_options(size):
    place = dict(ways(size))["by rows"]
    try:
        train("Shampoo", place, weight_decay=0.1 * dist.get_rank())
        raise AssertionError("ranks with other options were taken")
    except RuntimeError as error:
        assert "different models, options or placements" in str(error), error


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
        optimizer, parameters = train(name, lambda value: value, process_group=dist.group.WORLD)
        refuses_to_save(name, optimizer)
        with mock.patch.object(dist, "gather_object", side_effect=AssertionError("it unpickles what others send")):
            optimizer.consolidate_state_dict(to=to)
        if dist.get_rank() == to:
            saved = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}
            torch.save(saved, f"{folder}/{name}.{size}.pt")
        else:
            refuses_to_save(name, optimizer)
        run(optimizer, parameters, lambda gradient: gradient, [STEPS + 1])
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
        ("in one process", lambda value: value, {}),
        ("as replicas", lambda value: value, {"process_group": dist.group.WORLD}),
        ("by rows", dict(ways(size))["by rows"], {}),
    ]:
        others = go_on(name, saved["parameters"], saved["optimizer"], place, **more)
        assert not differing(expected, others), f"{name} {way}: parameters {differing(expected, others)}"


def failures_travel(size):
    """Failed refreshes of factors, which one process counts in a row, go to the owners of their tiles and come back."""
    parameters = [torch.nn.Parameter(value) for value in numbers(-1)]
    optimizer = make("Shampoo", parameters)
    run(optimizer, parameters, lambda gradient: gradient, [1])
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


# --- state of each rank

MATRICES = [(48, 64)] * 24 + [(96, 32)] * 12  # whose rows every world below divides evenly
LARGE = 4 * 2**20  # bytes: elementwise state below that is not divided among replicas


def bytes_of(optimizer, parameters):
    """Bytes of state here, those of matrices and all others, clocks among them."""
    counts = [0, 0]
    for p in parameters:
        for name, value in optimizer.state[p].items():
            if name != "counts" and not name.startswith("failures"):
                local = value.to_local() if isinstance(value, DTensor) else value
                counts[p.ndim < 2 or name == "step"] += local.numel() * local.element_size()
    return counts


def state_bytes(size):
    """A rank has 1/W of the state of one process and 2 % more, and elementwise state below 4 MiB."""
    blank = {"Shampoo": {"max_preconditioner_dim": 32}, "SOAP": {}, "Muon": {}}

    def train_blank(name, place, **more):
        parameters = [torch.nn.Parameter(place(torch.zeros(shape))) for shape in [*MATRICES, (96,)]]
        optimizer = getattr(optim, name)(parameters, lr=0.1, **blank[name], **more)
        for p in parameters:
            p.grad = place(torch.ones(p.shape))
        optimizer.step()
        return bytes_of(optimizer, parameters)

    for name in blank:
        matrices, others = train_blank(name, lambda value: value)
        assert others < LARGE
        for way, place, more in [
            ("as replicas", lambda value: value, {"process_group": dist.group.WORLD}),
            ("by rows", dict(ways(size))["by rows"], {}),
        ]:
            every = [None] * size
            dist.all_gather_object(every, sum(train_blank(name, place, **more)))
            most = 1.02 * matrices / size + others
            assert max(every) <= most, f"{name} {way}: {every} bytes on the ranks, expected {most} at most"


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
        half_precision,
        states_divided,
        resumes,
        takes_state_of_one,
        skips_together,
        disagrees,
        other_options,
        really_trains,
        save,
        consolidates,
        failures_travel,
        replicas_by_checkpoint,
        state_bytes,
        offloads,
    ],
    3: [equal_bits, states_divided, load, goes_on_with_more, consolidates, state_bytes],
    4: [equal_bits, half_precision, really_trains, state_bytes],
}
