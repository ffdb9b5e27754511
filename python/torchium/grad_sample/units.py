"""Modules without a rule, run per sample: each sample gets its own parameters, views of the original, whose gradients
in the ordinary backward pass are the per-sample gradients. By torch.func.vmap if it supports all operations, otherwise
in a loop. Random numbers, such as dropout's, are drawn once, in this forward.

The batch dimension of an argument is known for modules of torch.nn and those with an attribute `batch_first`; for
others it is the first. An argument of another size there is shared by all samples. If this fails, `apart` tries other
dimensions of arguments after the first. The batch dimension of a result has size 1 for one sample.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

# vmap flattens arguments with it, and no other function knows the same containers.
from torch.utils import _pytree as pytree

from torchium._watch.layers import Part
from torchium._watch.uses import Use
from torchium.grad_sample.apart import Layout, layout_of
from torchium.grad_sample.forwards import Forward

if TYPE_CHECKING:
    from torchium.grad_sample.capture import Capture


class UnitForward(Forward):
    def __init__(self, capture: Capture, part: Part) -> None:
        super().__init__(capture, part)
        self.shell = Shell(self.module, lambda *args, **kwargs: self.original(*args, **kwargs))
        self.loops = False  # vmap failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.capture.trainable(self.part)
        if not parameters:
            return self.original(*args, **kwargs)
        call = SampleCall(self.part, self.capture.batch_dim, args, kwargs)
        batch = self.capture.check_batch(self.part, call.size)
        if call.size != batch:
            raise RuntimeError(f"the input of {self.part.title} has {call.size} sample, expected {batch}")
        kind = call.device.type
        if not torch.is_autocast_enabled(kind):
            return self.take(call, parameters)
        # In the parameters' type: under autocast and vmap, the backward pass of PyTorch's attention has mismatching
        # types, which is only detected there.
        call.widen(next(iter(parameters.values())).dtype)
        with torch.autocast(kind, enabled=False):
            return self.take(call, parameters)

    def take(self, call: SampleCall, parameters: dict[str, nn.Parameter], anew: bool = False) -> Any:
        layout = layout_of(self, call, parameters, anew)
        if isinstance(layout, str):
            if self.capture.plan.strict:
                raise NotImplementedError(f"{self.part.title} {layout}")
            return call.whole(self.shell, self.sources(parameters))
        call = call.arranged(layout.arguments)
        use = Use(self.part, self.capture.sink, self.capture.round, parameters, call.size)
        if use.batch == 0:
            use.sink.made(use)
            return self.run_without_samples(call, use)
        rows, spec = self.run(call, {f"inner.{name}": self.own_for_each(use, p) for name, p in parameters.items()})
        results = call.joined(rows, layout.results)
        if results is None:  # the kinds of its results have changed
            if anew:
                raise NotImplementedError(f"{self.part.title} returns tensors of other shapes each time it is called")
            return self.take(call, parameters, anew=True)
        use.sink.made(use)
        return pytree.tree_unflatten(results, spec)

    def sources(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {f"inner.{name}": self.capture.source(p) for name, p in parameters.items()}

    def run_without_samples(self, call: SampleCall, use: Use) -> Any:
        """vmap does not support empty batches. Their gradients exist as soon as a result has a gradient."""
        shared = self.sources(use.parameters)
        if not self.capture.gradients:
            shared = {name: p.requires_grad_() for name, p in shared.items()}
        results = call.whole(self.shell, shared)
        waiting = list(use.parameters.values())

        def arrive(gradient: Tensor) -> None:
            while waiting:
                parameter = waiting.pop()
                use.sink.formed(use, parameter, parameter.new_zeros((0, *parameter.shape)))

        for t in pytree.tree_flatten(results)[0]:
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(arrive)
        return results

    def own_for_each(self, use: Use, parameter: nn.Parameter) -> Tensor:
        """Expands the parameter to [B, ...], without a copy."""
        capture, sink = self.capture, use.sink
        own = capture.source(parameter).expand(use.batch, *parameter.shape)
        if capture.gradients:
            own.register_hook(lambda gradient: sink.formed(use, parameter, gradient.detach()))
        else:
            own.requires_grad_()
            own.register_post_accumulate_grad_hook(lambda leaf: sink.formed(use, parameter, take_gradient(leaf)))
        return own

    def run(self, call: SampleCall, own: dict[str, Tensor]) -> tuple[list[Any], Any]:
        """The flat results, each tensor [B, ...] per sample, and their structure."""
        if not self.loops:
            try:
                return call.by_vmap(self.shell, own)
            except Exception:  # the loop reveals whether vmap or the module failed
                pass
        try:
            results = call.by_loop(self.shell, own)
        except Exception as error:
            raise RuntimeError(
                f"{self.part.title} has no rule for per-sample gradients, and cannot be run on one sample at a time: "
                f"{error}"
            ) from error
        self.loops = True
        return results


class Shell(nn.Module):
    """The module with its original forward, for functional_call, which would otherwise call the replacement again."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def take_gradient(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    return gradient


