"""What a parameter is, told by structure and exact class names: foreign norms, experts, routers, tokens, kernels."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes
from surefoot.initialise import AsBuilt
from surefoot.views import AlternatingStack, Fused, FusedStack, Stack, Transposed


class Own(nn.Module):
    """A module that owns what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)


def kinds(model, *args, **kwargs):
    plan = Plan.of(model, *args, **kwargs)
    return {name: plan[name].role.name for name in plan}


def of_class(full_name, base=Own, **attributes):
    """A module whose class has this full name, as if it came from there."""
    module, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": module, "__qualname__": name})(**attributes)


# --- norm layers of any class --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [
        Own(weight=torch.ones(8), variance_epsilon=1e-6),
        Own(scale=torch.ones(8), eps=1e-5),
        Own(gamma=torch.ones(8), beta=torch.zeros(8), epsilon=0.0),
        Own(weight=torch.zeros(8), bias=torch.zeros(8), norm_eps=1e-6),
    ],
    ids=["weight", "scale", "gamma and beta", "centred"],
)
def test_a_norm_by_its_structure(norm):
    plan = Plan.of(norm)
    assert [plan[name].role.name for name in plan] == ["gain", "bias"][: len(plan)]
    (gain, *_) = norm.parameters()
    before = gain.detach().clone()
    plan.initialise_(norm)
    assert torch.equal(before, gain)  # 1 or, centred on 0, 0: as built
    assert "by its structure" in plan.rows()[0]["why"]


@pytest.mark.parametrize(
    "module",
    [
        Own(weight=torch.ones(8)),
        Own(weight=torch.ones(8), eps=3.0),
        Own(weight=torch.ones(8), eps="small"),
        Own(weight=torch.ones(8), inner=nn.ReLU(), eps=1e-6),
        Own(weight=torch.ones(8), gain=torch.ones(8), eps=1e-6),
        Own(weight=torch.ones(8), bias=torch.ones(1), eps=1e-6),
        Own(weight=torch.ones(8), slope=torch.ones(8), eps=1e-6),
        Own(table=torch.ones(8), eps=1e-6),
    ],
    ids=["no epsilon", "large", "not a number", "a child", "two gains", "two sizes", "unknown part", "no gain"],
)
def test_what_is_no_norm_stays_a_vector(module):
    assert set(kinds(module).values()) == {"scalar"}


def test_a_gain_centred_on_zero_starts_at_zero_wherever_it_was_built():
    norm = of_class("transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm", weight=torch.ones(8), eps=1e-6)
    plan = Plan.of(norm)
    plan.initialise_(norm)
    assert plan["weight"].role.name == "gain"
    assert not norm.weight.any()
    assert "centred on 0" in plan["weight"].why


def test_a_layer_norm_centred_on_zero_keeps_its_bias_a_bias():
    class_name = "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P"
    module, _, name = class_name.rpartition(".")
    norm = type(name, (nn.LayerNorm,), {"__module__": module, "__qualname__": name})(8)
    plan = Plan.of(norm)
    plan.initialise_(norm)
    assert kinds(norm) == {"weight": "gain", "bias": "bias"}
    assert not norm.weight.any()


# --- exact class names ---------------------------------------------------------------------------------------


def conv1d(d_in, d_out, name="transformers.pytorch_utils.Conv1D"):
    return of_class(name, weight=torch.randn(d_in, d_out), bias=torch.zeros(d_out))


def test_conv1d_is_stored_transposed():
    layer = conv1d(100, 900)
    plan = Plan.of(layer)
    assert plan["weight"].role.view == Transposed()
    assert (plan["weight"].block, plan["bias"].block) == ((1, 900, 100), (1, 900))
    plan.initialise_(layer)
    assert layer.weight.std().item() == pytest.approx(3 / (10 + 30), rel=0.01)


@pytest.mark.parametrize("name", ["mine.Conv1D", "transformers.pytorch_utils.Conv1Dx", "transformers.Conv1D"])
def test_a_class_of_another_name_is_not_taken_for_it(name):
    with pytest.raises(ValueError, match="cannot place weight"):
        Plan.of(conv1d(4, 8, name))


