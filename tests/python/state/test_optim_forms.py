"""Storage forms of state: factors and roots as lower triangles (`packed_factors`), roots in bfloat16 (`root_dtype`),
moments in bfloat16 and in eight bits (`state_dtype`): their names, shapes and types, and checkpoints of one form in an
optimizer of another. C tests compare the steps of each form (tests/optim)."""

import copy

import pytest
import torch
import torchium
from optim_cases import CLASSES, LIVELY, SECOND_ORDER, assert_same_bits, through_file
from torchium.optim._engine.moments import decode, encode

# --- factors and roots

MATRICES = {
    "shampoo": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 8, "relative_eps": 1e-3},
    "soap": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 8, "block": True},
    "kl_shampoo": {"lr": 0.02, "precondition_frequency": 2, "max_preconditioner_dim": 8, "relative_eps": 1e-3},
}


def one_matrix(kind, device, **more):
    """World-invariant and of even sizes, so that a GPU's libraries see one aligned matrix at a time in either form."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 16, bias=False).to(device)
    return model, CLASSES[kind](model.parameters(), **(MATRICES[kind] | {"world_invariant": device != "cpu"} | more))


def matrix_steps(model, optimizer, count, first=0):
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + i)
        model.weight.grad = torch.randn(16, 24, generator=generator).to(model.weight.device)
        optimizer.step()


def in_another_form(kind, device, form, other, **more):
    """After three steps in one form, the state in an optimizer of another form: the saved options determine the form,
    and the state follows if they are changed back."""
    model, optimizer = one_matrix(kind, device, **form, **more)
    matrix_steps(model, optimizer, 3)
    saved = through_file(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.update(other)
    twin, following = one_matrix(kind, device, **other, **more)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    following.load_state_dict(saved)
    return model, optimizer, twin, following


def assert_matrices_go_on_alike(model, optimizer, twin, other):
    matrix_steps(model, optimizer, 4, first=3)
    matrix_steps(twin, other, 4, first=3)
    assert_same_bits([twin.weight], [model.weight])


@pytest.mark.parametrize("to", [False, True])
@pytest.mark.parametrize("kind", MATRICES)
def test_packed_and_whole_factors_are_exchanged(kind, to, device):
    pairs = in_another_form(kind, device, {"packed_factors": not to}, {"packed_factors": to})
    assert pairs[3].state[pairs[2].weight]["factor.0.0"].dim() == (1 if to else 2)
    assert_matrices_go_on_alike(*pairs)


def test_what_does_not_fit_is_named(device):
    model, optimizer = one_matrix("shampoo", device)
    matrix_steps(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["factor.0.0"] = torch.ones(5, device=device)
    with pytest.raises(ValueError, match=r"factor\.0\.0"):
        one_matrix("shampoo", device)[1].load_state_dict(saved)


def lower(matrix):
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


@pytest.mark.parametrize("to", ["float32", "bfloat16", torch.bfloat16])
def test_roots_of_either_type_are_exchanged(to, device):
    """Nothing is refreshed after the first step, so that steps use the loaded state."""
    kept = "bfloat16" if to == "float32" else "float32"
    options = {"precondition_frequency": 1000, "stagger": False}
    pairs = in_another_form("shampoo", device, {"root_dtype": kept}, {"root_dtype": to}, **options)
    root, loaded = (o.state[m.weight]["root.0.0"] for m, o in (pairs[:2], pairs[2:]))
    if to == "float32":
        assert root.dtype == torch.bfloat16
        assert_same_bits([lower(loaded)], [root.float()])
        assert_matrices_go_on_alike(*pairs)
    else:
        assert_same_bits([loaded], [lower(root).bfloat16()])


# --- moments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
# Of v, or of |m| + floor: 254 steps of at most a fourth for 48 octaves, 127 for 24.
HALF_STEP = 1 / 8
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}


def network(device, seed=0):
    """Two matrices that are large enough and vectors that are not; sizes are not multiples of a block."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(61, 97), torch.nn.Tanh(), torch.nn.Linear(97, 53)).to(device)


