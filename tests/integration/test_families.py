"""Model families of transformers, each parameter against a table written by hand.

A row of a table says which parameters it is of, their role, how many matrices `(out, in)` or vectors one is made of,
and which entries those are (`whole`, `turned`, ...: plain indexing, none of the library's views). From these the norm
of one step is measured in float64.
"""

import copy
import fnmatch
import math

import pytest
import torch
from families_llama import LLAMA_FAMILIES, V
from families_other import OTHER_FAMILIES

import surefoot as sf
from surefoot.discovery.find import find_kinds

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

LR = 2.0**-6


# --- norms in natural units ----------------------------------------------------------------------------------


def rms(w):
    return w.square().mean(-1).sqrt()


def spectral(w):
    return torch.linalg.matrix_norm(w, 2) * math.sqrt(w.shape[1] / w.shape[0])


NORMS = {
    "linear": (spectral, 1),
    "conv": (spectral, 1),
    "experts": (spectral, 1),
    "embedding": (lambda w: rms(w).max(), 1),
    "positions": (lambda w: rms(w).max(), 1),
    "head": (lambda w: w.shape[1] * rms(w).max(), 16),
    "router": (lambda w: w.shape[1] * rms(w).max(), 16),
    "tied_positions": (lambda w: w.shape[1] * rms(w).max(), 16),
    "gain": (lambda w: w.abs().max(), 0.25),
    "bias": (rms, 0.25),
    "scalar": (lambda w: w.abs().max(), 1),
}
"""Role -> norm of a matrix or a vector, and the default recipe's factor on the learning rate."""

BY_ROWS = {"embedding", "positions", "head", "router", "tied_positions"}

FAMILIES = LLAMA_FAMILIES | OTHER_FAMILIES
each_family = pytest.mark.parametrize("family", FAMILIES)


def built(family):
    """The model, without dropout, and its table."""
    name, config, table = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval(), table


def inputs_of(family):
    """One batch; its tokens leave rows of the table out."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, V // 2, (2, 8), generator=generator)
    if family in ("vit", "dinov2"):
        images = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 3, 4])}
    if family == "whisper":
        return {"input_features": torch.randn(2, 10, 16, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def loss_of(family, model):
    return model(**inputs_of(family)).loss


def row_of(name, table):
    """The one row of the table that a name matches."""
    matches = [row for row in table if fnmatch.fnmatchcase(name, row[0])]
    assert len(matches) == 1, f"{name} matches {[row[0] for row in matches]}"
    return matches[0]


@each_family
def test_every_parameter_is_placed_as_the_table_says(family):
    model, table = built(family)
    plan, used = sf.Plan.of(model, sf.recipes.beyond_mup()), set()
    parameters = dict(model.named_parameters())
    assert list(plan) == list(parameters)  # a frozen one as if it were trained
    for name, p in parameters.items():
        pattern, role, shapes, split = row_of(name, table)
        used.add(pattern)
        assert plan[name].role.name == role, name
        assert plan[name].why.startswith("frozen; ") != p.requires_grad, name
        parts = split(p.detach())
        assert [tuple(part.shape) for part in parts] == shapes, name
        blocks = [block[1:] for block in plan[name].blocks for _ in range(block[0])]
        assert blocks == [tuple(part.shape) for part in parts], name
    assert used == {row[0] for row in table}  # a row that matches nothing is a mistake in the table
    with torch.device("meta"):
        meta = type(model)(model.config)
    assert sf.Plan.of(meta, sf.recipes.beyond_mup()).hash == plan.hash


@each_family
def test_one_step_has_its_norm_in_every_part_and_lowers_the_loss(family):
    model, table = built(family)
    plan = sf.Plan.of(model, sf.recipes.beyond_mup())
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=LR)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    loss = loss_of(family, model)
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        change = p.detach().double() - before[name]
        if not p.requires_grad or p.grad is None:
            assert not change.any(), name
            continue
        _, role, _, split = row_of(name, table)
        for part, g in zip(split(change), split(p.grad), strict=True):
            check_step(name, role, part / (unit_in_t5(name, role, model.config) if family == "t5" else 1), g)
    with torch.no_grad():
        assert loss_of(family, model) < loss


def unit_in_t5(name, role, config):
    """Logits are over the root of the width; products of queries and keys are not over the root of a head's size."""
    if role == "head":
        return config.d_model**0.5
    return config.d_kv**-0.25 if name.endswith(("Attention.q.weight", "Attention.k.weight")) else 1


