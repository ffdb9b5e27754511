"""Modules without a rule, run sample by sample: each sample gets parameters of its own, views of the one there is,
whose gradients in the ordinary backward pass are the gradients of the samples. By torch.func.vmap where that knows all
operations inside, otherwise in a loop. Random numbers, such as dropout's, are drawn once, in this one forward.

Which dimension of an argument or a result the samples are in is known for the modules of torch.nn; for others it is the
first, and an argument that has another size there is taken to be shared by all samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

# vmap itself takes arguments apart with it, and there is no other that knows the same containers.
from torch.utils import _pytree as pytree

from torchium._watch.layers import Part
from torchium._watch.uses import Use
from torchium.grad_sample.apart import keeps_apart
from torchium.grad_sample.forwards import Forward

if TYPE_CHECKING:
    from torchium.grad_sample.capture import Capture


class UnitForward(Forward):
    def __init__(self, capture: Capture, part: Part) -> None:
        super().__init__(capture, part)
        self.shell = Shell(self.module, lambda *args, **kwargs: self.original(*args, **kwargs))
        self.loops = False  # vmap was tried in vain

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
        # In the parameters' own type: under autocast and vmap together PyTorch's attention has backward passes of types
        # that do not fit, which shows only when it is too late to do otherwise.
        call.widen(next(iter(parameters.values())).dtype)
        with torch.autocast(kind, enabled=False):
            return self.take(call, parameters)

    def take(self, call: SampleCall, parameters: dict[str, nn.Parameter]) -> Any:
        apart = keeps_apart(self, call, parameters)
        if not apart and self.capture.plan.strict:
            raise NotImplementedError(
                f"{self.part.title} mixes the samples of a batch, or changes as it runs: what it computes for one of "
                "them by itself is not what it computes for it among the others, so that a single sample has no "
                "gradient of its own. Let each sample's output depend on that sample alone, as with GroupNorm in place "
                "of batch norm, or call eval() on a module that keeps statistics"
            )
        if not apart:
            return call.whole(self.shell, self.sources(parameters))
        use = Use(self.part, self.capture.sink, self.capture.round, parameters, call.size)
        use.sink.made(use)
        if use.batch == 0:
            return self.run_without_samples(call, use)
        return self.run(call, {f"inner.{name}": self.own_for_each(use, p) for name, p in parameters.items()})

    def sources(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        return {f"inner.{name}": self.capture.source(p) for name, p in parameters.items()}

    def run_without_samples(self, call: SampleCall, use: Use) -> Any:
        """Which vmap does not know. The gradients, of no samples, are there when a gradient comes to a result."""
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
        """The parameter once for each sample, [B, ...] in the memory of one."""
        capture, sink = self.capture, use.sink
        own = capture.source(parameter).expand(use.batch, *parameter.shape)
        if capture.gradients:
            own.register_hook(lambda gradient: sink.formed(use, parameter, gradient.detach()))
        else:
            own.requires_grad_()
            own.register_post_accumulate_grad_hook(lambda leaf: sink.formed(use, parameter, take_gradient(leaf)))
        return own

    def run(self, call: SampleCall, own: dict[str, Tensor]) -> Any:
        if not self.loops:
            try:
                return call.by_vmap(self.shell, own)
            except Exception:  # the loop tells whether it was vmap's fault or the module's own
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
    """The module with its own forward, for functional_call, which would otherwise come back through the hooks."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def take_gradient(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    return gradient


# --- where the samples are --------------------------------------------------------------------------------------------


def argument_dim(part: Part, place: Any, t: Tensor, batch_dim: int) -> int | None:
    """The dimension of the samples in a tensor among the arguments; `place` is its number or name. None for none."""
    module = part.module
    if isinstance(module, nn.RNNBase):
        return 1 if place in (1, "hx") else 0 if module.batch_first else 1
    if isinstance(module, nn.MultiheadAttention):
        if place in (5, "attn_mask"):
            if t.dim() != 2:
                raise RuntimeError(f"attn_mask of {part.title} has {t.dim()} dimensions, expected 2, one mask for all")
            return None
        return 0 if module.batch_first or place in (3, "key_padding_mask") else 1
    return batch_dim if t.dim() > batch_dim else 0 if t.dim() > 0 else None


