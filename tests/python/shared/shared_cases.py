"""Functions run by test_optim_shared.py's processes, and one process with the same gradients."""

import contextlib
import copy
import cProfile
import datetime
import functools
import itertools
import os
import pickle
import signal
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchium.optim as optim
from processes import join_group, load_checkpoint, save_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchium import linalg
from torchium.optim._shared.group import Group
from torchium.optim._shared.sharding import local_tensor, wrap_like

STEPS = 5
# Matrices of several shapes, one too small for most groups, a convolution, a vector, experts, and one with moments in
# less memory, of which every shard has whole blocks.
SHAPES = [(24, 17), (24, 17), (40, 9), (31,), (10, 3, 3, 2), (2, 6), (6, 5, 8), (1, 12), (6, 1536)]


class Whitened(optim.MatrixOptimizer):
    """Written in Python: a momentum, and one side of Shampoo."""

    def init_state(self, gradients, group):
        gram = gradients @ gradients.mT
        return {"exp_avg": torch.zeros_like(gradients), "factor": torch.zeros_like(gram), "root": gram}

    def direction(self, gradients, state, group):
        state["exp_avg"].lerp_(gradients, 0.2)
        state["factor"] = 0.9 * state["factor"] + linalg.gram(gradients)
        if group["step"] % 2 == 0:
            state["root"] = linalg.inverse_root(state["factor"], 2, eps=1e-30, relative_eps=1e-3)
        return state["root"] @ state["exp_avg"] / (1 - 0.8 ** state["step"][:, None, None])


OPTIONS = {
    "Whitened": {"lr": 0.02},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01},
    "Lion": {"lr": 0.01},
    "AdamW bfloat16": {"lr": 0.01, "state_dtype": "bfloat16"},
    "AdamW int8": {"lr": 0.01, "state_dtype": "int8"},
    "Shampoo": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 16},
    "SOAP": {"lr": 0.01, "precondition_frequency": 2, "packed_factors": True},
    "Muon": {"lr": 0.02},
    "NorMuon": {"lr": 0.02},
}


