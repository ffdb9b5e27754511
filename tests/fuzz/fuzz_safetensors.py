#!/usr/bin/env python3
"""Mutated safetensors files, read by the library and by the safetensors package: the results agree, or a documented
rule explains the difference.

    tests/fuzz/fuzz_safetensors.py LIBRARY [--seed N] [--runs N | --seconds S]

A file accepted by both has the same tensors and settings in both, bitwise. One accepted only by the package violates a
rule of the library, listed in docs/checkpoints.md under "What is accepted"; one accepted only by the library is an
error. Such a file is saved in the current folder. Exits with 77 if the package is missing.
"""

import argparse
import ctypes
import json
import os
import pathlib
import random
import re
import struct
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "checkpoint"))
from checkpoint_interop import SKIPPED, TYPES, Library, find_safetensors, tensor_over  # noqa: E402
from make_corpus import CORPORA, JSON_WORDS  # noqa: E402

# A part of the library's message, and the rule of docs/checkpoints.md.
STRICTER = {
    r"a tensor has the unknown member": "other members of a tensor",
    r"a header begins with '{'": "white space before the header",
    r"a number is above 2\^63 - 1": "a size above 2^63 - 1",
    r"a string contains NUL": "a NUL character in a string",
    r"the setting .* occurs twice": "a key of __metadata__ that occurs twice",
    r"checksum|are not those that were written": "checksums",
    r"written by a later Torchium|a file of Torchium whose": "the version of the format",
    r"the shard \"": "a shard fits its description, its name and the others",
}


