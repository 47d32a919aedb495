"""Bounds of blocks go by activations that are known, never by what a batch shows, and nothing exceeds them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from combinations import combinations
from surefoot.monitor.block_bounds import LIPSCHITZ, block_bounds

KNOWN = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "softsign": F.softsign,
    "relu of tanh": lambda x: F.relu(torch.tanh(x)),
    "none": lambda x: x,
    "times itself": lambda x: x * F.relu(x),  # in a plain MLP, a gate by the same layer
} | {f"nn.{kind.__name__}": kind() for kind in LIPSCHITZ}
KINDS = ["two in one", "plain", "gated"]
UNKNOWN = {
    "10 relu": lambda x: 10 * F.relu(x),
    "steep far from 0": lambda x: torch.where(x > 3, 10 * x - 27, F.relu(x)),
    "by its values": lambda x: F.relu(x) if x.max() < 3 else 10 * F.relu(x),
    "square": lambda x: F.relu(x).square(),
    "leaky": lambda x: F.leaky_relu(x, 3.0),
    "not 0 at 0": torch.sigmoid,
    "dropout that stays": lambda x: F.dropout(F.relu(x), 0.9),
    "written to": lambda x: F.relu(x.mul_(10)),
    "written to and returned": lambda x: (x.mul_(10), F.relu(x))[1],
    "times itself twice": lambda x: x * F.relu(x) * x,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Mlp(nn.Module):
    """`down(act(up(x)))`, or gated, by names of its own."""

    def __init__(self, act, kind: str) -> None:
        super().__init__()
        inner = 12 * (2 if kind == "two in one" else 1)
        self.one, self.last, self.kind = nn.Linear(6, inner), nn.Linear(12, 6), kind
        self.two = nn.Linear(6, 12) if kind == "gated" else None
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "two in one":
            a, b = self.one(x).chunk(2, dim=-1)
            return self.last(self.act(a) * b)
        h = self.act(self.one(x))
        return self.last(h if self.two is None else self.two(x) * h)


def changed(module: nn.Module, scale: float) -> nn.Module:
    """A copy with other weights."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.add_(scale * torch.randn(p.shape, generator=seeded(i)))
    return module


def climbed(value, x: Tensor, steps: int = 40) -> float:
    """The largest value by ascent over inputs of RMS at most 1."""
    best = 0.0
    for step in range(steps):
        x = (x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1)).detach().requires_grad_()
        values = value(x)
        best = max(best, float(values.detach().max()))
        (gradient,) = torch.autograd.grad(values.sum(), x)
        x = x.detach() + gradient / gradient.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12) / (1 + step / 10)
    return best


def rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1) + 1e-300).sqrt()


def reached(new: nn.Module, old: nn.Module) -> dict[str, float]:
    """By ascent in float64, from many inputs: what the bounds are of."""
    new, old = (copy.deepcopy(module).double().eval() for module in (new, old))
    x = 2 * torch.randn(256, 6, generator=seeded(), dtype=torch.float64)
    short = 1e-4 * F.normalize(torch.randn(256, 6, generator=seeded(1), dtype=torch.float64), dim=1)
    apart = climbed(lambda x: rms(new(0.999 * x + short) - new(0.999 * x)) / rms(short), x)
    forward, update = climbed(lambda x: rms(new(x)), x), climbed(lambda x: rms(new(x) - old(x)), x)
    return {"forward_bound": forward, "dependency_bound": apart, "update_bound": update}


@combinations(name=[*KNOWN], kind=KINDS)
def test_an_mlp_with_a_known_activation_is_bounded_whatever_its_layers_are_called(name, kind):
    torch.manual_seed(0)
    new = changed(Mlp(copy.deepcopy(KNOWN[name]), kind), 0.5).eval()
    old = changed(new, 0.2)
    bounds = block_bounds(new, old)
    if (kind != "plain" and name == "times itself") or (
        kind == "gated" and any(getattr(m, "inplace", False) for m in new.modules())
    ):
        assert not bounds
        return
    found = reached(new, old)
    assert bounds.keys() == found.keys()
    for key, value in found.items():
        assert value <= bounds[key] * (1 + 1e-6) <= 60 * value, key


@combinations(name=[*UNKNOWN], kind=KINDS)
def test_an_activation_that_is_not_known_has_no_bound_on_any_batch(name, kind):
    torch.manual_seed(0)
    new = Mlp(UNKNOWN[name], kind)
    plan = sf.Plan.of(new)
    for x in (torch.zeros(3, 6), torch.ones(3, 6), torch.randn(3, 6), torch.randn(1, 6)):
        numbers = sf.measure(new, x, before=changed(new, 0.1), plan=plan, names=[""])[""]
        assert not any("bound" in key for key in numbers)


class Named(nn.Module):
    """Ten times what its names promise; on zeros nobody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(10 * F.relu(self.up(x)))


def test_an_mlp_measured_on_zeros():
    torch.manual_seed(0)
    model = Named()
    numbers = sf.measure(model, torch.zeros(4, 16), plan=sf.Plan.of(model), names=[""])[""]
    x = torch.randn(256, 16, generator=seeded())
    forward = climbed(lambda x: rms(model(x)), x)
    assert forward > 2
    assert forward <= numbers.get("forward_bound", math.inf)


@pytest.mark.parametrize(
    "change", ["patched activation", "patched layer", "subclass", "other slope before", "side effect"]
)
def test_a_class_that_is_known_must_compute_what_it_is_known_for(change):
    class Steep(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return 10 * super().forward(x)

    new = Mlp(nn.ReLU(), "plain")
    old = copy.deepcopy(new)
    assert block_bounds(new, old)
    if change == "patched activation":
        new.act.forward = lambda x: 10 * F.relu(x)
    elif change == "patched layer":
        new.one.forward = lambda x: 10 * F.linear(x, new.one.weight, new.one.bias)
    elif change == "subclass":
        new.act = Steep()
    elif change == "other slope before":
        old.act = nn.GELU()
    else:
        new.forward = lambda x: (new.one.weight.mul_(2), new.last(new.act(new.one(x))))[1]
    assert not block_bounds(new, old)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_have_no_bound(value):
    blocks = [nn.Linear(6, 6), nn.LayerNorm(6), nn.MultiheadAttention(6, 2), nn.Sequential(nn.Linear(6, 6), nn.ReLU())]
    for block in (*blocks, Mlp(nn.ReLU(), "plain")):
        assert block_bounds(block)
        with torch.no_grad():
            next(block.parameters()).view(-1)[0] = value
        assert not block_bounds(block)


def test_a_norms_change_is_not_lost_in_bfloat16():
    old, new = (nn.LayerNorm(4).bfloat16() for _ in range(2))
    with torch.no_grad():
        old.weight.fill_(-0.00390625)
    assert block_bounds(new, old)["update_bound"] == pytest.approx(1.00390625, rel=1e-6)


@pytest.mark.parametrize("kind", [k for k in LIPSCHITZ if k is not nn.Dropout])
def test_no_slope_is_above_its_constant_and_the_constant_is_not_loose(kind):
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kind()(x).sum(), x)
    assert LIPSCHITZ[kind] - 2e-3 < float(slope.abs().max()) <= LIPSCHITZ[kind]
    assert float(kind()(torch.zeros(()))) == 0