def result_dim(part: Part, number: int, t: Tensor, batch_dim: int) -> int:
    """The dimension of the samples in a tensor among the results."""
    module = part.module
    if isinstance(module, nn.RNNBase):
        return 0 if number == 0 and module.batch_first else 1
    if isinstance(module, nn.MultiheadAttention):
        return 0 if number > 0 or module.batch_first else 1
    if t.dim() == 0:
        raise RuntimeError("its result has no batch dimension")
    return batch_dim if t.dim() > batch_dim else 0


class SampleCall:
    """The arguments of one call, taken apart so that the call can be made for one sample at a time."""

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
        # Where the module is not one we know, what has another size there is shared by all samples.
        self.dims = [
            dim if dim is not None and leaf.size(dim) == self.size else None
            for leaf, dim in zip(self.leaves, dims, strict=True)
        ]
        self.mapped = [i for i, dim in enumerate(self.dims) if dim is not None]
        self.device = self.leaves[self.mapped[0]].device

    def widen(self, dtype: torch.dtype) -> None:
        """Floating-point arguments of another type become this one."""
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.leaves[i] = leaf.to(dtype)

    def repeating(self, count: int) -> SampleCall:
        """The same with the first sample in place of all from `count` on."""
        other = copy.copy(self)
        order = torch.tensor([i if i < count else 0 for i in range(self.size)], device=self.device)
        other.leaves = [
            leaf if dim is None else leaf.index_select(dim, order)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return other

    def first(self, results: list[Any], count: int) -> list[Any]:
        """The results, flat, of the first samples alone."""
        tensors = [t for t in results if isinstance(t, Tensor)]
        dims = [result_dim(self.part, number, t, self.batch_dim) for number, t in enumerate(tensors)]
        return [t.narrow(dim, 0, count) for t, dim in zip(tensors, dims, strict=True)]

    def whole(self, shell: Shell, shared: dict[str, Tensor]) -> Any:
        """For all samples at once."""
        return pytree.tree_unflatten(*self.call(shell, shared, [self.leaves[i] for i in self.mapped]))

    def call(self, shell: Shell, own: dict[str, Tensor], samples: list[Tensor]) -> tuple[list[Any], Any]:
        """For one sample, whose tensors still have the batch dimension. The results, flat, and their structure."""
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

    def by_vmap(self, shell: Shell, own: dict[str, Tensor]) -> Any:
        shape: list[Any] = []  # of the results, which vmap wants to be tensors alone

        def one(own: dict[str, Tensor], *samples: Tensor) -> tuple[Tensor, ...]:
            whole = [t.unsqueeze(self.dims[i]) for i, t in zip(self.mapped, samples, strict=True)]
            results, spec = self.call(shell, own, whole)
            places = [(i, t) for i, t in enumerate(results) if isinstance(t, Tensor)]
            dims = {i: result_dim(self.part, n, t, self.batch_dim) for n, (i, t) in enumerate(places)}
            shape[:] = [results, spec, dims]
            return tuple(t.squeeze(dims[i]) for i, t in places)

        in_dims = (0, *(self.dims[i] for i in self.mapped))
        # The other kernels for attention on GPUs want their results laid out as vmap does not keep them.
        with sdpa_kernel(SDPBackend.MATH):
            tensors = vmap(one, in_dims=in_dims, randomness="different")(own, *(self.leaves[i] for i in self.mapped))
        results, spec, dims = shape
        for (i, dim), t in zip(dims.items(), tensors, strict=True):
            results[i] = t.movedim(0, dim)
        return pytree.tree_unflatten(results, spec)

    def by_loop(self, shell: Shell, own: dict[str, Tensor]) -> Any:
        rows = []
        for b in range(self.size):
            samples = [self.leaves[i].narrow(self.dims[i], b, 1) for i in self.mapped]
            results, spec = self.call(shell, {name: p[b] for name, p in own.items()}, samples)
            rows.append(results)
        joined, number = list(rows[0]), 0
        for i, first in enumerate(rows[0]):
            if isinstance(first, Tensor):
                dim = result_dim(self.part, number, first, self.batch_dim)
                joined[i] = torch.cat([row[i] for row in rows], dim)
                number += 1
        return pytree.tree_unflatten(joined, spec)
