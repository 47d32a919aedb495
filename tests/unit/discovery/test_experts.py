"""Experts, in stacks and in lists, and the routers beside them."""

import math
from dataclasses import replace

import pytest
import torch
from discovery_helpers import Own, kinds, mixture
from torch import nn

import surefoot as sf
from surefoot import Plan
from surefoot.views import AlternatingStack, FusedStack, Stack, Transposed


@pytest.mark.parametrize("transposed", [False, True], ids=["(E, out, in)", "(E, in, out)"])
@pytest.mark.parametrize(
    ("whole", "gated", "view", "count"),
    [(True, True, FusedStack(2), 8), (False, True, AlternatingStack(2), 8), (True, False, Stack(), 4)],
    ids=["gate over up", "gate and up in turn", "no gate"],
)
def test_experts_that_declare_their_layout(transposed, whole, gated, view, count):
    plan = Plan.of(mixture(transposed, whole, gated))
    up = "experts.gate_up_proj" if gated else "experts.up_proj"
    assert plan[up].role.view == (Transposed(view) if transposed else view)
    assert {name: (plan[name].role.name, plan[name].blocks) for name in plan} == {
        up: ("experts", ((count, 6, 5),)),
        "experts.down_proj": ("experts", ((4, 5, 6),)),
        f"{up}_bias": ("bias", ((count, 6),)),
        "experts.down_proj_bias": ("bias", ((4, 5),)),
        "gate.weight": ("router", ((1, 4, 5),)),
    }


@pytest.mark.parametrize(
    ("router", "kind"),
    [
        (Own(weight=torch.randn(4, 5), bias=torch.zeros(4)), "router"),
        (nn.Linear(5, 4), "router"),
        (nn.Linear(5, 3), "linear"),
        (nn.Sequential(nn.Linear(5, 4)), "router"),
        (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)), "linear"),
        (nn.Conv1d(5, 4, 1), "conv"),
    ],
    ids=["bare", "linear", "another count", "in a wrapper", "not alone", "a layer of another kind"],
)
def test_the_router_is_a_sibling_of_its_experts(router, kind):
    plan = Plan.of(mixture(router=router))
    (weight, bias, *_) = [name for name in plan if name.startswith("gate.")]
    assert (plan[weight].role.name, plan[bias].role.name) == (kind, "bias")


def test_a_router_may_hold_a_frozen_row_of_corrections():
    """As ERNIE's; a row that is trained may be anything, and so the module."""
    router = Own(weight=torch.randn(4, 5), statistics=Own(correction=torch.zeros(1, 4)))
    with pytest.raises(ValueError, match=r"cannot place gate.weight \(4, 5\) of Own, gate.statistics.correction"):
        Plan.of(mixture(router=router))
    router.statistics.correction.requires_grad_(False)
    assert Plan.of(mixture(router=router))["gate.weight"].role.name == "router"


def test_a_layout_may_be_declared_in_the_class():
    flags = {"has_gate": True, "is_transposed": False, "is_concatenated": True}
    experts = type("Experts", (Own,), flags)(gate_up_proj=torch.randn(4, 12, 5), down_proj=torch.randn(4, 5, 6))
    assert set(kinds(Own(experts=experts)).values()) == {"experts"}


def test_bare_stacks_are_refused_with_the_word_for_them():
    model = Own(w1=torch.randn(4, 6, 5))
    with pytest.raises(ValueError, match=r"cannot place w1 \(4, 6, 5\) of Own.*\('w1', 'experts'\)"):
        Plan.of(model)
    assert kinds(model, overrides=[("w1", "experts")]) == {"w1": "experts"}


def test_a_stack_that_is_none_of_matrices_is_refused_with_a_word_for_it():
    model = Own(modes=torch.randn(6, 4, 2))  # real and imaginary parts of a state-space layer's outputs
    with pytest.raises(ValueError, match="'scalar' if it acts entry by entry"):
        Plan.of(model)
    assert kinds(model, overrides=[("modes", "scalar")]) == {"modes": "scalar"}


def test_a_list_of_experts_is_linear_layers():
    model = nn.ModuleList(nn.Linear(5, 6, bias=False) for _ in range(4))
    assert set(kinds(model).values()) == {"linear"}


class Noisy(nn.Module):
    """A router of two matrices, the second for its noise."""

    def __init__(self):
        super().__init__()
        self.choose, self.noise = nn.Linear(8, 3), nn.Linear(8, 3)


