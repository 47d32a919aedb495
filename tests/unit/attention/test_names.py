"""One table of names: the plan, QK-clip and the monitor find the same queries, keys and values in every row of it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import random
from torch import nn

import surefoot as sf
from surefoot.attention.logits import largest_logits, multihead_logits
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.qk_pairs import QueryKey, find_pairs
from surefoot.discovery import heads
from surefoot.monitor.layer_bounds import forward_bound
from surefoot.views import Interleaved

D, SIZE = 16, 4
NAMES = [
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("c_q", "c_k", "c_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("Wq", "Wk", "Wv"),
    ("to_query", "to_key", "to_value"),
    ("lin_query", "lin_key", "lin_value"),
]


class Attention(nn.Module):
    """Attention whose layers have any names; nothing says its scale."""

    def __init__(self, names=("wq", "wk", "wv"), out="wo", keys=2):
        super().__init__()
        self.names, self.out, self.head_dim = names, out, SIZE
        for name, rows in zip(names, (D, keys * SIZE, keys * SIZE), strict=True):
            setattr(self, name, nn.Linear(D, rows))
        setattr(self, out, nn.Linear(D, D))

    def forward(self, x):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for n in self.names)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return getattr(self, self.out)(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_a_plain_module_is_the_same_to_all_three(names, monkeypatch):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Attention(names)})
    plan = sf.Plan.of(model)
    pair = find_pairs(model)["a"]
    for projection, name in ((pair.query, names[0]), (pair.key, names[1])):
        assert projection.layer is model["a"].get_submodule(name)
        placed = plan[f"a.{name}.weight"]
        assert placed.blocks == ((projection.count // SIZE, SIZE, D),)
        assert f"by the name `{name}`: heads of {SIZE} rows, a norm each" in placed.why
    assert plan[f"a.{names[2]}.weight"].blocks == ((1, 8, D),)
    monkeypatch.setattr(Attention, "__module__", "transformers.models.own")  # bounds are for known packages only
    bound = forward_bound(model["a"])
    with torch.no_grad():
        for name in names[:2]:
            model["a"].get_submodule(name).weight.mul_(100)
    assert forward_bound(model["a"]) == bound
    with torch.no_grad():
        model["a"].get_submodule(names[2]).weight.mul_(100)
    assert forward_bound(model["a"]) > 5 * bound


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_logits_of_a_plain_module_are_measured_and_come_back_to_the_threshold(names):
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"a": Attention(names)}), random(2, 6, D)
    control = LogitControl(model, threshold=1e9)
    optimizer = sf.SteepestDescent(model, lr=0.0)
    control.hold(optimizer)
    model["a"](x)
    before = control.largest.pop("a")
    control.threshold = float(before.median())
    optimizer.scale_(control.factors({"a": before}))
    model["a"](x)
    torch.testing.assert_close(control.largest["a"], before.clamp(max=control.threshold), rtol=1e-4, atol=0)
    assert (before > 1.01 * control.threshold).any()
    bound = LogitControl(model, scale=SIZE**-0.5).bounds(float(x.square().mean(-1).max().sqrt()))["a"]
    assert (control.largest["a"] <= bound).all()


@pytest.mark.parametrize("options", [{}, {"bias": False, "kdim": 5, "vdim": 3}, {"add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_torchs_own_attention_is_measured_bounded_and_rescaled(options, weights, masked):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(D, D // SIZE, batch_first=True, **options)
    x, y = random(2, 6, D), random(2, 5, options.get("kdim", D), seed=1)
    given = {"need_weights": weights}
    causal, padded = torch.ones(6, 5, dtype=torch.bool).triu(1), torch.arange(5).expand(2, 5) > 3
    if masked:
        given |= {"attn_mask": causal, "key_padding_mask": padded}
    model, of_keys = nn.ModuleDict({"a": layer}), layer.bias_k
    if of_keys is not None:
        with pytest.raises(ValueError, match="has a key of its own, bias_k"):
            LogitControl(model)
        layer.bias_k = None
    control = LogitControl(model, pairs=find_pairs(model))
    pair, layer.bias_k = control.pairs["a"], of_keys
    q, k = (rows["weight"].split(SIZE) for rows in (pair.query.rows(), pair.key.rows()))
    placed = sf.Plan.of(layer)
    assert {b[:2] for name in placed for b in placed[name].blocks if "k_proj" in name or "in_proj_w" in name} <= {
        (4, SIZE), (8, SIZE), (1, D)
    }  # fmt: skip
    assert len(q) == len(k) == 4
    control.hold(sf.SteepestDescent(layer, lr=0.0))
    layer(x, y, random(2, 5, options.get("vdim", D), seed=2), **given)
    q, k = (p.rows()["weight"] @ z.mT for p, z in ((pair.query, x), (pair.key, y)))
    biases = [p.rows().get("bias", torch.zeros(D)) for p in (pair.query, pair.key)]
    q, k = ((z + b[:, None]).unflatten(1, (4, SIZE)).mT for z, b in zip((q, k), biases, strict=True))
    allowed = ~(causal | padded[:, None, None]) if masked else torch.ones(2, 1, 6, 5, dtype=torch.bool)
    if "add_bias_kv" in options:
        k = torch.cat([k, layer.bias_k.detach().view(1, 4, 1, SIZE).expand(2, -1, -1, -1)], 2)
        allowed = F.pad(allowed, (0, 1), value=True)
    torch.testing.assert_close(control.largest["a"], largest_logits(q, k, SIZE**-0.5, allowed))
    if not options.get("add_bias_kv"):
        r = float(torch.cat([x.square().mean(-1).flatten(), y.square().mean(-1).flatten()]).max().sqrt())
        assert (control.largest["a"] <= control.bounds(r)["a"]).all()


def test_torchs_function_may_be_called_with_masks_of_either_kind():
    q, k, weight = random(4, 2, D), random(3, 2, D, seed=1), random(3 * D, D, seed=2)
    blocked = torch.tensor([False, True, True]).expand(4, 3)
    given = {"num_heads": 4, "in_proj_weight": weight, "in_proj_bias": None}
    as_numbers = torch.zeros(4, 3).masked_fill(blocked, -torch.inf)
    wanted = multihead_logits(q, k[:1], **given)
    for mask in (blocked, as_numbers, blocked.expand(8, 4, 3)):
        torch.testing.assert_close(multihead_logits(q, k, attn_mask=mask, **given), wanted)
    torch.testing.assert_close(multihead_logits(q, k, key_padding_mask=blocked[:2], **given), wanted)


class ByHead(nn.Module):
    """Megatron's order, under a name that tells another: for each head its query, key and value."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (4, 3 * SIZE)).transpose(1, 2).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_rows_that_a_forward_pass_shows_elsewhere_are_not_clipped_by_their_name():
    torch.manual_seed(0)
    model, x = ByHead(), random(2, 6, D)
    with torch.no_grad():
        model.qkv.weight.mul_(8)
    optimizer = sf.SteepestDescent(model, sf.Plan.of(model, inputs=x, head=()), lr=0.0)
    with pytest.raises(
        ValueError, match=r"rows of 'qkv' .* are Fused\(parts=3\) by its name, Interleaved\(heads=4, parts=3\)"
    ):
        LogitControl(model, threshold=2.0).hold(optimizer)
    query, key = (heads.Projection(model.qkv, Interleaved(4, 3), part) for part in (0, 1))
    control = LogitControl(model, threshold=2.0, pairs={"": QueryKey(query, key, SIZE)})
    by_name = sf.SteepestDescent(model, sf.Plan.of(model, head=()), lr=0.0)
    for handle in control.hold(by_name):  # who says which rows has the last word
        handle.remove()
    control.hold(optimizer)
    model(x).square().mean().backward()
    assert control.largest[""].max() > 4.0
    optimizer.step()
    model(x)
    assert 1.99 < control.largest[""].max() < 2.01