def numbers(step):
    """Gradients of a step, or the initial parameters."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def make(name, parameters, **more):
    cls = Whitened if name == "Whitened" else getattr(optim, name.split()[0])
    return cls(parameters, **OPTIONS[name], **more)


def run(optimizer, parameters, place, steps, dtype=torch.float32):
    for step in steps:
        for p, gradient in zip(parameters, numbers(step), strict=True):
            p.grad = place(gradient.to(dtype))
        optimizer.step()


def goes_on(what, name, values, state, place, **more):
    """Another STEPS with a new optimizer that has loaded the state, vs the result of one process."""
    parameters = [torch.nn.Parameter(place(value.clone())) for value in values]
    optimizer = make(name, parameters, **more)
    optimizer.load_state_dict(state)
    run(optimizer, parameters, place, range(STEPS + 1, 2 * STEPS + 1))
    wrong = differing(alone(name, 2 * STEPS), parameters)
    assert not wrong, f"{what}: parameters {wrong}"


# --- placements


def on(mesh, *placements):
    """Shards dimensions that a tensor has; other tensors are replicated on the mesh."""

    def place(value):
        fitting = [Replicate() if isinstance(p, Shard) and p.dim >= value.ndim else p for p in placements]
        return distribute_tensor(value, mesh, fitting, src_data_rank=None)

    return place


def by_rows(size):
    return on(init_device_mesh("cpu", (size,)), Shard(0))


def ways(size):
    """Every placement of parameters on a world of this size, and the optimizer's options for it; of four ranks those on
    a square."""
    if size == 4:
        square = init_device_mesh("cpu", (2, 2))
        yield "in replicas", on(square, Replicate(), Shard(0)), {}
        yield "by rows and columns", on(square, Shard(0), Shard(1)), {}
        yield "by rows twice", on(square, Shard(0), Shard(0)), {}
        return
    line = init_device_mesh("cpu", (size,))
    yield "by rows", on(line, Shard(0)), {}
    yield "by columns", on(line, Shard(1)), {}
    yield "whole on every rank", on(line, Replicate()), {}
    yield "as replicas", plain, {"process_group": dist.group.WORLD}


def whole(p):
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


def differing(expected, parameters):
    return [k for k, (a, p) in enumerate(zip(expected, parameters, strict=True)) if not torch.equal(a, whole(p))]


def plain(value):
    """A single rank instead of a mesh."""
    return value


def train(name, place, steps=STEPS, dtype=torch.float32, **more):
    parameters = [torch.nn.Parameter(place(value.to(dtype))) for value in numbers(-1)]
    optimizer = make(name, parameters, **more)
    run(optimizer, parameters, place, range(1, steps + 1), dtype)
    return optimizer, parameters


# --- cases in each world


@functools.cache
def alone(name, steps=STEPS, dtype=torch.float32, **more):
    """The result of one process."""
    return [p.detach() for p in train(name, plain, steps, dtype, **more)[1]]


def equal_bits(size):
    half = {"dtype": torch.bfloat16, "master_weights": True}
    for name, more in [*((name, {}) for name in OPTIONS), *((name, half) for name in ("AdamW", "Shampoo", "Muon"))]:
        expected = alone(name, **more)
        for way, place, group in ways(size):
            _, parameters = train(name, place, **more, **group)
            assert not differing(expected, parameters), f"{name} {way}: parameters {differing(expected, parameters)}"


def several_in_a_shard(size):
    """Cuts, and experts, whose boundaries are not those of the shards."""

    def trained(place, **group):
        values = numbers(-1)
        parameters = [torch.nn.Parameter(place(values[k])) for k in (0, 6)]
        groups = [{"params": parameters[:1], "cuts": (5, 7, 12)}, {"params": parameters[1:], "batch_dims": 1}]
        optimizer = make("Whitened", groups, **group)
        for step in range(STEPS):
            for p, k in zip(parameters, (0, 6), strict=True):
                p.grad = place(numbers(step)[k])
            optimizer.step()
        return parameters

    expected = [p.detach() for p in trained(plain)]
    for way, place, group in ways(size):
        assert not differing(expected, trained(place, **group)), way


def more_parameters_are_no_more_calls(size):
    """A step calls no Python function per parameter."""
    for name, (way, (place, more)) in itertools.product(("AdamW", "Muon"), layouts(size).items()):
        calls = []
        for count in (2, 50):
            parameters = [torch.nn.Parameter(place(torch.ones(8, 6))) for _ in range(count)]
            optimizer = make(name, parameters, **more)
            for p in parameters:
                p.grad = place(torch.ones(8, 6))
            optimizer.step()
            optimizer.step()
            for p in parameters:  # new objects with new descriptions
                p.grad = place(torch.ones(8, 6))
            profile = cProfile.Profile(builtins=False)
            profile.runcall(optimizer.step)
            calls.append(sum(entry.callcount for entry in profile.getstats()))
        assert calls[0] == calls[1], f"{name} of {way}: {calls}"


def goes_on_from_state(size):
    """From the state_dict of one process to any number of them, and from one of the same world."""
    rows = by_rows(size)
    for name in OPTIONS:
        for trained, places in ((plain, ways(size)), (rows, [("by rows", rows, {})])):
            optimizer, parameters = train(name, trained)
            for way, place, more in places:
                goes_on(f"{name} {way}", name, map(whole, parameters), optimizer.state_dict(), place, **more)


@contextlib.contextmanager
def refused(what, words):
    """What is inside raises an error that says this."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        assert words in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what}: nothing was said")


# What one rank may do unlike the others, and what all others are told.
ANOTHER_ENGINE = {"max_preconditioner_dim": 8, "amsgrad": True, "adamw_eps": 1e-6}


