#!/usr/bin/env python3
"""Times the optimizers of libtorchium beside PyTorch's, on one GPU or on the CPU: the same parameters and gradients,
one process.

    bench/optim_compare.py build/cuda/src/libtorchium.so [--folder DIR] [--quick] [--device cpu]

On a GPU the parameters are those of GPT-2 small and of a Llama of a billion, with gradients of rank 64 plus noise.
Where PyTorch has the optimizer it is the anchor; for Shampoo and SOAP the anchor is a plain implementation in PyTorch,
written below, whose figures are those of somebody who writes it today. On the CPU the sizes are those of small
networks.
"""

import argparse
import os
import statistics
import sys

import figures
import torch
from library import Library
from optimizers import GRAFTING, NONFINITE, STATE_DTYPE, Optimizer, defaults
from timing import Clock, host_ms, machine, waiter

GPT2 = 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
GPT2_VECTORS = 12 * [(2304,), (768,), (3072,), (768,), (768,), (768,), (768,), (768,)]
LLAMA = 16 * [(2048, 2048)] * 4 + 16 * [(5632, 2048), (5632, 2048), (2048, 5632)]
SMALL = [(64, 64), (64,), (128, 64), (128,), (64, 128), (64,), (10, 64), (10,)]
MLP = [(512, 256), (256,), (256, 512), (256,), (128, 256), (128,), (64, 128), (64,)]


def make(shapes, device, seed=0):
    """Parameters and gradients; matrices get gradients of rank 64 plus noise."""
    generator = torch.Generator(device).manual_seed(seed)
    parameters, gradients = [], []
    for shape in shapes:
        parameters.append(0.02 * torch.randn(shape, device=device, generator=generator))
        g = 1e-3 * torch.randn(shape, device=device, generator=generator)
        if len(shape) == 2:
            rank = min(64, *shape)
            left = torch.randn(shape[0], rank, device=device, generator=generator)
            right = torch.randn(rank, shape[1], device=device, generator=generator)
            g += 1e-2 * left @ right / rank**0.5
        gradients.append(g)
    return parameters, gradients


# --- anchors ----------------------------------------------------------------------------------------------------------


def torch_optimizer(cls, parameters, gradients, **options):
    own = [torch.nn.Parameter(p.clone()) for p in parameters]
    for p, g in zip(own, gradients, strict=True):
        p.grad = g.clone()
    return cls(own, **options).step


class PlainShampoo:
    """Shampoo as one writes it in PyTorch: blocks of at most `most`, one after another, roots by eigendecomposition."""

    def __init__(self, parameters, gradients, most, lr=0.01, eps=1e-6):
        self.parameters = [p.clone() for p in parameters]
        self.gradients = gradients
        self.most, self.lr, self.eps = most, lr, eps
        self.blocks = []
        for index, p in enumerate(parameters):
            if p.ndim == 2:
                for i in range(0, p.shape[0], most):
                    for j in range(0, p.shape[1], most):
                        m, n = min(most, p.shape[0] - i), min(most, p.shape[1] - j)
                        zeros = [torch.zeros(k, k, device=p.device) for k in (m, n)]
                        eyes = [torch.eye(k, device=p.device) for k in (m, n)]
                        self.blocks.append([index, i, j, zeros, eyes])
        self.filtered = [torch.zeros_like(p) for p in parameters]
        self.t = 0

    def _root(self, a):
        w, v = torch.linalg.eigh(a)
        w = w.clamp_min(0) + self.eps * w[-1]
        return (v * w.pow(-0.25)) @ v.T

    def step(self, refresh):
        self.t += 1
        correction = 1 - 0.9**self.t
        for p, g, f in zip(self.parameters, self.gradients, self.filtered, strict=True):
            f.lerp_(g, 0.1)
            if p.ndim != 2:
                p.add_(f, alpha=-self.lr / correction)
        for index, i, j, factors, roots in self.blocks:
            g = self.gradients[index][i : i + self.most, j : j + self.most]
            f = self.filtered[index][i : i + self.most, j : j + self.most]
            factors[0].addmm_(g, g.T)
            factors[1].addmm_(g.T, g)
            if refresh:
                roots[:] = [self._root(c) for c in factors]
            d = roots[0] @ (f / correction) @ roots[1]
            self.parameters[index][i : i + self.most, j : j + self.most].sub_(d, alpha=self.lr)


