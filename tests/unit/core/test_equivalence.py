"""One network written in several ways is trained to the same weights: layouts change nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import surefoot as sf
from combinations import combinations
from surefoot.views import Fused, Grouped, Interleaved, Projections

D, HEADS, V = 16, 4, 19


class Net(nn.Module):
    """Embedding, norm, causal attention, gated MLP, head; subclasses say how the projections are stored."""

    def __init__(self, keys):
        super().__init__()
        self.sizes = (D, D // HEADS * keys, D // HEADS * keys)
        self.embedding, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.store()
        self.output, self.down = nn.Linear(D, D), nn.Linear(24, D)
        self.head = nn.Linear(D, V, bias=False)

    def attend(self, x):
        q, k, v = (p.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for p in self.project(x))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(-2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attend(self.norm(x))
        gate, up = self.expand(x)
        return self.head(x + self.down(nn.functional.silu(gate) * up))


class Split(Net):
    def store(self):
        self.q, self.k, self.v = (nn.Linear(D, size) for size in self.sizes)
        self.gate, self.up = nn.Linear(D, 24), nn.Linear(D, 24)

    def project(self, x):
        return self.q(x), self.k(x), self.v(x)

    def expand(self, x):
        return self.gate(x), self.up(x)


class OneLayer(Net):
    """All rows in one layer; `order[i]` is the number of row i among the rows of the parts laid end to end."""

    def store(self):
        self.qkv, self.gate_up = nn.Linear(D, sum(self.sizes)), nn.Linear(D, 48)

    def project(self, x):
        return self.qkv(x)[..., self.order.argsort()].split(self.sizes, -1)

    def expand(self, x):
        return self.gate_up(x).chunk(2, -1)


class Multihead(Split):
    """torch's own attention, whose layout is discovered."""

    def store(self):
        self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.gate, self.up = nn.Linear(D, 24), nn.Linear(D, 24)

    def attend(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


def interleaved(sizes, groups):
    """Rows group by group: the order in which the rows of the parts, laid end to end, are stored."""
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(groups)[i] for i in range(groups) for part in parts])


def pair(keys, groups):
    """A split and a fused network of the same values."""
    torch.manual_seed(0)
    split, fused = Split(keys), OneLayer(keys)
    fused.order = interleaved(split.sizes, groups) if groups else torch.arange(sum(split.sizes))
    fused.load_state_dict(fuse(split, fused.order))
    return split, fused


def fuse(split, order):
    state = {name: x.clone() for name, x in split.state_dict().items() if name[:2] not in ("q.", "k.", "v.")}
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(split, name), kind).detach() for name in "qkv"]
        state[f"qkv.{kind}"] = torch.cat(parts)[order]
        state[f"gate_up.{kind}"] = torch.cat([state.pop(f"gate.{kind}"), state.pop(f"up.{kind}")])
    return state


def train(model, overrides=(), steps=10):
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.0), overrides=overrides)
    optimizer = sf.SteepestDescent(model, plan, lr=2**-5)
    tokens = torch.randint(V, (6, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()


def laid_out(view):
    return lambda role: replace(role, view=view)


DTYPES = [torch.float32, torch.float64]
LAYOUTS = {
    "end to end": (4, 0, Fused(3)),
    "grouped queries": (2, 0, Projections((16, 8, 8))),
    "head by head": (4, 4, Interleaved(4, 3)),
    "key by key": (2, 2, Grouped(2, (8, 4, 4))),
}


@combinations(
    lambda layout, dtype: dtype == torch.float32 or layout == "key by key", layout=list(LAYOUTS), dtype=DTYPES
)
def test_fused_and_split_projections_are_trained_alike(layout, dtype):
    """To rounding, which ten steps of a direction multiply."""
    (keys, groups, view), tolerance = LAYOUTS[layout], 2e-5 if dtype == torch.float32 else 1e-12
    split, fused = (model.to(dtype) for model in pair(keys, groups))
    train(split)
    train(fused, [("qkv.*", laid_out(view)), ("gate_up.*", laid_out(Fused(2)))])
    for name, expected in fuse(split, fused.order).items():
        same = torch.ones(len(expected), dtype=torch.bool)
        if name == "qkv.bias":  # softmax does not see the keys' bias: its gradient is rounding, whose direction differs
            q, k, _ = split.sizes
            same[(fused.order >= q) & (fused.order < q + k)] = False
        torch.testing.assert_close(fused.state_dict()[name][same], expected[same], rtol=0, atol=tolerance)


def test_a_fused_layer_taken_for_one_matrix_is_trained_otherwise():
    split, fused = pair(4, 0)
    train(split)
    train(fused)
    difference = fused.state_dict()["qkv.weight"] - fuse(split, fused.order)["qkv.weight"]
    assert float(difference.abs().max()) > 1e-3


def test_torchs_attention_is_trained_as_its_projections():
    """Queries and keys with a norm for each head, values with one: fused, or in layers of their own; to rounding."""
    split, fused = pair(4, 0)
    split.head_dim = D // HEADS
    assert sf.Plan.of(split)["k.weight"].blocks == ((HEADS, D // HEADS, D),)
    assert sf.Plan.of(split)["v.weight"].blocks == ((1, D, D),)
    whole = Multihead(4)
    del whole.output  # it has its own
    state = fused.state_dict()
    for kind in ("weight", "bias"):
        state[f"attention.in_proj_{kind}"] = state.pop(f"qkv.{kind}")
        state[f"attention.out_proj.{kind}"] = state.pop(f"output.{kind}")
        state[f"gate.{kind}"], state[f"up.{kind}"] = state.pop(f"gate_up.{kind}").chunk(2)
    whole.load_state_dict(state)
    train(split)
    train(whole)
    expected, state = fuse(split, torch.arange(3 * D)), whole.state_dict()
    torch.testing.assert_close(state["attention.in_proj_weight"], expected["qkv.weight"], rtol=0, atol=5e-5)
    torch.testing.assert_close(state["attention.out_proj.weight"], expected["output.weight"], rtol=0, atol=5e-5)
    values = slice(2 * D, 3 * D)
    torch.testing.assert_close(state["attention.in_proj_bias"][values], expected["qkv.bias"][values], rtol=0, atol=5e-5)


@pytest.mark.parametrize(("keys", "groups", "view"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_norm_per_head_is_the_same_in_every_layout(keys, groups, view):
    split, fused = pair(keys, groups)
    heads = sf.per_head(D // HEADS)
    train(split, [(f"{name}.weight", heads) for name in "qkv"])
    by_head = ("qkv.weight", lambda role: heads(replace(role, view=view)))
    train(fused, [by_head, ("qkv.bias", laid_out(view)), ("gate_up.*", laid_out(Fused(2)))])
    expected = fuse(split, fused.order)["qkv.weight"]
    torch.testing.assert_close(fused.state_dict()["qkv.weight"], expected, rtol=0, atol=1e-5)
    whole, _ = pair(keys, groups)
    train(whole)
    assert float((fuse(whole, fused.order)["qkv.weight"] - expected).abs().max()) > 1e-3
