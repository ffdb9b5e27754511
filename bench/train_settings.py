#!/usr/bin/env python3
"""Trains the GPT of train_lm.py, or an image classifier, in many settings: every head, warm-up, schedule, seed and
number of steps asked for, each optimizer at every rate of the matrices, in whole schedules; a row of figures for each.

    PYTHONPATH=build/release/python bench/train_settings.py --size 33m --text CHECKOUTS --head normal,zero \\
        --warm-up 0.13,0.33 --optimizers muon:0.012,shampoo:0.004:0.008,shampoo:precondition_frequency=1:0.004

An optimizer is a name of train_lm.py, options of its class, and rates, separated by colons. Runs of a seed begin from
the same weights and see the same batches; --warm-up is the share of the steps.
"""

import argparse
import ast
import itertools
import math
import os
import sys
import tempfile
from dataclasses import replace

import figures
import torch
from lm import images, text
from lm.model import HEADS, SIZES
from lm.optimizers import ENTRIES, Ours
from lm.training import of_text
from timing import machine


def parsed(words):
    """Label, entry and rates of NAME:option=value:rate:rate."""
    name, *further = words.split(":")
    entry = ENTRIES[name]
    options = {key: ast.literal_eval(value) for key, value in (one.split("=") for one in further if "=" in one)}
    if options:
        entry = replace(entry, make=Ours(entry.make.kind, entry.make.options | options))
    label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
    return label, entry, [float(one) for one in further if "=" not in one]


def rows_of(course, args):
    """A row for every optimizer and rate; a run that fails has its reason and no loss."""
    for label, entry, rates in args.optimizers:
        course.warm_up(entry, (rates[0], args.rest))
        for rate, steps in itertools.product(rates, args.steps):
            row = {"optimizer": label, "rate": rate, "steps": steps}
            try:
                ran = course.run(entry, (rate, args.rest), steps)
                row |= {name: ran.get(name) for name in ("loss", "held_out_loss", "seconds", "step_ms", "refreshes")}
                row["curve"] = ran["curve"]["losses"][5::6]
            except Exception as failure:
                row |= {"loss": math.nan, "why": f"{type(failure).__name__}: {failure}".splitlines()[0]}
            print(", ".join(f"{key} {value}" for key, value in figures.plain(row).items()), flush=True)
            yield row


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=[*SIZES, *images.MODELS], default="cpu")
    parser.add_argument("--batch", type=int, help="sequences of a step, if not those of the size")
    parser.add_argument("--head", type=lambda words: words.split(","), default=["tied"], help=", ".join(HEADS))
    parser.add_argument("--warm-up", type=lambda words: list(map(float, words.split(","))), default=[0.1])
    parser.add_argument("--schedule", type=lambda words: words.split(","), default=["cosine"], help="cosine, linear")
    parser.add_argument("--steps", type=lambda words: list(map(int, words.split(","))), default=[300])
    parser.add_argument("--seeds", type=lambda words: list(map(int, words.split(","))), default=[0])
    parser.add_argument("--rest", type=float, default=6e-3, help="learning rate of what AdamW trains")
    parser.add_argument("--optimizers", type=lambda words: list(map(parsed, words.split(","))), required=True)
    parser.add_argument("--initial", type=float, default=1.0, help="factor of the matrices' initial weights")
    parser.add_argument("--bfloat16", action="store_true", help="parameters; ours take master_weights=True")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile the model; on the CPU it never is")
    parser.add_argument("--out", default=os.path.join(figures.RESULTS, "train-settings.json"))
    parser.add_argument("--text", metavar="DIR", help="checkouts of the repositories of bench/lm/text.py")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "torchium-train-lm"))
    return parser.parse_args()


def main():
    import torchium

    args = arguments()
    device, compiled = torch.device(args.device), args.device == "cuda" and not args.eager
    torch.set_float32_matmul_precision("high")
    found = {"machine": machine(args.device, torchium.__version__), "settings": []}
    batch = images.BATCH
    if args.size in SIZES:
        size = replace(SIZES[args.size], batch=args.batch or SIZES[args.size].batch)
        corpus, batch = text.load(size, args.cache, args.text), size.batch
        found["text"] = corpus.summary
    for head, seed in itertools.product(args.head, args.seeds):
        if args.size in SIZES:
            course = of_text(size, corpus, device, seed, compiled, head)
        else:
            course = images.course(args.size, device, seed, compiled, head)
        course.scale_matrices(args.initial)
        if args.bfloat16:
            course.use_bfloat16()
        for schedule, warm_up in itertools.product(args.schedule, args.warm_up):
            course.schedule = {"schedule": schedule, "warm_up": warm_up}
            setting = {"size": args.size, "batch": batch, "head": head, "seed": seed} | course.schedule
            setting |= {"bfloat16": True} if args.bfloat16 else {}
            setting |= {"initial": args.initial} if args.initial != 1.0 else {}
            found["settings"].append(setting | {"runs": []})
            print(setting, flush=True)
            for row in rows_of(course, args):
                found["settings"][-1]["runs"].append(row)
                figures.write(args.out, found)
    return int(any("why" in row for one in found["settings"] for row in one["runs"]))


if __name__ == "__main__":
    sys.exit(main())
