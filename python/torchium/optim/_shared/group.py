"""The ranks that share an optimizer, and their collectives."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import gc
import json
import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchium._messages import shown

from .flat import flat_of
from .sharding import Mesh, Placement, is_laid_out, is_sharded, placement_of

__all__ = ["CHAINED", "JOINT", "EvenInputs", "Group", "make_group", "meeting", "pack", "ranks_of", "unpack"]

_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8),
    )
}
_LENGTH = 8  # bytes of the header's length
_LABEL = 128  # about those of its entry for a tensor
_BUFFER = 1 << 26  # bytes of the messages of all ranks, where state is brought together
JOINT, CHAINED = 1, 2
_NONE, _REFUSED = 2**31 - 1, -(2**31)
_GAVE_UP = "torchium: gave up"  # the key of the reason in the store of a process group
_LOOK = datetime.timedelta(seconds=0.5)  # between looks at it, while this rank waits for others
# The process groups made here, by ranks and type of device: one serves all optimizers until PyTorch destroys it.
_MADE: weakref.WeakValueDictionary[tuple[tuple[int, ...], str], Any] = weakref.WeakValueDictionary()


class _OnGPU:
    """Memory on a GPU, as CUDA's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _bytes_at(device: torch.device, address: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_OnGPU(address, size), device=device)