@pytest.mark.parametrize(("crossed", "parts"), [(False, 3), (True, 2)])
def test_fused_projections_of_a_known_owner(crossed, parts):
    name = "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
    attention = of_class(name, c_attn=conv1d(4, 4 * parts), c_proj=conv1d(4, 4), is_cross_attention=crossed)
    plan = Plan.of(attention)
    assert plan["c_attn.weight"].role.view == Transposed(Fused(parts))
    assert plan["c_attn.bias"].role.view == Fused(parts)
    assert plan["c_proj.weight"].role.view == Transposed()


def test_a_subclass_of_a_known_owner_is_known_and_a_namesake_is_not():
    known = type(of_class("transformers.models.phi3.modeling_phi3.Phi3MLP"))
    child = type("Mine", (known,), {})(gate_up_proj=nn.Linear(4, 12, bias=False))
    namesake = of_class("mine.Phi3MLP", gate_up_proj=nn.Linear(4, 12, bias=False))
    assert Plan.of(child)["gate_up_proj.weight"].block == (2, 6, 4)
    assert Plan.of(namesake)["gate_up_proj.weight"].block == (1, 12, 4)


def test_a_known_owner_of_another_version_is_refused_and_settled_by_an_override():
    name = "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
    attention = of_class(name, c_attn=conv1d(4, 12))  # without is_cross_attention
    with pytest.raises(ValueError, match=r"cannot place c_attn\.weight"):
        Plan.of(attention)
    assert kinds(attention, overrides=[("c_attn.weight", "linear"), ("c_attn.bias", "bias")])


def test_torchtitans_grouped_queries_are_cut_key_by_key():
    """Two keys of head size 4, three queries each: a key's queries, the key, the value."""
    name = "torchtitan.models.common.attention.FusedQKVLinear"
    owner = of_class(name, wqkv=nn.Linear(6, 40), head_dim=4, heads_per_kv=3, r_dim=5)
    plan = Plan.of(owner)
    assert plan["wqkv.weight"].blocks == ((1, 24, 6), (1, 8, 6), (1, 8, 6))
    assert plan["wqkv.bias"].blocks == ((1, 24), (1, 8), (1, 8))
    rows = torch.arange(40.0)[:, None].expand(40, 6)
    queries, keys, values = plan["wqkv.weight"].role.view.split(rows)
    assert [int(x) for x in queries[0, :, 0]] == [*range(12), *range(20, 32)]
    assert [int(x) for x in keys[0, :, 0]] == [*range(12, 16), *range(32, 36)]
    assert [int(x) for x in values[0, :, 0]] == [*range(16, 20), *range(36, 40)]


def test_torchtitans_latent_attention():
    sizes = {"kv_lora_rank": 5, "qk_rope_head_dim": 2, "n_heads": 3, "qk_nope_head_dim": 4, "v_head_dim": 6}
    latents = {"wkv_a": nn.Linear(8, 7, bias=False), "wkv_b": nn.Linear(5, 30, bias=False)}
    plan = Plan.of(of_class("torchtitan.models.deepseek_v3.model.Attention", **latents, **sizes))
    assert plan["wkv_a.weight"].blocks == ((1, 5, 8), (1, 2, 8))
    assert plan["wkv_b.weight"].blocks == ((1, 12, 5), (1, 18, 5))


