"""A module with `configure_optimizers`, as Lightning's users write it, with automatic and with manual optimization.

    python lightning_style.py                                   # some seconds

If lightning is installed, its own LightningModule and Trainer are used; otherwise the small ones of this file, which
call the optimizer in the same way: `optimizer.step(closure)` where the closure runs forward and backward, or, with
manual optimization, `optimizer.step()` from the module's own training step.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchium.optim import Muon, Shampoo


class SmallModule(nn.Module):
    automatic_optimization = True

    def optimizers(self):
        return self.optimizer

    def lr_schedulers(self):
        return self.scheduler

    def manual_backward(self, loss: Tensor) -> None:
        loss.backward()

    def log(self, name: str, value: Tensor, **options) -> None:
        pass


class SmallTrainer:
    """What a Trainer does with the optimizer and the scheduler that a module configures."""

    def __init__(self, max_epochs: int, gradient_clip_val: float | None = None, **options) -> None:
        self.max_epochs, self.clip = max_epochs, gradient_clip_val

    def fit(self, module: SmallModule, loader: DataLoader) -> None:
        module.to("cuda" if torch.cuda.is_available() else "cpu").train()
        configured = module.configure_optimizers()
        module.optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]
        module.scheduler = schedule["scheduler"]
        device = next(module.parameters()).device
        for _ in range(self.max_epochs):
            for i, batch in enumerate(loader):
                batch = [part.to(device) for part in batch]
                if module.automatic_optimization:
                    module.optimizer.step(lambda batch=batch, i=i: self.closure(module, batch, i))
                    if schedule["interval"] == "step":
                        module.scheduler.step()
                else:
                    module.training_step(batch, i)
            if module.automatic_optimization and schedule["interval"] == "epoch":
                module.scheduler.step()

    def closure(self, module: SmallModule, batch: list[Tensor], i: int) -> Tensor:
        module.optimizer.zero_grad()
        loss = module.training_step(batch, i)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        return loss


try:
    from lightning import LightningModule, Trainer
except ImportError:
    LightningModule, Trainer = SmallModule, SmallTrainer


class Regression(LightningModule):
    """Automatic: the trainer calls the optimizer and the scheduler."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = Shampoo(self.parameters(), lr=0.01, eps=0.0, update_freq=10, grafting="adam")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, self.steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ManualRegression(Regression):
    """Manual: the training step calls them, here to accumulate gradients over two batches."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = Muon(self.parameters(), lr=0.03, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps // 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows(count: int = 2048) -> TensorDataset:
    """A smooth function of eight numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 8, generator=generator) * 2 - 1
    return TensorDataset(x, torch.sin(3 * x[:, 0]) * x[:, 1] + (x[:, 2] + x[:, 3] * x[:, 4]).tanh())


def main() -> None:
    data, epochs = rows(), 10
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    print(f"with {Trainer.__module__}.{Trainer.__name__}")
    for kind, clip in ((Regression, 1.0), (ManualRegression, None)):
        torch.manual_seed(0)
        module = kind(steps=epochs * len(loader))
        variance = data.tensors[1].var()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        Trainer(max_epochs=epochs, gradient_clip_val=clip, enable_model_summary=False, **quiet).fit(module, loader)
        x, y = (part.to(next(module.parameters()).device) for part in data.tensors)
        with torch.no_grad():
            error = nn.functional.mse_loss(module.net(x).squeeze(1), y)
        print(f"{kind.__name__}: {100 * error / variance:.2f} % of the variance is left")


if __name__ == "__main__":
    main()