class Group:
    """The C library's collectives over a process group of torch.distributed, on bytes."""

    def __init__(self, process_group: Any, ranks: tuple[int, ...], device: torch.device) -> None:
        import torch.distributed as dist

        self._dist = dist
        # A reference to the world's group would keep it alive: destroy_process_group() must end its threads, which may
        # still free tensors.
        self._process_group = None if process_group is dist.group.WORLD else process_group
        self.ranks = ranks
        self.device = device
        self.rank = ranks.index(dist.get_rank())
        self.is_awaited = False  # the other ranks wait for this one to agree
        # Whether a rank of the group decides together with other ranks (JOINT), in groups of which none contains the
        # others (CHAINED): of this rank, and of any.
        self.own_mode = 0
        self.mode: int | None = None  # until the first agreement
        self._waits = device.type == "cpu"  # the host for the end of a collective
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._meshes: dict[Any, Mesh] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    def placement_of(self, parameter: torch.Tensor) -> Placement | None:
        return placement_of(parameter, self._mesh_of)

    def _mesh_of(self, mesh: Any) -> Mesh:
        if mesh not in self._meshes:
            rank_of = {rank: k for k, rank in enumerate(self.ranks)}
            self._meshes[mesh] = tuple(mesh.mesh.shape), tuple(rank_of[rank] for rank in mesh.mesh.flatten().tolist())
        return self._meshes[mesh]

    @property
    def name(self) -> str:
        return f"ranks {self.ranks[0]} to {self.ranks[-1]}"

    def arguments(self) -> tuple[Any, ...]:
        """The argument of _C.Optimizer."""
        return self.name, self.rank, self.size, self.collective

    def _at(self, address: int, size: int) -> torch.Tensor:
        key = address, size
        if key not in self._views:
            self._views[key] = _bytes_at(self.device, address, size)
        return self._views[key]

    def collective(self, operation: str, send: int, receive: int, numbers: Any, stream: int) -> None:
        """Queued on `stream`, which may differ from PyTorch's current one: communication overlaps with computation."""
        if operation == "abort":
            self.give_up(numbers)
            return
        try:
            if self.device.type != "cuda" or stream == torch.cuda.current_stream(self.device).cuda_stream:
                self._call(operation, send, receive, numbers)
                return
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
                self._call(operation, send, receive, numbers)
        except (RuntimeError, ValueError) as error:  # a lost rank, or a timeout
            raise RuntimeError(
                f"{operation} of {self.name}, rank {self.rank} of {self.size}, failed: {error}\nThe step is not "
                "whole: resume from a checkpoint"
            ) from error

    def _call(self, operation: str, send: int, receive: int, numbers: Any) -> None:
        dist = self._dist
        if operation == "reduce_max":
            values = self._at(send, 4 * numbers).view(torch.int32)
            seen = values.clone() if self._waits else values  # they may be on the stack, see _complete
            self._reduce_max(seen)
            values.copy_(seen)
        elif operation == "all_gather":
            parts = list(self._at(receive, self.size * numbers).chunk(self.size))
            self._complete(dist.all_gather, parts, self._at(send, numbers))
        else:
            _, sent, _, received = numbers
            into, given = self._at(receive, sum(received)), self._at(send, sum(sent))
            self._complete(dist.all_to_all_single, into, given, received, sent)

    def _complete(self, call: Any, *arguments: Any, **more: Any) -> None:
        """A collective. In host memory it ends, with an error, also when another rank has given up; then threads of
        PyTorch may still use its tensors, until the timeout of the process group."""
        work = call(*arguments, group=self._process_group, async_op=self._waits, **more)
        while work is not None:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                reason = self._reason()
                if reason is not None:
                    raise RuntimeError(reason) from None
                if work.is_completed():
                    raise

    def _store(self) -> Any:
        return self._dist.distributed_c10d._get_process_group_store(self._process_group or self._dist.group.WORLD)

    def _reason(self) -> str | None:
        """Why another rank has given up, if one has."""
        try:
            return self._store().get(_GAVE_UP).decode() if self._store().check([_GAVE_UP]) else None
        except RuntimeError:  # the rank with the store may be gone
            return None

    def give_up(self, reason: object) -> None:
        """Tells ranks that wait for this one in a step that it has failed. The process group is out of step from now
        on."""
        self.is_awaited = False
        with contextlib.suppress(RuntimeError, NotImplementedError, KeyError):
            self._store().compare_set(_GAVE_UP, "", f"rank {self.rank} gave up: {reason}")

    def _reduce_max(self, tensor: torch.Tensor) -> None:
        self.is_awaited = False
        self._complete(self._dist.all_reduce, tensor, op=self._dist.ReduceOp.MAX)

    def agree(
        self, doing: str, params: Sequence[Any] = (), groups: Sequence[Any] = (), found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The agreement of all ranks that they do the same, with the same gradients and options: reduced like that of
        the library's steps, so that it may meet one, see src/optim/shared/shared.h."""
        given = [0 if p.grad is None else 2 - is_laid_out(p) for p in params]
        odd = next((k for k, p in enumerate(params) if p.grad is None and p.requires_grad), _NONE)
        told = (bool, int, float, str, tuple)  # without waiting for a device
        options = _hash([[item for item in group.items() if isinstance(item[1], told)] for group in groups])
        number = -2 - _hash(doing, given, options)
        pairs = [number, ~number, odd, ~odd, options, ~options, 0, self.own_mode]
        seen = torch.tensor(pairs, dtype=torch.int32, device=self.device)
        if found is not None:
            seen[6] = found
        self._reduce_max(seen)
        self.is_awaited = True  # in general for the step
        return seen

    def check(self, seen: Sequence[int], doing: str, labels: Sequence[str] = ()) -> None:
        """An error on every rank, unless they have agreed."""
        if seen[0] == ~seen[1]:
            self.mode = seen[7]
            return
        what, self.is_awaited = f"not all ranks of the group {doing}", False
        if seen[1] == _NONE:
            what = "another rank of the group could not take part, and its error says why"
        elif seen[0] < 0 and seen[2] != ~seen[3] and labels:
            what = f"some ranks of the group have a gradient of {labels[~seen[3]]!r} and some have none"
        elif seen[0] < 0 and seen[4] != ~seen[5]:
            what = "the ranks of the group have different options, such as lr"
        raise RuntimeError(f"{what}; nothing was changed")

    def refuse(self) -> None:
        """Tells ranks that wait for this one that it has failed."""
        if self.is_awaited:
            numbers = [_REFUSED, _NONE, 0, -1, 0, -1, 0, 0]
            with contextlib.suppress(RuntimeError):  # they may be gone
                self._reduce_max(torch.tensor(numbers, dtype=torch.int32, device=self.device))

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        """Broadcasts from this rank of the group."""
        self._complete(self._dist.broadcast, tensor, self.ranks[owner])

    def is_at(self, rank: int) -> bool:
        """Whether this process has that global rank."""
        return self.ranks[self.rank] == rank

    def gather(self, tensors: Mapping[str, torch.Tensor], to: int | None) -> Iterator[tuple[int, str, torch.Tensor]]:
        """The tensors of every rank, by its number in the group and their names, in host memory on rank `to` of the
        world, nothing on the others; to=None: on all. They travel in messages of a limited size."""
        if to is not None and (not isinstance(to, int) or to not in self.ranks):
            raise ValueError(f"to is {shown(to)}, expected one of the ranks that share the state: {list(self.ranks)}")
        messages, begun = _messages(tensors, max(_BUFFER // self.size, 1 << 16)), dict[tuple[int, str], _Arriving]()
        while (every := self._gather_messages(next(messages, None), to)) is not None:
            for k, data in enumerate(every):
                for label, piece in unpack(data, self.ranks[k]).items() if data.numel() else ():
                    name, shape = label.rsplit("|", 1)
                    arriving = begun.setdefault((k, name), _Arriving(piece.dtype, json.loads(shape)))
                    if arriving.take(piece):
                        yield k, name, begun.pop((k, name)).whole

    def _gather_messages(self, mine: torch.Tensor | None, to: int | None) -> list[torch.Tensor] | None:
        """The next message of every rank where they are wanted, else none; None after the last."""
        mine = torch.empty(0, dtype=torch.uint8) if mine is None else mine
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        self._dist.all_gather(list(sizes.chunk(self.size)), sizes.new_tensor([mine.numel()]), group=self._process_group)
        longest = int(sizes.max())
        if longest == 0:
            return None
        padded = torch.empty(longest, dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        every = [torch.empty_like(padded) for _ in self.ranks] if to is None or self.is_at(to) else None
        if to is None:
            self._dist.all_gather(every, padded, group=self._process_group)
        else:
            self._dist.gather(padded, every, dst=to, group=self._process_group)
        return [part[:size].cpu() for part, size in zip(every or (), sizes.tolist(), strict=bool(every))]


class _Arriving:
    """A tensor of which some elements have arrived."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.whole = torch.empty(*map(_length, shape), dtype=dtype, device="cpu")
        self._count = 0

    def take(self, piece: torch.Tensor) -> bool:
        """Takes the next elements; whether that is all."""
        self.whole.view(-1)[self._count : self._count + piece.numel()] = piece
        self._count += piece.numel()
        return self._count == self.whole.numel()


def _messages(tensors: Mapping[str, torch.Tensor], room: int) -> Iterator[torch.Tensor]:
    """The tensors, packed in pieces of about `room` bytes."""
    pieces: dict[str, torch.Tensor] = {}
    left = room
    for name, tensor in tensors.items():
        label, flat, at = f"{name}|{json.dumps([*tensor.shape])}", tensor.detach().reshape(-1), 0
        while at < flat.numel() or at == 0:
            count = max(left // flat.itemsize, 1)
            pieces[label] = flat[at : at + count]
            at, left = at + count, left - count * flat.itemsize - _LABEL
            if left <= 0:
                yield pack(pieces)
                pieces, left = {}, room
    if pieces:
        yield pack(pieces)


@contextlib.contextmanager
def meeting(groups: Iterable[Group]) -> Iterator[None]:
    """What all ranks of these groups do: one that fails tells those that wait for it."""
    for group in groups:
        group.is_awaited = True
    try:
        yield
    except Exception:
        for group in groups:
            group.refuse()
        raise


class EvenInputs:
    """The DistributedDataParallel models of these ranks. In their join() ranks without inputs take no steps, for which
    the others would wait, or which would meet other collectives."""

    def __init__(self, process_group: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        ranks = _ranks_in(process_group)
        found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        self._models = [weakref.ref(model) for model in found if _ranks_in(model.process_group) & ranks]

    def check(self, who: str) -> None:
        for model in self._models:
            config = getattr(model(), "_join_config", None)
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise RuntimeError(
                    f"{who}: in join() of DistributedDataParallel ranks that have no more inputs take no steps, but "
                    "the ranks of process_group divide each step: use join(throw_on_early_termination=True), which "
                    "ends on all ranks with the first, or give all ranks as many inputs; nothing was changed"
                )


def _ranks_in(process_group: Any) -> set[int]:
    import torch.distributed as dist

    try:
        return set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    except (KeyError, ValueError):  # it was destroyed
        return set()


def _hash(*what: Any) -> int:
    return zlib.crc32(repr(what).encode()) >> 2


def pack(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tensors as bytes in host memory: the length of a header, the header as JSON, their elements. Not a pickle, which
    could execute code of another rank."""
    header = json.dumps([[name, str(t.dtype).removeprefix("torch."), [*t.shape]] for name, t in tensors.items()])
    head = bytearray(len(header).to_bytes(_LENGTH, "little") + header.encode("ascii"))
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *parts])


def unpack(data: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """The inverse of `pack`."""
    head = int.from_bytes(bytes(data[:_LENGTH].tolist()), "little") + _LENGTH
    tensors: dict[str, torch.Tensor] = {}
    try:
        if head > data.numel():
            raise ValueError(f"its header ends at byte {head} of {data.numel()}")
        entries = json.loads(bytes(data[_LENGTH:head].tolist()))
        for name, dtype, shape in entries:
            size = _TYPES[dtype].itemsize * math.prod(_length(n) for n in shape)
            if not isinstance(name, str) or name in tensors or size > data.numel() - head:
                raise ValueError(f"the tensor {shown(name)} of {size} bytes does not fit")
            tensors[name] = data[head : head + size].clone().view(_TYPES[dtype]).reshape(shape)
            head += size
        if head != data.numel():
            raise ValueError(f"{data.numel() - head} bytes are left over")
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise ValueError(f"rank {rank} sent a state that cannot be read: {error}") from error
    return tensors


def _length(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a length is {shown(value)}")
    return value


@functools.lru_cache(maxsize=64)
def _ranks_on(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def ranks_of(parameter: Any, process_group: Any) -> tuple[int, ...]:
    """The global ranks that share a parameter: those of a DTensor's mesh, or of the process group with replicas. None
    for a single rank."""
    flat = flat_of(parameter)
    if is_sharded(parameter):
        ranks = _ranks_on(parameter.device_mesh)
    elif flat is not None:
        ranks = tuple(sorted(_ranks_in(flat.process_group)))
    elif process_group is not None:
        import torch.distributed as dist

        try:
            ranks = tuple(sorted(dist.get_process_group_ranks(process_group)))
        except KeyError:  # PyTorch finds it among its groups
            raise TypeError(
                f"process_group must be a group of torch.distributed that is in use, got {type(process_group).__name__}"
            ) from None
    else:
        return ()
    return ranks if len(ranks) > 1 else ()


def make_group(parameter: Any, process_group: Any, device: torch.device) -> Group:
    """The group of those ranks: an existing one, or a new one, created by its ranks only."""
    import torch.distributed as dist

    ranks = ranks_of(parameter, process_group)
    known = [dist.group.WORLD]
    if is_sharded(parameter):
        known += [parameter.device_mesh.get_group()] if parameter.device_mesh.ndim == 1 else []
    else:
        flat = flat_of(parameter)
        known.append(process_group if flat is None else flat.process_group)
    for group in known:
        if tuple(sorted(dist.get_process_group_ranks(group))) == ranks and _serves(group, device):
            return Group(group, tuple(dist.get_process_group_ranks(group)), device)
    made = _MADE.get((ranks, device.type))
    if made is None or not _ranks_in(made):
        made = _MADE[ranks, device.type] = _new_group(list(ranks), device)
    return Group(made, ranks, device)


def _serves(group: Any, device: torch.device) -> bool:
    """Whether it has a backend for this device: NCCL has none for host memory, which CPUOffloadPolicy uses."""
    import torch.distributed as dist

    return device.type in dist.get_backend_config(group)


def _new_group(ranks: list[int], device: torch.device) -> Any:
    import torch.distributed as dist

    if _serves(dist.group.WORLD, device):
        return dist.new_group(ranks, use_local_synchronization=True)
    if device.type != "cpu" or not dist.is_gloo_available():
        raise RuntimeError(
            f"the parameters of ranks {ranks[0]} to {ranks[-1]} are on {device}, and the process groups "
            f"({dist.get_backend_config(dist.group.WORLD)}) have no backend for it: "
            f"init_process_group('cpu:gloo,cuda:nccl') makes one for each kind of device"
        )
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
