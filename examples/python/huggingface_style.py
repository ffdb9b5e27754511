"""Hugging Face's Trainer: `optimizers=(optimizer, scheduler)`, accumulated gradients, clipping, checkpoints.

    python huggingface_style.py                                 # some seconds

If transformers (with accelerate) is installed, its own Trainer is used; otherwise the small one of this file, with the
same arguments and the same names of files in its checkpoints. One training goes through; another stops half way and is
resumed from its checkpoint by fresh objects. Both must end with the same weights, to the bit.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchium.optim import SOAP


class Features(Dataset):
    """Rows of 20 numbers; the label is what a small fixed network makes of them."""

    def __init__(self, count: int, seed: int) -> None:
        fixed, drawn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 20, generator=drawn)
        hidden = torch.tanh(self.x @ torch.randn(20, 16, generator=fixed))
        self.y = (hidden @ torch.randn(16, 5, generator=fixed)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"inputs": self.x[i], "labels": self.y[i]}


class Classifier(nn.Module):
    """Gives its loss with its logits, as models of that library do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class SmallArguments:
    output_dir: str
    max_steps: int
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    save_steps: int = 500
    seed: int = 42
    report_to: str = "none"
    disable_tqdm: bool = False
    logging_strategy: str = "steps"


class SmallTrainer:
    """What a Trainer does with the optimizer it is given."""

    def __init__(self, model: nn.Module, args: SmallArguments, train_dataset: Dataset, optimizers: tuple) -> None:
        self.model, self.args, self.dataset = model, args, train_dataset
        self.optimizer, self.scheduler = optimizers
        self.step = 0

    def batches(self):
        """Endless; the order of an epoch depends on its number and the seed only."""
        epoch = 0
        while True:
            order = torch.Generator().manual_seed(self.args.seed + epoch)
            size = self.args.per_device_train_batch_size
            yield from DataLoader(self.dataset, size, shuffle=True, drop_last=True, generator=order)
            epoch += 1

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        if resume_from_checkpoint:
            self.load(Path(resume_from_checkpoint))
        batches, parts = self.batches(), self.args.gradient_accumulation_steps
        for _ in range(self.step * parts):
            next(batches)
        device = next(self.model.parameters()).device
        self.model.train()
        while self.step < self.args.max_steps:
            for _ in range(parts):
                batch = {name: value.to(device) for name, value in next(batches).items()}
                (self.model(**batch)["loss"] / parts).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step % self.args.save_steps == 0:
                self.save(Path(self.args.output_dir) / f"checkpoint-{self.step}")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "pytorch_model.bin")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save({"scheduler": self.scheduler.state_dict(), "step": self.step}, folder / "scheduler.pt")

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        state = torch.load(folder / "scheduler.pt", weights_only=True)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


try:
    import accelerate  # noqa: F401 (transformers imports without it, and its Trainer does not work)
    from transformers import Trainer, TrainingArguments
except ImportError:
    Trainer, TrainingArguments = SmallTrainer, SmallArguments

STEPS = 120


def make_trainer(folder: str, steps: int) -> Trainer:
    torch.manual_seed(0)
    model = Classifier().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = SOAP(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        save_steps=STEPS // 2,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    return Trainer(model=model, args=arguments, train_dataset=Features(2000, seed=1), optimizers=(optimizer, scheduler))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    rows = Features(1000, seed=2)[:]
    device = next(model.parameters()).device
    logits = model.eval()(rows["inputs"].to(device), rows["labels"].to(device))["logits"]
    return (logits.argmax(1).cpu() == rows["labels"]).float().mean().item()


def main() -> None:
    print(f"with {Trainer.__module__}.{Trainer.__name__}")
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(f"{folder}/whole", STEPS)
        print(f"before: {100 * accuracy(whole.model):.1f} % right")
        whole.train()
        print(f"after {STEPS} steps: {100 * accuracy(whole.model):.1f} % right")

        make_trainer(f"{folder}/parts", STEPS // 2).train()
        resumed = make_trainer(f"{folder}/parts", STEPS)
        resumed.train(resume_from_checkpoint=f"{folder}/parts/checkpoint-{STEPS // 2}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise SystemExit("the resumed training ended elsewhere")
    print("resumed from half way: the same weights to the bit")


if __name__ == "__main__":
    main()
