"""The plan's language-model head: declared, by shape, tied, given by the caller, or refused."""

from collections import OrderedDict

import pytest
import torch
from plan_helpers import Language, roles, tied
from torch import nn

from surefoot import Plan, SteepestDescent
from surefoot.views import Matrix, Transposed


def test_head_by_shape_beside_the_embedding():
    plan = Plan.of(Language())
    assert {name: plan[name].role.name for name in plan} == {
        "table.weight": "embedding",
        "hidden.weight": "linear",
        "hidden.bias": "bias",
        "norm.weight": "gain",
        "norm.bias": "bias",
        "out.weight": "head",
    }
    assert "beside Embedding(V, d)" in plan["out.weight"].why


def test_head_by_get_output_embeddings_wins_over_shape():
    class Declared(Language):
        def __init__(self):
            super().__init__()
            self.twin = nn.Linear(8, 50)

        def get_output_embeddings(self):
            return self.twin

    plan = Plan.of(Declared())
    assert plan["twin.weight"].role.name == "head"
    assert plan["out.weight"].role.name == "linear"
    assert plan["twin.bias"].role.name == "bias"
    assert "get_output_embeddings" in plan["twin.weight"].why


def test_a_model_that_declares_no_head_has_none():
    class Headless(Language):
        def get_output_embeddings(self):
            return None

    model = Headless()
    assert roles(model)["out.weight"] == "linear"
    del model.out  # nothing is like a head: found by shape, the plan would be refused
    assert "head" not in roles(model).values()
    wrapped = nn.Sequential(OrderedDict(module=nn.Sequential(OrderedDict(_orig_mod=model))))  # as DDP's names are
    assert {name.removeprefix("module._orig_mod."): role for name, role in roles(wrapped).items()} == roles(model)
    with pytest.raises(ValueError, match="no Linear"):
        Plan.of(nn.Sequential(OrderedDict(encoder=model)))  # a part does not speak for the whole


class Declared(nn.Sequential):
    """A model that has no language model's head, as image classifiers of `transformers` say of themselves."""

    def get_output_embeddings(self):
        return None


def classifier(*head, norm=None, name="head", kind=nn.Sequential):
    """A stem, a norm of its 8 outputs and a head of one or more layers."""
    parts = {
        "stem": nn.Linear(4, 8),
        "norm": norm or nn.LayerNorm(8),
        name: head[0] if len(head) == 1 else nn.Sequential(*head),
    }
    return kind(OrderedDict(parts))


@pytest.mark.parametrize(
    ("model", "last", "role"),
    [
        (classifier(nn.Linear(8, 10)), "head", "head"),
        (classifier(nn.Linear(8, 8, bias=False), norm=nn.RMSNorm(8), name="classifier"), "classifier", "head"),
        (classifier(nn.LayerNorm(8), nn.Linear(8, 1), norm=nn.ReLU(), name="mlp_head"), "mlp_head.1", "head"),
        (nn.ModuleDict({"q": classifier(nn.Linear(8, 10)), "old": nn.Linear(8, 8)}), "q.head", "head"),
        (classifier(nn.Linear(8, 10), name="out"), "out", "linear"),
        (classifier(nn.Linear(8, 10), norm=nn.BatchNorm1d(8)), "head", "linear"),
        (classifier(nn.Linear(2, 10), norm=nn.Sequential(nn.LayerNorm(8), nn.Unflatten(-1, (4, 2)))), "head", "linear"),
        (classifier(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), "head.2", "linear"),
        (classifier(nn.Linear(8, 10), kind=Declared), "head", "linear"),
        (nn.ModuleDict({"module": classifier(nn.Linear(8, 10), kind=Declared)}), "module.head", "linear"),
        (nn.ModuleDict({"head": nn.Linear(8, 10)}), "head", "linear"),
        (nn.ModuleDict({"head": nn.ReLU(), "body": nn.Linear(8, 10)}), "body", "linear"),
    ],
)  # fmt: skip
def test_what_is_called_a_head_is_one_behind_a_norm(model, last, role):
    assert Plan.of(model)[f"{last}.weight"].role.name == role
    if role == "head":
        assert "name" in Plan.of(model)[f"{last}.weight"].why
        assert Plan.of(model, head=())[f"{last}.weight"].role.name == "linear"