def forget_gradients(optimizer, parameters):
    for p in parameters:
        p.grad = None


def forget_a_gradient(optimizer, parameters):
    parameters[2].grad = None


def take_another_rate(optimizer, parameters):
    optimizer.param_groups[0]["lr"] = 0.5


def take_another_engine(optimizer, parameters):
    group = optimizer.param_groups[0]
    group.update(((name, value) for name, value in ANOTHER_ENGINE.items() if name in group))


def have_a_sparse_gradient(optimizer, parameters):
    parameters[0].grad = torch.zeros(SHAPES[0]).to_sparse()


def have_another_layout(optimizer, parameters):
    parameters[0].grad = DTensor.from_local(torch.zeros(SHAPES[0]), parameters[0].device_mesh, [Partial()])


ALONE = {
    forget_gradients: "parameter 0 of group 0",
    forget_a_gradient: "parameter 2 of group 0",
    take_another_rate: "options",
    take_another_engine: "",
    have_a_sparse_gradient: "",
    have_another_layout: "",
}


def falls_out_of_step(size):
    """One rank alone does something else, at the first step or later: every rank gets an error at once, nothing
    changes, and the next step is taken."""
    for name, (way, (place, more)) in itertools.product(("Shampoo", "AdamW", "Whitened"), layouts(size).items()):
        for begun, (act, words) in itertools.product((0, 2), ALONE.items()):
            if way == "columns" or act is (have_a_sparse_gradient if way == "rows" else have_another_layout):
                continue
            optimizer, parameters = train(name, place, begun, **more)
            before, options = [whole(p).clone() for p in parameters], dict(optimizer.param_groups[0])
            for p, gradient in zip(parameters, numbers(50), strict=True):
                p.grad = place(gradient)
            if dist.get_rank() == size - 1:
                act(optimizer, parameters)
            what = f"{act.__name__} with {name} of {way}, {begun} steps"
            with refused(what, words):
                optimizer.step()
            assert not differing(before, parameters), what
            optimizer.param_groups[0].update(options)
            run(optimizer, parameters, place, [51])
            assert differing(before, parameters) == list(range(len(SHAPES))), what


def refuses_a_state(size):
    """A state that one rank cannot take is taken by none."""
    for name in ("Shampoo", "Muon", "Whitened"):
        place = by_rows(size)
        optimizer, parameters = train(name, place)
        before, state = [whole(p).clone() for p in parameters], optimizer.state_dict()
        if dist.get_rank() == size - 1:
            moment = next(key for key in state["state"][3] if key.startswith(("exp_avg", "momentum")))
            state["state"][3][moment] = torch.zeros(3)
        second = make(name, [torch.nn.Parameter(p.detach().clone()) for p in parameters])
        for loaded in (second, optimizer):
            with refused(name, "expected [" if dist.get_rank() == size - 1 else "another rank"):
                loaded.load_state_dict(state)
        assert not differing(before, parameters)
        ends_as_one_process(name, name, optimizer, parameters, place)


def decides_over_meshes(size):
    """Experts of one rank alone beside shards of all: a NaN there skips all, or is an error of all; without tokens an
    expert is not updated, and no rank waits for it."""
    lone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ranks", "one"))["one"]
    for name, policy in itertools.product(("Shampoo", "Muon", "Whitened"), ("skip", "raise")):
        for place, expert in (by_rows(size), on(lone, Shard(0))), (by_rows(size), plain):
            parameters = [torch.nn.Parameter(way(torch.ones(12, 10))) for way in (expert, place)]
            optimizer = make(name, parameters, nonfinite=policy)
            for case in ("", "nan", "no tokens", ""):
                before = [whole(p).clone() for p in parameters]
                for p, way in zip(parameters, (expert, place), strict=True):
                    p.grad = way(torch.randn(12, 10, generator=torch.Generator().manual_seed(1)))
                if case == "nan" and dist.get_rank() == 0:
                    local_tensor(parameters[0].grad)[0, 0] = float("nan")
                if case == "no tokens" and dist.get_rank() == 0:
                    parameters[0].grad = None
                try:
                    optimizer.step()
                    assert case != "nan" or policy == "skip"
                except RuntimeError as error:
                    assert (case, policy) == ("nan", "raise") and "nothing was changed" in str(error), error
                expected = {"nan": [], "no tokens": [0, 1][dist.get_rank() == 0 :]}.get(case, [0, 1])
                assert differing(before, parameters) == expected, f"{name}, {policy}, {case or 'nothing'}"
            assert policy == "raise" or optimizer.stats()["skipped"] == 1, name


