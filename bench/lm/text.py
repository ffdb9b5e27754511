"""The text that bench/train_lm.py trains on: the Python sources that every machine with PyTorch has, those of the
standard library and of installed packages, as numbers of a vocabulary.

What is read depends on what is installed, so losses compare within one run and not from machine to machine. Files go in
the order of a hash of their paths, which mixes packages and does not depend on where they lie; a text that occurs twice
counts once; and whether a file is held out depends on its own text alone, so that more packages do not move the border.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass

import numpy as np

LARGEST = 1 << 20  # bytes: longer files are tables that a program has written
HELD_OUT = 8  # of 256: the first byte of the text's hash
END = "<|end|>"  # between files; a zero byte where the vocabulary is bytes


@dataclass
class Source:
    """Files in their order: what to train on and what is held out, and what the cache knows them by."""

    train: list[str]
    held_out: list[str]
    digest: str

    def summary(self):
        count = [sum(len(text.encode()) for text in part) for part in (self.train, self.held_out)]
        return {"files": len(self.train), "megabytes": count[0] / 1e6, "held_out_megabytes": count[1] / 1e6}


def folders(packages):
    """Where sources lie: the standard library, and what is installed if `packages` is set."""
    places = sysconfig.get_paths()
    names = ("stdlib", "purelib", "platlib") if packages else ("stdlib",)
    return list(dict.fromkeys(os.path.realpath(places[name]) for name in names))


def files(roots):
    """(path relative to its folder, whole path) of every source; installed packages are not the standard library's."""
    for root in roots:
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
            for name in names:
                if name.endswith(".py"):
                    whole = os.path.join(folder, name)
                    yield os.path.relpath(whole, root), whole


def content(path):
    """The text of a file, or "" of one that cannot be read, is too long or is not UTF-8."""
    try:
        if os.path.getsize(path) > LARGEST:
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def gather(roots, most):
    """Sources until there are `most` bytes of them."""
    found = Source([], [], "")
    seen, size = set(), 0
    for _, path in sorted(files(roots), key=lambda pair: (hashlib.sha256(pair[0].encode()).digest(), pair)):
        text = content(path)
        digest = hashlib.sha256(text.encode()).digest()
        if not text or digest in seen:
            continue
        seen.add(digest)
        (found.held_out if digest[0] < HELD_OUT else found.train).append(text)
        size += len(text)
        if size >= most:
            break
    found.digest = hashlib.sha256(b"".join(sorted(seen))).hexdigest()
    return found


# --- vocabularies -----------------------------------------------------------------------------------------------------


class Bytes:
    """The 256 bytes; files end with a zero."""

    name, size = "bytes", 256

    def encode(self, texts):
        return np.frombuffer(b"".join(text.encode() + b"\0" for text in texts), np.uint8)


class Trained:
    """A byte-level BPE vocabulary, trained by the package tokenizers on the first part of the text."""

    SAMPLE = 24_000_000  # characters
    AT_ONCE = 512  # files: encodings are many times as large as their text

    def __init__(self, size, path, texts):
        import tokenizers

        self.name, self.size = f"byte-level BPE, tokenizers {tokenizers.__version__}", size
        if not os.path.exists(path):
            self._train(tokenizers, path, texts)
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.end = self.tokenizer.token_to_id(END)

    def _train(self, tokenizers, path, texts):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(self._sample(texts), trainer)
        tokenizer.save(path + ".part")
        os.replace(path + ".part", path)

    def _sample(self, texts):
        size = 0
        for text in texts:
            yield text
            size += len(text)
            if size >= self.SAMPLE:
                return

    def encode(self, texts):
        parts = []
        for first in range(0, len(texts), self.AT_ONCE):
            for encoding in self.tokenizer.encode_batch_fast(texts[first : first + self.AT_ONCE]):
                parts.append(np.array([*encoding.ids, self.end], np.uint16))
        return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def vocabulary(size, cache, source):
    """One of `size` where the package tokenizers is installed, or else bytes."""
    if size > Bytes.size:
        try:
            return Trained(size, os.path.join(cache, f"bpe-{size}-{source.digest[:16]}.json"), source.train)
        except ImportError:
            print("tokenizers is not installed: the vocabulary is bytes", flush=True)
    return Bytes()


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass
class Corpus:
    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int
    summary: dict


def load(packages, most, vocabulary_size, cache):
    """The text as numbers, from the cache where it is there."""
    source = gather(folders(packages), most)
    os.makedirs(cache, exist_ok=True)
    words = vocabulary(vocabulary_size, cache, source)
    path = os.path.join(cache, f"text-{words.size}-{source.digest[:16]}.npz")
    if not os.path.exists(path):
        np.savez(path + ".part.npz", train=words.encode(source.train), held_out=words.encode(source.held_out))
        os.replace(path + ".part.npz", path)
    with np.load(path) as saved:
        train, held_out = saved["train"], saved["held_out"]
    summary = source.summary() | {"vocabulary": words.name, "tokens": len(train), "held_out_tokens": len(held_out)}
    return Corpus(train, held_out, words.size, summary)
