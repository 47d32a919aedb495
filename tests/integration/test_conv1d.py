"""GPT-2's attention, fused and stored transposed, is trained to the weights of the same attention written plainly."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import surefoot as sf

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

D, HEADS, V = 16, 4, 19


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

        config = transformers.GPT2Config(n_embd=D, n_head=HEADS, n_positions=16, attn_implementation="sdpa")
        self.inner = GPT2Attention(config, layer_idx=0).eval()

    def forward(self, x):
        return self.inner(x)[0]


class Net(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.attention, self.head = attention, nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x)))


def stored(plain):
    """The plain attention's values in GPT-2's layout."""
    return {
        "c_attn.weight": torch.cat([plain.q.weight, plain.k.weight, plain.v.weight]).T,
        "c_attn.bias": torch.cat([plain.q.bias, plain.k.bias, plain.v.bias]),
        "c_proj.weight": plain.o.weight.T,
        "c_proj.bias": plain.o.bias,
    }


def test_conv1d_and_linear_are_trained_alike():
    torch.manual_seed(0)
    ours, theirs = Net(Plain()), Net(Theirs())
    for name in ("embedding", "norm", "head"):
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    theirs.attention.inner.load_state_dict({name: x.detach().clone() for name, x in stored(ours.attention).items()})
    tokens = torch.randint(V, (6, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), theirs(tokens))
    for model in (ours, theirs):
        plan = sf.Plan.of(model, sf.recipes.beyond_mup(), stabiliser=sf.PostClip(1.0))
        optimizer = sf.SteepestDescent(model, plan, lr=2**-5)
        for _ in range(10):
            optimizer.zero_grad()
            cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
            optimizer.step()
    trained = dict(theirs.attention.inner.named_parameters())
    for name, expected in stored(ours.attention).items():
        same = torch.ones(expected.shape[-1], dtype=torch.bool)
        if (
            name == "c_attn.bias"
        ):  # softmax does not see the keys' bias: its gradient is rounding, whose direction differs
            same[D : 2 * D] = False
        torch.testing.assert_close(trained[name][..., same], expected[..., same], rtol=0, atol=1e-5)
    for name in ("embedding", "norm", "head"):
        for a, b in zip(getattr(ours, name).parameters(), getattr(theirs, name).parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
