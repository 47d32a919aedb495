"""What a forward pass tells of rows in any order, of separate layers, gates, adapters and bare matrices."""

from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot import Plan
from surefoot.layers import InNormLinear, PostNorm
from surefoot.views import Fused, Interleaved, Matrix, Stack, Transposed


class Attends(nn.Module):
    """What `cut` makes of one product, (B, T, rows) -> queries, keys and values (B, heads, T, d)."""

    def __init__(self, rows, cut):
        super().__init__()
        self.w, self.cut = nn.Linear(32, rows, bias=False), cut

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.cut(self.w(x)))


def heads_of(x, d=8):
    return x.unflatten(-1, (-1, d)).transpose(1, 2)


CUTS = {
    "by head": (96, lambda x: x.unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0), Interleaved(4, 3), 9),
    "keys first": (96, lambda x: [heads_of(x.chunk(3, -1)[i]) for i in (1, 0, 2)], Fused(3), 9),
    "values first": (96, lambda x: [heads_of(x.chunk(3, -1)[i]) for i in (1, 2, 0)], Fused(3), 3),
    "one for queries and keys": (64, lambda x: [heads_of(x.chunk(2, -1)[i]) for i in (0, 0, 1)], Fused(2), 5),
    "features first": (96, lambda x: x.unflatten(-1, (8, 3, 4)).permute(3, 0, 4, 1, 2).unbind(0), Matrix(), 1),
    "cut in place": (96, lambda x: [torch.zeros(2, 4, 5, 8).index_put_((torch.arange(2),), y) if i else y
                     for i, y in enumerate(map(heads_of, x.chunk(3, -1)))], Matrix(), 1),
}  # fmt: skip
"""Rows, how they are cut, the layout and the number of matrices with a norm."""


@pytest.mark.parametrize("case", CUTS)
def test_rows_in_any_order(case):
    rows, cut, view, count = CUTS[case]
    found = Plan.of(Attends(rows, cut), inputs=torch.randn(2, 5, 32), head=())
    assert found["w.weight"].role.view.whole == view
    assert sum(block[0] for block in found["w.weight"].blocks) == count
    assert bool(found.unsplit) == (view == Matrix())


def test_a_name_that_tells_another_order_is_said_to():
    class Named(Attends):
        def __init__(self):
            super().__init__(96, CUTS["by head"][1])
            self.num_heads, self.qkv_proj, self.out = 4, self.w, nn.Linear(32, 32)
            del self.w

        def forward(self, x):
            return self.out(F.scaled_dot_product_attention(*self.cut(self.qkv_proj(x))).transpose(1, 2).flatten(2))

    why = Plan.of(Named(), inputs=torch.randn(2, 5, 32), head=())["qkv_proj.weight"].why
    assert "by the name `qkv_proj`, whose rows are in another order than its name says; query, key, value by" in why


def test_layers_before_torchs_attention_are_the_same_in_training_and_in_evaluation():
    """Its fast path is one operation on what lies before the projections."""

    class Before(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.att = nn.Linear(8, 32), nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            y = self.inp(x)
            return self.att(y, y, y, need_weights=False)[0]

    plans = [Plan.of(Before().train(mode), inputs=torch.zeros(1, 5, 8), head=()) for mode in (True, False)]
    assert plans[0]["inp.weight"] == plans[1]["inp.weight"]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("stored", [(16, 8), (8, 16)], ids=["(out, in)", "(in, out)"])
def test_the_bias_beside_a_bare_matrix_is_a_bias(stored):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(stored)), nn.Parameter(torch.randn(16))

        def forward(self, x):
            return (x @ self.weight if stored == (8, 16) else F.linear(x, self.weight)) + self.bias

    plan = Plan.of(Bare(), inputs=torch.zeros(2, 8), head=())
    assert [plan[name].role.name for name in ("weight", "bias")] == ["linear", "bias"]


def test_queries_in_wrappers_are_placed_though_their_heads_are_not_known():
    model = nn.ModuleDict({f"to_{x}": nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)) for x in "qkv"})
    model.heads = 4
    assert "adds" not in Plan.of(model, head=())["to_q.0.weight"].why


