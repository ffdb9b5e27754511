"""The training text of bench/train_lm.py: tokenized Python sources of REPOSITORIES, checked out in one folder, or, for
the smallest model, of the standard library.

Files are ordered by a hash of their relative paths, which mixes repositories; duplicates are removed; and a hash of a
file's text decides whether it is held out, independently of other files.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass

import numpy as np

LARGEST = 1 << 20  # bytes; larger files are generated tables
HELD_OUT = 8  # of 256: the first byte of the text's hash
END = "<|end|>"  # between files; a zero byte where the vocabulary is bytes
REPOSITORIES = {  # of github.com, and their commits
    "ansible/ansible": "c9ac477e53a99e95781f333eec3329a935c1bf95",
    "django/django": "03988c5a5ba248c3b9b11ea96fd4fda5e98849aa",
    "matplotlib/matplotlib": "adecc563eabdfeb103ca338b50d5191b838ae8e9",
    "numpy/numpy": "1f90bbb55e65e7de68921bc3f1a2d94492fdf689",
    "pandas-dev/pandas": "66d98e5d527ed7beb50feaa85a6d222938dd713d",
    "scikit-learn/scikit-learn": "be5a8a8bd493747a5d52c7700dc0f1d47b645be6",
    "scipy/scipy": "3dbf660a919b1479cdf30d533176053b428d08d3",
    "sympy/sympy": "e950d313a932bc6cccbc95376b3821cd2f8b5af4",
}
DIGEST = "075c407a0928c0ffae59f180430345773573047633258a8bd92c296ed37ee363"  # of what `gather` finds


@dataclass
class Source:
    """Texts for training and held-out texts, in order, and the key of the cache."""

    train: list[str]
    held_out: list[str]
    digest: str

    def summary(self):
        count = [sum(len(text.encode()) for text in part) for part in (self.train, self.held_out)]
        return {"files": len(self.train), "megabytes": count[0] / 1e6, "held_out_megabytes": count[1] / 1e6}


def folders(checkouts):
    """The folders of sources: the standard library, or those of REPOSITORIES in the folder `checkouts`."""
    if checkouts is None:
        return [os.path.realpath(sysconfig.get_paths()["stdlib"])]
    found = {name: os.path.join(checkouts, name.split("/")[1]) for name in REPOSITORIES}
    missing = [f"{name} at {REPOSITORIES[name]}" for name in found if not os.path.isdir(found[name])]
    if missing:
        raise SystemExit(f"{checkouts} has no checkout of {', '.join(missing)} (github.com)")
    return list(found.values())


def files(roots):
    """(relative path, path) of every source, without installed packages."""
    for root in roots:
        for folder, below, names in os.walk(root):
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages", "__pycache__")]
            for name in names:
                whole = os.path.join(folder, name)
                if name.endswith(".py") and not os.path.islink(whole):
                    yield os.path.relpath(whole, os.path.dirname(root)), whole


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


def load(size, cache, checkouts):
    """The tokenized text of a model's size, cached on disk."""
    if size.named and checkouts is None:
        raise SystemExit(f"--text: this size wants a folder with checkouts of {', '.join(REPOSITORIES)} (github.com)")
    source = gather(folders(checkouts if size.named else None), size.text)
    if size.named and source.digest != DIGEST:
        print(f"other commits than those of bench/lm/text.py: the text's digest is {source.digest}", flush=True)
    os.makedirs(cache, exist_ok=True)
    words = vocabulary(size.vocabulary, cache, source)
    path = os.path.join(cache, f"text-{words.size}-{source.digest[:16]}.npz")
    if not os.path.exists(path):
        np.savez(path + ".part.npz", train=words.encode(source.train), held_out=words.encode(source.held_out))
        os.replace(path + ".part.npz", path)
    with np.load(path) as saved:
        train, held_out = saved["train"], saved["held_out"]
    summary = source.summary() | {
        "digest": source.digest,
        "vocabulary": words.name,
        "tokens": len(train),
        "held_out_tokens": len(held_out),
    }
    return Corpus(train, held_out, words.size, summary)
