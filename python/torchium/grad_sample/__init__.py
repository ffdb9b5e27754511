"""Per-sample gradients from one ordinary backward pass: materialized as `p.grad_sample`, or only their norms or their
clipped sum.

    model = torchium.GradSampleModule(model)
    loss_fn(model(x), y).backward()
    model.weight.grad_sample                     # [B, *weight.shape]

`plan` finds the layers of a model and names unsupported ones; `forwards` captures a layer's input and its output's
gradient, `bags` those of an embedding bag, and `units` runs modules without a rule per sample, after `apart` has
checked them; `capture`, a watch as in torchium._watch, installs them on a model. The results are used in `module`,
`norms`, `clipping` and `functions`.
"""

from torchium.grad_sample.clipping import GhostClipping
from torchium.grad_sample.module import GradSampleModule
from torchium.grad_sample.norms import per_sample_norms

__all__ = ["GhostClipping", "GradSampleModule", "per_sample_norms"]
