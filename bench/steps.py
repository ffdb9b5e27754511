"""Steps of optimizers, Torchium's from C and from Python and others': the same parameters and gradients; gradients of
matrices have rank 64 plus noise, like those of layers."""

import dataclasses
import statistics
from functools import partial

import torch
from cases import Case, Work
from optimizers import GRAFTING, NONFINITE, STATE_DTYPE, Optimizer, defaults
from peers import PEERS, found

GPT2 = 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
GPT2 += 12 * [(2304,), (768,), (3072,), (768,), (768,), (768,), (768,), (768,)]
LLAMA = 16 * 4 * [(2048, 2048)] + 16 * [(5632, 2048), (5632, 2048), (2048, 5632)]
GPT98M = 12 * (4 * [(768, 768)] + [(3072, 768), (768, 3072)])
SMALL = [(64, 64), (64,), (128, 64), (128,), (64, 128), (64,), (10, 64), (10,)]
MLP = [(512, 256), (256,), (256, 512), (256,), (128, 256), (128,), (64, 128), (64,)]
GPT192 = 2 * [(576, 192), (192, 192), (768, 192), (192, 768)]
TINY = [(40, 24), (24,), (8, 40)]
NEVER = 1 << 20  # an interval that no measurement reaches
CLASSES = {name.lower(): name for name in ("SGD", "AdamW", "Shampoo", "SOAP", "Muon")} | {"kl_shampoo": "KLShampoo"}
# The paper's Shampoo, and SOAP in blocks.
SHAMPOO = {"lr": 1e-4, "betas": (0.9, 1.0), "eps": 0.0, "relative_eps": 1e-6, "grafting": None, "exponent_override": 0}
GRAFTED = {"lr": 1e-3, "betas": (0.9, 0.95), "grafting_beta2": 0.95, "weight_decay": 0.1}
SOAP = {"lr": 1e-4, "max_preconditioner_dim": 1024, "block": True}
WHOLE = {"lr": 1e-3, "weight_decay": 0.1}

# Options of torchium.optim as fields of tch_optim_config, where their names differ.
_C_NAMES = {"relative_eps": "damping"}
_C_NUMBERS = {
    "grafting": GRAFTING,
    "nonfinite": NONFINITE,
    "method": {"polar_express": 0, "muon": 1, "minimax": 2},
    "precision": {"high": 0, "highest": 1},
    "state_dtype": STATE_DTYPE,
    "root_dtype": STATE_DTYPE,
}


def c_options(options):
    numbered = {name: _C_NUMBERS[name][value] if name in _C_NUMBERS else value for name, value in options.items()}
    if "betas" in numbered:
        numbered["beta1"], numbered["beta2"] = numbered.pop("betas")
    return {_C_NAMES.get(name, name): value for name, value in numbered.items()}


def make(bench, shapes, matrices=False):
    """Parameters with their gradients; matrices only, if asked."""
    generator = bench.random(0)
    random = partial(torch.randn, device=bench.device, generator=generator)
    parameters = []
    for shape in TINY if bench.tiny else shapes:
        if matrices and len(shape) != 2:
            continue
        parameters.append(torch.nn.Parameter(0.02 * random(shape)))
        gradient = 1e-3 * random(shape)
        if len(shape) == 2:
            rank = min(64, *shape)
            gradient += 1e-2 * random(shape[0], rank) @ random(rank, shape[1]) / rank**0.5
        parameters[-1].grad = gradient
    return parameters


def copies(parameters):
    made = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, made, strict=True):
        q.grad = p.grad.clone()
    return made


def from_c(bench, kind, parameters, **options):
    config = defaults(bench.library, kind, **c_options({"nonfinite": "ignore"} | options))
    optimizer = Optimizer(bench.library, config, [p.detach().clone() for p in parameters])
    optimizer.set_gradients([p.grad for p in parameters])
    return optimizer


def from_python(kind, parameters, **options):
    import torchium

    return getattr(torchium.optim, CLASSES[kind])(copies(parameters), **({"nonfinite": "ignore"} | options))


def others(bench, names, parameters, period):
    """The steps of available peers; failures are reported."""
    steps = {}
    for name in names:
        module, maker = PEERS[name]
        if not found(module) or (bench.quick and name.startswith("plain") and bench.cuda):
            continue
        peer = bench.attempt(name, maker, copies(parameters), period)
        if peer and bench.attempt(name, lambda peer=peer: (peer.step(), True)):
            steps[name] = peer.step
    return steps