# --- batch dimensions -------------------------------------------------------------------------------------------------


def argument_dim(part: Part, place: Any, t: Tensor, batch_dim: int) -> int | None:
    """The batch dimension of a tensor argument; `place` is its index or name. None: no such dimension."""
    module = part.module
    first = getattr(module, "batch_first", None)
    if isinstance(first, bool):  # the module has batch_first
        batch_dim = 0 if first else 1
    if isinstance(module, nn.RNNBase) and place in (1, "hx"):
        return 1
    if isinstance(module, nn.MultiheadAttention):
        if place in (5, "attn_mask"):
            if t.dim() != 2:
                raise RuntimeError(f"attn_mask of {part.title} has {t.dim()} dimensions, expected 2, one mask for all")
            return None
        if place in (3, "key_padding_mask"):
            return 0
    return batch_dim if t.dim() > batch_dim else 0 if t.dim() > 0 else None


class SampleCall:
    """The flat arguments of a call, which can be repeated for single samples."""

    def __init__(self, part: Part, batch_dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.part, self.batch_dim = part, batch_dim
        if any(isinstance(value, PackedSequence) for value in args):
            raise RuntimeError(f"the input of {part.title} is a PackedSequence: give it padded sequences")
        named = [*enumerate(args), *kwargs.items()]
        self.keys = [key for key, _ in named]
        flat = [pytree.tree_flatten(value) for _, value in named]
        self.specs = [spec for _, spec in flat]
        self.leaves = [leaf for leaves, _ in flat for leaf in leaves]
        self.counts = [len(leaves) for leaves, _ in flat]
        dims = [
            argument_dim(part, key, leaf, batch_dim) if isinstance(leaf, Tensor) else None
            for key, (leaves, _) in zip(self.keys, flat, strict=True)
            for leaf in leaves
        ]
        sizes = [leaf.size(dim) for leaf, dim in zip(self.leaves, dims, strict=True) if dim is not None]
        if not sizes:
            raise RuntimeError(f"{part.title} has trainable parameters and no argument with a batch dimension")
        self.size = sizes[0]
        # For unknown modules, arguments of another size there are shared by all samples.
        self.dims = [
            dim if dim is not None and leaf.size(dim) == self.size else None
            for leaf, dim in zip(self.leaves, dims, strict=True)
        ]
        self.device = self.leaves[self.mapped[0]].device

    # --- batch dimensions of the arguments ----------------------------------------------------------------------------

    @property
    def mapped(self) -> list[int]:
        """The indices of arguments that are not shared."""
        return [i for i, dim in enumerate(self.dims) if dim is not None]

    def arranged(self, dims: list[int | None]) -> SampleCall:
        """The same call with these batch dimensions."""
        other = copy.copy(self)
        other.dims = dims
        return other

    def kind(self) -> tuple[Any, ...]:
        """The key of calls with the same layout."""
        leaves = [
            leaf.dim() if isinstance(leaf, Tensor) else leaf if isinstance(leaf, (bool, str)) else type(leaf)
            for leaf in self.leaves
        ]
        return self.batch_dim, *self.keys, *map(str, self.specs), *leaves

    def fits(self, layout: Layout) -> bool:
        """Whether the layout of such a call fits this one."""
        return all(d is None or t.size(d) == self.size for t, d in zip(self.leaves, layout.arguments, strict=True))

    def choices(self) -> Iterator[list[int | None]]:
        """The usual dimensions; then, for arguments of other shapes than the first's, other dimensions of the batch
        size, as in a recurrent state [layers, samples, features]. Arguments of one shape have one layout."""
        if isinstance(self.part.module, (nn.RNNBase, nn.MultiheadAttention)):
            yield self.dims
            return
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        first = shapes[self.mapped[0]]
        usual = dict(zip(shapes, self.dims, strict=True))
        others = {
            shape: [d for d, size in enumerate(shape or ()) if size == self.size and d != dim and shape != first]
            for shape, dim in usual.items()
        }
        for chosen in itertools.product(*([dim, *others[shape]] for shape, dim in usual.items())):
            dims = dict(zip(usual, chosen, strict=True))
            yield [dims[shape] for shape in shapes]

    # --- running ------------------------------------------------------------------------------------------------------

    def widen(self, dtype: torch.dtype) -> None:
        """Converts floating-point arguments of other types to this one."""
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.leaves[i] = leaf.to(dtype)

    def repeating(self, count: int) -> SampleCall:
        """Replaces all samples from `count` on by the first."""
        other = copy.copy(self)
        order = torch.tensor([i if i < count else 0 for i in range(self.size)], device=self.device)
        other.leaves = [
            leaf if dim is None else leaf.index_select(dim, order)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return other

    def whole(self, shell: Shell, shared: dict[str, Tensor]) -> Any:
        """Runs all samples at once."""
        return pytree.tree_unflatten(*self.call(shell, shared, [self.leaves[i] for i in self.mapped]))

    def call(self, shell: Shell, own: dict[str, Tensor], samples: list[Tensor]) -> tuple[list[Any], Any]:
        """Runs one sample; its tensors keep the batch dimension. Returns the flat results and their structure."""
        leaves = list(self.leaves)
        for i, sample in zip(self.mapped, samples, strict=True):
            leaves[i] = sample
        args, kwargs, at = [], {}, 0
        for key, spec, count in zip(self.keys, self.specs, self.counts, strict=True):
            value = pytree.tree_unflatten(leaves[at : at + count], spec)
            at += count
            if isinstance(key, int):
                args.append(value)
            else:
                kwargs[key] = value
        return pytree.tree_flatten(functional_call(shell, own, tuple(args), kwargs))

    def by_vmap(self, shell: Shell, own: dict[str, Tensor]) -> tuple[list[Any], Any]:
        shape: list[Any] = []  # of the results; vmap accepts only tensors

        def one(own: dict[str, Tensor], *samples: Tensor) -> tuple[Tensor, ...]:
            whole = [t.unsqueeze(self.dims[i]) for i, t in zip(self.mapped, samples, strict=True)]
            shape[:] = self.call(shell, own, whole)
            return tuple(t for t in shape[0] if isinstance(t, Tensor))

        in_dims = (0, *(self.dims[i] for i in self.mapped))
        # Other attention kernels on GPUs need strides of results that vmap does not preserve.
        with sdpa_kernel(SDPBackend.MATH):
            tensors = vmap(one, in_dims=in_dims, randomness="different")(own, *(self.leaves[i] for i in self.mapped))
        results, spec = shape
        rows = iter(tensors)
        return [next(rows) if isinstance(t, Tensor) else t for t in results], spec

    def by_loop(self, shell: Shell, own: dict[str, Tensor]) -> tuple[list[Any], Any]:
        rows = []
        for b in range(self.size):
            samples = [self.leaves[i].narrow(self.dims[i], b, 1) for i in self.mapped]
            results, spec = self.call(shell, {name: p[b] for name, p in own.items()}, samples)
            rows.append(results)
        return [torch.stack(t) if isinstance(t[0], Tensor) else t[0] for t in zip(*rows, strict=True)], spec

    def joined(self, rows: list[Any], dims: list[int]) -> list[Any] | None:
        """The results for all samples from those of single ones; None if these dimensions do not fit."""
        tensors = [t for t in rows if isinstance(t, Tensor)]
        if self.size == 1:
            joined = iter([t.squeeze(0) for t in tensors])
        elif len(tensors) == len(dims) and all(
            t.shape[d + 1 :][:1] == (1,) for t, d in zip(tensors, dims, strict=True)
        ):
            joined = iter([t.movedim(0, d).squeeze(d + 1) for t, d in zip(tensors, dims, strict=True)])
        else:
            return None
        return [next(joined) if isinstance(t, Tensor) else t for t in rows]
