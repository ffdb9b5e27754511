"""Writes the corpora of the fuzz targets to FOLDER/TARGET, from the texts below, and their dictionaries to
FOLDER/TARGET.dict: make_corpus.py FOLDER.

A corpus is small: one file per syntactic form. Findings of long runs are added here by hand if they increase coverage.
"""

import struct
import sys
from pathlib import Path


def checkpoint(header, data=24):
    return struct.pack("<Q", len(header)) + header + bytes(range(data))


HEADERS = {
    "empty": b"{}",
    "types": b'{"__metadata__":{"format":"torchium","torchium.format_version":"1","step":"12","lr":"0.5"},'
    b'"b":{"dtype":"F64","shape":[],"data_offsets":[0,8]},'
    b'"c":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},'
    b'"e":{"dtype":"I64","shape":[0],"data_offsets":[12,12]},'
    b'"x":{"dtype":"F32","shape":[3,0],"data_offsets":[12,12]},'
    b'"q":{"dtype":"F4","shape":[24],"data_offsets":[12,24]}}   ',
    "sums": b'{"__metadata__":{"torchium.crc32c":"420467de","torchium.crc32c/a":"42709aea","k":"v"},'
    b'"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}',
    "shards": b'{"__metadata__":{"torchium.shard/w[0:1,0:2]":"2,2;0,0","torchium.shard/w[1:2,0:2]":"2,2;1,0"},'
    b'"w[0:1,0:2]":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"w[1:2,0:2]":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
    b'"x":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}',
    "shards_apart": b'{"__metadata__":{"torchium.shard/w[0:2,0:1]":"2,2;0,0","torchium.shard/w[0:1,1:2]":"2,2;0,1",'
    b'"torchium.shard/w[1:2,1:2]":"2,2;1,1","torchium.shard/x[0:2,0:1,0:1]":"2,2,2;0,0,0"},'
    b'"w[0:2,0:1]":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"w[0:1,1:2]":{"dtype":"F32","shape":[1,1],"data_offsets":[8,12]},'
    b'"w[1:2,1:2]":{"dtype":"F32","shape":[1,1],"data_offsets":[12,16]},'
    b'"x[0:2,0:1,0:1]":{"dtype":"F16","shape":[2,1,1],"data_offsets":[16,20]},'
    b'"y":{"dtype":"F32","shape":[1],"data_offsets":[20,24]}}',
    "shards_overlap": b'{"__metadata__":{"torchium.shard/w[0:2,0:1]":"2,2;0,0","torchium.shard/w[0:1,0:2]":"2,2;0,0"},'
    b'"w[0:2,0:1]":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"w[0:1,0:2]":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
    b'"x":{"dtype":"F32","shape":[4611686018427387904,3,0],"data_offsets":[16,16]},'
    b'"y":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}',
    "shard_scalar": b'{"__metadata__":{"torchium.shard/x[]":""},"x[]":{"dtype":"F64","shape":[],"data_offsets":[0,8]},'
    b'"y":{"dtype":"I8","shape":[16],"data_offsets":[8,24]}}',
    "whole": b'{"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"x":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}',
    "whole_other": b'{"w":{"dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}',
    "whole_rank": b'{"w":{"dtype":"I64","shape":[3,1,1,1,1,1,1,1,1],"data_offsets":[0,24]}}',
    "sums_twice": b'{"__metadata__":{"torchium.crc32c/a":"42709aea","torchium.crc32c/a":"42709aea"},'
    b'"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}',
    "long": b'{"' + b"n" * 200 + b'":{"dtype":"F32","shape":[7],"data_offsets":[0,24]}}',
    "escapes": b'{"\\u00e9\\ud83d\\udd25\\n\xc3\xa9":'
    b'{"shape":[3,1,1,1,1,1,1,1,1],"dtype":"I64","data_offsets":[0,24]}}',
    "order": b'{"b":{"dtype":"U8","shape":[8],"data_offsets":[16,24]},"a":{"data_offsets":[0,16],"dtype":"F16",'
    b'"shape":[8]}}',
    "many": b"{"
    + b",".join(b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(24))
    + b"}",
}

INDEX = {
    "empty": b'{"weight_map":{}}',
    "both": b'{"metadata":{"total_size":24},"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}',
    "one": b'{"weight_map":{"b":"b.safetensors"},"other":[1,-2.5e3,{"x":[null,true,"\\u0041"]},[]]}',
    "elsewhere": b'{"weight_map":{"a":"../a.safetensors"}}',
    "absent": b'{"weight_map":{"c":"a.safetensors"}}',
    "folder": b'{"weight_map":{"a":"folder.safetensors"}}',
    "itself": b'{"weight_map":{"a":"x.index.json"}}',
    "twice": b'{"weight_map":{"a":"a.safetensors","a":"a.safetensors"}}',
}