def check_step(name, role, change, g):
    """The norm of one part's step is lr times the role's factor; what has no gradient rests."""
    norm, scale = NORMS[role]
    still = (g == 0).all(-1, keepdim=role in BY_ROWS) if role in BY_ROWS else (g == 0).all()
    assert not (change * still).any(), name
    if not g.any():
        return
    ratio = float(norm(change)) / (LR * scale)
    assert (0.96 if norm is spectral else 0.999) <= ratio <= 1.001, f"{name}: {ratio}"
    if role in BY_ROWS:
        each_row = rms(change[~still[:, 0]])
        torch.testing.assert_close(each_row, each_row.max().expand_as(each_row), rtol=1e-3, atol=0)


DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers", "decoder_layers")
"""Attributes of configurations that count blocks."""

BRANCHES = {"t5": {6, 9}, "whisper": {6, 9}, "mamba": {3}, "mamba2": {3}}
"""Families -> branches of a stack of three blocks, where they are not two each."""
SMALL_ROWS = {"gpt2", "falcon", "bert", "whisper", "mamba"}
"""Families with a tied table that they do not multiply: each branch counts as four."""


@each_family
def test_without_what_writes_nothing_else_in_a_block_matters(family):
    """Three blocks; what discovery says to write is zero, and the matrices that it says do not write are drawn anew."""
    name, config, _ = FAMILIES[family]
    config = copy.deepcopy(config)
    for attribute in DEPTHS:
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, 3)
    if "layer_types" in vars(config):
        config.layer_types *= 3
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    kinds = find_kinds(model)
    writing = {name for name, kind in kinds.items() if kind and kind.branches}
    inside = {name for name, kind in kinds.items() if kind and kind.name in ("linear", "experts") and ".1." in name}
    small = 4 if family in SMALL_ROWS else 1
    assert {kinds[name].branches for name in writing} == {small * count for count in BRANCHES.get(family, {6})}
    with torch.no_grad():
        for parameter in writing:
            model.get_parameter(parameter).zero_()
        before = loss_of(family, model)
        assert len(inside - writing) > 0
        for parameter in inside - writing:
            model.get_parameter(parameter).normal_()
        assert loss_of(family, model) == before


def test_rows_of_absent_tokens_rest():
    model, _ = built("llama")
    plan = sf.Plan.of(model, sf.recipes.beyond_mup())  # no decay
    optimizer, table = sf.SteepestDescent(model, plan, lr=LR), model.model.embed_tokens.weight
    before = table.detach().clone()
    loss_of("llama", model).backward()
    optimizer.step()
    moved = (table.detach() != before).any(-1)
    assert 3 < int(moved.sum()) <= 16
    assert not moved[V // 2 :].any()


@pytest.mark.parametrize(
    ("family", "layer", "blocks"),
    [
        ("gpt2", "c_attn", ((8, 6, 24), (1, 24, 24))),
        ("llama", "k_proj", ((2, 8, 24),)),
        ("llama", "v_proj", ((1, 16, 24),)),
        ("bert", "query", ((4, 6, 24),)),
        ("bert", "value", ((1, 24, 24),)),
    ],
)
def test_the_default_has_a_norm_for_each_head_of_queries_and_keys(family, layer, blocks):
    """Fused or not, and one for all of the values."""
    plan = sf.Plan.of(built(family)[0])
    assert {plan[name].blocks for name in plan if name.endswith(f".{layer}.weight")} == {blocks}


@each_family
def test_a_forward_pass_finds_what_the_names_say(family):
    model = built(family)[0]
    if any("experts" in name for name, _ in model.named_parameters()):
        model.set_experts_implementation("batched_mm")  # torch's grouped products have no shapes in float32
    assert sf.Plan.of(model, inputs=inputs_of(family)).hash == sf.Plan.of(model).hash