class Apart(nn.Module):
    """Layers of names that say nothing; keys come first, the softmax is along the first side of the product."""

    def __init__(self, gated=False):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))
        self.gated = gated

    def forward(self, x):
        a, b, c, d = (heads_of(layer(x)) for layer in (self.a, self.b, self.c, self.d))
        weights = torch.einsum("bhjd,bhid->bhji", a * d.sigmoid() if self.gated else a, b).softmax(2)
        return weights.mT @ c


def test_the_side_of_the_softmax_tells_keys_from_queries():
    found = Plan.of(Apart(), inputs=torch.randn(2, 5, 32), head=())
    why = {name[0]: found[name].why.partition("; ")[2] for name in found if "weight" in name}
    heads = "by the forward pass: heads of 8 rows, a norm each"
    assert why == {"a": f"key {heads}", "b": f"query {heads}", "c": "value by the forward pass", "d": ""}


def test_what_a_gate_multiplies_is_not_clear_and_the_plan_says_so():
    found = Plan.of(Apart(gated=True), inputs=torch.randn(2, 5, 32), head=())
    assert [found[f"{each}.weight"].blocks for each in "abcd"] == [((1, 32, 32),)] * 4
    assert found.unsplit.startswith("attention with one norm for all heads, b.weight, c.weight: ")


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low, self.up = base, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.low(x))


def test_matrices_whose_outputs_are_added_feed_attention_together():
    """LoRA: the base and B have heads, A has not."""
    model = Apart()
    model.b = Adapted(model.b)
    found = Plan.of(model, inputs=torch.randn(2, 5, 32), head=())
    assert found["b.base.weight"].blocks == ((4, 8, 32),)
    assert found["b.up.weight"].blocks == ((4, 8, 4),)
    assert found["b.low.weight"].blocks == ((1, 4, 32),)


class Bare(nn.Module):
    """A bare matrix that multiplies what a linear layer has made."""

    def __init__(self, shape, multiply):
        super().__init__()
        self.first, self.w, self.multiply = nn.Linear(4, 8), nn.Parameter(torch.randn(shape)), multiply

    def forward(self, x, *, scale=1.0):
        return self.multiply(scale * self.first(x), self.w)


@pytest.mark.parametrize(
    ("shape", "multiply", "view"),
    [
        ((6, 8), F.linear, Matrix()),
        ((8, 6), torch.matmul, Transposed(Matrix())),
        ((8, 8), lambda x, w: (w @ x.mT).mT, Matrix()),
        ((8, 8), lambda x, w: torch.einsum("btd,de->bte", x, w.type_as(x) / 2), Transposed(Matrix())),
        ((3, 5, 8), lambda x, w: F.linear(x, w[1]) + F.linear(x, w[2]), Stack()),
    ],
)
def test_bare_matrices_are_linear_layers_as_they_are_multiplied(shape, multiply, view):
    model = Bare(shape, multiply)
    for inputs in ((torch.randn(2, 3, 4),), {"x": torch.randn(2, 3, 4), "scale": 2.0}):
        placed = Plan.of(model, inputs=inputs)["w"]
        assert (placed.role.name, placed.role.view) == ("linear", view)
    with pytest.raises(ValueError, match="cannot place w"):
        Plan.of(Bare((8, 8), lambda x, w: x @ w + x @ w.mT), inputs=torch.randn(2, 3, 4))  # both ways
    assert Plan.of(model, inputs=torch.randn(2, 3, 4), overrides=[("w", "positions")])["w"].role.name == "positions"


def test_a_bare_matrix_of_the_shape_of_a_table_may_be_the_head():
    model = Bare((8, 8), F.linear)
    model.table = nn.Embedding(8, 8)
    with pytest.raises(ValueError, match=r"cannot place w .*it may be the head, 'head': name its role"):
        Plan.of(model, inputs=torch.randn(2, 3, 4), head=())
    model.table, model.places = nn.Embedding(9, 8), nn.Embedding(8, 8)
    assert Plan.of(model, inputs=torch.randn(2, 3, 4), head=())["w"].role.name == "linear"


