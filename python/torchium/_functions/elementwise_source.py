"""The CUDA C source of torchium.elementwise. Generated names begin with tch_, which is reserved; the user's text
follows #line, so that the compiler's messages have its line numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# How an input is passed: an array of the result's shape, an array of one element, a number.
ARRAY, ONE, NUMBER = "array", "one", "number"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Declaration(NamedTuple):
    type: str
    name: str


class _CType(NamedTuple):
    stored: str
    computed: str
    bytes: int
    load: str
    store: str


# Half precision is computed as float and rounded once, when stored.
_C_TYPES = {
    "float": _CType("float", "float", 4, "{}", "{}"),
    "double": _CType("double", "double", 8, "{}", "{}"),
    "int": _CType("int", "int", 4, "{}", "{}"),
    "long": _CType("long long", "long long", 8, "{}", "{}"),
    "half": _CType("__half", "float", 2, "__half2float({})", "__float2half({})"),
    "bfloat16": _CType("__nv_bfloat16", "float", 2, "__bfloat162float({})", "__float2bfloat16({})"),
}
_HEADERS = {"half": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}


# --- parsing declarations ---------------------------------------------------------------------------------------------


def declarations(argument: str, declared: Any, types: Mapping[str, Any]) -> list[Declaration]:
    """Parses "float x, T y"."""
    if not isinstance(declared, str):
        raise TypeError(f"{argument} must be a str such as 'float x', got {type(declared).__name__!r}")
    found = []
    for part in declared.split(","):
        words = part.split()
        if len(words) != 2:
            raise ValueError(f"{argument} has {part.strip()!r}, expected a type and a name, as in 'float x'")
        if words[0] != "T" and words[0] not in types:
            raise ValueError(f"{argument} has the type {words[0]!r}, expected T or one of {', '.join(types)}")
        if not _IDENTIFIER.match(words[1]):
            raise ValueError(f"{argument} has the name {words[1]!r}, expected letters, digits and _")
        found.append(Declaration(*words))
    return found


def check_names(declared: Iterable[Declaration]) -> None:
    seen: set[str] = set()
    for name in (d.name for d in declared):
        if name in seen:
            raise ValueError(f"the name {name!r} is declared twice")
        if name == "T" or name.startswith("tch_") or "__" in name:
            raise ValueError(f"the name {name!r} is not free: T, tch_... and names with __ are taken")
        seen.add(name)


def kernel_name(name: Any) -> str:
    if name is None:
        return "elementwise"
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__!r}")
    if not _IDENTIFIER.match(name):
        raise ValueError(f"name is {name!r}, expected letters, digits and _")
    return name


def mentions(expression: str, name: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])", expression) is not None


# --- writing the kernel -----------------------------------------------------------------------------------------------

_TEMPLATE = """\
{headers}
{preamble}
#line 1 "elementwise"
{generic}
template <typename S, int N> struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) tch_pack {{
    S v[N];
}};

__device__ __forceinline__ void tch_apply({formal})
{{
#line 1 "operation"
{operation}
;
#line 100 "elementwise"
}}

__global__ void {name}({parameters})
{{
    {ones}
#if __CUDA_ARCH__
    const long long tch_step = (long long)gridDim.x * blockDim.x;
    const long long tch_first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long tch_i = tch_first; tch_i < tch_packs; tch_i += tch_step) {{
        {load_packs}
#pragma unroll
        for (int tch_k = 0; tch_k < {width}; tch_k++) {{
            {results}
            tch_apply({of_pack});
            {into_packs}
        }}
        {store_packs}
    }}
    for (long long tch_i = tch_packs * {width} + tch_first; tch_i < tch_n; tch_i += tch_step) {{
#else
    const long long tch_end = tch_n * (blockIdx.x + 1) / gridDim.x;
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (long long tch_i = tch_n * blockIdx.x / gridDim.x; tch_i < tch_end; tch_i++) {{
#endif
        {results}
        tch_apply({of_element});
        {into_elements}
    }}
}}
"""


def write(
    name: str,
    inputs: Sequence[tuple[Declaration, str, str]],
    outputs: Sequence[tuple[Declaration, str]],
    operation: str,
    preamble: str,
    generic: str | None,
) -> tuple[str, int]:
    """The source of a kernel, and the number of elements that a GPU thread processes at once. Inputs are (declaration,
    type, kind), outputs (declaration, type); the kernel's parameters are the number of elements, the number of packs
    that may be accessed 16 bytes at a time, the inputs, the outputs."""
    types = {d.name: _C_TYPES[kind] for d, kind, *_ in (*inputs, *outputs)}
    arrays = [d.name for d, _, kind in inputs if kind == ARRAY]
    ones = [d.name for d, _, kind in inputs if kind == ONE]
    numbers = [d.name for d, _, kind in inputs if kind == NUMBER]
    results = [d.name for d, _ in outputs]
    width = 16 // min(types[n].bytes for n in (*arrays, *results))

    def pack(n: str) -> str:
        return f"tch_pack<{types[n].stored}, {width}>"

    def value(n: str, element: str) -> str:
        return f"tch_at_{n}" if n in numbers else f"tch_one_{n}" if n in ones else types[n].load.format(element)

    formal = [f"{types[d.name].computed} {d.name}" for d, *_ in inputs]
    formal += [f"{types[n].computed} &{n}" for n in results]
    parameters = ["long long tch_n", "long long tch_packs"]
    for d, _, kind in inputs:
        t = types[d.name]
        parameters.append(f"{t.computed} tch_at_{d.name}" if kind == NUMBER else f"const {t.stored} *tch_at_{d.name}")
    parameters += [f"{types[n].stored} *tch_at_{n}" for n in results]
    actual = [f"tch_result_{n}" for n in results]
    source = _TEMPLATE.format(
        headers="\n".join(f"#include <{h}>" for k, h in _HEADERS.items() if _C_TYPES[k] in types.values()),
        preamble=f'#line 1 "preamble"\n{preamble}' if preamble else "",
        generic="" if generic is None else f"typedef {_C_TYPES[generic].computed} T;",
        name=name,
        formal=", ".join(formal),
        operation=operation,
        parameters=", ".join(parameters),
        width=width,
        ones=_lines(
            4, (f"const {types[n].computed} tch_one_{n} = {types[n].load.format(f'tch_at_{n}[0]')};" for n in ones)
        ),
        load_packs=_lines(
            8,
            (f"const {pack(n)} tch_in_{n} = reinterpret_cast<const {pack(n)} *>(tch_at_{n})[tch_i];" for n in arrays),
            (f"{pack(n)} tch_out_{n};" for n in results),
        ),
        results=_lines(8, (f"{types[n].computed} tch_result_{n} = 0;" for n in results)),
        of_pack=", ".join([value(d.name, f"tch_in_{d.name}.v[tch_k]") for d, *_ in inputs] + actual),
        into_packs=_lines(12, (f"tch_out_{n}.v[tch_k] = {types[n].store.format(f'tch_result_{n}')};" for n in results)),
        store_packs=_lines(8, (f"reinterpret_cast<{pack(n)} *>(tch_at_{n})[tch_i] = tch_out_{n};" for n in results)),
        of_element=", ".join([value(d.name, f"tch_at_{d.name}[tch_i]") for d, *_ in inputs] + actual),
        into_elements=_lines(8, (f"tch_at_{n}[tch_i] = {types[n].store.format(f'tch_result_{n}')};" for n in results)),
    )
    return source, width


def _lines(indent: int, *groups: Iterable[str]) -> str:
    return ("\n" + " " * indent).join(line for lines in groups for line in lines)
