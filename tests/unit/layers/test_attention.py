"""Rotary positions and attention against their formulas."""

import math

import pytest
import torch

from surefoot.experiment.models.decoder import Decoder, LlamaConfig, Size
from surefoot.layers import Attention, Heads, InNormLinear, Rope, attention_scale


def test_rope_products_depend_on_the_distance_only():
    rope, d = Rope(), 16
    q, k = torch.randn(2, d, generator=torch.Generator().manual_seed(0))
    cos, sin = rope.angles(64, d, q.device)
    turned_q, turned_k = rope.rotate(q.expand(64, d), cos, sin), rope.rotate(k.expand(64, d), cos, sin)
    products = turned_q @ turned_k.T
    for distance in (-20, -3, 0, 1, 7):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert (products[0, 0] - products[0, 5]).abs() > 1e-2  # and they do depend on it
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(64))


def test_rope_against_complex_rotation():
    d, base = 8, 500.0
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = torch.complex(x[:, : d // 2], x[:, d // 2 :])
    speed = torch.tensor([base ** (-2 * j / d) for j in range(d // 2)], dtype=torch.float64)
    turned = pairs * torch.exp(1j * torch.arange(3)[:, None] * speed)
    ours = Rope(base).rotate(x, *Rope(base).angles(3, d, x.device))
    assert torch.allclose(ours, torch.cat((turned.real, turned.imag), -1), atol=1e-6)


def test_attention_scale():
    assert attention_scale(64) == 1 / 8
    assert attention_scale(64, 64) == 1 / 8
    assert attention_scale(64, 16) == pytest.approx(16 / 4 / 64)
    assert attention_scale(128, 16) == pytest.approx(attention_scale(64, 16) / 2)  # inverse in d
    with pytest.raises(ValueError, match="positive"):
        attention_scale(64, 0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_equals_the_formula_head_by_head(kv_heads):
    torch.manual_seed(0)
    attention = (
        Decoder(LlamaConfig(Size(32, 2, head_dim=8, vocab=50), kv_heads=kv_heads, base_head_dim=2)).blocks[0].attention
    )
    x, turn = torch.randn(1, 6, 32), Rope().angles(6, 8, torch.device("cpu"))
    q, k, v = (f(x)[0] for f in (attention.query, attention.key, attention.value))
    mask = torch.full((6, 6), -math.inf).triu(1)
    heads = []
    for h in range(4):
        g = h // (4 // kv_heads)
        qh = Rope().rotate(q[:, 8 * h : 8 * h + 8], *turn)
        kh, vh = Rope().rotate(k[:, 8 * g : 8 * g + 8], *turn), v[:, 8 * g : 8 * g + 8]
        heads.append((qh @ kh.T * (2 / math.sqrt(2) / 8) + mask).softmax(-1) @ vh)
    assert torch.allclose(attention(x, turn)[0], attention.output(torch.cat(heads, -1)), atol=1e-5)


def test_attention_alone_is_that_of_the_reference_models():
    """Its own angles, plain layers without biases; In Norm on request."""
    torch.manual_seed(0)
    heads = Heads(count=4, dim=8, kv_count=2, scale=attention_scale(8))
    attention, x = Attention(heads, Rope()), torch.randn(2, 6, 32)
    turn = Rope().angles(6, 8, x.device)
    assert torch.equal(attention(x), attention(x, turn))
    assert not torch.allclose(attention(x), Attention(heads)(x))
    assert [tuple(p.shape) for p in attention.parameters()] == [(32, 32), (16, 32), (16, 32), (32, 32)]
    normed = Attention(heads, linear=InNormLinear)
    assert torch.allclose(normed(1e-12 * x), normed(x), atol=1e-5)
    with pytest.raises(ValueError, match="3 key-value heads cannot be shared by 4 heads"):
        Heads(4, 8, 3, 1.0)


def test_an_empty_batch():
    assert Attention(Heads(2, 8, 2, 0.3))(torch.zeros(0, 6, 16)).shape == (0, 6, 16)


def test_it_is_one_graph_whatever_the_default_device():
    model, x = Attention(Heads(2, 8, 2, 0.3)), torch.randn(2, 6, 16)
    with torch.device("cpu"):
        assert torch._dynamo.explain(model)(x).graph_break_count == 0
