"""The training text of bench/train_lm.py: tokenized Python sources of the standard library and of installed packages.

The text depends on the installed packages, so losses are comparable on one machine only. Files are ordered by a hash of
their relative paths, which mixes packages; duplicates are removed; and a hash of a file's text decides whether it is
held out, independently of other files.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass

import numpy as np

LARGEST = 1 << 20  # bytes; larger files are generated tables
HELD_OUT = 8  # of 256: the first byte of the text's hash
END = "<|end|>"  # between files; a zero byte where the vocabulary is bytes


@dataclass
class Source:
    """Texts for training and held-out texts, in order, and the key of the cache."""

    train: list[str]
    held_out: list[str]
    digest: str

    def summary(self):
        count = [sum(len(text.encode()) for text in part) for part in (self.train, self.held_out)]
        return {"files": len(self.train), "megabytes": count[0] / 1e6, "held_out_megabytes": count[1] / 1e6}


def folders(packages):
    """The folders of sources: the standard library, and installed packages if `packages` is set."""
    places = sysconfig.get_paths()
    names = ("stdlib", "purelib", "platlib") if packages else ("stdlib",)
    return list(dict.fromkeys(os.path.realpath(places[name]) for name in names))


def files(roots):
    """(relative path, path) of every source; the standard library excludes installed packages."""
    for root in roots:
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
            for name in names:
                if name.endswith(".py"):
                    whole = os.path.join(folder, name)
                    yield os.path.relpath(whole, root), whole


def content(path):
    """The text of a file, or "" if it cannot be read, is too long or is not UTF-8."""
    try:
        if os.path.getsize(path) > LARGEST:
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def gather(roots, most):
    """At most about `most` bytes of sources."""
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
    """Bytes as tokens; files end with a zero."""

    name, size = "bytes", 256

    def encode(self, texts):
        return np.frombuffer(b"".join(text.encode() + b"\0" for text in texts), np.uint8)


class Trained:
    """A byte-level BPE vocabulary, trained by the package tokenizers on the beginning of the text."""

    SAMPLE = 24_000_000  # characters
    AT_ONCE = 512  # files, since encodings are many times larger than their text

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
    """A BPE vocabulary of `size` if the package tokenizers is installed, else bytes."""
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
    """The tokenized text, cached on disk."""
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
