"""torchium.elementwise: everything around the kernel of a call. Operands are brought to a common shape and layout, in
which element i of every array has offset i, so that the kernel is a loop over a range.

A kernel is compiled for each signature: the device, the type T, and which inputs are arrays, arrays of one element or
numbers. If no operand needs a conversion, later calls of the signature use the fast path _C.Elementwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchium import _C, kernels
from torchium._functions import elementwise_operands as operands
from torchium._functions import elementwise_source as text
from torchium._functions.transforms import untraced
from torchium._messages import shown

# Below this number of elements, another CPU thread costs more than it saves.
_GRAIN = 16384
# Signatures with a fast path; a failed attempt costs about a hundred nanoseconds.
_MOST_SHORT = 8
# Blocks of a GPU's kernel per resident block: a few, so that the last ones end together.
_WAVES = 4


class _Plan(NamedTuple):
    """The properties of a call without its values: how inputs are passed, and the outputs' types."""

    device: torch.device
    shape: torch.Size
    inputs: list[Any]  # tensors and numbers
    dtypes: list[torch.dtype]  # of the inputs, then of the outputs
    kinds: tuple[str, ...]  # of the inputs: text.ARRAY, text.ONE or text.NUMBER
    promoted: torch.dtype | None  # what T stands for


class _Compiled(NamedTuple):
    kernel: kernels.Kernel
    device: str
    width: int  # elements that a GPU thread processes at once
    threads: int
    blocks: int


