"""Views are reversible, and a fused, transposed or interleaved parameter is trained as its parts alone."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot import views
from surefoot.views import (
    AlternatingStack,
    Convolution,
    Fused,
    FusedStack,
    Grouped,
    Interleaved,
    Matrix,
    OneBlock,
    PerHead,
    Projections,
    Rows,
    Stack,
    Transposed,
    TransposedConvolution,
    Vector,
)

FITTING = {
    "matrix": (Matrix(), (6, 4)),
    "stack": (Stack(), (2, 3, 6, 4)),
    "rows": (Rows(), (1, 5, 4)),
    "fused": (Fused(3), (12, 4)),
    "fused bias": (Fused(3), (12,)),
    "vector": (Vector(), (3, 2)),
    "convolution": (Convolution(2), (8, 3, 5, 5)),
    "projections": (Projections((8, 2, 4)), (14, 5)),
    "projections' bias": (Projections((8, 2, 4)), (14,)),
    "interleaved": (Interleaved(2, 3), (24, 5)),
    "interleaved bias": (Interleaved(2, 3), (24,)),
    "grouped": (Grouped(2, (4, 1, 2)), (14, 5)),
    "grouped bias": (Grouped(2, (4, 1, 2)), (14,)),
    "fused experts": (FusedStack(2), (3, 8, 5)),
    "fused experts' biases": (FusedStack(2), (3, 8)),
    "experts' biases": (FusedStack(1), (3, 8)),
    "alternating experts": (AlternatingStack(2), (3, 8, 5)),
    "alternating experts' biases": (AlternatingStack(2), (3, 8)),
    "transposed alternating experts": (Transposed(AlternatingStack(2)), (3, 5, 8)),
    "transposed convolution": (TransposedConvolution(2), (8, 3, 5, 2)),
    "transposed": (Transposed(), (4, 6)),
    "transposed projections": (Transposed(Projections((8, 2, 4))), (5, 14)),
    "transposed experts": (Transposed(Stack()), (3, 4, 6)),
    "heads": (PerHead(3, Matrix()), (6, 4)),
    "heads of projections": (PerHead(2, Projections((8, 2, 4))), (14, 5)),
    "heads of a bias": (PerHead(2, Interleaved(2, 3)), (24,)),
    "heads, values whole": (PerHead(2, Fused(3), values=False), (12, 5)),
    "heads of projections, values whole": (PerHead(2, Transposed(Projections((8, 2, 2))), values=False), (5, 12)),
    "heads, transposed": (PerHead(2, Transposed(Fused(3))), (5, 12)),
}
all_views = pytest.mark.parametrize(("view", "shape"), FITTING.values(), ids=FITTING.keys())


@all_views
def test_split_and_join_are_inverse(view, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks = view.split(x)
    assert tuple(tuple(block.shape) for block in blocks) == view.blocks(shape)
    assert torch.equal(view.join(blocks, shape), x)
    assert sum(block.numel() for block in blocks) == x.numel()


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (Matrix(), (2, 3, 4)),
        (Stack(), (3, 4)),
        (Fused(3), (10, 4)),
        (Projections((4, 2)), (7, 4)),
        (Projections((4, 2)), (6, 4, 1)),
        (Interleaved(4, 3), (18, 4)),
        (Grouped(2, (4, 1)), (11, 4)),
        (FusedStack(2), (3, 7, 4)),
        (FusedStack(2), (8,)),
        (AlternatingStack(2), (3, 7)),
        (TransposedConvolution(3), (8, 3, 5)),
        (TransposedConvolution(1), (8, 3)),
        (PerHead(4, Matrix()), (6, 4)),
        (PerHead(0, Matrix()), (6, 4)),
        (Transposed(), (4,)),
        (Transposed(Projections((4, 2))), (6, 4)),
    ],
    ids=repr,
)
def test_a_view_that_does_not_fit_names_the_shape(view, shape):
    with pytest.raises(ValueError, match=str(shape[0])):
        view.blocks(shape)


@pytest.mark.parametrize("base", [OneBlock, Matrix, FusedStack])
@pytest.mark.parametrize("name", ["blocks", "split", "join"])
def test_a_reshape_whose_split_or_join_is_overridden_is_refused(base, name):
    """Like parameters are stacked and split by one reshape: such an override would not be called."""
    with pytest.raises(TypeError, match=rf"Mine\.{name}.*subclass View"):
        type("Mine", (base,), {name: lambda *args: None})
    mixin = type("Mixin", (), {name: lambda *args: None})
    with pytest.raises(TypeError, match=rf"Mine\.{name}.*subclass View"):
        type("Mine", (mixin, base), {})


@pytest.mark.parametrize("base", [Interleaved, Projections, Transposed, PerHead])
@pytest.mark.parametrize("name", ["split", "join"])
def test_a_view_that_overrides_split_or_join_alone_is_refused(base, name):
    """What one of them permutes the other must permute back, or a step of 0 would change the weight."""
    with pytest.raises(TypeError, match=f"Mine overrides {name} alone"):
        type("Mine", (base,), {name: lambda *args: None})
    both = type("Mine", (base,), {"split": base.split, "join": base.join})
    assert issubclass(both, base)


def rows(n, start):
    """`(n, 2)`, rows with one distinct value per row."""
    return torch.arange(start, start + n).float()[:, None].expand(n, 2)


ROWS = {
    "grouped": (
        Grouped(2, (2, 1)),
        torch.cat([rows(2, 0), rows(1, 10), rows(2, 2), rows(1, 11)]),
        ([0, 1, 2, 3], [10, 11]),
    ),
    "fused": (
        FusedStack(2),
        torch.stack([torch.cat([rows(2, 10 * e), rows(2, 10 * e + 5)]) for e in range(2)]),
        ([[0, 1], [5, 6], [10, 11], [15, 16]],),
    ),
    "alternating": (
        AlternatingStack(2),
        torch.stack([rows(4, 10 * e) for e in range(2)]),
        ([[0, 2], [1, 3], [10, 12], [11, 13]],),
    ),
}


@pytest.mark.parametrize(("view", "x", "expected"), ROWS.values(), ids=ROWS.keys())
def test_every_projection_gets_its_own_rows(view, x, expected):
    for block, values in zip(view.split(x), expected, strict=True):
        assert block[..., 0].squeeze(0).tolist() == values


LAYOUTS = {
    "projections": (Projections((16, 4, 4)), lambda q, k, v: torch.cat([q, k, v])),
    "transposed projections": (Transposed(Projections((16, 4, 4))), lambda q, k, v: torch.cat([q, k, v]).mT),
    "grouped": (
        Grouped(2, (8, 2, 2)),
        lambda q, k, v: torch.cat([x for i in range(2) for x in (q.chunk(2)[i], k.chunk(2)[i], v.chunk(2)[i])]),
    ),
}


ROLES = {
    "linear": sf.recipes.beyond_mup().role("linear"),
    "head": sf.recipes.beyond_mup().role("head"),
    "moonlight": sf.recipes.muon(sf.Moonlight()).role("linear"),  # whose scale depends on the shape
}


@combinations(
    pairs=True,
    layout=list(LAYOUTS),
    stabiliser=[sf.Free(), sf.PostClip(0.5), sf.StreamingPostClip(0.5, 2)],
    role=list(ROLES),
)
def test_grouped_queries_fused_are_trained_as_three_parameters(layout, stabiliser, role):
    """Unequal blocks: every block has its own norm, scale, radius unit and state; through a resume in the middle."""
    (view, fuse), role = LAYOUTS[layout], replace(ROLES[role], stabiliser=stabiliser)
    generator = torch.Generator().manual_seed(1)
    parts = [nn.Parameter(torch.randn(n, 12, generator=generator) / 4) for n in (16, 4, 4)]
    whole = nn.Parameter(fuse(*(p.detach() for p in parts)).clone())
    split = sf.SteepestDescent([{"params": parts, "role": role}], lr=0.1)
    fused = sf.SteepestDescent([{"params": [whole], "role": replace(role, view=view)}], lr=0.1)
    for step in range(30):
        gradients = [torch.randn(p.shape, generator=generator) for p in parts]
        for p, g in zip(parts, gradients, strict=True):
            p.grad = g
        whole.grad = fuse(*gradients).clone()
        split.step()
        fused.step()
        torch.testing.assert_close(whole.detach(), fuse(*(p.detach() for p in parts)), rtol=0, atol=2e-5)
        if step == 15:
            state = copy.deepcopy(fused.state_dict())
            fused = sf.SteepestDescent([{"params": [whole], "role": replace(role, view=view)}], lr=0.1)
            fused.load_state_dict(state)
    ours, theirs = fused.stability(), split.stability()
    for i in range(3):
        assert ours[f"group0.0[{i}]"]["forward_lower"] == pytest.approx(
            theirs[f"group0.{i}"]["forward_lower"], rel=1e-2
        )


def test_a_norm_per_head_trains_each_head_as_a_parameter_of_its_own():
    generator = torch.Generator().manual_seed(1)
    role = sf.recipes.muon(sf.Moonlight()).role("linear")  # whose scale depends on the shape
    whole = nn.Parameter(torch.randn(12, 8, generator=generator))
    heads = [nn.Parameter(rows.clone()) for rows in whole.detach().split(4)]
    fused = sf.SteepestDescent([{"params": [whole], "role": sf.per_head(4)(role)}], lr=0.1)
    split = sf.SteepestDescent([{"params": heads, "role": role}], lr=0.1)
    for _ in range(5):
        whole.grad = torch.randn(12, 8, generator=generator)
        for p, g in zip(heads, whole.grad.split(4), strict=True):
            p.grad = g.clone()
        fused.step()
        split.step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in heads]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("head_dim", [0, -4, 16.0, "a", True])
def test_a_head_is_a_whole_number_of_rows(head_dim):
    with pytest.raises(ValueError, match="must be a positive integer"):
        sf.per_head(head_dim)


def test_a_gradient_that_is_not_finite_in_one_block_stops_them_all():
    whole = nn.Parameter(torch.randn(24, 12))
    role = replace(sf.recipes.beyond_mup().role("linear"), view=Projections((16, 4, 4)))
    optimizer = sf.SteepestDescent([{"params": [whole], "role": role}], lr=0.1)
    before = whole.detach().clone()
    whole.grad = torch.randn(24, 12)
    whole.grad[20, 3] = float("nan")
    optimizer.step()
    assert torch.equal(whole, before)
    assert optimizer.skipped() == {"group0.0": 1}


def test_initial_values_and_the_table_follow_the_blocks():
    model = nn.Linear(12, 24, bias=False)
    role = replace(sf.recipes.beyond_mup().role("linear"), view=Projections((16, 4, 4)))
    plan = sf.Plan.of(model, overrides=[("weight", role)])
    plan.initialise_(model, seed=0)
    for rows, size in zip(model.weight.detach().split([16, 4, 4]), (16, 4, 4), strict=True):
        expected = (size / 12) ** 0.5 / (size**0.5 + 12**0.5)
        assert float(rows.std()) == pytest.approx(expected, rel=0.35)
    row = plan.rows()[0]
    assert (row["layout"], row["fan in"], row["fan out"]) == ("Projections(sizes=(16, 4, 4))", "12", "16, 4")


def test_public_views():
    assert {"Fused", "Interleaved", "Projections", "Transposed"} <= set(dir(views))
