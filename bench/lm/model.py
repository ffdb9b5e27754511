"""The GPT of bench/train_lm.py: pre-norm attention and feed-forward blocks with RMS norms, rotary positions and no
biases. The head is the embedding or a separate layer."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    text: int  # bytes at most
    named: bool = True  # the text is that of text.REPOSITORIES, or else of the standard library


SIZES = {
    "cpu": Size(2, 64, 2, 256, 64, 8, 2_000_000, named=False),
    "33m": Size(8, 512, 8, 16384, 1024, 64, 96_000_000),
    "98m": Size(12, 768, 12, 16384, 1024, 64, 96_000_000),
}


def rotate(x, angles):
    """Rotary positions: dimension i is paired with i + half."""
    cos, sin = angles
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        # Separate matrices for query, key and value, so that each has its own preconditioner.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.project = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def attend(self, x, angles):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(-2))

    def forward(self, x, angles):
        x = x + self.attend(self.norm1(x), angles)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


TIED, NORMAL, ZERO = HEADS = ("tied", "normal", "zero")  # the embedding, or a layer with this initialization


class GPT(nn.Module):
    """Maps tokens and their successors to the mean loss."""

    def __init__(self, size, vocabulary, head=TIED):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        half = size.width // size.heads // 2
        turns = torch.arange(size.context)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out_of_block = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * size.layers) ** 0.5 if out_of_block else 0.02)
        self.head = self.embed
        if head != TIED:
            self.head = nn.Linear(size.width, vocabulary, bias=False)
            nn.init.normal_(self.head.weight, std=0.02 if head == NORMAL else 0.0)

    def forward(self, tokens, following):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = functional.linear(self.norm(x), self.head.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def matrices(self):
        """The matrices of the blocks, which second-order methods update."""
        return [p for p in self.blocks.parameters() if p.ndim == 2]

    def rest(self):
        """The embedding, the head and vectors, which AdamW updates in every run."""
        chosen = {id(p) for p in self.matrices()}
        return [p for p in self.parameters() if id(p) not in chosen]
