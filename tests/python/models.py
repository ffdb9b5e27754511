"""Small models with the modules and names of common ones, registered in the same order."""

import torch
from torch import nn


class GPT2(nn.Module):
    """Like nanoGPT: the head tied to the embedding, a position embedding. The numbers of positions, words and hidden
    units of an MLP are equal, so that sizes do not identify parameters."""

    def __init__(self, words=256, positions=256, width=64, layers=2, tied=True):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(positions, width),
                "h": nn.ModuleList([GPT2Block(width) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, words):
        x = self.transformer.wte(words) + self.transformer.wpe(torch.arange(words.shape[1], device=words.device)[None])
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class GPT2Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        x = x + self.attn["c_proj"](nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


def model_of(parts):
    """Modules and parameters by their names, dots and all."""
    model = nn.Module()
    for name, part in parts.items():
        owner = model
        *path, last = name.split(".")
        for word in path:
            if not hasattr(owner, word):
                owner.add_module(word, nn.Module())
            owner = getattr(owner, word)
        setattr(owner, last, part)
    return model


def Llama(words=96, width=32, layers=2):
    """Like transformers: an untied lm_head next to the model, RMS norms, no biases."""
    parts = {"model.embed_tokens": nn.Embedding(words, width)}
    for k in range(layers):
        parts |= {f"model.layers.{k}.self_attn.{n}_proj": nn.Linear(width, width, bias=False) for n in "qkvo"}
        # as wide as the vocabulary
        parts |= {f"model.layers.{k}.mlp.{n}_proj": nn.Linear(width, words, bias=False) for n in ("gate", "up")}
        parts[f"model.layers.{k}.mlp.down_proj"] = nn.Linear(words, width, bias=False)
        parts[f"model.layers.{k}.input_layernorm"] = nn.RMSNorm(width)
    return model_of(parts | {"model.norm": nn.RMSNorm(width), "lm_head": nn.Linear(width, words, bias=False)})


def MetaLlama(words=96, width=32):
    """Like Meta's: the head is called output."""
    parts = {"tok_embeddings": nn.Embedding(words, width), "layers.0.wq": nn.Linear(width, width, bias=False)}
    return model_of(parts | {"norm": nn.RMSNorm(width), "output": nn.Linear(width, words, bias=False)})


def ViT(width=32, classes=10):
    """Like torchvision: patches by a convolution, a class token and positions as parameters, heads.head."""
    parts = {"conv_proj": nn.Conv2d(3, width, 4, 4), "class_token": nn.Parameter(torch.zeros(1, 1, width))}
    parts["encoder.pos_embedding"] = nn.Parameter(torch.randn(1, 17, width))
    parts["encoder.layers.0"] = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    return model_of(parts | {"encoder.ln": nn.LayerNorm(width), "heads.head": nn.Linear(width, classes)})


def ResNet(width=8, classes=10):
    """Like torchvision: convolutions, batch norms, fc."""
    parts = {"conv1": nn.Conv2d(3, width, 7, bias=False), "bn1": nn.BatchNorm2d(width)}
    parts |= {"layer1.0": nn.Conv2d(width, width, 3, bias=False), "layer1.1": nn.BatchNorm2d(width)}
    return model_of(parts | {"fc": nn.Linear(width, classes)})
