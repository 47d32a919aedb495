"""What is added to a tied table takes its rule, its initial values and its unit of radii, whatever holds it."""

import math

import pytest
import torch
from discovery_helpers import Own, kinds, of_class
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes
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
