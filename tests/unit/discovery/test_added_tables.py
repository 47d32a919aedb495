"""What is added to a tied table takes its rule, its initial values and its unit of radii, whatever holds it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from discovery_helpers import Own, kinds, of_class
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes
from surefoot.experiment.models.decoder import reference
from surefoot.initialise import AsBuilt
from surefoot.recipes import DepthRule
from surefoot.scaling import Constant

V, D = 50, 8


def tied(body, table):
    """A model of a body with a table, and a head that shares the table."""
    head = nn.Linear(D, V, bias=False)
    head.weight = table.weight
    return Own(body=body, mix=nn.Linear(D, D, bias=False), head=head)


def block():
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))


def siblings(table):
    return nn.ModuleDict({"wte": table, "wpe": nn.Embedding(9, D), "h": nn.ModuleList([block()])})


def normed(table):
    return Own(words=table, places=nn.Embedding(9, D), types=nn.Embedding(2, D), norm=nn.LayerNorm(D))


def wrapped(table):
    return Own(tokens=Own(inner=table), places=Own(inner=nn.Embedding(9, D)), block=block())


def pure(table):
    return Own(embed=Own(tokens=table, places=Own(place=torch.randn(1, 9, D))), block=block())


def bare(table):
    return Own(tokens=table, place=torch.randn(1, 9, D), block=block())


def listed(table):
    return Own(tokens=nn.ModuleList([table]), place=nn.Embedding(9, D), block=block())


def codebooks(table):
    return Own(tables=nn.ModuleList([table, nn.Embedding(9, D)]), block=block())


def frozen_beside(table):
    fixed = nn.Embedding(9, D).requires_grad_(False)
    return Own(embed=Own(tokens=table, fixed=fixed, places=nn.Embedding(9, D)), block=block())


@pytest.mark.parametrize(
    ("body", "added"),
    [
        (siblings, {"body.wpe.weight"}),
        (normed, {"body.places.weight", "body.types.weight"}),
        (wrapped, {"body.places.inner.weight"}),
        (pure, {"body.embed.places.place"}),
        (bare, {"body.place"}),
        (listed, {"body.place.weight"}),
        (codebooks, {"body.tables.1.weight"}),
        (frozen_beside, {"body.embed.places.weight", "body.embed.fixed.weight"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize(
    "recipe", [recipes.steady(), recipes.beyond_mup(), recipes.muon()], ids=lambda recipe: recipe.name
)
def test_what_is_added_takes_the_tables_rule(body, added, recipe):
    table = nn.Embedding(V, D)
    model = tied(body(table), table)
    plan = Plan.of(model, recipe, stabiliser=sf.PostClip(2.0))
    assert {name for name in plan if plan[name].role.name == "tied_positions"} == added
    (head,) = (name for name in plan if plan[name].role.name == "head")
    plan.initialise_(model)
    for name in added:
        mine, its = plan[name].role, plan[head].role
        assert (mine.geometry, mine.momentum, mine.lr_scale) == (its.geometry, its.momentum, its.lr_scale)
        assert plan[name].stabilisers[0].bound == plan[head].stabilisers[0].bound == 2 * math.log(V)
        if (p := model.get_parameter(name)).requires_grad:  # a frozen one stays as it is
            assert float(p.detach().std()) == pytest.approx(1 / D, rel=0.3)
        assert f"added to {head}" in plan[name].why


def encoder_decoder(table):
    encoder = Own(places=nn.Embedding(9, D), block=block())
    return Own(encoder=encoder, decoder=Own(tokens=table, block=block()))


def other_width(table):
    return Own(tokens=table, places=nn.Embedding(9, 2 * D), block=block())


def by_layer(table):
    values = nn.ModuleList(nn.Embedding(V, D) for _ in range(2))
    return Own(tokens=table, values=values, block=block())


@pytest.mark.parametrize("body", [encoder_decoder, other_width, by_layer])
def test_what_is_not_added_keeps_the_embeddings_rule(body):
    table = nn.Embedding(V, D)
    assert "tied_positions" not in kinds(tied(body(table), table)).values()


def test_untied_and_multiplied_models_keep_rows_of_rms_one():
    model = Own(body=siblings(nn.Embedding(V, D)), head=nn.Linear(D, V))
    assert kinds(model, head="head")["body.wpe.weight"] == "embedding"
    table = nn.Embedding(V, D)
    model = tied(siblings(table), table)
    model.output_multiplier = 1 / D
    assert kinds(model)["body.wpe.weight"] == "embedding"


@pytest.mark.parametrize("recipe", [sf.recipes.steady(), sf.recipes.steady_bounded(), sf.recipes.beyond_mup()], ids=str)
def test_the_last_gain_sets_the_size_of_multiplied_logits(recipe):
    """Decision 36: what follows the last matrix, of the table's width; under the default alone."""

    def model(**parts):
        model = Own(tokens=nn.Embedding(V, D), **parts, head=nn.Linear(D, V, bias=False))
        model.head.weight = model.tokens.weight
        return model

    def factors(owner, **options):
        plan = Plan.of(owner, recipe, **options)
        return {name: plan[name].lr_scales[0] for name in plan if plan[name].role.name == "gain"}

    usual = recipe.role("gain").lr_scale((1, D))
    last = usual if recipe.name == "beyond_mup" else 8.0
    block = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))
    behind = nn.ModuleList([nn.Linear(D, D), nn.LayerNorm(D)])
    models = {
        "norm": model(head_norm=nn.RMSNorm(2), block=block, norm=nn.RMSNorm(D)),
        "0.0": model(block=block, **{"0": nn.Sequential(nn.LayerNorm(D))}),  # in one module with the head
        "behind.1": model(embedding_norm=nn.LayerNorm(D), behind=behind),
        "body.behind.1": Own(body=model(behind=behind, layernorm_embedding=nn.LayerNorm(D))),
        "": model(norm=nn.LayerNorm(D), block=block),  # the last one has no gain, or nobody can tell
        "none": model(block=nn.Linear(D, D), narrow=nn.LayerNorm(2)),
    }
    for name, own in models.items():
        before = factors(own)
        assert set(before.values()) <= {usual}
        inner = getattr(own, "body", own)
        own.output_multiplier = torch.ones(3)  # no number
        inner.output_multiplier = 1 / D
        gain = f"{name}.weight" in before
        assert factors(own) == before | ({f"{name}.weight": last} if gain else {})
        assert any("better no multiplier" in x.why for x in Plan.of(own, recipe).placements.values()) == (not gain)
    named = models["norm"]
    unit = Plan.of(named, recipe)["norm.weight"].role.radius_unit((1, D))
    assert unit == (1.0 if recipe.name == "beyond_mup" else 8.0)
    assert factors(named, overrides=[("norm.weight", "gain")])["norm.weight"] == usual
    assert factors(named, tied="head")["norm.weight"] == usual