def test_a_table_of_as_many_positions_as_features_makes_no_square_matrix_a_head():
    model = Language()
    model.places, model.mix = nn.Embedding(8, 8), nn.Linear(8, 8)
    assert {name for name, role in roles(model).items() if role == "head"} == {"out.weight"}


def test_a_head_of_as_many_words_as_an_mlp_beside_it_has_features_is_found():
    layers = [nn.Embedding(50, 8), nn.Linear(8, 50), nn.GELU(), nn.Linear(50, 8), nn.Linear(8, 50, bias=False)]
    found = roles(nn.Sequential(*layers))
    assert [name for name, role in found.items() if role == "head"] == ["4.weight"]


@pytest.mark.parametrize(("multiplier", "role"), [(None, "head"), (1 / 8, "embedding")])
def test_tied_by_identity_has_one_explicit_policy(multiplier, role):
    model = tied() if multiplier is None else tied(output_multiplier=multiplier)
    plan = Plan.of(model)
    assert plan["table.weight"].role.name == role
    assert "tied (table.weight, out.weight)" in plan["table.weight"].why
    assert "out.weight" not in set(plan)  # once
    assert ("output_multiplier" in plan["table.weight"].why) == (multiplier is not None)


def test_tied_head_whose_first_name_is_the_heads():
    class Declared(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 50, bias=False)
            self.table = nn.Embedding(50, 8)
            self.table.weight = self.out.weight

        def get_output_embeddings(self):
            return self.out

    assert roles(Declared()) == {"out.weight": "head"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"twin": nn.Linear(8, 50)}, "out, twin could each be"), ({"out": nn.Linear(8, 3)}, "no Linear")],
    ids=["two candidates", "none"],
)
def test_an_unclear_head_raises_and_names_the_remedy(extra, message):
    model = Language()
    for name, module in extra.items():
        setattr(model, name, module)
    with pytest.raises(ValueError, match=message) as error:
        Plan.of(model)
    assert "head='" in str(error.value)
    assert "head=()" in str(error.value)
    assert roles(model, head="out")["out.weight"] == "head"
    assert "head" not in roles(model, head=()).values()


def test_layers_of_blocks_are_no_heads_where_a_table_has_as_many_rows_as_the_model_is_wide():
    model = Language()
    model.positions, model.hidden = nn.Embedding(8, 8), nn.Linear(8, 9)
    model.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    assert [name for name, role in roles(model).items() if role == "head"] == ["out.weight"]
    model.twin = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50))
    with pytest.raises(ValueError, match=r"out, twin\.1 could each be"):
        roles(model)