def steps(model, optimizer, count, first=0):
    device = next(model.parameters()).device
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + i)
        x = torch.randn(16, 61, generator=generator).to(device)
        optimizer.zero_grad()
        (model(x) - x[:, :53]).square().mean().backward()
        optimizer.step()


def moment(optimizer, parameter, name):
    """A moment in float32, from any form."""
    state = optimizer.state[parameter]
    return decode(name, state[name], state[f"{name}_scale"]) if f"{name}_scale" in state else state[name].float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MOMENTS)
def test_types_and_names(kind, dtype, device):
    """Codes have the parameter's shape, small parameters float32, and stored values are near float32's."""
    models = [network(device) for _ in range(2)]
    ours = CLASSES[kind](models[0].parameters(), **LIVELY[kind], state_dtype=dtype)
    plain = CLASSES[kind](models[1].parameters(), **LIVELY[kind])
    steps(models[0], ours, 3)
    steps(models[1], plain, 3)
    for name in MOMENTS[kind]:
        weight, bias = ours.state[models[0][0].weight], ours.state[models[0][0].bias]
        assert weight[name].dtype == DTYPES[dtype]
        assert weight[name].shape == (97, 61)
        assert bias[name].dtype == torch.float32
        assert (f"{name}_scale" in weight) == (dtype == "int8")
        a, b = moment(ours, models[0][0].weight, name), moment(plain, models[1][0].weight, name)
        assert torch.linalg.vector_norm(a - b) <= 0.2 * torch.linalg.vector_norm(b)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_the_rest_of_other_kinds(kind, device):
    model = network(device)
    options = LIVELY[kind] | {"use_adamw": ("0.*",)}
    ours = CLASSES[kind](model.named_parameters(), **options, state_dtype="int8")
    steps(model, ours, 2)
    assert ours.state[model[0].weight]["exp_avg_sq"].dtype == torch.uint8
    assert all(v.dtype != torch.uint8 for v in ours.state[model[2].weight].values())
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_first_moments_of_matrices(kind, dtype, device):
    """Rows that are no whole blocks of codes have bfloat16; a run goes on alike in its own form, and in float32 without
    loss."""
    name = "momentum_buffer" if "muon" in kind else "exp_avg"

    def trained(count, saved=None, weights=None):
        torch.manual_seed(4)
        whole, cut = (torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((24, 256), (70, 65)))
        optimizer = CLASSES[kind]([whole, cut], state_dtype=dtype)
        if saved is not None:
            optimizer.load_state_dict(saved)
            for p, value in zip((whole, cut), weights, strict=True):
                p.data.copy_(value)
        for i in range(3 if saved else 0, count):
            generator = torch.Generator().manual_seed(i)
            whole.grad, cut.grad = (torch.randn(p.shape, generator=generator).to(device) for p in (whole, cut))
            optimizer.step()
        return optimizer, [whole, cut]

    first, weights = trained(3)
    saved = through_file(first.state_dict())
    assert [first.state[p][name].dtype for p in weights] == [DTYPES[dtype], torch.bfloat16]
    ends = trained(6, saved, weights)[1]
    assert_same_bits(ends, trained(6)[1])
    for group in saved["param_groups"]:
        group["state_dtype"] = "float32"
    plain, _ = trained(3, saved, weights)
    for p, q in zip(weights, plain.param_groups[0]["params"], strict=True):
        assert plain.state[q][name].dtype == torch.float32
        assert torch.equal(plain.state[q][name], moment(first, p, name))


