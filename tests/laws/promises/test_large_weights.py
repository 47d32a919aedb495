"""Weights and radii at the end of the range of floats: refused by name, before anything is written."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.stabilise import Free

from .roles import KINDS

BOUNDED = (sf.PostClip, sf.Rescale, sf.Normalise, sf.SpectralSphere, sf.Stiefel, sf.RowSphere, sf.ColumnSphere)
DECAYING = (sf.WeightDecay, sf.PreDecay, sf.StreamingPreDecay)


@pytest.mark.parametrize("scheme", [*BOUNDED, *DECAYING, sf.StreamingPostClip], ids=lambda scheme: scheme.__name__)
@pytest.mark.parametrize("norm", [3.4e38, 1e38, 1e20])
def test_a_radius_whose_square_overflows_is_refused(scheme, norm):
    decay = scheme in DECAYING
    with pytest.raises(ValueError, match=f"{scheme.__name__}'s {'rate' if decay else 'radius'}, .*overflow"):
        scheme(1 / norm if decay else norm)


@combinations(
    scheme=[scheme(0.5) for scheme in (*BOUNDED, *DECAYING)] + [Free(), sf.contrib.CautiousDecay(0.5), sf.Hyperball()],
    kind=list(KINDS),
    size=[1e17, 1e30, 1e38, 3.4e38],
)
def test_weights_whose_squares_overflow_are_refused_by_name(scheme, kind, size):
    p = nn.Parameter(torch.full(KINDS[kind], -size))
    role = replace(recipes.lion().role(kind), stabiliser=scheme)
    optimizer = sf.SteepestDescent([{"params": [("deep.weight", p)], "role": role}], lr=0.01)
    assert not any(math.isnan(x) for x in optimizer.stability()["deep.weight"].values())
    p.grad = torch.randn(KINDS[kind])
    with pytest.raises(ValueError, match=r"deep.weight has weights up to .* overflow"):
        optimizer.step()
    assert torch.equal(p, torch.full_like(p, -size))


def test_a_plan_relative_to_such_weights_names_them():
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.mul_(1e30)
    with pytest.raises(ValueError, match=r"weight's norm, .*overflow"):
        sf.Plan.of(model, stabiliser=sf.PostClip(1.2)).relative_to(model)
