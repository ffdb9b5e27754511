"""A small GPT on characters, trained with AdamW, Muon, SOAP and Shampoo side by side.

    python char_gpt.py                                          # text from grammar.py; a minute for each on two cores
    python char_gpt.py --text book.txt --steps 5000 --layers 6 --width 384 --context 256 --batch 64   # on a GPU

On a GPU it trains under bf16 autocast; `--precision fp16` uses a GradScaler. Every optimizer starts from the same
weights and sees the same batches. The model is a pre-norm transformer.
"""

from pathlib import Path

import torch
from compare import Batch, Task, compare, options, settle
from grammar import write
from torch import Tensor, nn
from torch.nn import functional
from torchium.optim import SOAP, AdamW, Muon, Shampoo

RATES = {"shampoo": 0.01, "soap": 0.01, "muon": 0.03, "adamw": 0.01}


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Matrices get the method; vectors, and the embeddings by their names, get AdamW in the same optimizer."""
    parameters, betas, decay = model.named_parameters(), (0.9, 0.95), 0.1
    rest = {"use_adamw": ("embed*",), "adamw_betas": betas}
    match name:
        case "shampoo":
            factors = {"eps": 0.0, "precondition_frequency": 10, "grafting": "adam", "grafting_beta2": 0.95}
            return Shampoo(parameters, lr, betas=betas, weight_decay=decay, **factors, **rest)
        case "soap":
            return SOAP(parameters, lr, betas=betas, weight_decay=decay, **rest)
        case "muon":
            return Muon(parameters, lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw", **rest)
        case "adamw":
            return AdamW(parameters, lr, betas=betas, weight_decay=decay)
    raise ValueError(f"no optimizer {name!r}")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Three matrices rather than a fused one: each is preconditioned separately.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.project = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.embed_letters, self.embed_places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out_of_block = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if out_of_block else 0.02)

    def forward(self, letters: Tensor) -> Tensor:
        """[batch, time] to logits [batch, time, letters]. The embedding is the head, too."""
        places = torch.arange(letters.shape[1], device=letters.device)
        x = self.blocks(self.embed_letters(letters) + self.embed_places(places))
        return functional.linear(self.norm(x), self.embed_letters.weight)

    @torch.no_grad()
    def continue_text(self, letters: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """`count` more letters after those given, [time], drawn one by one."""
        for _ in range(count):
            logits = self(letters[-self.context :][None])[0, -1].float()
            drawn = torch.multinomial(torch.softmax(logits, -1).cpu(), 1, generator=generator)
            letters = torch.cat([letters, drawn.to(letters.device)])
        return letters


def read(args) -> tuple[str, str]:
    """Text to train on, and text held out."""
    if args.text:
        text = Path(args.text).read_text(encoding="utf-8")
        cut = len(text) * 9 // 10
        return text[:cut], text[cut:]
    return write(1_000_000, args.seed), write(100_000, args.seed + 1)


def windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    rows = text[starts[:, None] + torch.arange(length + 1, device=text.device)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_task(args) -> tuple[Task, list[str]]:
    train_text, held_out_text = read(args)
    alphabet = sorted({*train_text, *held_out_text})
    number = {letter: i for i, letter in enumerate(alphabet)}
    train, held_out = (
        torch.tensor([number[c] for c in text], device=args.device) for text in (train_text, held_out_text)
    )
    if len(held_out) <= args.context + 1:
        raise SystemExit(f"the text is too short for a context of {args.context} characters")

    def batch(step: int) -> Batch:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(train) - args.context, (args.batch,), generator=generator)
        return windows(train, starts.to(args.device), args.context)

    generator = torch.Generator().manual_seed(args.seed)
    places = torch.randint(len(held_out) - args.context, (128,), generator=generator).to(args.device)
    task = Task(
        "A small GPT on characters",
        lambda: GPT(len(alphabet), args.context, args.layers, args.width, args.heads),
        make_optimizer,
        RATES,
        batch,
        [windows(held_out, part, args.context) for part in places.split(64)],
    )
    return task, alphabet


def main() -> None:
    parser = options(__doc__.splitlines()[0], steps=300, rates=RATES)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to learn, in place of the grammar's")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--context", type=int, default=64, help="characters the model sees")
    parser.add_argument("--sample", type=int, default=100, help="characters to write with each model in the end")
    args = settle(parser.parse_args(), RATES)

    task, alphabet = make_task(args)
    weights = sum(p.numel() for p in task.make_model().parameters())
    subtitle = (
        f"{args.layers} layers of {args.width}, {weights:,} weights, {args.batch} x {args.context} characters a step"
    )
    models = compare(task, args, subtitle)

    for name, model in models.items() if args.sample else ():
        start = torch.tensor([alphabet.index("\n") if "\n" in alphabet else 0], device=args.device)
        letters = model.continue_text(start, args.sample, torch.Generator().manual_seed(args.seed))
        print(f"\n  {name} writes: {''.join(alphabet[i] for i in letters[1:].tolist())!r}")


if __name__ == "__main__":
    main()