class Turned(nn.Module):
    """Attention whose forward pass does otherwise than its names say."""

    def __init__(self, names, size=SIZE, order=(0, 1, 2), scattered=False):
        super().__init__()
        self.names, self.size, self.order, self.scattered, self.num_heads = names, size, order, scattered, D // SIZE
        for name in names:
            self.add_module(name, nn.Linear(D, 3 * D // len(names), bias=False))
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        all_three = [y for name in self.names for y in self.get_submodule(name)(x).chunk(3 // len(self.names), -1)]
        shape = (self.size, -1) if self.scattered else (-1, self.size)
        heads = [y.unflatten(-1, shape).movedim(-1 if self.scattered else -2, 1) for y in all_three]
        return self.out(F.scaled_dot_product_attention(*(heads[i] for i in self.order)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("names", [("qkv",), ("q_proj", "k_proj", "v_proj")], ids=["fused", "apart"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"order": (2, 1, 0)}, "query number . by its name, .*value"),
        ({"size": SIZE // 2}, "heads of 4 by its attributes, of 2 by the plan"),
        ({"scattered": True}, "by its name, another order by the plan"),
    ],
    ids=["order", "size", "scattered"],
)
def test_names_that_the_forward_pass_contradicts_are_refused_and_do_not_decide(names, other, said):
    model = Turned(names, **other)
    plan = sf.Plan.of(model, inputs=random(2, 6, D), head=())
    with pytest.raises(ValueError, match=said):
        LogitControl(model).hold(sf.SteepestDescent(model, plan, lr=0.1))
    heads_of_names = sf.views.PerHead(SIZE, sf.views.Matrix(), values=False)
    assert "order" in other or all(plan[f"{name}.weight"].role.view != heads_of_names for name in names)
    right = Turned(names)
    LogitControl(right).hold(sf.SteepestDescent(right, sf.Plan.of(right, inputs=random(2, 6, D), head=()), lr=0.1))


def test_another_optimizer_is_refused():
    model = Turned(("qkv",))
    with pytest.raises(ValueError, match="hold needs a SteepestDescent, not a SGD"):
        LogitControl(model).hold(torch.optim.SGD(model.parameters()))


def test_the_table_has_these_rows():
    assert set(heads._SEPARATE) == set(NAMES)


@pytest.mark.parametrize("relative", [False, True])
def test_torchs_transformer_trains_under_control(relative):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 32, batch_first=True), 2, enable_nested_tensor=False)
    control = LogitControl(model, threshold=0.05)
    plan = sf.Plan.of(model, head=())
    optimizer = sf.SteepestDescent(model, plan.relative_to(model) if relative else plan, lr=0.01)
    control.hold(optimizer)
    for _ in range(3):
        model(random(2, 6, D)).square().mean().backward()
        assert list(control.largest) == ["layers.0.self_attn", "layers.1.self_attn"]
        optimizer.step()


class Normed(Attention):
    def __init__(self, name, norm):
        super().__init__()
        self.add_module(name, norm)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Attention(("a", "b", "c")), r"bad \(Attention\) has head_dim, but no W_q and W_k by a known name"),
        (Normed("norm", nn.LayerNorm(D)), "has a norm 'norm' that may or may not"),
        (Normed("inner", nn.LayerNorm(SIZE)), "has a norm 'inner'"),
        (nn.MultiheadAttention(D, 4, kdim=5), "make it with bias=False"),
        (Normed("wq", nn.Sequential(nn.Linear(D, D))), "has 'wq', a wrapper and not a linear layer"),
    ],
    ids=["names", "a norm before", "a norm of heads", "torch, other keys", "a wrapper"],
)
def test_a_layer_that_is_not_understood_is_named_with_the_remedy(layer, message):
    good = Attention()
    with pytest.raises(ValueError, match=message) as error:
        LogitControl(nn.ModuleDict({"good": good, "bad": layer}))
    assert "pairs={'bad': QueryKey(" in str(error.value)
    pairs = find_pairs(nn.ModuleDict({"good": good}))
    assert LogitControl(nn.ModuleDict({"good": good, "bad": copy.deepcopy(layer)}), pairs=pairs).pairs == pairs


@pytest.mark.parametrize("name", heads.QK_NORMS)
def test_a_layer_with_a_norm_on_its_queries_is_left_out(name):
    model = nn.ModuleDict({"normed": Normed(name, nn.RMSNorm(SIZE)), "plain": Attention()})
    assert list(find_pairs(model)) == ["plain"]
    model = nn.ModuleDict({"none": Normed(name, nn.Identity()), "wide": Normed("before", nn.LayerNorm(3))})
    assert list(find_pairs(model)) == ["none", "wide"]


class Around(nn.Module):
    """torchtitan's way: the module with the projections does not compute attention, the one around it does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.wo = nn.Module(), nn.Linear(D, D)
        self.qkv.wq, self.qkv.wk, self.qkv.wv, self.qkv.head_dim = *(nn.Linear(D, D) for _ in "qkv"), SIZE

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in self.qkv.children())
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_module_whose_forward_is_not_called_warns_and_the_remedy_works():
    model = nn.ModuleDict({"a": Around()})
    pairs = find_pairs(model)
    assert list(pairs) == ["a.qkv"]
    for name, given in (("a.qkv", None), ("a", {"a": pairs["a.qkv"]})):
        control, optimizer = LogitControl(model, pairs=given), sf.SteepestDescent(model, lr=0.0)
        control.hold(optimizer)
        model["a"](random(2, 6, D)).square().mean().backward()
        if given:
            assert control.largest[name].shape == (4,)
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match=r"the attention logits of a\.qkv were not measured"):
                optimizer.step()