def test_all_tables_of_a_listed_class_are_added_whatever_their_width():
    table = nn.Embedding(V, D)
    name = "transformers.models.opt.modeling_opt.OPTDecoder"
    decoder = of_class(name, embed_tokens=table, embed_positions=nn.Embedding(9, 2 * D), up=nn.Linear(D, 2 * D))
    assert kinds(tied(decoder, table))["body.embed_positions.weight"] == "tied_positions"


def test_overrides_say_what_a_parameter_is():
    table = nn.Embedding(V, D)
    model = tied(Own(tokens=table, place=torch.randn(9, D), block=block()), table)
    with pytest.raises(ValueError, match=r"cannot place body\.place"):
        Plan.of(model)
    for name in ("positions", "tied_positions"):
        placed = Plan.of(model, overrides=[("body.place", name)])["body.place"]
        assert (placed.role.name, placed.why) == (name, "override 'body.place'")
    own = sf.Role("own", sf.RowRMS(), lr_scale=Constant(3.0))
    assert Plan.of(model, overrides=[("body.place", own)])["body.place"].role == own


def test_a_table_named_as_the_head_is_tied_unless_another_of_its_shape_is_for_the_inputs():
    """`x @ table.weight.T` in `forward` is a head without a module; an output table beside an input table is none."""

    def roles(model, **options):
        plan = Plan.of(model, **options)
        return [plan[f"{name}.weight"].role.name for name in ("words", "places")]

    both = {"words": nn.Embedding(V, D), "places": nn.Embedding(9, D)}
    once = Own(**both, block=block())
    assert roles(once, head="words") == ["head", "tied_positions"]
    assert roles(once, head="words", overrides=[("words.weight", "embedding")]) == ["embedding", "embedding"]
    with pytest.raises(ValueError, match=r"words\.weight as table and as head are one matrix.*untie"):
        Plan.of(once, head="words", tied="error")
    once.get_output_embeddings = lambda: once.words
    assert roles(once) == ["head", "tied_positions"]
    twice = Own(**both, out=nn.Embedding(V, D), block=block())
    assert roles(twice, head="out") == ["embedding", "embedding"]
    assert roles(twice, head=("words", "out")) == ["head", "tied_positions"]


