"""State in tiles as torch.distributed.checkpoint reads and writes it: under the name and with the size that one process
has, of which each rank holds its tiles. A checkpoint thus loads into any number of ranks, sharded in any way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["TileShape", "Tiled", "boxes_of", "rows_of", "scales_shape", "shape_of", "untiled"]

_BLOCK = 128  # elements to a scale of 8-bit moments

Box = tuple[tuple[int, ...], tuple[int, ...]]
# The shape of the whole after merging dimensions, where the tile begins in it, and its values.
Tile = tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]


class TileShape(NamedTuple):
    factors: int
    dims: tuple[int, ...]  # of the parameter, merged
    at: tuple[slice, ...]  # where the tile lies in them

    def of(self, name: str) -> TileShape:
        """The same of this state: scales of a span have an entry for every block."""
        if not name.endswith("_scale"):
            return self
        at = tuple(slice(side.start // _BLOCK, -(-side.stop // _BLOCK)) for side in self.at)
        return TileShape(self.factors, tuple(-(-size // _BLOCK) for size in self.dims), at)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of 8-bit moments: rows of whole blocks are rows there too, and are sharded with the parameter."""
    row = math.prod(shape[1:])
    rows = len(shape) > 1 and row % _BLOCK == 0
    return (shape[0], row // _BLOCK) if rows else (-(-math.prod(shape) // _BLOCK),)


def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a moment, or its scales."""
    return scales_shape(shape) if name.endswith("_scale") else tuple(shape)


def rows_of(tiles: Mapping[int, TileShape], first: int = 3) -> dict[int, slice]:
    """Where one process has the failures of each tile's factors in its counts, behind those of the parameter."""
    rows = {}
    for number, tile in sorted(tiles.items()):
        rows[number] = slice(first, first + tile.factors)
        first += tile.factors
    return rows


class Tiled(torch.Tensor):
    """A tensor of the size of the whole, which has memory for this rank's tiles only, by the names of their state. It
    can be copied, saved and loaded, but not computed with."""

    tiles: Mapping[str, Tile]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], tiles: Mapping[str, Tile], dtype: torch.dtype) -> Tiled:
        device = next((tile.device for *_, tile in tiles.values()), torch.device("cpu"))
        whole = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        whole.tiles = tiles
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tiled, (tuple(self.shape), self.tiles, self.dtype)

    def __deepcopy__(self, memo: Any) -> Tiled:
        return self.clone()

    def __repr__(self, **_: Any) -> str:
        return f"Tiled({tuple(self.shape)}, {sorted(self.tiles)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, own = torch.ops.aten, args[0]
        if function is aten.new_empty.default:  # of a copy that is then given copies of the tiles
            return cls(tuple(args[1]), {}, own.dtype)
        if function not in (aten.clone.default, aten.detach.default, aten._to_copy.default):
            raise RuntimeError(f"{own!r} has the tiles of one rank and cannot compute {function}")
        tiles = {n: (dims, a, function(t, *args[1:], **(kwargs or {}))) for n, (dims, a, t) in own.tiles.items()}
        return cls(tuple(own.shape), tiles, next((t.dtype for *_, t in tiles.values()), own.dtype))

    def _pieces(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The tiles in rectangles of the whole, with views of their values."""
        for dims, start, tile in self.tiles.values():
            ranges = zip(_merged(self.shape, dims), start, tile.shape, strict=True)
            sides = [boxes_of(sizes, first, first + length) for sizes, first, length in ranges]
            for boxes in itertools.product(*(list(_placed(side)) for side in sides)):
                piece = tile[tuple(slice(first, first + math.prod(size)) for first, _, size in boxes)]
                for k in range(len(boxes) - 1, -1, -1):
                    piece = piece.unflatten(k, boxes[k][2])
                at = tuple(itertools.chain.from_iterable(start for _, start, _ in boxes))
                yield (at, tuple(piece.shape)), piece

    # What torch.distributed.checkpoint asks of tensors of its own kinds.

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for (start, size), _ in self._pieces()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(piece for (start, _), piece in self._pieces() if start == tuple(index.offset))


torch.serialization.add_safe_globals([Tiled])


def untiled(saved: Mapping[str, Any]) -> dict[str, Any]:
    """State with its tiles under their own names."""
    found = {name: value for name, value in saved.items() if not isinstance(value, Tiled)}
    for value in saved.values():
        if isinstance(value, Tiled):
            found |= {name: tile for name, (*_, tile) in value.tiles.items()}
    return found


def _merged(shape: torch.Size, dims: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The dimensions that each of `dims` was merged from; those of size 1 may go anywhere."""
    left = list(shape)
    for k, side in enumerate(dims):
        sizes: list[int] = []
        while math.prod(sizes) < side or not sizes:
            sizes.append(left.pop(0))
        while left and (k == len(dims) - 1 or left[0] == 1):
            sizes.append(left.pop(0))
        yield tuple(sizes)


def boxes_of(sizes: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """A range of the merged dimension as rectangles of those it was merged from, in order."""
    if len(sizes) == 1:
        yield (first,), (end - first,)
        return
    inner = math.prod(sizes[1:])
    while first < end:
        row, rest = divmod(first, inner)
        rows = (end - first) // inner
        if rest == 0 and rows > 0:
            yield (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            first += rows * inner
            continue
        stop = min(end, (row + 1) * inner)
        for start, size in boxes_of(sizes[1:], rest, stop - row * inner):
            yield (row, *start), (1, *size)
        first = stop


def _placed(boxes: Iterator[Box]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Rectangles with where they begin in the range."""
    first = 0
    for start, size in boxes:
        yield first, start, size
        first += math.prod(size)