def test_torchtitans_experts_and_routers():
    grouped = {"w1_EFD": torch.randn(4, 6, 5), "w2_EDF": torch.randn(4, 5, 6), "w3_EFD": torch.randn(4, 6, 5)}
    experts = of_class("torchtitan.models.common.moe.GroupedExperts", **grouped)
    router = of_class("torchtitan.models.common.moe.TokenChoiceTopKRouter", gate=nn.Linear(5, 4))
    assert {**kinds(experts), **kinds(router)} == {
        "w1_EFD": "experts",
        "w2_EDF": "experts",
        "w3_EFD": "experts",
        "gate.weight": "router",
        "gate.bias": "bias",
    }
    paired = {"mlp1_weight_EGD": torch.randn(4, 12, 5), "mlp1_bias_EG": torch.zeros(4, 12)}
    single = {"mlp2_weight_EDF": torch.randn(4, 5, 6), "mlp2_bias_ED": torch.zeros(4, 5)}
    plan = Plan.of(of_class("torchtitan.models.gpt_oss.moe.GptOssGroupedExperts", type(experts), **paired, **single))
    assert {name: (plan[name].role.name, plan[name].role.view) for name in plan} == {
        "mlp1_weight_EGD": ("experts", AlternatingStack(2)),
        "mlp1_bias_EG": ("bias", AlternatingStack(2)),
        "mlp2_weight_EDF": ("experts", Stack()),
        "mlp2_bias_ED": ("bias", FusedStack(1)),
    }


# --- experts and routers -------------------------------------------------------------------------------------


def mixture(transposed=False, whole=True, gated=True, router=None):
    up, f, d = ("gate_up_proj", 12, 5) if gated else ("up_proj", 6, 5)
    shapes = {up: (4, f, d), "down_proj": (4, d, 6)}
    if transposed:
        shapes = {name: (e, b, a) for name, (e, a, b) in shapes.items()}
    flags = {"has_gate": gated, "is_transposed": transposed, "is_concatenated": whole}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    biases = {f"{up}_bias": torch.zeros(4, f), "down_proj_bias": torch.zeros(4, d)}
    return Own(experts=Own(**tensors, **biases, **flags), gate=router or Own(weight=torch.randn(4, 5)))


@pytest.mark.parametrize("transposed", [False, True], ids=["(E, out, in)", "(E, in, out)"])
@pytest.mark.parametrize(
    ("whole", "gated", "view", "count"),
    [(True, True, FusedStack(2), 8), (False, True, AlternatingStack(2), 8), (True, False, Stack(), 4)],
    ids=["gate over up", "gate and up in turn", "no gate"],
)
def test_experts_that_say_their_layout(transposed, whole, gated, view, count):
    plan = Plan.of(mixture(transposed, whole, gated))
    up = "experts.gate_up_proj" if gated else "experts.up_proj"
    assert plan[up].role.view == (Transposed(view) if transposed else view)
    assert {name: (plan[name].role.name, plan[name].block) for name in plan} == {
        up: ("experts", (count, 6, 5)),
        "experts.down_proj": ("experts", (4, 5, 6)),
        f"{up}_bias": ("bias", (count, 6)),
        "experts.down_proj_bias": ("bias", (4, 5)),
        "gate.weight": ("router", (1, 4, 5)),
    }


@pytest.mark.parametrize(
    ("router", "kind"),
    [
        (Own(weight=torch.randn(4, 5), bias=torch.zeros(4)), "router"),
        (nn.Linear(5, 4), "router"),
        (nn.Linear(5, 3), "linear"),
        (nn.Sequential(nn.Linear(5, 4)), "linear"),
        (nn.Conv1d(5, 4, 1), "conv"),
    ],
    ids=["bare", "linear", "another count", "no sibling", "a layer of another kind"],
)
def test_the_router_stands_beside_its_experts(router, kind):
    plan = Plan.of(mixture(router=router))
    (weight, bias) = [name for name in plan if name.startswith("gate.")]
    assert (plan[weight].role.name, plan[bias].role.name) == (kind, "bias")


def test_bare_stacks_are_refused_with_the_word_for_them():
    model = Own(w1=torch.randn(4, 6, 5))
    with pytest.raises(ValueError, match=r"cannot place w1 \(4, 6, 5\) of Own.*\('w1', 'experts'\)"):
        Plan.of(model)
    assert kinds(model, overrides=[("w1", "experts")]) == {"w1": "experts"}


def test_a_list_of_experts_is_linear_layers():
    model = nn.ModuleList(nn.Linear(5, 6, bias=False) for _ in range(4))
    assert set(kinds(model).values()) == {"linear"}


