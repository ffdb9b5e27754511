"""Prints the table of performance.md: the state that each optimizer keeps for models of three sizes.

    python memory_table.py

Nothing is allocated: a parameter here is one number, expanded to the shape, and memory_report() only reads shapes.
"""

import torch
from torch import nn
from torchium.optim import SOAP, AdamW, Muon, Shampoo

Shapes = list[tuple[int, ...]]


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257, context: int = 1024) -> tuple[Shapes, Shapes]:
    """Embeddings (the head is the first of them), and the rest."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), (width,)] + 4 * [(width,)]
    return [(vocabulary, width), (context, width)], layers * (layer + vectors) + 2 * [(width,)]


def llama(width: int, layers: int, key_value: int, hidden: int, embeddings: Shapes) -> tuple[Shapes, Shapes]:
    attention = [(width, width), (key_value, width), (key_value, width), (width, width)]
    layer = [*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return embeddings, layers * layer + [(width,)]


MODELS = {
    "GPT-2 small": gpt2(),
    "Llama 1B": llama(2048, 16, 512, 8192, [(128256, 2048)]),
    "Llama 7B": llama(4096, 32, 4096, 11008, [(32000, 4096), (32000, 4096)]),
}

OPTIMIZERS = {
    "AdamW": lambda groups: AdamW(groups),
    "Muon": lambda groups: Muon(groups),
    **{
        f"Shampoo, blocks of {size}": lambda groups, size=size: Shampoo(groups, max_preconditioner_dim=size)
        for size in (256, 1024, 4096)
    },
    "Shampoo, blocks of 1024, `packed_factors=True`": lambda groups: Shampoo(groups, packed_factors=True),
    "the same, `root_dtype='bfloat16'`": lambda groups: Shampoo(groups, packed_factors=True, root_dtype="bfloat16"),
    "Shampoo, blocks of 1024, `betas[0]=0`": lambda groups: Shampoo(groups, betas=(0.0, 0.99)),
    "Shampoo, blocks of 1024, `grafting=None`": lambda groups: Shampoo(groups, grafting=None),
    "SOAP, no blocks (with `block=True` as Shampoo)": lambda groups: SOAP(groups),
}


def groups_of(model: tuple[Shapes, Shapes]) -> list[dict]:
    embeddings, others = ([nn.Parameter(torch.empty(1).expand(shape)) for shape in part] for part in model)
    return [{"params": others}, {"params": embeddings, "use_adamw": True}]


def main() -> None:
    counts = [sum(p.numel() for group in groups_of(model) for p in group["params"]) for model in MODELS.values()]
    print("| state, GiB | " + " | ".join(MODELS) + " |")
    print("|---|" + len(MODELS) * "---|")
    print("| parameters, millions | " + " | ".join(f"{count / 1e6:.0f}" for count in counts) + " |")
    print("| parameters in float32, and gradients again | " + " | ".join(f"{4 * n / 2**30:.2f}" for n in counts) + " |")
    for name, make in OPTIMIZERS.items():
        state = [make(groups_of(model)).memory_report()["state"] / 2**30 for model in MODELS.values()]
        print(f"| {name} | " + " | ".join(f"{size:.2f}" for size in state) + " |")


if __name__ == "__main__":
    main()
