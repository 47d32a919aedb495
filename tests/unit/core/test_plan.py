"""The plan: where every parameter goes and why, overrides, the table, the hash, and initial values."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes
from surefoot.views import Fused, Matrix


class Language(nn.Module):
    """Embedding, one hidden layer, head; what differs between tests is given."""

    def __init__(self, head=None, vocab=50, width=8):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = head or nn.Linear(width, vocab, bias=False)


def tied(**attributes):
    model = Language()
    model.out.weight = model.table.weight
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def roles(model, *args, **kwargs):
    return {row["name"]: row["role"] for row in Plan.of(model, *args, **kwargs).rows()}


def spectral(w):
    """Natural norm of a linear weight `(out, in)`, in float64."""
    return float(torch.linalg.matrix_norm(w.detach().double(), 2)) * math.sqrt(w.shape[1] / w.shape[0])


# --- the LM head, four ways --------------------------------------------------------------------------------


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

    assert roles(Headless())["out.weight"] == "linear"


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
    [
        ({"twin": nn.Linear(8, 50)}, "out, twin could each be"),
        ({"out": nn.Linear(8, 3)}, "no Linear"),
    ],
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


def test_no_head_is_looked_for_without_an_embedding():
    assert set(roles(nn.Sequential(nn.Linear(8, 50), nn.Linear(50, 8))).values()) == {"linear", "bias"}


def test_names_mean_nothing():
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


# --- other layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8)],
    ids=lambda layer: type(layer).__name__,
)
def test_norm_layers(layer):
    plan = Plan.of(layer)
    assert plan["weight"].role.name == "gain"
    assert isinstance(plan["weight"].role.geometry, sf.MaxNorm)
    assert [plan[n].role.name for n in plan if n != "weight"] == ["bias"] * (sum(1 for _ in layer.parameters()) - 1)
    assert type(layer).__name__ in plan["weight"].why


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        (nn.Conv1d(6, 8, 3), (1, 8, 18)),
        (nn.Conv2d(6, 8, (3, 5)), (1, 8, 90)),
        (nn.Conv2d(6, 8, 3, groups=2), (2, 4, 27)),
        (nn.Conv2d(6, 12, 3, groups=6), (6, 2, 9)),
        (nn.Conv1d(6, 6, 4, groups=6), (6, 1, 4)),
        (nn.Conv3d(4, 8, 2, groups=4), (4, 2, 8)),
    ],
    ids=str,
)
def test_convolutions_by_group_on_the_unfolded_patch(layer, block):
    plan = Plan.of(layer)
    assert plan["weight"].block == block
    assert plan["weight"].role.name == "conv"
    assert plan["bias"].role.name == "bias"
    assert isinstance(plan["weight"].role.geometry, sf.Spectral)


def test_a_convolution_equals_the_linear_layer_of_its_unfolded_patch():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    plan = Plan.of(conv)
    plan.initialise_(conv, seed=1)
    x = torch.randn(1, 4, 3, 3)
    (blocks,) = plan["weight"].role.view.split(conv.weight.detach())
    patches = x.reshape(2, 18)
    expected = torch.cat([block @ patch for block, patch in zip(blocks, patches, strict=True)])
    assert torch.allclose(conv(x).flatten(), expected, atol=1e-6)


def test_depthwise_convolution_has_the_head_rule():
    g = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(0))
    ours = sf.Spectral("svd").direction(g)
    assert torch.allclose(ours, sf.HeadRMS().direction(g.reshape(6, 4)).reshape(6, 1, 4), atol=1e-6)


def test_multihead_attention_fused():
    plan = Plan.of(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    assert {name: (plan[name].role.name, plan[name].block) for name in plan} == {
        "in_proj_weight": ("linear", (3, 8, 8)),
        "in_proj_bias": ("bias", (3, 8)),
        "bias_k": ("bias", (1, 8)),
        "bias_v": ("bias", (1, 8)),
        "out_proj.weight": ("linear", (1, 8, 8)),
        "out_proj.bias": ("bias", (1, 8)),
    }


def test_multihead_attention_with_separate_projections():
    plan = Plan.of(nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False))
    assert {name: plan[name].block for name in plan} == {
        "q_proj_weight": (1, 8, 8),
        "k_proj_weight": (1, 8, 3),
        "v_proj_weight": (1, 8, 5),
        "out_proj.weight": (1, 8, 8),
    }
    assert {plan[name].role.name for name in plan} == {"linear"}


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [
        (nn.LSTM(3, 5, proj_size=2), {"ih": (4, 5, 3), "hh": (4, 5, 2), "hr": (1, 2, 5), "bias": (4, 5)}),
        (nn.LSTMCell(3, 5), {"ih": (4, 5, 3), "hh": (4, 5, 5), "bias": (4, 5)}),
        (nn.GRU(3, 5, 2, bidirectional=True), {"ih": (3, 5, 3), "hh": (3, 5, 5), "bias": (3, 5)}),
        (nn.GRUCell(3, 5), {"ih": (3, 5, 3), "hh": (3, 5, 5), "bias": (3, 5)}),
        (nn.RNN(3, 5), {"ih": (1, 5, 3), "hh": (1, 5, 5), "bias": (1, 5)}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_recurrent_layers_have_a_norm_per_gate(layer, blocks):
    plan = Plan.of(layer)
    assert set(plan) == {name for name, _ in layer.named_parameters()}
    for name in plan:
        part = "bias" if name.startswith("bias") else name[7:9]
        expected = blocks[part]
        if part == "ih" and "_l1" in name:
            expected = (*expected[:2], 10)  # both directions of the layer below
        assert plan[name].block == expected, name
        assert plan[name].role.name == ("bias" if part == "bias" else "linear")


def test_a_bag_of_embeddings_is_an_embedding():
    assert roles(nn.EmbeddingBag(20, 8)) == {"weight": "embedding"}


class Bare(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.layer_scale = nn.Parameter(torch.full(shape, 0.5))


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_bare_vectors_and_scalars(shape):
    model = Bare(*shape)
    plan = Plan.of(model)
    assert plan["layer_scale"].role.name == "scalar"
    assert plan.rows()[0]["shape"] == ("5" if shape else "scalar")
    plan.initialise_(model)
    assert bool((model.layer_scale == 0.5).all())  # as the model has it


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Bare(4, 5), ["layer_scale (4, 5)"]),
        (Bare(1, 5), ["layer_scale (1, 5)"]),
        (Bare(2, 4, 5), ["layer_scale (2, 4, 5)"]),
        (nn.Sequential(nn.Linear(3, 3), nn.Bilinear(3, 4, 5)), ["1.weight"]),
        (nn.Bilinear(3, 4, 5), ["weight (5, 3, 4)"]),
        (nn.Bilinear(3, 4, 1), ["weight (1, 3, 4)"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_no_rule_knows_is_refused_by_name_with_the_remedy(model, names):
    with pytest.raises(ValueError, match="cannot place") as error:
        Plan.of(model)
    assert all(name in str(error.value) for name in names)
    assert f"overrides=[('{names[0].split()[0]}'" in str(error.value)
    assert "requires_grad_(False)" in str(error.value)


def test_the_remedies_of_an_unplaceable_matrix_work():
    model = Bare(4, 5)
    assert roles(model, overrides=[("layer_scale", "linear")]) == {"layer_scale": "linear"}
    model.layer_scale.requires_grad_(False)
    assert roles(model) == {}


def test_shared_parameter_is_listed_once_with_all_its_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    plan = Plan.of(model)
    assert list(plan) == ["0.weight", "0.bias", "2.bias"]
    assert "shared by 0.weight, 2.weight" in plan["0.weight"].why


def two_roles():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight = model[0].bias
    return model


def test_two_roles_for_one_parameter_raise():
    with pytest.raises(ValueError, match=r"two roles \(0.bias: bias, 1.weight: gain\).*override"):
        Plan.of(two_roles())


def test_two_roles_are_settled_by_an_override():
    assert roles(two_roles(), overrides=[("0.bias", "gain")])["0.bias"] == "gain"


def test_two_parameters_over_one_memory_are_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are two parameters over one memory"):
        Plan.of(model)


def test_parts_of_one_flat_buffer_are_separate_parameters():
    flat = torch.zeros(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    assert len(Plan.of(model)) == 2


def test_every_trainable_parameter_exactly_once_in_the_models_order():
    model = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Conv1d(4, 4, 3), nn.Linear(4, 9))
    model[1].linear1.weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    plan = Plan.of(model)
    assert list(plan) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(plan) == len(list(model.parameters())) - 2
    assert all(plan[name].why for name in plan)


def test_a_name_that_the_plan_lacks_raises():
    with pytest.raises(ValueError, match="'nothing'"):
        Plan.of(nn.Linear(2, 2))["nothing"]


# --- recipes and stabilisers through the plan --------------------------------------------------------------


def test_the_recipe_changes_the_increment_and_not_the_layout():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Conv2d(4, 4, 3, groups=2))
    default, row = Plan.of(model), Plan.of(model, recipes.moga_row(1.5))
    assert isinstance(row["0.in_proj_weight"].role.geometry, sf.MeanOperator)
    assert isinstance(row["1.weight"].role.geometry, sf.MeanOperator)
    assert [default[n].block for n in default] == [row[n].block for n in row]
    assert default.recipe == "beyond_mup"
    assert row.recipe == "moga_row(1.5)"


def test_a_stabiliser_goes_to_every_role_in_its_own_unit():
    plan = Plan.of(Language(), stabiliser=sf.PostClip(2.0))
    logs = math.log(50)
    assert {name: plan[name].stabiliser for name in plan} == {
        name: sf.PostClip(2.0 * logs if name == "out.weight" else 2.0) for name in plan
    }
    assert Plan.of(Language(), stabiliser=sf.WeightDecay(0.5))["out.weight"].stabiliser == sf.WeightDecay(0.5 / logs)
    assert Plan.of(Language(), stabiliser=sf.PreDecay(0.5))["out.weight"].stabiliser == sf.PreDecay(0.5 / logs)
    assert Plan.of(Language(), stabiliser=sf.Rescale(2))["out.weight"].stabiliser == sf.Rescale(2 * logs)
    assert Plan.of(Language(), stabiliser=sf.Normalise(2))["out.weight"].stabiliser == sf.Normalise(2 * logs)
    assert Plan.of(Language(), stabiliser=sf.Free())["out.weight"].stabiliser == sf.Free()


def test_tied_head_has_the_heads_unit():
    assert Plan.of(tied(), stabiliser=sf.PostClip(1.0))["table.weight"].stabiliser == sf.PostClip(math.log(50))


# --- overrides ---------------------------------------------------------------------------------------------


def test_override_by_pattern_module_and_function():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 6, bias=False))
    own = sf.Role("mine", sf.RowRMS())
    overrides = [
        ("0.w*", "embedding"),
        (model[1], lambda role: dataclasses.replace(role, stabiliser=sf.PostClip(3.0))),
        (lambda name, p: tuple(p.shape) == (6, 4), own),
        (lambda name, p: name == "3.weight", "head"),
    ]
    plan = Plan.of(model, overrides=overrides)
    assert [plan[n].role.name for n in plan] == ["embedding", "bias", "linear", "bias", "mine", "bias", "head"]
    assert plan["2.weight"].role is own
    assert "override '0.w*'" in plan["0.weight"].why
    assert plan["1.weight"].stabiliser == plan["1.bias"].stabiliser == sf.PostClip(3.0)
    assert "override" in plan["1.weight"].why
    assert "override" not in plan["0.bias"].why


def test_override_by_a_function_of_the_role_that_was_found():
    def doubled(role):
        return dataclasses.replace(role, lr_scale=sf.Constant(2.0))

    plan = Plan.of(nn.MultiheadAttention(8, 2), overrides=[("in_proj_weight", doubled)])
    assert plan["in_proj_weight"].role.lr_scale == sf.Constant(2.0)
    assert plan["in_proj_weight"].role.view == Fused(3)  # what was found is kept


def test_override_pattern_matches_whole_names_only():
    model = nn.ModuleDict({"proj": nn.Linear(4, 4), "proj_out": nn.Linear(4, 4)})
    changed = roles(model, overrides=[("proj.weight", "embedding")])
    assert changed["proj.weight"] == "embedding"
    assert changed["proj_out.weight"] == "linear"
    with pytest.raises(ValueError, match="'proj'"):
        Plan.of(model, overrides=[("proj", "embedding")])


@pytest.mark.parametrize(
    ("where", "label"),
    [("nothing.*", "'nothing.*'"), (nn.Linear(2, 2), "'Linear'"), (lambda name, p: False, "lambda")],
    ids=["pattern", "module", "function"],
)
def test_override_that_matches_nothing_raises(where, label):
    with pytest.raises(ValueError, match="matches no trainable parameter") as error:
        Plan.of(nn.Linear(4, 4), overrides=[(where, "linear")])
    assert label in str(error.value)


def test_override_of_a_frozen_parameter_matches_nothing():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="'bias'"):
        Plan.of(model, overrides=[("bias", "gain")])


def test_two_overrides_for_one_parameter_raise():
    with pytest.raises(ValueError, match=r"weight has two overrides.*'weight'.*'w\*'"):
        Plan.of(nn.Linear(4, 4), overrides=[("weight", "embedding"), ("w*", "head")])


def test_override_with_a_role_that_does_not_fit_raises():
    with pytest.raises(ValueError, match=r"bias cannot be linear.*\(4,\)"):
        Plan.of(nn.Linear(4, 4), overrides=[("bias", "linear")])
    with pytest.raises(ValueError, match=r"unknown role 'liner'.*linear, embedding"):
        Plan.of(nn.Linear(4, 4), overrides=[("weight", "liner")])


@pytest.mark.parametrize(
    ("role", "shape", "block", "geometry"),
    [
        ("experts", (3, 4, 5), (3, 4, 5), sf.Spectral()),
        ("router", (3, 5), (1, 3, 5), sf.HeadRMS()),
        ("positions", (16, 5), (1, 16, 5), sf.RowRMS()),
    ],
)
def test_derived_roles(role, shape, block, geometry):
    model = Bare(*shape)
    plan = Plan.of(model, overrides=[("layer_scale", role)])
    assert plan["layer_scale"].block == block
    assert plan["layer_scale"].role.geometry == geometry
    before = model.layer_scale.detach().clone()
    plan.initialise_(model)
    assert torch.equal(before, model.layer_scale) == (role == "positions")  # positions stay as built


# --- the table and the hash --------------------------------------------------------------------------------


def test_the_printed_table():
    text = str(Plan.of(Language(), stabiliser=sf.PostClip(2.0)))
    lines = text.splitlines()
    assert lines[0].split()[:8] == ["name", "shape", "layout", "role", "fan", "in", "fan", "out"]
    assert len(lines) == 6 + 4  # rows; heading, two rules, total
    head = next(line for line in lines if line.startswith("out.weight"))
    assert head.split()[:7] == ["out.weight", "50x8", "Matrix", "head", "8", "50", "HeadRMS"]
    assert "  16  " in head
    assert f"norm <= {2 * math.log(50):.4g} at every step, certified" in head
    assert head.endswith("LM head: Linear(d, V) beside Embedding(V, d)")
    hidden = next(line for line in lines if line.startswith("hidden.weight"))
    assert hidden.split()[:7] == ["hidden.weight", "8x8", "Matrix", "linear", "8", "8", "Spectral"]
    assert lines[-1].startswith("6 parameters, 888 entries, recipe beyond_mup, plan ")
    assert all(line == line.rstrip() for line in lines)


def test_the_table_of_nothing():
    assert str(Plan.of(nn.ReLU())) == "plan beyond_mup: no trainable parameters"


def test_rows_are_strings():
    for row in Plan.of(Language()).rows():
        assert {"name", "shape", "role", "norm", "init", "lr scale", "promise", "why"} <= set(row)
        assert all(isinstance(value, str) and value for value in row.values())


def test_hash_ignores_names_and_sees_roles_shapes_and_order():
    a = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 4)})
    renamed = nn.ModuleDict({"x": nn.Linear(4, 8), "y": nn.Linear(8, 4)})
    swapped = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 8)})
    plan = Plan.of(a)
    assert plan.hash == Plan.of(renamed).hash == Plan.of(a).hash
    others = [
        Plan.of(swapped),
        Plan.of(a, recipes.muon()),
        Plan.of(a, recipes.moga_row(1.5)),
        Plan.of(a, stabiliser=sf.PostClip(2.0)),
        Plan.of(a, stabiliser=sf.PostClip(3.0)),
        Plan.of(a, overrides=[("a.weight", "embedding")]),
        Plan.of(nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 5)})),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 1 + len(others)


def test_hash_is_the_same_in_every_process():
    code = "from torch import nn; import surefoot; print(surefoot.Plan.of(nn.Linear(3, 4)).hash)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == Plan.of(nn.Linear(3, 4)).hash


# --- initial values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_initial_norms_are_about_one_at_every_width(width):
    model = nn.ModuleDict(
        {
            "square": nn.Linear(width, width),
            "wide": nn.Linear(4 * width, width),
            "tall": nn.Linear(width, 4 * width),
            "table": nn.Embedding(300, width),
            "head": nn.Linear(width, 300),
            "conv": nn.Conv2d(width // 4, width, 3, groups=4),
            "norm": nn.LayerNorm(width),
        }
    )
    plan = Plan.of(model, head="head")
    plan.initialise_(model, seed=3)
    for name in ("square", "wide", "tall"):
        assert 0.9 < spectral(model[name].weight) < 1.06
        assert not model[name].bias.any()
    rms = model["table"].weight.square().mean(-1).sqrt()
    assert rms.max() < 1 + 3.2 / math.sqrt(width)
    assert rms.min() > 1 - 3.2 / math.sqrt(width)
    head = width * model["head"].weight.square().mean(-1).sqrt()
    assert 1 < head.max() < 1 + 3.2 / math.sqrt(width)
    for kernel in model["conv"].weight.reshape(4, width // 4, -1):
        assert 0.85 < spectral(kernel) < 1.1
    assert bool((model["norm"].weight == 1).all())
    assert not model["norm"].bias.any()


def test_initial_standard_deviations():
    model = Language(vocab=2000, width=128)
    Plan.of(model).initialise_(model)
    assert model.table.weight.std().item() == pytest.approx(1, rel=0.01)
    assert model.out.weight.std().item() == pytest.approx(1 / 128, rel=0.01)
    assert model.hidden.weight.std().item() == pytest.approx(1 / (2 * math.sqrt(128)), rel=0.02)
    layer = nn.Linear(100, 900)
    Plan.of(layer).initialise_(layer)
    assert layer.weight.std().item() == pytest.approx(3 / (10 + 30), rel=0.01)  # fan-in and fan-out differ


def initialised(model, seed=0, recipe=None, **kwargs):
    Plan.of(model, recipe, **kwargs).initialise_(model, seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_initialisation_is_deterministic_in_the_seed_and_leaves_the_global_generator():
    torch.manual_seed(5)
    a, b = Language(), Language()
    before = torch.get_rng_state()
    first, second, other = initialised(a), initialised(b), initialised(a, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert same(first, second)
    assert same(first, initialised(a))
    assert not torch.equal(first["hidden.weight"], other["hidden.weight"])


def test_equal_shapes_get_different_values():
    values = initialised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert not torch.equal(values["0.weight"], values["1.weight"])


def test_initialisation_does_not_depend_on_the_order_or_the_company():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 50, bias=False)
            self.extra = nn.Linear(8, 3)
            self.hidden = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            self.table = nn.Embedding(50, 8)

    a, b = initialised(Language()), initialised(Reversed())
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "recipe",
    [recipes.moga_row(1.5), recipes.moga_column(), recipes.muon(), recipes.scion(), recipes.lion(), recipes.sign_sgd()],
    ids=lambda recipe: recipe.name,
)
def test_initialisation_does_not_depend_on_the_recipe(recipe):
    assert same(initialised(Language()), initialised(Language(), recipe=recipe))
    assert same(initialised(Language()), initialised(Language(), stabiliser=sf.PostClip(0.1)))


def test_initialisation_does_not_depend_on_default_dtype_and_device():
    model, expected = Language(), initialised(Language())
    plan = Plan.of(model)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            plan.initialise_(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(expected, {name: p.detach() for name, p in model.named_parameters()})


def test_initialisation_by_way_of_the_meta_device():
    with torch.device("meta"):
        model = Language()
    plan = Plan.of(model)
    assert plan.hash == Plan.of(Language()).hash
    plan.initialise_(model)  # nothing to write to, and no error
    assert model.hidden.weight.is_meta
    model.to_empty(device="cpu")
    plan.initialise_(model)
    assert same(initialised(Language()), {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_initialisation_in_other_dtypes_is_the_rounded_float32_value(dtype):
    expected, values = initialised(Language()), initialised(Language().to(dtype))
    assert all(values[name].dtype == dtype and torch.equal(values[name], expected[name].to(dtype)) for name in expected)


def test_initialisation_of_parameters_that_are_not_contiguous():
    conv, plain = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), nn.Conv2d(4, 8, 3)
    linear, transposed = nn.Linear(6, 4), nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.zeros(6, 4).T)
    assert not conv.weight.is_contiguous()
    assert not transposed.weight.is_contiguous()
    assert same(initialised(plain), initialised(conv))
    assert same(initialised(linear), initialised(transposed))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_initialisation_leaves_frozen_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False).fill_(7)
    model[1].running_mean.fill_(3)
    initialised(model)
    assert bool((model[0].weight == 7).all())
    assert bool((model[1].running_mean == 3).all())


@pytest.mark.parametrize(
    ("other", "message"),
    [(nn.Sequential(nn.Linear(4, 4)), "weight is missing"), (nn.Linear(4, 5), r"weight has shape \(5, 4\)")],
    ids=["missing", "shape"],
)
def test_initialising_another_model_raises(other, message):
    with pytest.raises(ValueError, match=message):
        Plan.of(nn.Linear(4, 4)).initialise_(other)


def test_the_view_of_a_role_is_a_plain_value():
    assert Plan.of(nn.Linear(4, 4))["weight"].role.view == Matrix()


def test_the_promise_names_the_weights_norm_where_steps_are_of_another():
    rows = {
        row["name"]: row["promise"]
        for row in Plan.of(Language(), sf.recipes.moga_row(), stabiliser=sf.PostClip(2)).rows()
    }
    assert rows["hidden.weight"] == "Spectral norm <= 2 at every step, certified"
    assert rows["out.weight"].startswith("norm <= ")  # its steps are of its own norm
