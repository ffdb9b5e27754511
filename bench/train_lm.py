#!/usr/bin/env python3
"""Trains a GPT on Python sources with several optimizers, ours and others, and draws their losses over steps and over
seconds.

    PYTHONPATH=build/release/python bench/train_lm.py --size 33m --text CHECKOUTS --sweep
    PYTHONPATH=build/release/python bench/train_lm.py --size cpu --steps 60 --optimizers torch-adamw,muon --out a.json

All runs start from the same weights and use the same batches, a cosine schedule with warm-up and gradients clipped to
norm 1; on a GPU with bfloat16 autocast and a compiled model. --sweep first tunes the learning rates of each method in
short runs, which are recorded: three rates of the matrices at the largest rate of the rest, further ones while the best
is at the edge of the grid, then the other rates of the rest. Other implementations are included if they can be imported
or are in a folder of --peer-path or TORCHIUM_PEERS: github.com/nikhilvyas/SOAP, microsoft/dion,
facebookresearch/optimizers, HomebrewML/HeavyBall. A failed run is reported, and the others continue. Results are
written after every run.
"""

import argparse
import math
import os
import sys
import tempfile

import figures
import torch
from lm import text
from lm.model import SIZES
from lm.optimizers import BASELINE, ENTRIES, METHODS, chosen
from lm.training import EVERY, LAST, last_loss, of_text, reached
from plots import training as picture
from timing import machine

FURTHER = 3  # rates a sweep may add to its grid
SWEEP_LAST = 2  # points of the curve averaged for the final loss of a sweep run
IMAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "docs", "images")


class Report:
    """The results of all runs, written after each."""

    def __init__(self, args, described):
        self.out, self.svg = args.out, args.svg
        self.figures = {**described, "sweep": [], "runs": [], "failed": []}

    def rates(self, method):
        """The rates chosen by a sweep, or else the defaults."""
        found = [row for row in self.figures["sweep"] if row["method"] == method and row["chosen"]]
        return (found[-1]["matrices"], found[-1]["rest"]) if found else METHODS[method].rates

    def attempt(self, what, function, *arguments):
        """Records a failure instead of raising it."""
        try:
            return function(*arguments)
        except Exception as failure:
            why = f"{type(failure).__name__}: {failure}".splitlines()[0]
            self.figures["failed"].append({"what": what, "why": why})
            print(f"FAILED {what}: {why}", flush=True)
            return None

    def add(self, row):
        self.figures["runs"] = sorted([*self.figures["runs"], row], key=lambda one: list(ENTRIES).index(one["name"]))
        self.compare()
        self.write()

    def compare(self):
        """Finds when each run reached the final loss of PyTorch's AdamW."""
        goal = next((one["loss"] for one in self.figures["runs"] if one["name"] == BASELINE), None)
        for one in self.figures["runs"]:
            there = reached(one, goal) if goal is not None and math.isfinite(goal) else None
            if one["name"] == BASELINE:  # its loss may have been as low before the end
                there = one["curve"]["steps"][-1], one["curve"]["seconds"][-1]
            one["steps_to_adamw"], one["seconds_to_adamw"] = there or (None, None)

    def write(self):
        figures.write(self.out, self.figures)
        if self.figures["runs"]:
            picture.write(self.svg, figures.plain(self.figures))


def best(tried):
    """The row with the lowest final loss; NaN is the worst."""
    return min(tried, key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf)


def beyond(tried):
    """The next rate beyond the best one if that is at the edge of the grid, else None."""
    rates = [row["matrices"] for row in tried]
    found = best(tried)["matrices"]
    if found == min(rates):
        return found / 2
    return 2 * found if found == max(rates) else None


def sweep(course, report, method, steps):
    """Tunes the rates of a method in short runs."""
    tried, plan = [], METHODS[method]
    entry = ENTRIES[plan.by]

    def attempt(matrices, rest):
        ended = report.attempt(f"sweep of {method}", course.run, entry, (matrices, rest), steps)
        loss = last_loss(ended["curve"]["losses"], SWEEP_LAST) if ended else math.nan
        tried.append(
            {"method": method, "by": plan.by, "steps": steps, "matrices": matrices, "rest": rest, "loss": loss}
        )
        print(f"sweep {method}: {matrices:g} and {rest:g} gives {loss:.3f}", flush=True)

    course.warm_up(entry, (plan.matrices[0], plan.rest[-1]))
    for matrices in plan.matrices:
        attempt(matrices, plan.rest[-1])
    for _ in range(FURTHER):
        if beyond(tried) is not None:
            attempt(beyond(tried), plan.rest[-1])
    for rest in plan.rest[:-1]:
        attempt(best(tried)["matrices"], rest)
    winner = best(tried)
    report.figures["sweep"] += [row | {"chosen": row is winner} for row in tried]
    report.write()