def test_values_of_the_option(device):
    model = network(device)
    optimizer = torchium.optim.AdamW(model.parameters(), state_dtype=torch.bfloat16)
    steps(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    for bad in ("float16", "int4", torch.float64, 8):
        with pytest.raises((ValueError, TypeError), match="state_dtype"):
            torchium.optim.AdamW(model.parameters(), state_dtype=bad)
        with pytest.raises((ValueError, TypeError), match="root_dtype"):
            one_matrix("shampoo", device, root_dtype=bad)
    with pytest.raises(ValueError, match=r"state_dtype.*amsgrad"):
        torchium.optim.AdamW(model.parameters(), state_dtype="int8", amsgrad=True)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_are_converted(dtype, to, device):
    """To float32 without loss; to bfloat16 by half a unit of its fraction; to eight bits by half a step (HALF_STEP)."""
    model = network(device)
    first = torchium.optim.AdamW(model.parameters(), state_dtype=dtype)
    steps(model, first, 5)
    saved = through_file(first.state_dict())
    for group in saved["param_groups"]:
        group["state_dtype"] = to
    second = torchium.optim.AdamW(model.parameters())
    second.load_state_dict(saved)
    allowed = 0.0 if to == dtype else {"float32": 0.0, "bfloat16": 2.0**-8, "int8": HALF_STEP}[to]
    for name in MOMENTS["adamw"]:
        for p in model.parameters():
            a, b = moment(first, p, name), moment(second, p, name)
            floor = a.abs().mean() if name == "exp_avg" else 0.0
            least = 2.0**-48 * a.max() if name == "exp_avg_sq" else 0.0  # smaller ones become this
            assert ((a - b).abs() <= allowed * (a.abs() + floor) * 1.001 + least).all()
    steps(model, second, 1)


def test_state_of_torch_optim(device):
    model = network(device)
    theirs = torch.optim.AdamW(model.parameters())
    steps(model, theirs, 3)
    ours = torchium.optim.AdamW(model.parameters(), state_dtype="int8")
    ours.load_state_dict(theirs.state_dict())
    weight = model[0].weight
    assert ours.state[weight]["exp_avg_sq"].dtype == torch.uint8
    torch.testing.assert_close(
        moment(ours, weight, "exp_avg_sq"), theirs.state[weight]["exp_avg_sq"], rtol=HALF_STEP, atol=1e-12
    )
    broken = ours.state_dict()
    del broken["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match="exp_avg"):
        ours.load_state_dict(broken)


def test_other_layouts(device):
    """Codes of a non-contiguous parameter are a row in memory order."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 32, 3, 5, device=device).to(memory_format=torch.channels_last))
    optimizer = torchium.optim.AdamW([weight], state_dtype="int8")
    weight.grad = torch.randn(16, 32, 3, 5, device=device)
    optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].shape == (weight.numel(),)
    kept = decode("exp_avg", state["exp_avg"], state["exp_avg_scale"]).as_strided(weight.shape, weight.stride())
    assert torch.linalg.vector_norm(kept - 0.1 * weight.grad) <= 0.1 * torch.linalg.vector_norm(kept)
    twin = torch.nn.Parameter(weight.detach().clone())
    other = torchium.optim.AdamW([twin])
    other.load_state_dict(through_file(optimizer.state_dict()))
    for p, o in ((weight, optimizer), (twin, other)):
        p.grad = torch.ones_like(p)
        o.step()
    assert_same_bits([weight], [twin])


def test_codes_are_the_nearest():
    """Within half a step of their values, and v above 0 never becomes 0."""
    torch.manual_seed(3)
    for name in ("exp_avg", "exp_avg_sq"):
        values = torch.randn(1001).abs().clamp_min(1e-3) * torch.randn(1001).sign() * 10 ** (4 * torch.rand(1001))
        values = values if name == "exp_avg" else values.square()
        kept = decode(name, *encode(name, values))
        floor = values.abs().mean() if name == "exp_avg" else 0.0
        assert ((kept - values).abs() <= HALF_STEP * (values.abs() + floor)).all()
        assert torch.linalg.vector_norm(kept - values) <= 0.05 * torch.linalg.vector_norm(values)
    tiny, _ = encode("exp_avg_sq", torch.tensor([1.0, 1e-30, 0.0]))
    assert tiny.tolist()[1:] == [1, 0]