class Info(ctypes.Structure):
    """tch_checkpoint_info."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("dtype", ctypes.c_uint8 * 4),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("bytes", ctypes.c_int64),
        ("has_checksum", ctypes.c_int32),
    ]


def read_ours(library, path):
    """Tensors and settings, or the error message. Unsupported types have no bytes."""
    c = library.library
    checkpoint = ctypes.c_void_p()
    if c.tch_checkpoint_open(os.fsencode(path), ctypes.byref(checkpoint)) != 0:
        return c.tch_last_error().decode()
    try:
        tensors = {}
        for number in range(c.tch_checkpoint_count(checkpoint)):
            info = Info(struct_size=ctypes.sizeof(Info))
            library("tch_checkpoint_get_info", checkpoint, ctypes.c_int64(number), ctypes.byref(info))
            name, dtype, shape, data = info.name, info.type.decode(), info.shape[: info.ndim], None
            if dtype in TYPES and info.ndim <= 8:
                memory = ctypes.create_string_buffer(max(1, info.bytes))
                tensor = tensor_over(memory, dtype, shape)
                if c.tch_checkpoint_read(checkpoint, None, name, ctypes.byref(tensor)) != 0:
                    return c.tch_last_error().decode()
                data = memory.raw[: info.bytes]
            tensors[name.decode()] = (dtype, shape, data)
        keys = [
            c.tch_checkpoint_key(checkpoint, ctypes.c_int64(i)) for i in range(c.tch_checkpoint_key_count(checkpoint))
        ]
        return tensors, {key.decode(): library.text(checkpoint, key.decode()) for key in keys}
    finally:
        c.tch_checkpoint_close(checkpoint)


def read_theirs(safetensors, path, content):
    try:
        tensors = {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in safetensors.deserialize(content)}
        with safetensors.safe_open(path, framework="numpy") as file:
            return tensors, file.metadata() or {}
    except safetensors.SafetensorError as error:
        return str(error)


def difference(ours, theirs):
    """The difference between two successful results."""
    if ours[0].keys() != theirs[0].keys():
        return f"tensors {sorted(ours[0])} and {sorted(theirs[0])}"
    for name, (dtype, shape, data) in ours[0].items():
        other = theirs[0][name]
        if dtype != other[0] or list(shape) != list(other[1]) or (data is not None and data != other[2]):
            return f"{name!r}: {ours[0][name]} and {other}"
    settings = {key: value for key, value in theirs[1].items() if not re.match(r"torchium\.crc32c(/|$)", key)}
    return None if settings == ours[1] else f"settings {ours[1]} and {settings}"


def rule_for(message, content):
    (length,) = struct.unpack("<Q", content[:8])
    names = [name for name, _ in json.loads(content[8 : 8 + length], object_pairs_hook=list)]
    if len(set(names)) < len(names):
        return "a name that occurs twice"
    return next((rule for pattern, rule in STRICTER.items() if re.search(pattern, message)), None)


def compare(ours, theirs, content):
    """The error, or None; and the kind of case."""
    if isinstance(ours, str) and isinstance(theirs, str):
        return None, "refused by both"
    if isinstance(theirs, str):
        return f"accepted by us alone; the package says {theirs}", ""
    if isinstance(ours, str):
        rule = rule_for(ours, content)
        return None if rule else f"accepted by the package alone; we say {ours}", rule
    return difference(ours, theirs), "read by both"


class Changes:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seeds = list(CORPORA["checkpoint"].values())

    def change_text(self, text):
        """Changes, removes, repeats or replaces bytes of the header."""
        r = self.random
        text = bytearray(text)
        for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
            at = r.randrange(len(text) + 1)
            end = min(len(text), at + r.choice([0, 1, 1, 2, 8]))
            with_word = r.choice([b"", bytes([r.randrange(256)]), r.choice(JSON_WORDS), bytes(text[at:end]) * 2])
            text[at:end] = with_word
        return bytes(text)

    def change_number(self, text):
        """Replaces a number or type in the header."""
        r = self.random
        found = list(re.finditer(rb"\d+|\"[A-Z]+\d*\"", text))
        if not found:
            return text
        what = r.choice(found)
        old = what.group()
        if old.isdigit():
            new = b"%d" % max(0, int(old) + r.choice([-8, -4, -1, 1, 4, 8, 2**31, 2**63]))
        else:
            new = (
                b'"' + r.choice([b"F64", b"F32", b"F16", b"BF16", b"I64", b"I32", b"U8", b"BOOL", b"C64", b"F4"]) + b'"'
            )
        return text[: what.start()] + new + text[what.end() :]

    def next(self):
        r = self.random
        content = r.choice(self.seeds)
        (length,) = struct.unpack("<Q", content[:8])
        header = r.choice([self.change_text, self.change_number])(content[8 : 8 + length])
        data = content[8 + length :]
        if r.random() < 0.1:
            data = data[: r.randrange(len(data) + 1)] + r.randbytes(r.randrange(9))
        stated = len(header) if r.random() < 0.95 else max(0, len(header) + r.choice([-1, 1, 8, 2**40]))
        return struct.pack("<Q", stated) + header + data


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--runs", type=int, default=2**63)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    safetensors = find_safetensors()
    if safetensors is None:
        return SKIPPED
    library = Library(options.library)
    library.library.tch_checkpoint_key.restype = ctypes.c_char_p
    library.library.tch_checkpoint_key_count.restype = ctypes.c_int64
    changes, cases, runs = Changes(options.seed), {}, 0
    end = time.monotonic() + options.seconds
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # files are slow on a disk
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = os.path.join(folder, "changed.safetensors")
        while runs < options.runs and time.monotonic() < end:
            content = changes.next()
            pathlib.Path(path).write_bytes(content)
            wrong, case = compare(read_ours(library, path), read_theirs(safetensors, path, content), content)
            if wrong:
                pathlib.Path("difference.safetensors").write_bytes(content)
                print(f"FAILED: seed {options.seed}, file {runs}, in difference.safetensors: {wrong}")
                return 1
            cases[case] = cases.get(case, 0) + 1
            runs += 1
    print(f"seed {options.seed}, {runs} files, safetensors {safetensors.__version__}:")
    for case, count in sorted(cases.items(), key=lambda item: -item[1]):
        print(f"{count:9} {case}")
    return 0 if cases.get("read by both") and cases.get("refused by both") else 1


if __name__ == "__main__":
    sys.exit(main())