CSV = {
    "plain": b"\x001,2,a\n3,4,b\n",
    "header": b"\x08x,y,label\n1,2,0\n3,-4.5e2,1\n5,6,0\n",
    "quoted": b'\x00"a ""b"", c",y,z\r\n1,2,"x\ny"\r\n\r\n3,4,w\r\n',
    "semicolons": b"\x00a;b\n1;2\n3;4\n",
    "tabs": b"\x00\xef\xbb\xbf1\t2\n3\t4\n",
    "labels": b"\x11a,1,2\nb,3,4\n",
    "numbers": b"\x010.5,1e3,10\n-1,+2,9\n.5,5.,10\n",
    "missing": b"\x001,,a\nx,4,b\n",
    "columns": b"\x001,2,3\n4,5\n",
    "nothing": b"",
    "third": b"\x18a|b|c\n1|2|3\n",
}

KERNEL = {
    "shared": b"template <int n> __global__ void f(float *x) { extern __shared__ float s[]; s[0] = x[0]; }",
    "odd": b"extern __shared__ []; __shared__ extern []; extern __shared__ T[]; __global__ void f(float *x) {}",
    "nested": b'namespace a::b { extern "C" { __shared__ extern float s [ ] ; } }\n__global__ void f() '
    b"{ extern __shared__\nint t[]; }",
    "stride": b"__global__ void f(float *y, const float *x, int n)\n{\n"
    b"    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {\n"
    b"        y[i] = x[i];\n    }\n}\n",
    "guard": b"__global__ void f(double *x, long long n) { "
    b"long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
    b"if (i >= n) return; x[i] *= 2; __syncthreads(); }",
    "literals": b"#define K __global__ \\\n void f()\n"
    b'K { R"x(" ) )x" ; u8R"()" \'a\' \'\\\'\' "\\\\" 1\'000.5f /* */ // \\\n }',
    "includes": b'#include "a.h"\n # /* c */ include <b/c.h>\n%:include "d.h"\n#include_next <e>\n'
    b'#embed "f"\n#include NAME\n'
    b'/* \n*/ #in\\\nclude "g.h"\n#import "h"\n__global__ void f() {}',
    "blanks": b"#" + b" " * 1100 + b'include "a.h"\n__global__ void f() {}',
    "calls": b"__device__ void f(int) {} void g() { f(1); ::f(2); } __global__ void a::b::f<float, 4>() {}",
}

WORDS = {
    "name": b"\x00halve",
    "template": b"\x00space::scale<float, 4, unsigned int, -0x10u, a<b<c>>>",
    "deep": b"\x00" + b"a<" * 18 + b"1" + b">" * 18,
    "long": b"\x00" + b"a" * 1100,
    "macro": b"\x01-DNAME=1 + 2",
    "undefine": b"\x01-UNAME",
    "folder": b"\x01-I/usr/include",
    "standard": b"\x01-std=c++17",
    "file": b'\x02/a "b"\\c.cu',
    "stack": b"\x03a.cu:1:2:void f<int>(float*)\t48\tstatic\nb.cu:9:9:g\t1024\tdynamic,bounded\nh\t12\tdynamic\n",
}


def capsule(
    kind=1, choice=0, which=0, version=(1, 0), flags=0, rank=2, dtype=(2, 32, 1), sizes=((2, 3), (3, 1)), use=1
):
    """The input of fuzz_dlpack.c: sizes and strides are one byte each, offset by 4."""
    head = bytes((0, kind, choice, which, *version, flags, rank, *dtype, kind, 0))
    pairs = list(sizes) + [(0, 0)] * (12 - len(sizes))
    return head + bytes(n + 4 for pair in pairs for n in pair) + bytes((use,))


DLPACK = {
    "matrix": capsule(),
    "unversioned": capsule(which=1, use=2),
    "no_strides": capsule(choice=8, dtype=(2, 64, 1)),
    "scalar": capsule(rank=0, sizes=()),
    "empty": capsule(choice=1, sizes=((0, 1), (3, 1))),
    "half": capsule(dtype=(4, 16, 1), choice=16),
    "read_only": capsule(flags=1, use=0),
    "copied": capsule(flags=2, use=0),
    "later": capsule(version=(2, 0)),
    "gpu": capsule(kind=2),
    "pinned": capsule(kind=3),
    "complex": capsule(dtype=(5, 64, 1)),
    "bool": capsule(dtype=(6, 8, 1)),
    "lanes": capsule(dtype=(2, 32, 4)),
    "not_one": capsule(which=164),
}

