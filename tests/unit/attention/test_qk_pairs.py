"""Pairs of W_q and W_k: discovered by attributes, bounded, and scaled in every layout."""

import math

import pytest
import torch
from attention_helpers import Eager, llama, random
from torch import nn

from surefoot.attention import logits
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.qk_pairs import Projection, QueryKey, find_pairs
from surefoot.views import Fused, Interleaved, Projections


@pytest.mark.parametrize("width", [16, 64, 256])
def test_the_bound_is_attained_and_the_same_at_every_width(width):
    layer = nn.Linear(width, 32, bias=False)
    generator = torch.Generator().manual_seed(0)
    for rows in layer.weight.data.split(8):
        nn.init.orthogonal_(rows, gain=math.sqrt(8 / width), generator=generator)  # norm 1 in natural units
    pair = QueryKey(Projection(layer), Projection(layer), head_dim=8, scale=1 / math.sqrt(8))
    torch.testing.assert_close(pair.bound(), torch.full((4,), math.sqrt(8)))
    torch.testing.assert_close(pair.bound(input_rms=2.0), torch.full((4,), 4 * math.sqrt(8)))
    for head in range(4):
        rows = layer.weight.detach()[8 * head : 8 * head + 8]
        x = rows.T @ random(8) / math.sqrt(8 / width)
        x = x / x.square().mean().sqrt()
        logit = (rows @ x) @ (rows @ x) / math.sqrt(8)
        torch.testing.assert_close(float(logit), math.sqrt(8), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("view", "rows"),
    [(Fused(3), [(0, 8), (8, 16)]), (Projections((8, 4, 4)), [(0, 8), (8, 12)]), (Interleaved(2, 3), None)],
    ids=repr,
)
def test_fused_projections_are_scaled_where_their_rows_are(view, rows):
    layer = nn.Linear(6, 24 if rows is None or rows[1][1] == 16 else 16)
    pair = QueryKey(Projection(layer, view, 0), Projection(layer, view, 1), head_dim=4, scale=1.0)
    heads = 2
    factors = pair.factors(torch.tensor([4.0, 1.0]), 1.0)
    query, key = logits.logit_factors(torch.tensor([4.0, 1.0]), 1.0, len(pair.key.rows()["bias"]) // 4)
    wanted = torch.ones(layer.out_features)
    if rows is None:  # (heads, parts, head_dim)
        wanted = wanted.view(heads, 3, 4)
        wanted[:, 0] *= query[:, None]
        wanted[:, 1] *= key[:, None]
        wanted = wanted.flatten()
    else:
        for (start, end), by_head in zip(rows, (query, key), strict=True):
            wanted[start:end] *= by_head.repeat_interleave(4)
    torch.testing.assert_close(factors[layer.bias], wanted)
    torch.testing.assert_close(factors[layer.weight], wanted[:, None].expand_as(layer.weight))
    assert wanted.min() < 1


def test_layers_are_discovered_by_their_attributes():
    assert list(find_pairs(llama())) == ["blocks.0.attention", "blocks.1.attention"]
    pair = find_pairs(llama(kv_heads=2))["blocks.0.attention"]
    assert (pair.head_dim, pair.key.layer.out_features, pair.scale) == (8, 16, pytest.approx(8**-0.5))


def test_a_layer_that_does_not_declare_its_heads_raises():
    model = nn.ModuleDict({"known": Eager(), "unknown": Eager()})
    del model["unknown"].head_dim
    with pytest.raises(ValueError, match=r"unknown \(Eager\) has W_q and W_k, but no attribute head_dim"):
        LogitControl(model)


def test_bounds_need_the_scale_of_the_logits_and_measuring_does_not():
    model = nn.ModuleDict({"known": Eager(), "unknown": Eager()})
    del model["unknown"].scaling
    with pytest.raises(ValueError, match=r"unknown: no attribute `scaling` .* LogitControl\(model, scale="):
        LogitControl(model).bounds()
    control = LogitControl(model, scale=0.25)
    assert [pair.scale for pair in control.pairs.values()] == [0.5, 0.25]
    assert control.bounds().keys() == {"known", "unknown"}