def listed(**layers):
    """Three experts in a list, and layers beside them: a name with `behind` stands behind the list."""
    mlps = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3))
    before = {name: layer for name, layer in layers.items() if "behind" not in name}
    return Own(**before, several=mlps, **{name: layers[name] for name in layers.keys() - before.keys()})


def routers_of(model):
    plan = Plan.of(model, head=())
    return {name for name in plan if plan[name].role.name == "router"}


ROUTERS = [nn.Linear(8, 3), Own(weight=torch.randn(3, 8)), Noisy(), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))]


@pytest.mark.parametrize("layer", ROUTERS, ids=["linear", "bare", "noisy", "one for each task"])
@pytest.mark.parametrize("name", ["a", "gate_behind", "router_behind"])
def test_what_chooses_among_modules_in_a_list_is_a_router(layer, name):
    model = listed(**{name: layer})
    assert routers_of(model) == {n for n, p in model.named_parameters() if n.startswith(name) and p.ndim > 1}
    why = Plan.of(model, head=())[next(n for n in routers_of(model))].why
    assert why.startswith("router ")
    assert ("by the name" in why) == ("behind" in name)


def test_what_stands_behind_experts_in_a_block_is_a_router_under_any_name():
    blocks = nn.ModuleList(listed(behind=nn.Linear(8, 3)) for _ in range(6))
    assert routers_of(blocks) == {f"{i}.behind.weight" for i in range(6)}
    assert "one of 6 branches" in Plan.of(blocks, head=())["2.several.1.2.weight"].why


@pytest.mark.parametrize(
    "layers",
    [
        {"behind": nn.Linear(8, 3)},  # classes
        {"inp": nn.Linear(5, 3), "gate": nn.Linear(3, 8), "up": nn.Linear(8, 4), "gate_behind": nn.Linear(16, 3)},
        {"gate": nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 3)), "table_behind": nn.Embedding(3, 8)},
        {"score": nn.Linear(4, 1), "one": nn.ModuleList([nn.Linear(4, 4)])},
        {"weighted": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))},
    ],
    ids=["a head behind blocks", "of other sizes", "two layers, a table", "before one module", "a parametrization"],
)
def test_what_is_no_router_of_a_list(layers):
    if "weighted" in layers:
        with pytest.raises(ValueError, match="cannot place weighted"):
            routers_of(listed(**layers))
    else:
        assert routers_of(listed(**layers)) == set()


def test_every_expert_takes_a_step_of_one_norm_in_gate_and_up():
    model = mixture(transposed=True, whole=False)
    weight = model.experts.gate_up_proj
    before = weight.detach().clone()
    override = ("experts.gate_up_proj", lambda role: replace(role, geometry=sf.Spectral("svd")))
    plan = Plan.of(model, sf.recipes.beyond_mup(), overrides=[override])
    scale = torch.tensor([1.0, 1e-3, 1e3, 0.0])[:, None, None]  # one norm over the stack would let the third rule
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    weight.grad *= scale
    sf.SteepestDescent(model, plan, lr=0.5).step()
    change = (weight.detach() - before).double()
    for e in range(4):
        for part in (change[e, :, 0::2], change[e, :, 1::2]):
            norm = float(torch.linalg.matrix_norm(part, 2)) * math.sqrt(5 / 6)
            assert norm == pytest.approx(0.0 if e == 3 else 0.5, abs=1e-3)


def test_a_table_of_as_many_rows_as_experts_is_no_router():
    model = mixture()
    model.table = nn.Embedding(4, 5)
    assert kinds(model, head=())["table.weight"] == "embedding"


class Bare(nn.Module):
    """Experts under names that say nothing, and a router beside them."""

    def __init__(self, transposed=False):
        super().__init__()
        self.transposed, stacks = transposed, (torch.randn(4, 5, 6), torch.randn(4, 6, 5))
        self.w1, self.w2 = (nn.Parameter(x.mT.contiguous() if transposed else x) for x in stacks)
        self.gate = nn.Linear(6, 4)

    def forward(self, x):
        w1, w2 = (self.w1, self.w2) if self.transposed else (self.w1.mT, self.w2.mT)
        each = x.reshape(1, -1, 6).expand(4, -1, -1) @ w1
        return torch.einsum("etd,te->td", each.relu() @ w2, self.gate(x).softmax(-1).reshape(-1, 4)).view_as(x)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("said", [{"overrides": [("w?", "experts")]}, {"inputs": torch.zeros(1, 3, 6)}])
def test_a_router_is_known_beside_experts_that_are_said_or_seen_to_be_some(said, transposed):
    assert Plan.of(Bare(transposed), **said)["gate.weight"].role.name == "router"
