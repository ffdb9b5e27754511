"""Per-sample gradients from one ordinary backward pass: formed, as `p.grad_sample`; or not formed, where their
norms or their clipped sum are all that is wanted.

    model = torchium.GradSampleModule(model)
    loss_fn(model(x), y).backward()
    model.weight.grad_sample                     # [B, *weight.shape]

`plan` finds the layers of a model and names what cannot be right; `forwards` takes a layer's input and its output's
gradient, `bags` those of an embedding bag, and `units` runs what has no rule sample by sample, after `apart` has looked
whether it may; `capture`, a watch as in torchium._watch, puts them on a model and takes them off. What is done with it
all is in `module`, `norms`, `clipping` and `functions`.
"""

from torchium.grad_sample.clipping import GhostClipping
from torchium.grad_sample.module import GradSampleModule
from torchium.grad_sample.norms import per_sample_norms

__all__ = ["GhostClipping", "GradSampleModule", "per_sample_norms"]
