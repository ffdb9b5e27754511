#!/usr/bin/env python3
"""Checks that checkpoints and the safetensors package read each other's files, and that checksums follow the manual.

    tests/checkpoint/checkpoint_interop.py LIBRARY

Exits with 77 if the package is missing. It is imported by the current interpreter, or by that of the project's virtual
environment. The library is called through ctypes; elements are compared byte by byte.
"""

import ctypes
import importlib.util
import json
import os
import pathlib
import random
import struct
import sys
import tempfile

SKIPPED = 77
VENV = pathlib.Path(__file__).resolve().parents[2] / ".venv"

# name in the file: name in the package, DLPack's code, bits
TYPES = {
    "F64": ("float64", 2, 64),
    "F32": ("float32", 2, 32),
    "F16": ("float16", 2, 16),
    "BF16": ("bfloat16", 4, 16),
    "I64": ("int64", 0, 64),
    "I32": ("int32", 0, 32),
}
SHAPES = [(), (1,), (7,), (3, 5), (0,), (4, 0, 2), (2, 1, 3, 2), (1, 2, 1, 2, 1, 2, 1, 2)]
SETTINGS = {
    "step": "12",
    "learning rate": "0.10000000000000001",
    "gr\u00f6\u00dfe \U0001f525": 'quote " and \\ and\nline',
}
NAMES = ["weight", "optimizer/layer1.weight/factor.0.0", "gr\u00f6\u00dfe", "\U0001f525", 'a "quote"\tand\\']


class Tensor(ctypes.Structure):
    """tch_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def check(good, what):
    if not good:
        print(f"FAILED: {what}")
        sys.exit(1)


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.tch_last_error.restype = ctypes.c_char_p
        self.library.tch_checkpoint_text.restype = ctypes.c_char_p
        self.library.tch_checkpoint_count.restype = ctypes.c_int64

    def __call__(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        check(status == 0, f"{name}: {self.library.tch_last_error().decode()}")

    def text(self, checkpoint, key):
        value = self.library.tch_checkpoint_text(checkpoint, key.encode())
        return None if value is None else value.decode()


def tensor_over(memory, dtype, shape):
    """A tch_tensor in host memory; keep it, it owns its shape."""
    _, code, bits = TYPES[dtype]
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    tensor = Tensor(ctypes.addressof(memory), 1, 0, len(shape), code, bits, 1, sizes, None, 0)
    tensor.owner = (memory, sizes)
    return tensor


def examples():
    """Tensors of every type and shape with random bytes: name, type, shape, bytes."""
    generator = random.Random(1)
    for dtype, (_, _, bits) in TYPES.items():
        for shape in SHAPES:
            count = 1
            for size in shape:
                count *= size
            number = len(SHAPES) * list(TYPES).index(dtype) + SHAPES.index(shape)
            yield f"{NAMES[number % len(NAMES)]} {number}", dtype, shape, generator.randbytes(count * bits // 8)


def write_ours(library, path):
    writer = ctypes.c_void_p()
    kept = []
    library("tch_checkpoint_writer_create", ctypes.byref(writer))
    for name, dtype, shape, data in examples():
        memory = ctypes.create_string_buffer(data, max(1, len(data)))
        kept.append(tensor_over(memory, dtype, shape))
        library("tch_checkpoint_writer_add", writer, name.encode(), ctypes.byref(kept[-1]))
    for key, value in SETTINGS.items():
        library("tch_checkpoint_writer_set_text", writer, key.encode(), value.encode())
    library("tch_checkpoint_writer_save", writer, None, os.fsencode(path))
    library.library.tch_checkpoint_writer_destroy(writer)


def read_ours(library, path, settings, complete, more=0):
    checkpoint = ctypes.c_void_p()
    library("tch_checkpoint_open", os.fsencode(path), ctypes.byref(checkpoint))
    check(library.library.tch_checkpoint_count(checkpoint) == len(list(examples())) + more, "the number of tensors")
    check(library.library.tch_checkpoint_has_checksums(checkpoint) == complete, f"whether {path} has checksums")
    library("tch_checkpoint_verify", checkpoint, None)
    for name, dtype, shape, data in examples():
        memory = ctypes.create_string_buffer(max(1, len(data)))
        tensor = tensor_over(memory, dtype, shape)
        library("tch_checkpoint_read", checkpoint, None, name.encode(), ctypes.byref(tensor))
        check(memory.raw[: len(data)] == data, f"the bytes of {name}, {dtype} {shape}")
    for key, value in settings.items():
        check(library.text(checkpoint, key) == value, f"the setting {key}")
    library.library.tch_checkpoint_close(checkpoint)


def read_theirs(safetensors, path):
    found = dict(safetensors.deserialize(pathlib.Path(path).read_bytes()))
    check(len(found) == len(list(examples())), "the number of tensors, read by the package")
    for name, dtype, shape, data in examples():
        tensor = found[name]
        check(tensor["dtype"] == dtype and tuple(tensor["shape"]) == shape, f"{name}, read by the package")
        check(bytes(tensor["data"]) == data, f"the bytes of {name}, read by the package")


def parts_of(path):
    """The parsed JSON header and the data, without either library."""
    content = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def settings_of(path):
    return parts_of(path)[0]["__metadata__"]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return f"{crc ^ 0xFFFFFFFF:08x}"


def check_checksums(path):
    """The checksum rule of docs/checkpoints.md."""
    header, data = parts_of(path)
    settings = header.pop("__metadata__")
    own = settings.pop("torchium.crc32c")
    sums = {name: settings.pop("torchium.crc32c/" + name) for name in header}
    words = [word for key in sorted(settings) for word in (key, settings[key])]
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        check(crc32c(data[begin:end]) == sums[name], f"the checksum of {name}")
        words += [name, header[name]["dtype"], *map(str, header[name]["shape"]), "", sums[name]]
    check(crc32c("".join(word + "\0" for word in words).encode()) == own, "the checksum of the header")


def check_refused(library, path, words):
    checkpoint = ctypes.c_void_p()
    status = library.library.tch_checkpoint_open(os.fsencode(path), ctypes.byref(checkpoint))
    message = library.library.tch_last_error().decode()
    check(status != 0 and words in message, f"{path} should be refused with {words!r}, got {message!r}")


def write_theirs(safetensors, path, settings, others=()):
    """Newer versions of the package take addresses, older ones bytes."""
    kept = []
    tensors = {}
    for name, dtype, shape, data in [*examples(), *others]:
        described = {"dtype": TYPES[dtype][0], "shape": list(shape)}
        if hasattr(safetensors, "TensorSpec"):
            kept.append(ctypes.create_string_buffer(data, max(1, len(data))))
            address = ctypes.addressof(kept[-1])
            tensors[name] = safetensors.TensorSpec(**described, data_ptr=address, data_len=len(data))
        else:
            tensors[name] = {**described, "data": data}
    pathlib.Path(path).write_bytes(bytes(safetensors.serialize(tensors, settings)))


def read_their_index(safetensors, library, folder):
    """A model in two files and an index, as other programs write them; and the library's, read by the package alone."""
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, file in enumerate(files):
        write_theirs(safetensors, os.path.join(folder, file), {"format": "pt", "file": str(number)})
    listed = {name: files[number % 2] for number, (name, *_) in enumerate(examples())}
    index = {"metadata": {"total_size": 1.5e3, "more": [None, {"a": True}]}, "weight_map": listed}
    path = os.path.join(folder, "model.safetensors.index.json")
    pathlib.Path(path).write_text(json.dumps(index, indent=2), encoding="utf-8")
    read_ours(library, path, {"format": "pt", "file": "0"}, complete=0)