def test_a_layer_of_a_block_is_no_head_though_it_has_the_shape_of_positions():
    """As many positions as features, and a head for other classes than there are words."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    parts = {"words": nn.Embedding(50, 8), "positions": nn.Embedding(8, 8), "blocks": nn.TransformerEncoder(block, 1)}
    model = nn.ModuleDict({**parts, "classes": nn.Linear(8, 49)})
    with pytest.raises(ValueError, match=r"no Linear\(d, V\) beside Embedding"):
        Plan.of(model)


def test_several_heads_in_a_list_are_refused_unless_they_are_given():
    model = Language()
    model.ahead = nn.ModuleList([nn.Linear(8, 50) for _ in range(2)])
    with pytest.raises(ValueError, match=r"out, ahead\.0, ahead\.1 could each be"):
        roles(model)
    assert list(roles(model, head=("out", "ahead.0", "ahead.1")).values()).count("head") == 3
    with pytest.raises(ValueError, match=r"a layer's name, or names, not the Linear"):
        roles(model, head=model.out)


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8), nn.Conv1d(8, 50, 1)])
def test_a_language_model_without_a_linear_layer_is_asked_for_its_head(layer):
    model = nn.ModuleDict({"table": nn.Embedding(50, 8), "layer": layer})
    with pytest.raises(ValueError, match="no Linear"):
        Plan.of(model)
    assert Plan.of(model, head=())["table.weight"].role.name == "embedding"
    for body in ((), (nn.Conv2d(8, 8, 3),)):  # a table alone; the codes of pictures
        assert Plan.of(nn.Sequential(nn.Embedding(50, 8), *body))["0.weight"].role.name == "embedding"


def test_several_heads_can_be_given_and_an_unknown_one_raises():
    model = Language()
    model.twin = nn.Linear(8, 50)
    assert list(roles(model, head=("out", "twin")).values()).count("head") == 2
    with pytest.raises(ValueError, match="'outt'"):
        Plan.of(model, head="outt")


def test_given_head_that_owns_no_weight_raises():
    model = Language(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50)))
    with pytest.raises(ValueError, match="out"):
        Plan.of(model, head="out")


def test_a_model_without_an_embedding_has_no_head():
    assert set(roles(nn.Sequential(nn.Linear(8, 50), nn.Linear(50, 8))).values()) == {"linear", "bias"}


def test_roles_do_not_depend_on_names():
    class Misleading(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head_norm = nn.RMSNorm(8)
            self.embedding_proj = nn.Linear(8, 8)
            self.head = nn.Linear(8, 8)
            self.linear = nn.Embedding(50, 8)
            self.bias = nn.Linear(8, 50, bias=False)
            self.weight_gain_embed = nn.Parameter(torch.ones(8))

    assert roles(Misleading()) == {
        "weight_gain_embed": "scalar",
        "lm_head_norm.weight": "gain",
        "embedding_proj.weight": "linear",
        "embedding_proj.bias": "bias",
        "head.weight": "linear",
        "head.bias": "bias",
        "linear.weight": "embedding",
        "bias.weight": "head",
    }


class Bare(nn.Module):
    """A table, a layer and a head that is a parameter."""

    def __init__(self, *shape, table=None):
        super().__init__()
        self.table, self.hidden = table or nn.Embedding(50, 8), nn.Linear(8, 8)
        self.unembedding = nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bare_head_stored_inputs_first_is_one_beside_any_table(frozen):
    overrides = [("unembedding", "head")]
    module, parameter = Bare(8, 50), Bare(8, 50, table=nn.ParameterList([torch.randn(50, 8)]))
    module.table.requires_grad_(not frozen)
    assert Plan.of(module, overrides=overrides)["unembedding"].role.view == Transposed(Matrix())
    plan = Plan.of(parameter, overrides=[*overrides, ("table.0", "embedding")])
    assert plan["unembedding"].role.view == Transposed(Matrix())


@pytest.mark.parametrize(("shape", "view"), [((8, 50), Transposed(Matrix())), ((50, 8), Matrix())])
def test_a_bare_head_that_an_override_says_is_one_whichever_side_is_first(shape, view):
    model, rows = Bare(*shape), shape.index(50)
    plan = Plan.of(model, overrides=[("unembedding", "head")])
    assert plan["unembedding"].role.view == view
    plan.initialise_(model)
    before = model.unembedding.detach().clone()
    model.unembedding.grad = torch.zeros(shape)
    model.unembedding.grad.select(rows, 3).normal_()
    SteepestDescent(model, plan, lr=0.1).step()
    change, gradient = (x.select(rows, 3) for x in (before - model.unembedding.detach(), model.unembedding.grad))
    assert torch.cosine_similarity(change, gradient, dim=0) > 0.99  # of the other side it would be its signs
    with pytest.raises(ValueError, match="is the LM head; name it"):
        Plan.of(model)
