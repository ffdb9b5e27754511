"""Lightning and Accelerate, if installed: mixed precision with gradient clipping vs an equivalent PyTorch loop. Both
reject or skip clipping if an optimizer declares that it unscales by itself."""

import warnings

import pytest
import torch
from optim_cases import assert_same_bits, batch, copies, make, small

CLIP = 0.5
SCALE = 2.0**10
STEPS = 4


def loss_in(model, step, dtype):
    x, y = batch(step)
    with torch.autocast("cpu", dtype):
        return torch.nn.functional.mse_loss(model(x).float(), y)


def plain_loop(kind, dtype, scaled, **options):
    """The expected steps: unscale, clip, step."""
    model = small("cpu")
    optimizer = make(kind, model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_in(model, step, dtype)).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        scaler.step(optimizer)
        scaler.update()
    assert max(norms) > CLIP  # something was clipped
    return copies(model.parameters())


# --- Lightning


def lightning():
    return pytest.importorskip("lightning.pytorch")


def fit(kind, precision, **options):
    pl = lightning()
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small("cpu")

        def training_step(self, index, _):
            x, y = batch(int(index))
            return torch.nn.functional.mse_loss(self.model(x).float(), y)

        def configure_optimizers(self):
            return make(kind, self.parameters(), **options)

    module = Module()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if precision == "16-mixed" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's warnings about loaders and loggers
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            plugins=[MixedPrecision(precision, "cpu", scaler)],
            gradient_clip_val=CLIP,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(list(range(STEPS)), batch_size=None))
    assert trainer.global_step == STEPS
    return copies(module.model.parameters())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips(kind, precision):
    scaled = precision == "16-mixed"
    trained = fit(kind, precision)
    assert_same_bits(trained, plain_loop(kind, torch.float16 if scaled else torch.bfloat16, scaled))


def test_lightning_refuses_to_clip_what_unscales_by_itself():
    """Like PyTorch's fused optimizers."""
    lightning()
    with pytest.raises(RuntimeError, match="performs unscaling of gradients internally"):
        fit("adamw", "16-mixed", fused=True)


# --- Accelerate


def test_accelerate_clips(kind):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = small("cpu")
    prepared, optimizer = accelerator.prepare(model, make(kind, model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss_in(prepared, step, torch.bfloat16))
        accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
        optimizer.step()
    assert_same_bits(copies(model.parameters()), plain_loop(kind, torch.bfloat16, False))


def test_accelerate_notices_a_skipped_step(kind):
    """Its scheduler does not advance after a skipped step, detected by whether `step` was called."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    model = small("cpu")
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        make(kind, model.parameters()), scaler=torch.amp.GradScaler("cpu", init_scale=SCALE)
    )
    before = copies(model.parameters())
    for bad in (True, False):
        optimizer.zero_grad()
        optimizer.scaler.scale(loss_in(model, 0, torch.float16)).backward()
        if bad:
            model.hidden.weight.grad[0, 0] = float("inf")
        optimizer.step()
        assert optimizer.step_was_skipped == bad
        assert all(map(torch.equal, before, copies(model.parameters()))) == bad