class PlainSoap:
    """SOAP as published: projections by tensor products, the basis by one orthogonal iteration with QR, every step."""

    def __init__(self, parameters, gradients, most, lr=3e-3):
        self.parameters = [p.clone() for p in parameters]
        self.gradients = gradients
        self.most, self.lr = most, lr
        self.blocks = []
        for index, p in enumerate(parameters):
            if p.ndim == 2:
                for i in range(0, p.shape[0], most):
                    for j in range(0, p.shape[1], most):
                        g = gradients[index][i : i + most, j : j + most]
                        factors = [g @ g.T, g.T @ g]
                        bases = [torch.linalg.eigh(c)[1].flip(1) for c in factors]
                        self.blocks.append([index, i, j, factors, bases, torch.zeros_like(g), torch.zeros_like(g)])

    def step(self):
        for index, i, j, factors, bases, m, v in self.blocks:
            g = self.gradients[index][i : i + self.most, j : j + self.most]
            m.lerp_(g, 0.05)
            rotated = bases[0].T @ g @ bases[1]
            v.lerp_(rotated.square(), 0.05)
            n = bases[0].T @ m @ bases[1] / (v.sqrt() + 1e-8)
            self.parameters[index][i : i + self.most, j : j + self.most].sub_(bases[0] @ n @ bases[1].T, alpha=self.lr)
            factors[0].lerp_(g @ g.T, 0.05)
            factors[1].lerp_(g.T @ g, 0.05)
            for k in range(2):
                order = (bases[k].T @ factors[k] @ bases[k]).diagonal().argsort(descending=True)
                bases[k] = bases[k][:, order]
                v = v.index_select(k, order)
                bases[k] = torch.linalg.qr(factors[k] @ bases[k])[0]


# --- what is measured -------------------------------------------------------------------------------------------------