def really_trains(size):
    """fully_shard, backward, clipping and a loss scaler vs one process with the averaged loss."""

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

    # Norms of shards are rounded differently from one of the whole: eight samples leave factors singular, and with less
    # damping their roots would magnify a last bit to 2 %.
    for name, more in (("Muon", {}), ("Shampoo", {"relative_eps": 1e-3}), ("AdamW", {}), ("Whitened", {})):
        one, many = model(), model()
        steps(one, make(name, one.parameters(), **more))
        mesh = init_device_mesh("cpu", (size,))
        for layer in many:
            fully_shard(layer, mesh=mesh)
        fully_shard(many, mesh=mesh)
        steps(many, make(name, many.parameters(), **more))
        for a, b in zip(one.parameters(), many.parameters(), strict=True):
            assert torch.allclose(a, whole(b), rtol=1e-4, atol=1e-5), name


def flat_net(name, strategy=None, state=None):
    """A model, under FSDP1 with a strategy, with an optimizer; both go on from a state."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 16)
    net = torch.nn.Sequential(*layers, torch.nn.Unflatten(1, (4, 4)), torch.nn.Conv1d(4, 6, 3))
    if state is not None:
        net.load_state_dict(state["model"])
    if strategy is not None:
        options = {"use_orig_params": True, "device_id": torch.device("cpu"), "sharding_strategy": strategy}
        net[2] = FullyShardedDataParallel(net[2], **options)
        net = FullyShardedDataParallel(net, **options)
    more = {"relative_eps": 1e-3} if name == "Shampoo" else {}
    optimizer = make(name, net if name == "Shampoo" else net.parameters(), **more)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    return net, optimizer


def descended(net, optimizer, steps):
    """The parameters after steps."""
    for step in steps:
        optimizer.zero_grad()
        net(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    flat = isinstance(net, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(net) if flat else contextlib.nullcontext():
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in net.named_parameters()}


def flattened(size, folder):
    """FSDP1 with use_orig_params=True, where ranks have ranges of elements, or none, vs one process: after steps, and
    after going on there or in one process from a saved state."""
    full, other = dist.fsdp.ShardingStrategy.FULL_SHARD, dist.fsdp.ShardingStrategy.SHARD_GRAD_OP
    for name in ("Muon", "Shampoo", "NorMuon", "SOAP"):
        expected = descended(*flat_net(name), range(6))
        net, optimizer = flat_net(name, other if name == "NorMuon" else full)
        saved = {"model": descended(net, optimizer, range(3))}
        assert name in {row.method for row in optimizer.summary()}, optimizer.summary()
        refuses_to_save(name, optimizer)
        refuses_to_save(name, mock.Mock(state_dict=functools.partial(get_optimizer_state_dict, net, optimizer)))
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(saved | {"optimizer": optimizer.state_dict()}, f"{folder}/flat.{name}")
        dist.barrier()
        saved = torch.load(f"{folder}/flat.{name}")
        for again in ((net, optimizer), flat_net(name, full, saved), flat_net(name, None, saved)):
            found = descended(*again, range(3, 6))
            assert all(torch.allclose(value, found[key], 1e-4, 1e-5) for key, value in expected.items()), name


def layouts(size):
    """Some placements, by short names: shards, and plain tensors, alone or as replicas."""
    line = init_device_mesh("cpu", (size,))
    return {
        "rows": (on(line, Shard(0)), {}),
        "columns": (on(line, Shard(1)), {}),
        "plain": (plain, {"process_group": dist.group.WORLD} if size > 1 else {}),
    }


def save(size, folder):
    for way, name in itertools.product(("rows", "plain"), OPTIONS):
        place, more = layouts(size)[way]
        optimizer, parameters = train(name, place, **more)
        save_checkpoint(torch.nn.ParameterList(parameters), optimizer, f"{folder}/{name}/{size}.{way}")


def load(size, folder):
    """A checkpoint of any world, sharded in any way, resumes like one process; each path in the two ways by turns."""
    for k, name in enumerate(OPTIONS):
        for j, path in enumerate(sorted(Path(folder, name).iterdir())):
            way = ("columns", "plain")[(k + j) % 2]
            place, more = layouts(size)[way]
            optimizer, parameters = train(name, place, 0, **more)
            load_checkpoint(torch.nn.ParameterList(parameters), optimizer, path)
            ends_as_one_process(f"{name} from {path.name} to {size}.{way}", name, optimizer, parameters, place)


def ends_as_one_process(what, name, optimizer, parameters, place):
    run(optimizer, parameters, place, range(STEPS + 1, 2 * STEPS + 1))
    wrong = differing(alone(name, 2 * STEPS), parameters)
    assert not wrong, f"{what}: parameters {wrong}"


def whole_by_checkpoint(size):
    """A full state_dict is complete on rank 0, or on all, by turns, and loads from rank 0, or from all, sharded in any
    way."""
    for k, (name, (way, (place, more))) in enumerate(itertools.product(OPTIONS, layouts(size).items())):
        first = k % 2 == 1
        optimizer, parameters = train(name, place, **more)
        values = [whole(p) for p in parameters]
        options = StateDictOptions(full_state_dict=True, cpu_offload=first)
        given = get_optimizer_state_dict(torch.nn.ParameterList(parameters), optimizer, options=options)
        if dist.get_rank() == 0 or not first:
            group = {**given["param_groups"][0], "params": list(range(len(parameters)))}
            state = {int(fqn): state for fqn, state in given["state"].items()}
            goes_on(f"{name} of {way}", name, values, {"state": state, "param_groups": [group]}, plain)
        to = {"rows": "columns", "columns": "plain", "plain": "columns"}[way]
        there, group = layouts(size)[to]
        copies = [torch.nn.Parameter(there(value.clone())) for value in values]
        second = make(name, copies, **group)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
        rest = given if dist.get_rank() == 0 or not first else {}
        set_optimizer_state_dict(torch.nn.ParameterList(copies), second, rest, options=options)
        ends_as_one_process(f"{name} of {way}, whole, to {to}", name, second, copies, there)


def missing_in_a_whole_state(size):
    """Missing entries raise an error instead of becoming zeros."""
    optimizer, parameters = train("Shampoo", by_rows(size))
    options = StateDictOptions(full_state_dict=True)
    given = get_optimizer_state_dict(torch.nn.ParameterList(parameters), optimizer, options=options)
    for state in given["state"].values():
        state.pop("exp_avg")
    with refused("a state without moments", "exp_avg"):
        set_optimizer_state_dict(torch.nn.ParameterList(parameters), optimizer, given, options=options)


def large_vectors(size, folder):
    """Spans of a large parameter, which replicas divide across its rows, are one tensor in one process and in a
    checkpoint."""
    value = torch.randn(1100, 1000, generator=torch.Generator().manual_seed(4))

    def made(name, value, place=plain, **more):
        parameters = [torch.nn.Parameter(place(value.clone()))]
        return make(name, parameters, **more), parameters

    def steps(optimizer, parameters, place, gradient):
        parameters[0].grad = place(gradient)
        optimizer.step()
        return whole(parameters[0])

    group = {"process_group": dist.group.WORLD}
    for name in ("AdamW", "Lion", "AdamW int8"):
        optimizer, first = made(name, value, **group)
        middle = steps(optimizer, first, plain, value.sin()).clone()
        save_checkpoint(torch.nn.ParameterList(first), optimizer, f"{folder}/large/{name}")
        optimizer.consolidate_state_dict(to=0)
        saved = optimizer.state_dict() if dist.get_rank() == 0 else None
        expected = steps(optimizer, first, plain, value.cos())
        # Rows of 1000 cut blocks of 128, which shards refuse.
        for place, more in ((plain, group), *([] if "int8" in name else [(by_rows(size), {})])):
            second, parameters = made(name, value, place, **more)
            load_checkpoint(torch.nn.ParameterList(parameters), second, f"{folder}/large/{name}")
            assert torch.equal(steps(second, parameters, place, value.cos()), expected), f"{name}, {list(more)}"
        if saved is not None:
            second, parameters = made(name, middle)
            second.load_state_dict(saved)
            assert torch.equal(steps(second, parameters, plain, value.cos()), expected), name


def uneven_inputs(size):
    """In join() every rank is told at its first step; if all ranks end with the first, they step equally often."""
    for name in ("Muon", "AdamW", "Whitened", "KFAC"):
        for ends, words in (False, "throw_on_early_termination=True"), (True, "exhausted"):
            torch.manual_seed(1)
            model = DistributedDataParallel(torch.nn.Linear(6, 4))
            group = {"process_group": model.process_group}
            optimizer = optim.KFAC(model.module, **group) if name == "KFAC" else make(name, model.parameters(), **group)
            before, steps = [p.clone() for p in model.parameters()], 0
            with refused(name, words), model.join(throw_on_early_termination=ends):
                for _ in range(2 + dist.get_rank()):
                    optimizer.zero_grad()
                    model(torch.ones(5, 6)).sum().backward()
                    optimizer.step()
                    steps += 1
            assert steps == 2 * ends and len(differing(before, model.parameters())) == 2 * ends, name


def copies_of_a_part(size):
    """A rank's part of an optimizer cannot be copied or pickled: it would continue without the rest."""
    optimizer, _ = train("Shampoo", plain, process_group=dist.group.WORLD)
    for copy_of in (copy.deepcopy, pickle.dumps):
        with refused(copy_of.__name__, "consolidate_state_dict"):
            copy_of(optimizer)


