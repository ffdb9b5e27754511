"""Images of digits: the digits 0 to 9 drawn with a distorted pen, for kfac.py and dp_sgd.py."""

import itertools
import math

import torch
from torch import Tensor

SIZE = 28

# Each digit as lines of points in a unit square, y downward.
GLYPHS = [
    [[(0.5, 0.1), (0.75, 0.25), (0.78, 0.5), (0.75, 0.75), (0.5, 0.9), (0.25, 0.75), (0.22, 0.5), (0.25, 0.25),
      (0.5, 0.1)]],
    [[(0.35, 0.25), (0.55, 0.1), (0.55, 0.9)]],
    [[(0.25, 0.3), (0.35, 0.12), (0.6, 0.1), (0.75, 0.28), (0.65, 0.5), (0.25, 0.9), (0.78, 0.9)]],
    [[(0.25, 0.18), (0.5, 0.1), (0.72, 0.25), (0.65, 0.43), (0.45, 0.48), (0.7, 0.55), (0.75, 0.75), (0.5, 0.9),
      (0.22, 0.8)]],
    [[(0.62, 0.9), (0.62, 0.1), (0.2, 0.62), (0.82, 0.62)]],
    [[(0.72, 0.1), (0.32, 0.1), (0.28, 0.45), (0.55, 0.4), (0.75, 0.55), (0.72, 0.8), (0.5, 0.9), (0.25, 0.82)]],
    [[(0.65, 0.1), (0.38, 0.35), (0.26, 0.65), (0.4, 0.88), (0.62, 0.88), (0.74, 0.68), (0.6, 0.5), (0.3, 0.6)]],
    [[(0.22, 0.1), (0.78, 0.1), (0.42, 0.9)]],
    [[(0.5, 0.48), (0.3, 0.35), (0.35, 0.13), (0.65, 0.13), (0.7, 0.35), (0.5, 0.48), (0.74, 0.65), (0.65, 0.88),
      (0.35, 0.88), (0.26, 0.65), (0.5, 0.48)]],
    [[(0.72, 0.35), (0.5, 0.52), (0.28, 0.38), (0.35, 0.14), (0.62, 0.12), (0.72, 0.35), (0.66, 0.65), (0.5, 0.9)]],
]  # fmt: skip


def segments() -> Tensor:
    """All digits' lines as [10, most, 4]: from (x, y) to (x, y). Digits with fewer repeat their last one."""
    lists = [[(*a, *b) for line in glyph for a, b in itertools.pairwise(line)] for glyph in GLYPHS]
    most = max(map(len, lists))
    return torch.tensor([lines + lines[-1:] * (most - len(lines)) for lines in lists])


def distort(points: Tensor, generator: torch.Generator) -> Tensor:
    """Bends [count, points, 2] by a slow wave, then turns, scales, shears and shifts each image in its own way."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(len(points), *shape, generator=generator)

    wave = torch.sin(uniform(3, 7, 1, 2) * points.flip(-1) + uniform(0, 2 * math.pi, 1, 2))
    points = points - 0.5 + uniform(-0.09, 0.09, 1, 2) * wave
    angle, shear = uniform(-0.4, 0.4), uniform(-0.4, 0.4)
    turn = torch.stack([angle.cos(), shear - angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    return (points * uniform(0.55, 1.0, 1, 2)) @ turn.mT + uniform(-0.14, 0.14, 1, 2) + 0.5


def ink(lines: Tensor, width: Tensor) -> Tensor:
    """[count, SIZE, SIZE]: dark within `width` of the nearest of an image's lines [count, lines, 2, 2]."""
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(1, 1, -1, 2)
    begin, along = lines[:, :, None, 0], (lines[:, :, 1] - lines[:, :, 0])[:, :, None]
    part = ((pixels - begin) * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp_min(1e-9)
    distance = (pixels - begin - part.clamp(0, 1) * along).square().sum(-1).sqrt().amin(1)
    return torch.sigmoid((width[:, None] - distance) * 60).unflatten(-1, (SIZE, SIZE))


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [count, 1, SIZE, SIZE] between 0 and 1, and which digit each one is."""
    generator = torch.Generator().manual_seed(seed)
    glyphs, labels = segments(), torch.randint(10, (count,), generator=generator)
    images = []
    for part in labels.split(500):
        lines = distort(glyphs[part].flatten(1).unflatten(-1, (-1, 2)), generator).unflatten(1, (-1, 2))
        image = ink(lines, 0.02 + 0.04 * torch.rand(len(part), generator=generator))
        image *= 0.5 + 0.5 * torch.rand(len(part), 1, 1, generator=generator)
        images.append((image + 0.2 * torch.randn(image.shape, generator=generator)).clamp_(0, 1))
    return torch.cat(images)[:, None], labels