class Comparison:
    def __init__(self, library, device, seconds):
        self.library, self.device, self.seconds = library, device, seconds
        self.clock = Clock(device)
        self.rows = []

    def ours(self, kind, parameters, gradients, **options):
        options.setdefault("nonfinite", NONFINITE["ignore"])
        optimizer = Optimizer(self.library, defaults(self.library, kind, **options), [p.clone() for p in parameters])
        optimizer.set_gradients(gradients)
        return optimizer

    def host_ms(self, step, count=20):
        """The time the host spends in a step, without synchronizing."""
        wait = waiter(self.device)
        times = []
        for _ in range(count):
            wait()
            times.append(host_ms(step))
        return statistics.median(times)

    def replayed(self, optimizer):
        """Host and device milliseconds of a step captured in a CUDA graph; nothing on the CPU."""
        if self.device.type != "cuda":
            return {}
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        self.library.set_stream(side.cuda_stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            optimizer.step()
        self.library.set_stream(torch.cuda.current_stream().cuda_stream)
        ms = self.clock.median(graph.replay, self.seconds)
        return {"replay_host_ms": self.host_ms(graph.replay), "replay_ms": ms}

    def add(self, row, work, size, ours, anchors, target, **more):
        entry = {"row": row, "work": work, "size": size, "ours_ms": ours, "anchors_ms": anchors, "target_ms": target}
        entry |= more
        self.rows.append(entry)
        best = min(anchors.items(), key=lambda item: item[1], default=(None, None))
        text = f"row {row:<3} {work:<34} {size:<10} {ours:>9.3f} ms"
        if best[0]:
            text += f"  {best[0]} {best[1]:.3f} ms (x{best[1] / ours:.1f})"
        if target:
            text += f"  target {target:g} ms " + ("met" if ours <= target else "NOT MET")
        for name, value in more.items():
            text += f"  {name} {value:.4g}" if isinstance(value, float) else f"  {name} {value}"
        print(text, flush=True)

    def adamw(self, name, shapes, target, checked_too=True):
        parameters, gradients = make(shapes, self.device)
        optimizer = self.ours("adamw", parameters, gradients)
        ms = self.clock.median(optimizer.step, self.seconds)
        more = {"host_ms": self.host_ms(optimizer.step)} | self.replayed(optimizer)
        optimizer.close()
        if checked_too:
            optimizer = self.ours("adamw", parameters, gradients, nonfinite=NONFINITE["skip"])
            more["with_check_ms"] = self.clock.median(optimizer.step, self.seconds)
            optimizer.close()
        for dtype in ("float32", "bfloat16", "int8"):
            optimizer = self.ours("adamw", parameters, gradients, state_dtype=STATE_DTYPE[dtype])
            more[f"{dtype}_state_ms"] = self.clock.median(optimizer.step, self.seconds)
            more[f"{dtype}_state_bytes"] = optimizer.memory()["state"]
            optimizer.close()
            self.library.trim()
        fused = torch_optimizer(torch.optim.AdamW, parameters, gradients, lr=1e-3, fused=True)
        anchors = {"torch fused": self.clock.median(fused, self.seconds)}
        each = torch_optimizer(torch.optim.AdamW, parameters, gradients, lr=1e-3, foreach=True)
        anchors["torch foreach"] = self.clock.median(each, self.seconds)
        self.add(10, "AdamW step", name, ms, anchors, target, **more)

    def muon(self, name, shapes, target):
        parameters, gradients = make([s for s in shapes if len(s) == 2], self.device)
        ms = {}
        for method, number in (("muon", 1), ("polar_express", 0), ("minimax", 2)):
            optimizer = self.ours("muon", parameters, gradients, muon_method=number)
            ms[method] = self.clock.median(optimizer.step, self.seconds)
            more = {"host_ms": self.host_ms(optimizer.step)} | self.replayed(optimizer)
            optimizer.close()
            self.library.trim()
        anchors = {}
        if hasattr(torch.optim, "Muon"):
            anchors["torch Muon"] = self.clock.median(
                torch_optimizer(torch.optim.Muon, parameters, gradients, lr=1e-3), self.seconds
            )
        others = {"polar_express_ms": ms["polar_express"], "muon_ms": ms["muon"]}
        self.add(9, "Muon step", name, ms["minimax"], anchors, target, **others, **more)

    def shampoo(self, name, shapes, targets, most=1024, anchor=True):
        parameters, gradients = make(shapes, self.device)
        options = {"max_preconditioner_dim": most, "eps": 0.0, "relative_eps": 1e-6, "lr": 1e-4}
        anchors = [{}, {}]
        if anchor:
            by_hand = PlainShampoo(parameters, gradients, most)
            by_hand.step(False)
            anchors = [
                {"plain PyTorch": self.clock.median(lambda: by_hand.step(False), self.seconds)},
                {"plain PyTorch": self.clock.median(lambda: by_hand.step(True), 0.0)},
            ]
            del by_hand
        optimizer = self.ours("shampoo", parameters, gradients, precondition_frequency=1 << 20, **options)
        optimizer.step()
        ms = self.clock.median(optimizer.step, self.seconds)
        host = self.host_ms(optimizer.step)
        memory = optimizer.memory()
        more = {"host_ms": host} | self.replayed(optimizer)
        self.add(5, "Shampoo step, no refresh", name, ms, anchors[0], targets[0], **more, **memory)
        optimizer.set_config(precondition_frequency=1)
        ms = self.clock.median(optimizer.step, self.seconds)
        stats = optimizer.stats()
        self.add(
            6,
            "Shampoo step, all roots refreshed",
            name,
            ms,
            anchors[1],
            targets[1],
            host_ms=self.host_ms(optimizer.step),
            worst_residual=stats["worst_residual"],
            failed=stats["failed"],
        )
        optimizer.set_config(precondition_frequency=10)
        for _ in range(10):
            optimizer.step()
        times = []
        for _ in range(5):
            times.append(self.clock.times(optimizer.step, 10))
        slowest = statistics.median(max(period) for period in times)
        mean = statistics.mean(t for period in times for t in period)
        host = max(self.host_ms(optimizer.step, 1) for _ in range(10))
        self.add(7, "Shampoo, every 10 steps, slowest", name, slowest, {}, targets[2], mean_ms=mean, host_ms=host)
        optimizer.close()
        self.library.trim()
        for extra, options_more in (("grafting adam", {"grafting": GRAFTING["adam"]}), ("highest", {"precision": 1})):
            optimizer = self.ours(
                "shampoo", parameters, gradients, precondition_frequency=1 << 20, **options, **options_more
            )
            optimizer.step()
            self.add("5+", f"the same with {extra}", name, self.clock.median(optimizer.step, self.seconds), {}, None)
            optimizer.close()
            self.library.trim()
        self.refresh_memory(name, parameters, gradients, options, memory["state"])

    def refresh_memory(self, name, parameters, gradients, options, state):
        for share in (0.15, 0.05):
            optimizer = self.ours(
                "shampoo", parameters, gradients, precondition_frequency=1, memory_budget=int(share * state), **options
            )
            self.library.trim()
            held = self.library.memory()["allocated"]
            before = optimizer.memory()["scratch"]
            self.library.reset_peak()
            ms = self.clock.median(optimizer.step, 0.0)
            extra = self.library.memory()["peak"] - held + before
            self.add(16, f"refresh within {share:.0%} of the state", name, ms, {}, None, extra_share=extra / state)
            optimizer.close()
            self.library.trim()

    def soap(self, name, shapes, target, most=1024, anchor=True):
        parameters, gradients = make(shapes, self.device)
        anchors = {}
        if anchor:
            by_hand = PlainSoap(parameters, gradients, most)
            anchors = {"plain PyTorch": self.clock.median(by_hand.step, 0.0)}
            del by_hand
        options = {"max_preconditioner_dim": most, "block": 1, "lr": 1e-4}
        optimizer = self.ours("soap", parameters, gradients, precondition_frequency=1, **options)
        optimizer.step()
        ms = self.clock.median(optimizer.step, self.seconds)
        host = self.host_ms(optimizer.step)
        memory = optimizer.memory()
        stats = optimizer.stats()
        more = {"host_ms": host} | self.replayed(optimizer)
        optimizer.set_config(precondition_frequency=1 << 20)
        rest = self.clock.median(optimizer.step, self.seconds)
        self.add(
            8,
            "SOAP step, basis tracked every step",
            name,
            ms,
            anchors,
            target,
            without_tracking_ms=rest,
            failed=stats["failed"],
            **more,
            **memory,
        )
        optimizer.close()
        self.library.trim()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--folder", default=figures.RESULTS, help="where the figures go, as optim-DEVICE.json")
    parser.add_argument("--quick", action="store_true", help="without the slow anchors")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a dry run: its figures mean nothing")
    return parser.parse_args()


def on_gpu(c, arguments):
    h200 = "H200" in torch.cuda.get_device_name(c.device)
    gpt2 = GPT2 + GPT2_VECTORS

    def target(value):
        return value if h200 else None

    cases = [
        lambda: c.adamw("GPT-2", gpt2, target(0.75)),
        lambda: c.adamw("Llama-1B", LLAMA, target(6.2)),
        lambda: c.muon("GPT-2", gpt2, target(6.0)),
        lambda: c.muon("Llama-1B", LLAMA, target(45.0)),
        lambda: c.shampoo("GPT-2", gpt2, [target(6.0), target(90.0), target(15.0)], anchor=not arguments.quick),
        lambda: c.soap("GPT-2", gpt2, target(60.0), anchor=not arguments.quick),
    ]
    return cases


def on_cpu(c, arguments):
    tiny = [(40, 24), (24,), (8, 40)]
    mlp = tiny if arguments.tiny else MLP
    many = 20 * [(50,)] if arguments.tiny else 200 * [(1000,)]
    large = [(300, 100)] if arguments.tiny else [(4096, 4096), (4096,)]
    return [
        lambda: c.adamw("MLP", mlp, None),
        lambda: c.adamw("200 x 1000", many, None),
        lambda: c.adamw("4096^2", large, None),
        lambda: c.muon("MLP", mlp, None),
        lambda: c.shampoo("64 to 128", tiny if arguments.tiny else SMALL, [None, None, None]),
        lambda: c.shampoo("MLP", mlp, [None, None, None]),
        lambda: c.soap("MLP", mlp, None),
    ]


def main():
    arguments = parse()
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("highest")
    library = Library(arguments.library, arguments.device)
    info = machine(device, library.version())
    print(f"{info['device']}; PyTorch {info['torch']}; Torchium {info['torchium']}")
    c = Comparison(library, device, 0.05 if arguments.tiny else 0.4)
    if device.type == "cuda":
        library.set_stream(torch.cuda.current_stream().cuda_stream)
    failed = []
    for case in on_gpu(c, arguments) if device.type == "cuda" else on_cpu(c, arguments):
        try:
            case()
        except (RuntimeError, torch.cuda.OutOfMemoryError) as failure:
            failed.append(str(failure))
            print(f"FAILED {failure}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    path = os.path.join(arguments.folder, f"optim-{figures.device_name(info['device'])}.json")
    figures.write(path, {"machine": info, "rows": c.rows, "failed": failed})
    print(f"figures in {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