def read_our_index(safetensors, library, folder):
    path = os.path.join(folder, "ours.safetensors.index.json")
    writer = ctypes.c_void_p()
    data = [bytes(range(24)), bytes(range(24, 48))]
    library("tch_checkpoint_writer_create", ctypes.byref(writer))
    kept = []
    for number in range(2):
        kept.append(tensor_over(ctypes.create_string_buffer(data[number], 24), "F32", (2, 3)))
        shape, start = (ctypes.c_int64 * 2)(4, 3), (ctypes.c_int64 * 2)(2 * number, 0)
        library("tch_checkpoint_writer_add_shard", writer, b"w", ctypes.byref(kept[-1]), shape, start)
    library("tch_checkpoint_writer_save_sharded", writer, None, None, os.fsencode(path))
    library.library.tch_checkpoint_writer_destroy(writer)
    index = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    check(index["metadata"]["total_size"] == 48, "the size in an index of ours")
    for number, name in enumerate(["w[0:2,0:3]", "w[2:4,0:3]"]):
        file = os.path.join(folder, index["weight_map"][name])
        found = dict(safetensors.deserialize(pathlib.Path(file).read_bytes()))
        check(bytes(found[name]["data"]) == data[number], f"{name}, read by the package")
        check(settings_of(file)["torchium.shard/" + name] == f"4,3;{2 * number},0", f"the place of {name}")
        check_checksums(file)


def find_safetensors():
    """The package, from the virtual environment if needed; None if missing."""
    if importlib.util.find_spec("safetensors") is None:
        python = VENV / "bin" / "python"
        if pathlib.Path(sys.prefix) != VENV and python.exists():
            os.execv(python, [str(python), *sys.argv])
        print("skipped: no safetensors package")
        return None
    import safetensors

    return safetensors


def main():
    safetensors = find_safetensors()
    if safetensors is None:
        return SKIPPED
    library = Library(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        ours = os.path.join(folder, "ours.safetensors")
        theirs = os.path.join(folder, "theirs.safetensors")
        write_ours(library, ours)
        read_theirs(safetensors, ours)
        read_ours(library, ours, SETTINGS, complete=1)
        check(settings_of(ours).items() >= SETTINGS.items(), "the settings of a file of ours")
        check_checksums(ours)
        write_theirs(safetensors, theirs, SETTINGS)
        read_ours(library, theirs, SETTINGS, complete=0)
        # A file of the library rewritten by the package with all settings: unchanged, with an additional tensor, and
        # with a changed setting.
        write_theirs(safetensors, theirs, settings_of(ours))
        read_ours(library, theirs, SETTINGS, complete=1)
        write_theirs(safetensors, theirs, settings_of(ours), [("another", "F32", (2,), bytes(8))])
        read_ours(library, theirs, SETTINGS, complete=0, more=1)
        write_theirs(safetensors, theirs, settings_of(ours) | {"step": "13"})
        check_refused(library, theirs, "another program changed it")
        read_their_index(safetensors, library, folder)
        read_our_index(safetensors, library, folder)
    print(f"{len(list(examples()))} tensors both ways, safetensors {safetensors.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