def test_named_arguments_may_be_any_mapping():
    """As what the tokenizers of transformers return."""
    model = Attends(96, CUTS["keys first"][1])
    by_dict, by_mapping = (Plan.of(model, inputs=kind({"x": torch.zeros(2, 5, 32)})) for kind in (dict, UserDict))
    assert by_mapping["w.weight"] == by_dict["w.weight"]
    assert by_mapping["w.weight"].role.view.inner == Fused(3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_wraps_a_model_for_data_parallelism_is_looked_through_and_what_prepares_inputs_is_called(monkeypatch):
    class Prepared(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Attends(*CUTS["by head"][:2])

        def forward(self, x):
            return self.module(x.float().unflatten(-1, (-1, 32)))

    monkeypatch.setitem(nn.DataParallel.__init__.__globals__, "_get_available_device_type", lambda: None)
    wrapped = nn.DataParallel(torch.compile(Attends(*CUTS["by head"][:2])))
    for model, x in ((Prepared(), torch.zeros(2, 160, dtype=torch.int64)), (wrapped, torch.zeros(2, 5, 32))):
        (place,) = Plan.of(model, inputs=x, head=()).placements.values()
        assert place.role.view.whole == Interleaved(4, 3)


class Sums(nn.Module):
    """Attention whose logits, or weights, are of two products of queries and keys, (B, heads, T, d) each."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.q, self.k, self.k2 = kind, *(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.shared, self.v = nn.Linear(32, 4, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        q, k, k2, v = (heads_of(layer(x)) for layer in (self.q, self.k, self.k2, self.v))
        shared = self.shared(x)[:, None]
        if self.kind == "two terms":  # keys and positions
            weights = (q @ k2.mT + q @ k.mT).softmax(-1)
        elif self.kind == "parts of a head":  # one without and one with rotary positions, as MLA
            weights = (q[..., :4] @ k[..., :4].mT + q[..., 4:] @ shared.mT).softmax(-1)
        elif self.kind == "parts of a head, joined":
            keys = torch.cat([k[..., :4], shared.expand(-1, 4, -1, -1)], -1)
            weights = (torch.cat([q[..., :4], q[..., 4:]], -1) @ keys.mT).softmax(-1)
        else:  # two softmaxes
            weights = (q[:, :2] @ k[:, :2].mT).softmax(-1) - 0.5 * (q[:, 2:] @ k[:, 2:].mT).softmax(-1)
            v = v[:, :2]
        return weights @ v


def rows_by_head(kind):
    found = Plan.of(Sums(kind), inputs=torch.zeros(2, 5, 32), head=())
    assert not found.unsplit
    return {name: (found[f"{name}.weight"].blocks, found[f"{name}.weight"].lr_scales) for name in ("q", "k", "k2")}


@pytest.mark.parametrize("kind", ["two terms", "two softmaxes"])
def test_every_product_of_queries_and_keys_counts(kind):
    whole, heads = (((1, 32, 32),), (1.0,)), (((4, 8, 32),), (pytest.approx(4 / 8**0.25),))
    assert rows_by_head(kind) == {"q": heads, "k": heads, "k2": heads if kind == "two terms" else whole}


def test_a_head_whose_parts_are_multiplied_apart_is_one_head():
    assert rows_by_head("parts of a head") == rows_by_head("parts of a head, joined")


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::DeprecationWarning")
def test_flex_attention_is_attention():
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(32, 96, bias=False)

        def forward(self, x):
            return flex_attention(*(heads_of(part) for part in self.w(x).chunk(3, -1)))

    found = Plan.of(Flex(), inputs=torch.zeros(2, 5, 32), head=())["w.weight"]
    assert found.role.view.whole == Fused(3)
    assert sum(block[0] for block in found.blocks) == 9


def test_the_pass_is_the_same_under_inference_mode_and_with_inputs_on_the_meta_device():
    rows, cut, *_ = CUTS["by head"]
    want = Plan.of(Attends(rows, cut), inputs=torch.zeros(2, 5, 32))
    assert "heads of 8 rows" in want["w.weight"].why
    with torch.inference_mode():
        assert Plan.of(Attends(rows, cut), inputs=torch.zeros(2, 5, 32)) == want
    x = torch.zeros(2, 5, 32)
    with torch.device("meta"):
        assert Plan.of(Attends(rows, cut), inputs=x) == want
        assert Plan.of(Attends(rows, cut), inputs=torch.zeros(2, 5, 32)) == want


@pytest.mark.parametrize("make", [lambda: InNormLinear(8, 8), lambda: PostNorm(nn.Linear(8, 8))])
def test_layers_that_look_at_their_values_run_on_shapes_alone(make):
    model = nn.Sequential(nn.Linear(8, 8), make())
    assert Plan.of(model, inputs=torch.randn(2, 5, 8))["0.weight"].role.name == "linear"
