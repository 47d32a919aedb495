"""A measured dependency is never above the layer's own, whatever the dtypes round and however close two inputs are."""

import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from combinations import combinations
from surefoot.monitor.maxima import largest_ratio

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def nearby(x: Tensor, along: Tensor) -> Tensor:
    """x and inputs from one to three of its last digits away to once its length, along a direction and any other."""
    rows = [x]
    for _ in range(3):
        rows.append(torch.nextafter(rows[-1], torch.full_like(x, math.inf)))
    for far in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0):
        for direction in (along / along.norm(), torch.randn(len(x), generator=seeded()) / math.sqrt(len(x))):
            rows.append((x.double() + far * x.double().norm() * direction).to(x.dtype))
    return torch.stack(rows)


WEIGHTS = {
    "normal": lambda d: torch.randn(d, d, generator=seeded()) / math.sqrt(d),
    "identity": torch.eye,
    "ones": lambda d: torch.ones(d, d) / d,
}


@combinations(
    lambda dtype, weight, d, bias: d < 100 or dtype is torch.bfloat16,
    dtype=DTYPES,
    weight=list(WEIGHTS),
    d=[1, 4, 64, 256],
    bias=[0.0, 1.0, 1e3],
)
def test_a_linear_layer_reaches_its_norm_and_no_more(dtype, weight, d, bias):
    layer = nn.Linear(d, d).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(WEIGHTS[weight](d))
        layer.bias.copy_(bias * torch.randn(d, generator=seeded()))
    matrix = layer.weight.detach().double()
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    for size in (1e-6, 1.0, 1e3):
        for x in (torch.ones(d), torch.randn(d, generator=seeded())):
            found = sf.measure(layer, nearby((size * x).to(dtype), torch.linalg.svd(matrix).Vh[0]))[""]
            assert found.get("dependency", 0.0) <= norm * (1 + 1e-9)
            if bias == 0 and size == 1:
                assert found["dependency"] >= 0.9 * norm


def test_inputs_that_differ_in_their_last_digit_measure_no_rounding():
    """It was 8 where the norm is 1.12."""
    layer = nn.Linear(16, 16).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(1.12 * torch.eye(16))
        layer.bias.fill_(5.0)
    x = (1 + torch.arange(8)[:, None].expand(8, 16) / 128).bfloat16()  # the last digit
    apart, changed = ((z[1:] - z[:-1]).float().norm(dim=1) for z in (x, layer(x).detach()))
    assert float((changed / apart).max()) > 3
    x = torch.cat([x, -2 * x])
    assert 0.9 < sf.measure(layer, x)[""]["dependency"] <= float(layer.weight.detach().max())


class Casts(nn.Module):
    """float32 outside, half precision inside, by autocast."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.inside(x)
        return y.float()


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("bias", [0.0, 5.0])
def test_autocast_rounds_too(outside, bias):
    layer = nn.Linear(32, 32)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(32))
        layer.bias.fill_(bias)
    model, x = Casts(layer), nearby(torch.randn(32, generator=seeded()), torch.ones(32))
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        measured = sf.measure(model, x, names=[""])
    assert all(0.5 < numbers["dependency"] <= 1 for numbers in measured.values())


@combinations(lambda dtype, depth, bias: True, dtype=DTYPES[:3], depth=[2, 4], bias=[0.0, 1.0])
def test_a_sequence_stays_below_its_bound(dtype, depth, bias):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.copy_(torch.ones(16, 16) / 16)
            layer.bias.copy_(bias * torch.randn(16, generator=seeded()).abs())
    model = model.to(dtype)
    x = nearby(torch.ones(16).to(dtype), torch.ones(16))
    numbers = sf.measure(model, x, plan=sf.Plan.of(model), names=[""])[""]
    assert 0.8 * numbers["dependency_bound"] < numbers["dependency"] <= numbers["dependency_bound"]


def test_indices_differ_however_large_they_are():
    y = torch.tensor([[1.0], [3.0]])
    assert largest_ratio(torch.tensor([10**7, 10**7 + 1]), y, by_vector=False) == pytest.approx(2.0, rel=1e-4)
    assert largest_ratio(torch.tensor([10**7, 10**7]), y, by_vector=False) is None


def test_the_smallest_input_is_that_of_all_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(0.5 * x) + self.layer(x)

    x = torch.tensor([[1.0] * 4, [3.0] * 4])
    numbers = sf.measure(Twice(), x)["layer"]
    assert (numbers["input_smallest"], numbers["input"]) == (0.5, 3.0)
    assert math.isnan(sf.measure(Twice(), x * math.nan)["layer"]["input_smallest"])