# fuzz_state.c: kind and form to save, kind and form to load, options, edits. A form is the dtype of moments, plus 3 for
# packed factors and 6 for bfloat16 roots.
STATES = {
    f"{kind}_{saved}_{loaded}": bytes((kind, saved, kind, loaded, 0))
    for kind in range(8)
    for saved, loaded in ((0, 2 + 3 * (kind % 2)), (11, kind % 2))
}
STATES["other_byte"] = bytes((0, 2, 0, 0, 1, 255, 255, 255, 0x11, 1))
STATES["other_name"] = bytes((3, 0, 3, 0, 0, 40, 0, 0, 0x32)) + b"abc"

# fuzz_comm.c: kind, group, use, then the data sent by other ranks.
COMM = {
    f"{kind}_{use}": bytes((kind, 7 * kind, use)) for kind in range(8) for use in (15 + kind, 48 + kind)[: 2 - kind % 2]
}
COMM["disagree"] = bytes((2, 1, 9, 0, 0, 0, 0, 2, 0)) + bytes(range(120, 160))

# Tokens of each format, separated by blanks, and those that contain blanks or other bytes.
JSON_WORDS = [
    *rb"""{ } [ ] , : ; / " \ ../ 0 1 24 - 1e3 null true 9223372036854775807 18446744073709551615 \u0000 \ud800 \u00e9
    \n \ud83d\udd25 F64 F32 BF16 F16 I64 I32 U8 BOOL F4 F6_E2M3 F8_E4M3 C64 "a" "dtype" "shape":[1]
    "data_offsets":[0,4] "data_offsets":[4,0] "__metadata__":{} "__metadata__":{"a":"b"} "torchium.crc32c/b":"00000000"
    counts x.index.json "torchium.crc32c":"00000000" "torchium.format_version":"2" "torchium.shard/w[0:1,0:2]":"2,2;0,0"
    w[0:1,0:2] 2,2;0,0 "weight_map":{ "metadata":{"total_size":1} a.safetensors b.safetensors""".split(),
    *(
        b" ",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x94\xa5",
        b"\0\0\x80\x7f",
        b"\0\0\0\0\0\0\xf0\x7f",
        b"\xff" * 7 + b"\x7f",
    ),
]
KERNEL_WORDS = [
    *rb"""extern __shared__ __global__ __device__ void f( f [] [ ] ( ) { } < > :: , ; # %: include include_next embed
    "a.h" <a.h> // /* */ R"x( )x" ' " \ threadIdx int unsigned size_t const 1'000 0x1p3 -D -U -I/ -std=c++17
    --use_fast_math =1 static dynamic,bounded $$ i++; n--; ++i""".split(),
    *(b"template <int n>", b"namespace a {", b"for (", b"i += gridDim.x * blockDim.x", b"long long", b"\t48\tstatic\n"),
    *(b"blockIdx.x * blockDim.x + threadIdx.x", b"n = 1;", b"n += i;", b"n >>= 1;", b"\\\n", b"\n", b"\t", b"\\ "),
]
CSV_WORDS = [
    *b""", ; | " "" nan inf -1e308 1e-400 0x1 label""".split(),
    b"1,2,a\n",
    b"\t",
    b"\n",
    b"\r\n",
    b"\r",
    b"\xef\xbb\xbf",
]
BYTES = [b"\0", b"\xff" * 4, b"\x80\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 8, b"\x02\x20\x01"]
DICTIONARIES = {"csv": CSV_WORDS, "dlpack": BYTES, "kernel": KERNEL_WORDS}

CORPORA = {
    "comm": COMM,
    "state": STATES,
    "checkpoint": {name: checkpoint(text, 0 if name == "empty" else 24) for name, text in HEADERS.items()},
    "index": INDEX,
    "csv": CSV,
    "kernel": WORDS | {name: b"\x04" + text for name, text in KERNEL.items()},
    "dlpack": DLPACK,
}


def main():
    for target, inputs in CORPORA.items():
        folder = Path(sys.argv[1], target)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
        words = DICTIONARIES.get(target, JSON_WORDS)
        text = "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words)
        folder.with_suffix(".dict").write_text(text)


if __name__ == "__main__":
    main()