def replayed(bench, step):
    """Host and device milliseconds of a step captured in a CUDA graph; nothing on the CPU."""
    if not bench.cuda:
        return {}
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    bench.library.set_stream(side.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        step()
    bench.library.set_stream(torch.cuda.current_stream().cuda_stream)
    return {"replay_host_ms": bench.host_ms(graph.replay), "replay_ms": bench.clock.median(graph.replay, bench.seconds)}


def step(kind, shapes, options, peers, bench, c=True, capture=False):
    """One step, from C if `c` is set and from Python if the package is found."""
    parameters, optimizers, c = make(bench, shapes, kind == "muon"), {}, c or not found("torchium")
    if c:
        optimizers["C"] = from_c(bench, kind, parameters, **options)
    if found("torchium"):
        optimizers["Python"] = from_python(kind, parameters, **options)
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.step()
    period = options.get("precondition_frequency") or 1
    first = next(iter(optimizers.values()))

    def more():
        figures = {"host_ms": bench.host_ms(first.step)}
        if c:
            figures |= (replayed(bench, first.step) if capture else {}) | first.memory()
            figures |= {name: first.stats()[name] for name in ("worst_residual", "failed")}
        else:
            figures |= {"state": first.memory_report()["state"]}
        return figures

    def close():
        if c:
            optimizers["C"].close()
        optimizers.clear()
        bench.library.trim()

    ours = {name: optimizer.step for name, optimizer in optimizers.items()}
    return Work(ours, others(bench, peers, parameters, period), more=more, close=close)


def periodic(kind, shapes, options, bench, period=10):
    """Steps of an interval with staggered refreshes: the slowest, the mean and the median of five intervals."""
    parameters = make(bench, shapes)
    python = found("torchium")
    optimizer = (from_python if python else partial(from_c, bench))(
        kind, parameters, **options, precondition_frequency=period
    )
    bench.clock.times(optimizer.step, 2 * period)
    times = [bench.clock.times(optimizer.step, period) for _ in range(5)]
    flat = [t for each in times for t in each]
    slowest, median = statistics.median(max(each) for each in times), statistics.median(flat)
    more = {"mean_ms": statistics.fmean(flat), "median_ms": median, "slowest_over_median": slowest / median}
    more |= {"state": optimizer.memory_report()["state"]} if python else optimizer.memory()
    return Work({"slowest": slowest}, more=lambda: more, close=bench.library.trim)


def refresh(shapes, share, bench):
    """A step that refreshes everything within a fraction of the state's memory, and its workspace."""
    parameters, library = make(bench, shapes), bench.library
    probe = from_c(bench, "shampoo", parameters, precondition_frequency=1, **SHAMPOO)
    state = probe.memory()["state"]
    probe.close()
    optimizer = from_c(bench, "shampoo", parameters, precondition_frequency=1, budget=int(share * state), **SHAMPOO)
    library.trim()
    held, before = library.memory()["allocated"], optimizer.memory()["scratch"]
    library.reset_peak()
    ms = bench.clock.median(optimizer.step, 0.0)
    extra = (library.memory()["peak"] - held + before) / state
    optimizer.close()
    library.trim()
    return Work({"C": ms}, more=lambda: {"extra_share": extra, "state": state})


# --- the tables -------------------------------------------------------------------------------------------------------

ADAMW, MUON = {"lr": 1e-3}, {"lr": 1e-3, "method": "minimax"}
SOAPS = ("nikhilvyas", "HeavyBall", "Emerging-Optimizers SOAP")
MUONS = ("torch Muon", "Dion", "Emerging-Optimizers Muon")
FORMS = {
    "": {},
    ", packed factors": {"packed_factors": True},
    ", bfloat16 roots": {"root_dtype": "bfloat16"},
    ", both": {"packed_factors": True, "root_dtype": "bfloat16"},
}


def shampoo_cases(size, shapes, targets=(None, None, None), limits=(None, None, None)):
    never, always = {**SHAMPOO, "precondition_frequency": NEVER}, {**SHAMPOO, "precondition_frequency": 1}
    plain = ("plain PyTorch Shampoo",)
    make = partial(step, "shampoo", shapes)
    return [
        Case(5, "Shampoo step, no refresh", size, partial(make, never, plain, capture=True), targets[0], limits[0]),
        Case("5+", "the same with grafting adam", size, partial(make, never | {"grafting": "adam"}, ()), slow=True),
        Case("5+", "the same with highest", size, partial(make, never | {"precision": "highest"}, ()), slow=True),
        Case(
            6, "Shampoo step, all roots refreshed", size, partial(make, always, plain), targets[1],
            limits[1],
        ),
        Case(
            7, "Shampoo, every 10 steps, slowest", size, partial(periodic, "shampoo", shapes, SHAMPOO), targets[2],
            limits[2],
        ),
    ]  # fmt: skip


def peer_cases(size, shapes):
    """Torchium from Python with options that others also have."""
    grafted, soap = partial(step, "shampoo", shapes, c=False), partial(step, "soap", shapes, c=False)
    cases = []
    for what, period in (("all refreshed", 1), ("none refreshed", NEVER)):
        options = GRAFTED | {"precondition_frequency": period, "stagger": False}
        cases.append(Case("6m", f"Shampoo, Adam's grafting, {what}", size, partial(grafted, options, ("Meta",))))
        options = WHOLE | {"precondition_frequency": period, "stagger": False}
        cases.append(Case(18, f"SOAP, whole dimensions, {what}", size, partial(soap, options, SOAPS)))
    return cases


def kl_shampoo_cases(size, shapes, targets):
    make = partial(step, "kl_shampoo", shapes)
    never, always = {"precondition_frequency": NEVER, "stagger": False}, {"precondition_frequency": 1}
    return [
        Case(45, "KL-Shampoo step, no refresh", size, partial(make, never, ()), targets[0]),
        Case(46, "KL-Shampoo step, all roots refreshed", size, partial(make, always, (), c=False), targets[1]),
    ]


def soap_case(size, shapes, target=None):
    options = SOAP | {"precondition_frequency": 1}
    work = "SOAP step, basis tracked every step"
    make = partial(step, "soap", shapes, options, ("plain PyTorch SOAP",), capture=True)
    return Case(8, work, size, make, target)


def adamw_cases(size, shapes, target=None, limit=None):
    anchors = ("torch fused", "torch foreach")
    cases = [Case(10, "AdamW step", size, partial(step, "adamw", shapes, ADAMW, anchors, capture=True), target, limit)]
    checked = partial(step, "adamw", shapes, ADAMW | {"nonfinite": "skip"}, ())
    cases.append(Case("10+", "the same, gradients checked", size, checked, slow=True))
    for dtype, peers in (("bfloat16", ()), ("int8", ("bitsandbytes, 8 bits",))):
        options = ADAMW | {"state_dtype": dtype}
        cases.append(Case(24, f"the same, state in {dtype}", size, partial(step, "adamw", shapes, options, peers)))
    return cases


def muon_cases(size, shapes, target=None, limit=None):
    cases = [Case(9, "Muon step", size, partial(step, "muon", shapes, MUON, MUONS, capture=True), target, limit)]
    for method in ("polar_express", "muon"):
        make = partial(step, "muon", shapes, MUON | {"method": method}, ())
        cases.append(Case("9+", f"the same, method {method}", size, make, slow=True))
    return cases


def gpu_cases():
    whole98 = {"lr": 1e-3, "max_preconditioner_dim": 10000, "eps": 0.0, "betas": (0.9, 0.95)}
    cases = [
        *adamw_cases("GPT-2", GPT2, 0.75, 0.57),
        *adamw_cases("Llama-1B", LLAMA, 6.2, 5.5),
        *muon_cases("GPT-2", GPT2, 6.0, 3.0),
        *muon_cases("Llama-1B", LLAMA, 45.0, 30.0),
        *shampoo_cases("GPT-2", GPT2, (6.0, 90.0, 15.0), (2.0, 43.0, 7.0)),
        soap_case("GPT-2", GPT2, 60.0),
        *kl_shampoo_cases("GPT-2", GPT2, (3.2, 18.0)),
        *kl_shampoo_cases("Llama-1B", LLAMA, (24.0, 190.0)),
        *peer_cases("GPT-2", GPT2),
    ]
    for share in (0.15, 0.05):
        cases.append(Case(16, f"refresh within {share:.0%} of the state", "GPT-2", partial(refresh, GPT2, share)))
    cases += [
        Case(19, "SOAP in blocks, every 10 steps, slowest", "GPT-2", partial(periodic, "soap", GPT2, SOAP)),
        Case(20, "SOAP, whole dimensions, every 10 steps", "GPT-2", partial(periodic, "soap", GPT2, WHOLE)),
        Case(21, "Shampoo, whole dimensions, every 10 steps", "98 M", partial(periodic, "shampoo", GPT98M, whole98)),
    ]
    for form, options in FORMS.items():
        always = partial(step, "shampoo", LLAMA, options | {"precondition_frequency": 1}, (), c=False)
        cases.append(Case(22, f"Shampoo, all roots{form}", "Llama-1B", always, slow=True))
        often = partial(periodic, "shampoo", LLAMA, options)
        cases.append(Case(22, f"Shampoo, every 10 steps{form}", "Llama-1B", often, slow=True))
    return cases


def cpu_cases():
    many, large, eight = 200 * [(1000,)], [(4096, 4096), (4096,)], 8 * [(1024, 1024)]
    sizes = (("MLP", MLP), ("200 x 1000", many), ("4096^2", large), ("8 x 1024^2", eight))
    cases = [case for size, shapes in sizes for case in adamw_cases(size, shapes, 1.0)]
    cases += muon_cases("MLP", MLP)
    for size, shapes in (("64 to 128", SMALL), ("MLP", MLP)):
        cases += shampoo_cases(size, shapes)
    peers = [*peer_cases("GPT of 192", GPT192), *muon_cases("GPT of 192", GPT192)]
    return [*cases, soap_case("MLP", MLP), *(dataclasses.replace(case, slow=True) for case in peers)]