def stack(kind, **options):
    return reference(kind, 32, 4, head_dim=8, vocab=V, **options)


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_a_tied_table_starts_at_the_unit_of_its_radius_and_branches_beside_it_count_as_four(kind):
    plain, plan = Plan.of(stack(kind)), Plan.of(model := stack(kind, head="tied"))
    plan.initialise_(model, 0)
    table = model.embedding.weight.detach()
    assert float(table.std()) == pytest.approx(math.log(V) / 32, rel=0.05)
    writes = [name for name in plan if "branches" in plan[name].why]
    assert {name.split(".")[-2 if name.endswith("weight") else -1] for name in writes} >= {"output"}
    assert len(writes) == 8
    for name in plan:
        if plain[name].role.name != "embedding":
            changed = DepthRule().of(32) if name in writes else (lambda role: role)  # 4 blocks of 2 branches, each as 4
            usual = sf.recipes.steady().role(plain[name].role.name) if name in writes else plain[name].role
            assert [plan[name].role] == [changed(usual)], name


def of_transformers(module, name, **attributes):
    """Make a module one of `transformers` by the name of its class."""
    module.__class__ = type(name, (type(module),), {"__module__": "transformers"})
    for key, value in attributes.items():
        setattr(module, key, value)


@pytest.mark.parametrize(
    ("head", "options", "change"),
    [
        ("tied", {"overrides": [("embedding.weight", "embedding")]}, None),
        ("tied", {"overrides": [("embedding.weight", "head")]}, None),
        ("tied", {"overrides": [("embedding.weight", recipes.steady().role("embedding"))]}, None),
        ("tied_scaled", {"tied": "embedding"}, None),
        ("tied_scaled", {"tied": "head"}, None),
        ("tied", {}, lambda model: model.embedding.requires_grad_(False)),
        ("tied", {}, lambda model: of_transformers(model.embedding, "Multiplied", embed_scale=6.0)),
        ("tied", {}, lambda model: of_transformers(model, "Cohere", config=SimpleNamespace(logit_scale=0.25))),
    ],
)
def test_without_small_rows_that_are_trained_a_table_starts_as_a_head_and_branches_count_once(head, options, change):
    model, name = stack("gpt", head=head), "blocks.0.mlp.down.weight"
    if change:
        change(model)
    plan = Plan.of(model, **options)
    assert plan[name].role == Plan.of(stack("gpt"))[name].role
    if "embedding.weight" in plan:  # where it is not frozen
        assert getattr(plan["embedding.weight"].role.initial, "factor", 1) != math.log(V)


@pytest.mark.parametrize(
    ("name", "once"),
    [
        *((name, True) for name in ("word_embeddings_layernorm", "layernorm_embedding", "layer_norm_emb")),
        *((name, True) for name in ("embedding_layernorm", "embeddings_layer_norm")),
        ("embedding_norm", False),  # the last norm of LFM2
    ],
)
def test_branches_count_once_beside_rows_that_a_norm_makes_large(name, once):
    model = stack("gpt", head="tied")
    model.add_module(name, nn.LayerNorm(32))
    plan, usual = (Plan.of(x) for x in (model, stack("gpt", head="untied" if once else "tied")))
    written = "blocks.0.mlp.down.weight"
    assert plan[written].role == usual[written].role
    assert plan["embedding.weight"].role.initial.factor == math.log(V)


def test_only_what_writes_a_stream_as_wide_as_the_tied_table_counts_as_four():
    text = reference("gpt", 64, 4, head_dim=8, vocab=48, head="tied")
    others = {f"pictures{width}": reference("gpt", width, 4, head_dim=8, vocab=V).blocks for width in (16, 48)}
    plan = Plan.of(nn.ModuleDict({"text": text, **others}))
    whys = {name: plan[name].why for name in plan if "branches" in plan[name].why}
    assert {name.partition(".")[0] for name, why in whys.items() if "each counts as 4" in why} == {"text"}
    assert {name.partition(".")[0] for name in whys} == {"text", *others}


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_lengths_of_a_weight_beside_a_tied_table_count_as_the_weight(dim):
    model = stack("gpt", head="tied")
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.mlp.down, dim=dim)
    parts = {name: placed for name, placed in Plan.of(model).placements.items() if "down" in name}
    assert len(parts) == 8
    assert all("one of 8 branches; each counts as 4" in placed.why for placed in parts.values())


def test_a_model_s_own_initial_values_of_a_tied_table_stay():
    table = nn.Embedding(V, D)
    own = replace(recipes.steady().role("head"), initial=AsBuilt())
    recipe = replace(recipes.steady(), table={**recipes.steady().table, "head": own})
    plan, before = Plan.of(model := tied(siblings(table), table), recipe), table.weight.detach().clone()
    plan.initialise_(model, 0)
    assert torch.equal(table.weight, before)