def test_each_expert_takes_a_step_of_one_norm_in_gate_and_up():
    model = mixture(transposed=True, whole=False)
    weight = model.experts.gate_up_proj
    before = weight.detach().clone()
    plan = Plan.of(model, overrides=[("experts.gate_up_proj", lambda role: replace(role, geometry=sf.Spectral("svd")))])
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


# --- parameters that no module tells of ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1, 1, 8), "positions"),
        ((1, 17, 8), "positions"),
        ((1, 4, 4, 8), "positions"),
        ((8, 1, 1), "scalar"),
        ((1, 8, 1, 1), "scalar"),
        ((8,), "scalar"),
    ],
)
def test_tokens_and_channel_scales_by_their_shape(shape, kind):
    model = Own(p=torch.full(shape, 0.5))
    plan = Plan.of(model)
    assert plan["p"].role.name == kind
    assert plan["p"].role.initial == AsBuilt()


def test_a_bare_alias_of_a_layers_parameter_is_the_layers():
    model = nn.Sequential(nn.Linear(4, 8))
    model.bias, model.weight = model[0].bias, model[0].weight
    plan = Plan.of(model)
    assert {name: plan[name].role.name for name in plan} == {"bias": "bias", "weight": "linear"}
    assert "shared by weight, 0.weight" in plan["weight"].why


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 6)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_low_rank_adapters_start_at_zero_and_the_frozen_base_is_left_alone():
    model = LoRA()
    frozen = {name: p.detach().clone() for name, p in model.base.named_parameters()}
    a = model.a.weight.detach().clone()
    assert kinds(model) == {"a.weight": "linear", "b.weight": "linear"}
    optimizer = sf.SteepestDescent(model, lr=0.1)
    assert not model.b.weight.any()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.a.weight, a)  # its gradient passes through B = 0
    assert float(torch.linalg.matrix_norm(model.b.weight.detach(), 2)) * math.sqrt(2 / 6) == pytest.approx(0.1, 0.04)
    assert all(torch.equal(p, frozen[name]) for name, p in model.base.named_parameters())


@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrization_is_refused_by_name_and_its_remedy_works(make):
    model = nn.Sequential(make(nn.Linear(4, 6)))
    with pytest.raises(ValueError, match=r"cannot place 0\.parametrizations\.weight\.original") as error:
        Plan.of(model)
    assert "remove_parametrizations(layer, 'weight')" in str(error.value)
    assert kinds(model, overrides=[("0.parametrizations*", "scalar")])
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert kinds(model) == {"0.bias": "bias", "0.weight": "linear"}


def test_the_length_of_a_normalised_kernel_is_no_table_of_tokens():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=2)  # original0 is (1, 1, 3), as wav2vec2's
    with pytest.raises(ValueError, match=r"cannot place parametrizations\.weight\.original0 \(1, 1, 3\)"):
        Plan.of(layer)


# --- transposed convolutions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "block", "stride"),
    [
        (nn.ConvTranspose1d(6, 8, 3), (1, 8, 18), 1),
        (nn.ConvTranspose1d(6, 8, 4, stride=2), (1, 8, 24), 2),
        (nn.ConvTranspose2d(6, 8, 4, stride=2, groups=2), (2, 4, 48), 4),
        (nn.ConvTranspose2d(6, 8, (2, 3), stride=(4, 1)), (1, 8, 36), 2),  # gaps: two columns of taps, never together
        (nn.ConvTranspose1d(6, 8, 4, stride=2, dilation=2), (1, 8, 24), 1),  # every tap hits the same outputs
        (nn.ConvTranspose3d(4, 4, 2, stride=2, groups=4), (4, 1, 8), 8),
    ],
    ids=str,
)
def test_transposed_convolutions_by_group_and_effective_fan_in(layer, block, stride):
    plan = Plan.of(layer)
    assert plan["weight"].role.name == "conv"
    assert plan["weight"].block == block
    assert getattr(plan["weight"].role.geometry, "stride", 1) == stride
    # the taps that make one output entry, counted: ones in, ones as weights
    ones = torch.ones(1, layer.in_channels, *[12] * (layer.weight.ndim - 2))
    with torch.no_grad():
        layer.weight.fill_(1)
        out = layer(ones) - layer.bias.reshape(1, -1, *[1] * (layer.weight.ndim - 2))
    assert float(out.max()) == pytest.approx(block[2] / stride)