def consolidates(size, folder):
    """The last rank has the full state, from which one process resumes bitwise. The others, and all of them after
    another step, get an error with advice."""
    to = size - 1
    for name in OPTIONS:
        optimizer, parameters = train(name, plain, process_group=dist.group.WORLD)
        refuses_to_save(name, optimizer)
        optimizer.consolidate_state_dict(to=to)
        if dist.get_rank() == to:
            saved = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}
            torch.save(saved, f"{folder}/{name}.{size}.pt")
        else:
            refuses_to_save(name, optimizer)
        run(optimizer, parameters, plain, [STEPS + 1])
        refuses_to_save(name, optimizer)
        dist.barrier()
        saved = torch.load(f"{folder}/{name}.{size}.pt")
        goes_on(f"{name} in one process", name, saved["parameters"], saved["optimizer"], plain)


class Peak(TorchDispatchMode):
    """Counts the most bytes at a time of the tensors that are made inside."""

    def __init__(self):
        super().__init__()
        self.bytes, self._made = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        found = function(*args, **kwargs or {})
        for storage in (t.untyped_storage() for t in tree_leaves(found) if isinstance(t, torch.Tensor)):
            if storage._cdata not in before:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._made.values()))
        return found


def consolidates_in_one_place(size):
    """Only the rank that gets the state has memory for it: the others for messages."""
    wrong = []
    for name, (way, (place, more)) in itertools.product(("Muon", "AdamW"), layouts(size).items()):
        parameters = [torch.nn.Parameter(place(torch.zeros(2048, 512)))]
        optimizer = make(name, parameters, **more)
        parameters[0].grad = place(torch.ones(2048, 512))
        optimizer.step()
        with mock.patch("torchium.optim._shared.group._BUFFER", 1 << 18), Peak() as peak:
            optimizer.consolidate_state_dict(to=0)
        most = 1 << 20
        if dist.get_rank() == 0:  # the whole, and tensors that arrive
            state = optimizer.state_dict()["state"][0].values()
            most += sum(value.nbytes for value in state) + 2 * parameters[0].numel() * 4
            assert not any(isinstance(value, DTensor) for value in state)
        if peak.bytes > most:
            wrong.append(f"{name} of {way}: {peak.bytes}, at most {most}")
    assert not wrong, wrong


