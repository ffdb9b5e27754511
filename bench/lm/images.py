"""Image classification for bench/train_settings.py: a convolutional network, and a vision transformer, on generated
images.

Each class is a set of gratings of given frequencies and colors; an image adds them at random phases and amplitudes to
noise. Every step draws new images, so the loss of training is that of generalization."""

import torch
from torch import nn
from torch.nn import functional

from lm import training

CLASSES, GRATINGS, SIDE, BATCH, NOISE = 100, 3, 32, 512, 1.0


class Batches:
    count = training.HELD_OUT

    def __init__(self, seed, device):
        generator = torch.Generator().manual_seed(1)
        self.frequency = (torch.rand(CLASSES, GRATINGS, 2, generator=generator) * 1.6 - 0.8).to(device)
        self.color = torch.randn(CLASSES, GRATINGS, 3, generator=generator).to(device)
        self.seed, self.device = seed, device

    def __getitem__(self, step):
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + step)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator, device=self.device)

        label = (CLASSES * uniform(BATCH)).long()
        at = torch.arange(SIDE, device=self.device, dtype=torch.float32)
        waves = self.frequency[label] * 3.14159265
        angle = waves[..., 0, None, None] * at[:, None] + waves[..., 1, None, None] * at
        wave = torch.sin(angle + 6.2831853 * uniform(BATCH, GRATINGS, 1, 1)) * uniform(BATCH, GRATINGS, 1, 1)
        noise = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator, device=self.device)
        return torch.einsum("bgc,bghw->bchw", self.color[label], wave) + NOISE * noise, label


def convolutions(width=64):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(8, 2 * width), nn.ReLU()]
        layers += [nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GroupNorm(8, 2 * width), nn.ReLU()]
        width *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class Transformer(nn.Sequential):
    def __init__(self, width=256, patch=4):
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        super().__init__(nn.Conv2d(3, width, patch, patch), encoder, nn.Linear(width, CLASSES))
        self.position = nn.Parameter(0.02 * torch.randn((SIDE // patch) ** 2, width))

    def forward(self, x):
        return self[2](self[1](self[0](x).flatten(2).transpose(1, 2) + self.position).mean(1))


MODELS = {"conv": convolutions, "vit": Transformer}


class Classifier(nn.Module):
    """From images and labels to the mean loss; the output layer begins at zero where `head` says so."""

    def __init__(self, name, head):
        super().__init__()
        self.network = MODELS[name]()
        if head == "zero":
            nn.init.zeros_(self.network[-1].weight)

    def forward(self, images, labels):
        return functional.cross_entropy(self.network(images).float(), labels)

    def matrices(self):
        ends = (self.network[0].weight, self.network[-1].weight, getattr(self.network, "position", None))
        return [p for p in self.parameters() if p.ndim > 1 and all(p is not end for end in ends)]

    def rest(self):
        taken = {id(p) for p in self.matrices()}
        return [p for p in self.parameters() if id(p) not in taken]


def course(name, device, seed, compiled, head):
    torch.manual_seed(seed)
    train, held_out = Batches(seed, device), Batches(seed + 1000, device)
    return training.Course(Classifier(name, head), train, held_out, device, compiled)