def test_a_transposed_convolutions_norm_init_step_and_radius_share_the_fan_in():
    layer = nn.ConvTranspose2d(32, 48, 4, stride=2, bias=False)
    plan = Plan.of(layer, stabiliser=sf.PostClip(0.5, period=1))

    def norm(w):
        matrix = w.detach().double().permute(1, 0, 2, 3).reshape(48, 32 * 16)
        return float(torch.linalg.matrix_norm(matrix, 2)) * math.sqrt(32 * 16 / 4 / 48)

    plan.initialise_(layer)
    assert norm(layer.weight) == pytest.approx(1, abs=0.06)
    free, before = sf.SteepestDescent(layer, Plan.of(layer), lr=0.1), layer.weight.detach().clone()
    layer.weight.grad = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0))
    free.step()
    assert 0.096 < norm(layer.weight - before) < 0.1001
    optimizer = sf.SteepestDescent(layer, plan, lr=0.1)
    optimizer.step()
    assert norm(layer.weight) == pytest.approx(0.5, rel=1e-3)
    assert optimizer.stability()["weight"]["forward_upper"] == pytest.approx(0.5, rel=2e-3)


def test_a_strided_kernel_is_refused_by_recipes_without_the_spectral_norm():
    layer = nn.ConvTranspose1d(4, 8, 4, stride=2)
    with pytest.raises(ValueError, match=r"weight: the fan-in of a transposed convolution of stride 2.*MeanOperator"):
        Plan.of(layer, recipes.moga_row())
    assert kinds(nn.ConvTranspose1d(4, 8, 4), recipes.moga_row())["weight"] == "conv"  # stride 1 has no such trouble
    assert kinds(layer, recipes.muon())["weight"] == "conv"


# --- tied embedding and head ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, multiplier=None):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.out.weight = self.table.weight
        if multiplier:
            self.output_multiplier = multiplier


@pytest.mark.parametrize(
    ("multiplier", "tied", "kind"),
    [
        (None, None, "head"),
        (None, "head", "head"),
        (1 / 8, None, "embedding"),
        (1 / 8, "embedding", "embedding"),
        (1 / 8, "head", "head"),
    ],
)
def test_the_policy_for_a_tied_matrix(multiplier, tied, kind):
    assert kinds(Tied(multiplier), tied=tied) == {"table.weight": kind}


@pytest.mark.parametrize(
    ("model", "tied", "message"),
    [
        (Tied(), "embedding", r"tied='embedding' for table\.weight, out\.weight.*1/d.*output_multiplier"),
        (Tied(), "error", r"table\.weight, out\.weight are one matrix"),
        (Tied(1 / 8), "error", "are one matrix"),
    ],
)
def test_a_policy_that_cannot_hold_is_refused(model, tied, message):
    with pytest.raises(ValueError, match=message):
        Plan.of(model, tied=tied)
    assert kinds(model, tied=tied, overrides=[("table.weight", "head")]) == {"table.weight": "head"}


def test_models_that_tie_nothing_take_any_policy_that_there_is():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    assert kinds(model, tied="error")["1.weight"] == "head"
    with pytest.raises(ValueError, match="tied='both': choose 'head', 'embedding' or 'error'"):
        Plan.of(model, tied="both")


def test_a_table_of_as_many_rows_as_experts_is_no_router():
    model = mixture()
    model.table = nn.Embedding(4, 5)
    assert kinds(model, head=())["table.weight"] == "embedding"


def test_the_pages_examples_are_right():
    page = (Path(__file__).parents[3] / "docs" / "layers.md").read_text()
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(code, scope)
    assert scope["heads"]["query.weight"].blocks == ((4, 16, 64),)
    assert scope["plan"]["qkv.weight"].blocks == ((1, 64, 64), (1, 16, 64), (1, 16, 64))
    assert scope["plan"]["qkv.bias"].blocks == ((1, 64), (1, 16), (1, 16))