def forecasts_its_part(size):
    """What a rank will hold, before the first step, is what it then holds: not the whole."""
    for name, (way, place, more) in itertools.product(("Shampoo", "SOAP", "Muon", "AdamW"), ways(size)):
        values = [*numbers(-1), torch.zeros(1100, 1000)] if name == "AdamW" else numbers(-1)
        parameters = [torch.nn.Parameter(place(value)) for value in values]
        optimizer = make(name, parameters, **more)
        forecast = optimizer.memory_report()
        for p, value in zip(parameters, values, strict=True):
            p.grad = place(torch.ones_like(value))
        optimizer.step()
        held = optimizer.memory_report()
        assert forecast.forecast and not held.forecast and forecast == held, f"{name} {way}: {forecast}, {held}"
        whole = make(name, [torch.nn.Parameter(value) for value in values]).memory_report()
        if way == "by rows" or name in ("Shampoo", "SOAP"):
            assert held["state"] < whole["state"], f"{name} {way}: {held}, {whole} in one process"


def refuses_to_save(name, optimizer):
    """Elementwise state is complete on every rank."""
    try:
        optimizer.state_dict()
        assert name.split()[0] in ("SGD", "AdamW", "Lion"), f"{name} gave a part of the state"
    except RuntimeError as error:
        assert "consolidate_state_dict" in str(error) and "torch.distributed.checkpoint" in str(error), error


