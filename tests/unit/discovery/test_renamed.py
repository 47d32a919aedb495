"""Attributes under other names: the plan is the same, or its reasons say that names were used and what they changed."""

import pytest
import torch
from discovery_helpers import Own, mixture
from torch import nn

import surefoot as sf
from surefoot import Plan
from surefoot.discovery.find import find_kinds

D = 64


def linears(*names, **attributes):
    return Own(**{name: nn.Linear(D, D) for name in names}, **attributes)


def attention(**attributes):
    return linears("query", "key", "value", "output", **attributes)


def block(make):
    """BERT's way: queries, keys and values in one module, the projection in another."""
    return Own(inner=make(), output=Own(dense=nn.Linear(D, D)), up=nn.Linear(D, 2 * D), down=nn.Linear(2 * D, D))


def three():
    return linears("query", "key", "value")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D)), 1e-6


MODELS = {
    "attention, head_dim": lambda: attention(head_dim=16),
    "attention, head_size": lambda: attention(head_size=16),
    "attention, num_heads": lambda: attention(num_heads=4),
    "attention alone": attention,
    "fused": lambda: linears("c_attn", "c_proj", n_head=4),
    "torch": lambda: nn.ModuleDict({"attention": nn.MultiheadAttention(D, 4)}),
    "mlp": lambda: nn.ModuleList([linears("up", "down") for _ in range(8)]),
    "blocks": lambda: nn.ModuleList([block(three) for _ in range(8)]),
    "norm": Norm,
    "experts": mixture,
    "experts and a linear router": lambda: mixture(router=nn.Linear(5, 4)),
}


def renamed(model, old, new):
    """The model with one name of attributes replaced in every module that has it, in the order of definition."""
    for module in model.modules():
        for table in (module._modules, module._parameters, vars(module)):
            if old in table:
                items = [(new if name == old else name, value) for name, value in table.items()]
                table.clear()
                table.update(items)
    return model


def names_of(model):
    """Every name of an attribute that a module of its own class has."""
    found = set()
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            own = {name for name in vars(module) if not name.startswith("_") and name != "training"}
            found |= own | module._modules.keys() | module._parameters.keys()
    return sorted(name for name in found if not name.isdigit())


CASES = [(case, name) for case, make in MODELS.items() for name in names_of(make())]


@pytest.mark.parametrize(("case", "name"), CASES, ids=lambda x: x)
def test_a_name_changes_nothing_or_the_reasons_name_it(case, name):
    usual = Plan.of(MODELS[case](), head=())
    try:
        plan = Plan.of(renamed(MODELS[case](), name, "zz"), head=())
    except ValueError as error:
        if "cannot place" in str(error):  # said, and with the remedy
            return
        raise
    before = {".".join("zz" if part == name else part for part in each.split(".")): usual[each] for each in usual}
    assert plan.placements.keys() == before.keys()
    for each in plan:
        assert plan[each].digest == before[each].digest or "name" in before[each].why, before[each].why


def test_renamed_queries_are_named_with_what_it_changes_and_the_remedy():
    usual, other = Plan.of(attention(head_dim=16)), Plan.of(linears("a", "b", "value", "output", head_dim=16))
    assert usual["query.weight"].blocks == ((4, 16, D),)
    assert usual["query.weight"].why.endswith("; query by the name `query`: heads of 16 rows, a norm each")
    for name in ("a.weight", "b.weight"):
        assert other[name].blocks == ((1, D, D),)
        assert other[name].why.endswith(
            "; in a module with head_dim, but no name that is known tells whether these are queries or keys: one norm "
            "for all heads"
        )
    heads = sf.per_head(16)(sf.recipes.steady().role("heads"))
    mended = Plan.of(linears("a", "b", "value", "output", head_dim=16), overrides=[("[ab].weight", heads)])
    for name, mine in (("query.weight", "a.weight"), ("key.weight", "b.weight")):
        placed, wanted = mended[mine], usual[name]
        (shape,) = placed.blocks
        assert (shape,) == wanted.blocks
        assert placed.role.lr_scale(shape) == wanted.role.lr_scale(shape) == 2
        assert placed.role.initial == wanted.role.initial
        assert placed.stabilisers[0].lr_scale(shape) == wanted.stabilisers[0].lr_scale(shape)


@pytest.mark.parametrize("count", ["num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads"])
def test_a_number_of_heads_shows_an_attention_layer_whose_queries_no_name_tells(count):
    assert (
        f"in a module with {count}, but no name" in Plan.of(linears("a", "b", "c", "d", **{count: 4}))["a.weight"].why
    )


def test_a_configuration_that_raises_because_layers_differ_knows_no_number_of_heads():
    class Config:
        @property
        def num_attention_heads(self):
            raise RuntimeError("a per-layer attribute")

    layer = linears("query", "key", "value", "out")
    layer.config = Config()
    assert "but no attribute (head_dim, " in Plan.of(layer)["query.weight"].why


@pytest.mark.parametrize("size", [{}, {"num_heads": 7}, {"num_heads": 4, "num_kv_heads": 2}, {"head_dim": 48}], ids=str)
def test_known_names_without_a_size_of_heads_say_what_is_missing(size):
    why = Plan.of(attention(**size))["query.weight"].why
    missing = "whose rows are no whole number of heads of 48" if "head_dim" in size else "but no attribute (head_dim, "
    assert missing in why
    assert "name `query`" in why


def test_experts_say_that_their_attributes_names_were_used():
    plan = Plan.of(mixture())
    assert all("by its attributes' names" in plan[name].why for name in plan if name.startswith("experts."))


def test_a_recipe_without_heads_does_not_speak_of_them():
    assert "heads" not in Plan.of(attention(head_dim=16), sf.recipes.muon())["query.weight"].why
    assert "queries and keys by type: heads of 16 rows" in Plan.of(nn.MultiheadAttention(D, 4))["in_proj_weight"].why


def test_values_by_name_write_into_no_stream_and_others_may():
    by_name, without = (nn.ModuleList([block(make) for _ in range(8)]) for make in (three, lambda: linears("a", "b")))
    kinds = find_kinds(by_name)
    assert kinds["0.inner.value.weight"].branches is None
    assert "adds to no residual stream, by the names of queries" in kinds["0.inner.value.weight"].why
    assert kinds["0.down.weight"].branches == 16
    assert kinds["0.down.weight"].why.endswith("by the names of queries, keys and values; without them 24")
    assert find_kinds(without)["0.inner.b.weight"].branches == 24
