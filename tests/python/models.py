"""Small models with the modules and names of those that people train, in the order in which they register them."""

import torch
from torch import nn


class GPT2(nn.Module):
    """As nanoGPT: the head tied to the embedding, positions in an embedding of their own. There are as many positions
    as an MLP has hidden units, and as many words as that: sizes alone tell nothing."""

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


class Llama(nn.Module):
    """As transformers has it: an untied lm_head beside the model, RMS norms, no biases."""

    def __init__(self, words=96, width=32, layers=2):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(words, width),
                "layers": nn.ModuleList(
                    [
                        nn.ModuleDict(
                            {
                                "self_attn": nn.ModuleDict(
                                    {f"{n}_proj": nn.Linear(width, width, bias=False) for n in "qkvo"}
                                ),
                                "mlp": nn.ModuleDict(
                                    {
                                        "gate_proj": nn.Linear(width, words, bias=False),  # as many as there are words
                                        "up_proj": nn.Linear(width, words, bias=False),
                                        "down_proj": nn.Linear(words, width, bias=False),
                                    }
                                ),
                                "input_layernorm": nn.RMSNorm(width),
                            }
                        )
                        for _ in range(layers)
                    ]
                ),
                "norm": nn.RMSNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)


class MetaLlama(nn.Module):
    """As Meta writes it: the head is called output."""

    def __init__(self, words=96, width=32):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList([nn.ModuleDict({"wq": nn.Linear(width, width, bias=False)})])
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, words, bias=False)


class ViT(nn.Module):
    """As torchvision: patches by a convolution, a class token and positions as parameters, heads.head."""

    def __init__(self, width=32, classes=10):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.randn(1, 17, width))
        self.encoder.layers = nn.Sequential(nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True))
        self.encoder.ln = nn.LayerNorm(width)
        self.heads = nn.Sequential()
        self.heads.head = nn.Linear(width, classes)


class ResNet(nn.Module):
    """As torchvision: convolutions, batch norms, fc."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width))
        self.fc = nn.Linear(width, classes)