def failures_travel(size):
    """Failed refreshes of factors, which one process counts in a row, go to the owners of their tiles and come back; of
    the two blocks of a thin matrix, one has no factor along its long side."""
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(9)) for shape in ((24, 17), (2, 300))]

    def made(**more):
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        return optim.Shampoo(parameters, max_preconditioner_dim=256, **more), parameters

    optimizer, parameters = made()
    for p, value in zip(parameters, values, strict=True):
        p.grad = value.sin()
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["counts"][3:] = torch.arange(len(state["counts"]) - 3) % 3
    second, _ = made(process_group=dist.group.WORLD)
    second.load_state_dict(saved)
    second.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        for key, state in second.state_dict()["state"].items():
            assert torch.equal(state["counts"], saved["state"][key]["counts"]), f"parameter {key}"


def other_ways_to_save(size, folder):
    """Staged copies in host memory, with flattened keys, and a file per rank."""
    rows = by_rows(size)
    for k, more in enumerate(({}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True})):
        options = StateDictOptions(**more)
        optimizer, parameters = train("Shampoo", rows)
        state = {"optimizer": get_optimizer_state_dict(torch.nn.ParameterList(parameters), optimizer, options=options)}
        dcp.async_save(state, checkpoint_id=f"{folder}/staged/{k}").result()
        torch.save(state, f"{folder}/{k}.{dist.get_rank()}.pt")
        for alone in (False, True):
            copies = [torch.nn.Parameter(rows(whole(p).clone())) for p in parameters]
            second, model = make("Shampoo", copies), torch.nn.ParameterList(copies)
            state = {"optimizer": get_optimizer_state_dict(model, second, options=options)}
            if alone:
                state = torch.load(f"{folder}/{k}.{dist.get_rank()}.pt", weights_only=True)
            else:
                dcp.load(state, checkpoint_id=f"{folder}/staged/{k}")
            set_optimizer_state_dict(model, second, state["optimizer"], options=options)
            ends_as_one_process(f"{more}, {'alone' if alone else 'staged'}", "Shampoo", second, copies, rows)