class Elementwise:
    """The function that `torchium.elementwise` returns, for tensors and numbers. Its arguments are the same."""

    def __init__(
        self,
        inputs: str,
        outputs: str,
        operation: str,
        name: str | None = None,
        derivative: Any = None,
        options: Sequence[str] = (),
        preamble: str = "",
    ) -> None:
        for argument, value in (("operation", operation), ("preamble", preamble)):
            if not isinstance(value, str):
                raise TypeError(f"{argument} must be a str, got {type(value).__name__!r}")
        self._inputs = text.declarations("inputs", inputs, operands.TYPES)
        self._outputs = text.declarations("outputs", outputs, operands.TYPES)
        text.check_names([*self._inputs, *self._outputs])
        if any(d.type == "T" for d in self._outputs) and not any(d.type == "T" for d in self._inputs):
            raise ValueError("outputs has type T, which no input has, so it is undetermined")
        self.name = text.kernel_name(name)
        self._operation = operation
        self._options = options
        self._preamble = preamble
        self._derivative = _by_name(derivative, [d.name for d in self._inputs])
        self._gradients: dict[tuple[str, ...], Elementwise] = {}
        self._compiled: dict[Any, _Compiled] = {}
        self._short: tuple[_C.Elementwise, ...] = ()  # for calls like previous ones, latest first
        self._known: set[Any] = set()

    def __call__(self, *inputs: Any, out: Tensor | Sequence[Tensor] | None = None) -> Tensor | tuple[Tensor, ...]:
        """Broadcasts its arguments as PyTorch does and returns a new tensor for each output, or writes to `out`."""
        for short in self._short:
            results = short.run(inputs, out)
            if results is not None:
                return results
        results = self._carefully(inputs, out)
        return results[0] if len(self._outputs) == 1 else tuple(results)

    @untraced
    def _carefully(self, inputs: Sequence[Any], out: Any) -> Sequence[Tensor]:
        plan = self._plan(inputs)
        watched = self._watched(inputs)
        if watched and out is not None:
            raise RuntimeError(f"out cannot be given where an input, {watched[0]}, requires a gradient")
        if watched:
            self._check_derivatives(watched)
            return _Differentiable.apply(self, plan, *inputs)
        results = self._run(plan, self._checked_out(out, plan))
        self._remember(plan, inputs)
        return results

    def __repr__(self) -> str:
        return f"<torchium.Elementwise {self.name!r}: {self._operation!r}>"

    # --- the arguments ------------------------------------------------------------------------------------------------

    def _plan(self, inputs: Sequence[Any], promoted: torch.dtype | None = None) -> _Plan:
        """Checks the arguments of a call. `promoted` is the type T if it is known."""
        if len(inputs) != len(self._inputs):
            names = ", ".join(d.name for d in self._inputs)
            raise TypeError(f"{self.name} takes {len(self._inputs)} inputs ({names}), got {len(inputs)}")
        device = self._device(inputs)
        # As in PyTorch, a CPU tensor of one number is accepted by a GPU, as a number.
        values = [
            v.item() if isinstance(v, Tensor) and v.dim() == 0 and v.device != device and v.is_cpu else v
            for v in inputs
        ]
        generic = {d.name: v for d, v in zip(self._inputs, inputs, strict=True) if d.type == "T"}
        if promoted is None and generic:
            promoted = operands.promoted(generic)
        dtypes = [promoted if d.type == "T" else operands.TYPES[d.type] for d in (*self._inputs, *self._outputs)]
        shape = torch.broadcast_shapes(*(v.shape for v in values if isinstance(v, Tensor)))
        kinds = []
        for i, (d, value) in enumerate(zip(self._inputs, values, strict=True)):
            if not isinstance(value, Tensor):
                values[i] = operands.number(d.name, value, dtypes[i])
                kinds.append(text.NUMBER)
                continue
            operands.check_tensor(d, value, device, dtypes[i])
            if value.numel() > 1 and not any(value.stride()):  # one repeated number
                value = values[i] = value.detach()[(0,) * value.dim()]
            kinds.append(text.ONE if value.numel() == 1 and value.shape != shape else text.ARRAY)
        return _Plan(device, shape, values, dtypes, tuple(kinds), promoted)

    def _device(self, inputs: Sequence[Any]) -> torch.device:
        """Of the first tensor with more than one element, else of the first one."""
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        if not tensors:
            raise TypeError(f"{self.name} needs a tensor among its inputs, got numbers alone")
        chosen = next((t for t in tensors if t.dim() > 0 or not t.is_cpu), tensors[0])
        if not (chosen.is_cpu or chosen.is_cuda):
            raise ValueError(f"{self.name} runs on the CPU or a CUDA device, got a tensor on {chosen.device}")
        return chosen.device

    def _checked_out(self, out: Any, plan: _Plan) -> list[Tensor] | None:
        if out is None:
            return None
        tensors = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, (list, tuple)) else None
        if tensors is None or len(tensors) != len(self._outputs):
            raise TypeError(f"out must be a tensor for each output of {self.name}, {len(self._outputs)} in all")
        dtypes = plan.dtypes[len(self._inputs) :]
        for d, t, dtype in zip(self._outputs, tensors, dtypes, strict=True):
            if not isinstance(t, Tensor):
                raise TypeError(f"out for {d.name} must be a tensor, got {type(t).__name__!r}")
            if t.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(f"out for {d.name} requires a gradient: use torch.no_grad()")
            if t.device != plan.device or t.layout is not torch.strided:
                raise ValueError(f"out for {d.name} is on {t.device}, expected a dense tensor on {plan.device}")
            if t.dtype != dtype:
                raise TypeError(f"out for {d.name} has dtype {t.dtype}, expected {dtype}")
            if t.shape != plan.shape:
                raise ValueError(f"out for {d.name} has shape {tuple(t.shape)}, expected {tuple(plan.shape)}")
        if any(operands.overlap(a, b) for i, a in enumerate(tensors) for b in tensors[:i]):
            raise ValueError("the tensors of out overlap")
        return tensors

    # --- running ------------------------------------------------------------------------------------------------------

    def _run(self, plan: _Plan, out: list[Tensor] | None) -> list[Tensor]:
        results = self._results(plan, out)
        count = plan.shape.numel()
        if count > 0:
            arrays = [
                operands.laid_out(v, dtype, results[0]) if kind == text.ARRAY else operands.one(v, dtype)
                for v, dtype, kind in zip(plan.inputs, plan.dtypes, plan.kinds, strict=False)
            ]
            whole = [a for a, kind in zip(arrays, plan.kinds, strict=True) if kind == text.ARRAY]
            self._launch(self._kernel(plan), count, (*arrays, *results), [*whole, *results])
        if out is None:
            return results
        for given, result in zip(out, results, strict=True):
            if given is not result:
                given.copy_(result)
            else:
                torch.autograd.graph.increment_version(given)
        return out

    def _results(self, plan: _Plan, out: list[Tensor] | None) -> list[Tensor]:
        """The outputs, in one layout: that of `out` if possible, else that of the first input of the full shape."""
        dtypes = plan.dtypes[len(self._inputs) :]
        arrays = [v for v in plan.inputs if isinstance(v, Tensor)]
        if out is None:
            full = next((v for v in arrays if v.shape == plan.shape), None)
            if full is None:
                like = torch.empty(plan.shape, dtype=dtypes[0], device=plan.device)
            else:
                like = torch.empty_like(full, dtype=dtypes[0], requires_grad=False)
            return [like, *(torch.empty_like(like, dtype=dtype) for dtype in dtypes[1:])]
        like = out[0] if out[0].is_contiguous() else torch.empty_like(out[0])
        return [
            given
            if operands.same_layout(given, like) and not any(operands.clash(given, v) for v in arrays)
            else torch.empty_like(like, dtype=given.dtype)
            for given in out
        ]

    def _launch(self, compiled: _Compiled, count: int, arguments: tuple[Any, ...], arrays: list[Tensor]) -> None:
        packs = 0
        if compiled.device != "cpu":
            if all(a.data_ptr() % 16 == 0 for a in arrays):
                packs = count // compiled.width
            work = packs + count - packs * compiled.width
            grid = min(-(-work // compiled.threads), compiled.blocks)
        else:
            grid = max(1, min(_C.get_num_threads(), count // _GRAIN))
        kernel = compiled.kernel._on(compiled.device)
        kernel.launch(grid, compiled.threads, (count, packs, *arguments), 0, None, True)

    def _kernel(self, plan: _Plan) -> _Compiled:
        key = (plan.device, plan.promoted, plan.kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            types = [operands.NAMES[dtype] for dtype in plan.dtypes]
            source, width = text.write(
                self.name,
                list(zip(self._inputs, types, plan.kinds, strict=False)),
                list(zip(self._outputs, types[len(self._inputs) :], strict=True)),
                self._operation,
                self._preamble,
                None if plan.promoted is None else operands.NAMES[plan.promoted],
            )
            device = "cpu" if plan.device.type == "cpu" else f"cuda:{plan.device.index}"
            kernel = kernels.Kernel(source, self.name, self._options)
            info = kernel._on(device).info()
            threads = info["suggested_threads"] if device != "cpu" else 1
            compiled = _Compiled(kernel, device, width, threads, max(1, _WAVES * info["suggested_blocks"]))
            self._compiled[key] = compiled
        return compiled

    def _remember(self, plan: _Plan, inputs: Sequence[Any]) -> None:
        """Makes later calls of this kind fast if their tensors are contiguous too. Requires tensors of one shape,
        Python numbers, no conversion, and a tensor that determines T."""
        key = (kernels._forks, plan.device, plan.promoted, plan.kinds)
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        if key in self._known or len(tensors) != plan.kinds.count(text.ARRAY) or plan.shape.numel() == 0:
            return
        told = {isinstance(v, Tensor) for d, v in zip(self._inputs, inputs, strict=True) if d.type == "T"}
        if told == {False} or not all(_is_exact(v, t, plan.shape) for v, t in zip(inputs, plan.dtypes, strict=False)):
            return
        compiled = self._kernel(plan)
        keywords = tuple(None if t == tensors[0].dtype else {"dtype": t} for t in plan.dtypes[len(inputs) :])
        short = _C.Elementwise(
            compiled.kernel._on(compiled.device),
            len(inputs),
            keywords,
            compiled.width,
            compiled.threads,
            compiled.blocks,
            _GRAIN,
        )
        self._known.add(key)
        self._short = (short, *self._short[: _MOST_SHORT - 1])

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _watched(self, inputs: Sequence[Any]) -> list[str]:
        """The inputs for which autograd requires gradients."""
        names = [d.name for d, v in zip(self._inputs, inputs, strict=True) if isinstance(v, Tensor) and v.requires_grad]
        return names if names and torch.is_grad_enabled() else []

    def _check_derivatives(self, watched: list[str]) -> None:
        missing = [name for name in watched if name not in self._derivative]
        if missing:
            raise RuntimeError(
                f"{missing[0]} requires a gradient, and {self.name} has no derivative for it: give one, or use "
                "torch.no_grad() or detach()"
            )

    def _gradient(self, wanted: tuple[str, ...]) -> Elementwise:
        """The function for the gradients of some inputs, as a function of what their derivatives mention."""
        gradient = self._gradients.get(wanted)
        if gradient is None:
            grads = self._grad_names()
            expressions = [self._derivative[name] for name in wanted]
            known = {d.name: d.type for d in (*self._inputs, *self._outputs)}
            known |= dict(zip(grads, (d.type for d in self._outputs), strict=True))
            used = [n for n in known if n in grads or any(text.mentions(e, n) for e in expressions)]
            generic = [n for n in wanted if known[n] == "T"]
            if generic and not any(known[n] == "T" for n in used):
                used.append(generic[0])  # which determines T
            gradient = Elementwise(
                ", ".join(f"{known[n]} {n}" for n in used),
                ", ".join(f"{known[n]} d_{n}" for n in wanted),
                "\n".join(f"d_{n} = {expression};" for n, expression in zip(wanted, expressions, strict=True)),
                f"{self.name}_backward",
                None,
                self._options,
                self._preamble,
            )
            self._gradients[wanted] = gradient
        return gradient

    def _grad_names(self) -> list[str]:
        return ["grad"] if len(self._outputs) == 1 else [f"grad_{d.name}" for d in self._outputs]


class _Differentiable(torch.autograd.Function):
    """An elementwise function whose derivatives are elementwise functions without derivatives."""

    @staticmethod
    def forward(ctx: Any, function: Elementwise, plan: _Plan, *inputs: Any) -> tuple[Tensor, ...]:
        results = function._run(plan, None)
        ctx.function, ctx.promoted = function, plan.promoted
        ctx.places = [i for i, v in enumerate(inputs) if isinstance(v, Tensor)]
        ctx.numbers = [None if isinstance(v, Tensor) else v for v in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places), *results)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        function = ctx.function
        names = [d.name for d in function._inputs]
        values = dict(zip(names, ctx.numbers, strict=True))
        saved = list(ctx.saved_tensors)
        for i in ctx.places:
            values[names[i]] = saved.pop(0)
        values |= dict(zip((d.name for d in function._outputs), saved, strict=True))
        values |= dict(zip(function._grad_names(), grads, strict=True))
        wanted = tuple(name for name, needed in zip(names, ctx.needs_input_grad[2:], strict=True) if needed)
        gradient = function._gradient(wanted)
        with torch.no_grad():
            plan = gradient._plan([values[d.name] for d in gradient._inputs], ctx.promoted)
            made = [_summed(g, values[n]) for g, n in zip(gradient._run(plan, None), wanted, strict=True)]
        if torch.is_grad_enabled():
            made = _Last.apply(function.name, len(made), *made, *ctx.saved_tensors, *grads)
        results = dict(zip(wanted, made, strict=True))
        return None, None, *(results.get(name) for name in names)


class _Last(torch.autograd.Function):
    """For gradients computed with create_graph: differentiating them again raises an error. PyTorch's
    once_differentiable would silently lose their dependence on the inputs."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(f"the derivative of {ctx.name} cannot be differentiated again")


def _is_exact(value: Any, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether an input needs no conversion."""
    if isinstance(value, Tensor):
        return value.dtype == dtype and value.shape == shape
    return type(value) is int or (type(value) is float and dtype.is_floating_point)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums over broadcast dimensions, to the given shape."""
    return gradient.sum_to_size(like.shape).to(like)


def _by_name(derivative: Any, names: list[str]) -> dict[str, str]:
    if derivative is None:
        return {}
    if isinstance(derivative, str):
        derivative = (derivative,)
    if not isinstance(derivative, Mapping):
        if not isinstance(derivative, Sequence):
            raise TypeError(f"derivative must be a dict or a sequence of str, got {type(derivative).__name__!r}")
        if len(derivative) != len(names):
            raise ValueError(f"derivative has {len(derivative)} entries, expected one for each of {', '.join(names)}")
        derivative = dict(zip(names, derivative, strict=True))
    for name, expression in derivative.items():
        if name not in names:
            raise ValueError(f"derivative has an entry for {shown(name)}, which is not an input")
        if expression is not None and not isinstance(expression, str):
            raise TypeError(f"derivative of {name} must be a str, got {type(expression).__name__!r}")
    return {name: expression for name, expression in derivative.items() if expression is not None}