def train(course, report, name, steps):
    entry = ENTRIES[name]
    rates = report.rates(entry.method)
    course.warm_up(entry, rates)
    row = {"name": name, "label": entry.label, "ours": entry.ours, "matrices": rates[0], "rest": rates[1]}
    row |= course.run(entry, rates, steps)
    report.add(row)
    print(f"{name}: loss {row['loss']:.3f}, held out {row['held_out_loss']:.3f}, {row['seconds']:.1f} s", flush=True)


# --- the table --------------------------------------------------------------------------------------------------------

HEAD = ("optimizer", "rates", "loss", "held out", "seconds", "step, slowest ms", "peak, state GB", "to AdamW's loss")


def shown(value, form):
    return "-" if value is None else format(value, form)


def cells(row):
    memory = row.get("memory")
    return (
        row["label"],
        f"{row['matrices']:g}, {row['rest']:g}",
        shown(row["loss"], ".3f"),
        shown(row["held_out_loss"], ".3f"),
        shown(row["seconds"], ".1f"),
        f"{row['step_ms']:.2f}, {row['slowest_step_ms']:.1f}",
        f"{memory['peak_gb'] + memory['pool_gb']:.1f}, {memory['state_gb'] + memory['pool_gb']:.2f}" if memory else "-",
        f"{row['steps_to_adamw']} steps, {row['seconds_to_adamw']:.1f} s" if row["steps_to_adamw"] else "-",
    )


def table(rows):
    """Prints a Markdown table for the docs."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(HEAD))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


# --- options ----------------------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--optimizers", default="all", help=f"all, ours, peers, or some of {', '.join(ENTRIES)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sweep", action="store_true", help="find learning rates first")
    parser.add_argument("--sweep-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the model (never compiled on the CPU)")
    parser.add_argument("--out", help="results; default: bench/results/train-lm-SIZE.json")
    parser.add_argument("--svg", help="plot; default: next to --out, or docs/images/train-lm-SIZE.svg")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR", help="folder of a peer")
    parser.add_argument("--text", metavar="DIR", help="checkouts of the repositories of bench/lm/text.py")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "torchium-train-lm"))
    return settle(parser, parser.parse_args())


def settle(parser, args):
    """Parses and validates arguments."""
    args.names, unknown = chosen(args.optimizers)
    if unknown:
        parser.error(f"--optimizers: there is no {', '.join(unknown)}; only {', '.join(ENTRIES)}, all, ours and peers")
    for name in ("steps", "sweep_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    peers = args.peer_path + [path for path in os.environ.get("TORCHIUM_PEERS", "").split(os.pathsep) if path]
    for path in peers:
        if not os.path.isdir(path):
            parser.error(f"--peer-path: there is no folder {path}")
    sys.path.extend(peers)
    name = f"train-lm-{args.size}"
    args.svg = args.svg or (os.path.splitext(args.out)[0] + ".svg" if args.out else os.path.join(IMAGES, f"{name}.svg"))
    args.out = args.out or os.path.join(figures.RESULTS, f"{name}.json")
    return args


def describe(args, course, corpus):
    import torchium

    size, model = SIZES[args.size], course.model
    return {
        "machine": machine(args.device, torchium.__version__),
        "course": {
            "size": args.size,
            "model": f"GPT, {size.layers} x {size.width}, {size.heads} heads, rotary positions, tied head",
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocabulary": corpus.vocabulary,
            "batch": f"{size.batch} x {size.context} tokens",
            "steps": args.steps,
            "seed": args.seed,
            "arithmetic": "bfloat16 autocast" if course.device.type == "cuda" else "float32",
            "compiled": course.compiled is not model,
            "curve": f"means of {EVERY} steps; last losses of {EVERY * LAST}, in sweeps of {EVERY * SWEEP_LAST}",
            "text": corpus.summary,
        },
    }


def present(names):
    for name in names:
        if not ENTRIES[name].found():
            print(f"{name}: {ENTRIES[name].needs} is not installed here, left out", flush=True)
    return [name for name in names if ENTRIES[name].found()]


def main():
    args = arguments()
    names, size = present(args.names), SIZES[args.size]
    corpus = text.load(size, args.cache, args.text)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the precision of our products, also for the peers
    course = of_text(size, corpus, device, args.seed, device.type == "cuda" and not args.eager)
    report = Report(args, describe(args, course, corpus))
    if args.sweep:
        for method in dict.fromkeys(ENTRIES[name].method for name in names):
            report.attempt(f"sweep of {method}", sweep, course, report, method, args.sweep_steps)
    for name in names:
        report.attempt(name, train, course, report, name, args.steps)
    table(report.figures["runs"])
    return 1 if report.figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