# --- parameters in host memory


def offloads_from_a_gpu(size):
    """fully_shard with CPUOffloadPolicy vs without, up to rounding."""
    torch.cuda.set_device(0)

    def trained(name, policy, steps=3):
        torch.manual_seed(7)
        net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16)).cuda()
        mesh = init_device_mesh("cuda", (size,))
        for layer in net:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(net, mesh=mesh, offload_policy=policy)
        optimizer = make(name, net.parameters())
        for step in range(steps):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            (net(x) - x).square().mean().backward()
            optimizer.step()
        return [local_tensor(p).detach().cpu() for p in net.parameters()]

    # On a GPU Muon uses other polynomials, which leave singular values between 0.85 and 1.12 too.
    for name, most in (("Muon", 0.3), ("Shampoo", 0.02), ("AdamW", 0.02)):
        start = trained(name, OffloadPolicy(), steps=0)
        expected = trained(name, OffloadPolicy())
        got = trained(name, CPUOffloadPolicy(pin_memory=False))
        for a, b, before in zip(expected, got, start, strict=True):
            way, off = (a - before).norm(), (a - b).norm()
            assert off <= most * way, f"{name}: off by {off} of a way of {way}"


def on_a_mesh_of_gpus(size):
    """Host-memory shards on a mesh of GPUs whose group has no backend for it, as under NCCL with CPUOffloadPolicy:
    bitwise equal, and state in the memory that steps write. No GPU is used."""
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
        return wrap_like(part(value), Like(value), value.shape)

    made = mock.Mock(wraps=dist.new_group)
    for name in ("Muon", "Shampoo", "AdamW"):
        with mock.patch.object(dist, "new_group", made):
            optimizer, parameters = train(name, place)
        for a, p in zip(alone(name), parameters, strict=True):
            assert p.to_local().device.type == "cpu" and torch.equal(part(a), p.to_local()), name
        assert made.call_count == 1, f"{name}: these ranks have a communicator"
        views = next(iter(optimizer._engines.values())).states()
        for p, state in zip(parameters, views, strict=True):
            for key, value in state.items():
                if isinstance(value, DTensor):
                    assert optimizer.state[p][key].to_local().data_ptr() == value.to_local().data_ptr(), key


# Two ranks, unless a case is about the number of them, or reads what other worlds have written.
CASES = [
    (1, [save, whole_by_checkpoint]),
    (
        2,
        [
            goes_on_from_state,
            more_parameters_are_no_more_calls,
            refuses_a_state,
            really_trains,
            flattened,
            save,
            consolidates_in_one_place,
            forecasts_its_part,
            failures_travel,
            whole_by_checkpoint,
            missing_in_a_whole_state,
            large_vectors,
            copies_of_a_part,
            other_ways_to_save,
        ],
    ),
    (3, [equal_bits, several_in_a_shard, falls_out_of_step, decides_over_meshes, load, consolidates, uneven_inputs]),
    (4, [equal_bits, several_in_a_shard]),
    (1, [load]),
]


# --- a rank that dies during a step

LOST_OF, LOST, TIMEOUT = 3, 2, 4  # ranks, the one that dies, timeout in seconds


def die_in(operation):
    """This process exits silently the next time it reaches the operation."""
    call = Group._call

    def deadly(self, name, *rest):
        if name == operation:
            os.kill(os.getpid(), signal.SIGKILL)
        call(self, name, *rest)

    Group._call = deadly


def lose_a_rank(rank, size, folder):
    """Records a survivor's error, after how many seconds, and whether it may continue."""
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
