"""Wirings of libraries that build on torch: their own linear layers, bare tables, attention of two streams."""

import pytest
import torch
import torch.nn.functional as F
from discovery_helpers import Own, kinds
from torch import nn

import surefoot as sf
from surefoot.views import Fused, Matrix, PerHead, Projections, Transposed

D = 16


class Dense(nn.Module):
    """A linear layer that does not derive from torch's."""

    def __init__(self, d_in, d_out, stored=("out", "in"), of="channels"):
        super().__init__()
        sizes = {"in": d_in, "out": d_out}
        self.weight = nn.Parameter(torch.randn([sizes[side] for side in stored]) / d_in**0.5)
        self.bias, self.turned = nn.Parameter(torch.zeros(d_out)), stored == ("in", "out")
        for side, size in sizes.items():
            setattr(self, f"{side}_{of}", size)

    def forward(self, x):
        return F.linear(x, self.weight.mT if self.turned else self.weight, self.bias)


@pytest.mark.parametrize("of", ["channels", "features"])
@pytest.mark.parametrize(("stored", "view"), [(("out", "in"), Matrix()), (("in", "out"), Transposed())])
def test_a_linear_layer_of_any_class_is_placed_and_steps_as_torchs(of, stored, view):
    torch.manual_seed(0)
    own = nn.Sequential(Dense(4, 32, stored, of), nn.ReLU(), Dense(32, 3, stored, of))
    usual = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    x, plans = torch.randn(8, 4), [sf.Plan.of(model) for model in (own, usual)]
    assert plans[0]["0.weight"].role.view == view
    assert f"by the names `out_{of}`, `in_{of}`" in plans[0]["0.weight"].why
    for model, plan in zip((own, usual), plans, strict=True):
        plan.initialise_(model)
        for name in ("0", "2"):
            torch.manual_seed(1)
            weight = torch.randn(usual.get_parameter(f"{name}.weight").shape)
            rows = model.get_parameter(f"{name}.weight").data
            rows.copy_(weight.mT if model is own and stored[0] == "in" else weight)
        optimizer = sf.SteepestDescent(model, plan, lr=0.1)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(own(x), usual(x), rtol=1e-4, atol=1e-5)


def test_a_matrix_whose_sides_no_attribute_says_is_refused():
    for module in (Own(weight=torch.randn(4, 6)), Own(weight=torch.randn(4, 6), in_features=4, out_features=5)):
        with pytest.raises(ValueError, match=r"cannot place weight \(4, 6\)"):
            sf.Plan.of(module)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (5, D)) for name in ("pos_embedding", "position_embeddings", "pos_embed_height", "pos_emb_table")),
        *((name, (5, D)) for name in ("register_tokens", "scale_shift_table", "latents")),
        ("relative_position_bias_table", (9, 2)),
        ("attention_biases", (2, 9)),
        ("cls_token", (1, D)),
        ("latent_queries", (3, 4, D)),
    ],
)
def test_bare_rows_are_a_table_by_their_name(name, shape):
    model = Own(mix=nn.Linear(D, D), **{name: torch.full(shape, 0.5)})
    plan = sf.Plan.of(model)
    assert plan[name].role == sf.recipes.steady().role("positions")
    assert f"by the name `{name}`" in plan[name].why


@pytest.mark.parametrize("name", ["pos_proj", "token_mixer", "pos_embed_proj", "queries_weight", "table", "embedding"])
def test_a_bare_matrix_with_a_word_of_tables_in_its_name_is_still_refused(name):
    with pytest.raises(ValueError, match=f"cannot place {name}"):
        sf.Plan.of(Own(**{name: torch.randn(5, D)}))


def test_bare_positions_beside_a_tied_table_take_its_rule():
    table, out = nn.Embedding(11, D), nn.Linear(D, 11, bias=False)
    out.weight = table.weight
    found = kinds(Own(words=table, pos_emb=torch.randn(5, D), mix=nn.Linear(D, D), out=out))
    assert (found["words.weight"], found["pos_emb"]) == ("head", "tied_positions")


def test_a_norm_of_each_head_by_its_class_name():
    class RMSNorm(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(shape))

    assert kinds(RMSNorm(4, 1, 8)) == {"gamma": "gain"}
    with pytest.raises(ValueError, match=r"cannot place gamma \(4, 8\)"):
        sf.Plan.of(RMSNorm(4, 8))


class Attention(nn.Module):
    """Two heads of any size; `names` are its layers and their numbers of rows."""

    def __init__(self, d, **rows):
        super().__init__()
        self.heads = 2
        for name, out in rows.items():
            self.add_module(name, nn.Linear(d, out, bias=False))


def writers(plan):
    return {name for name in plan if "adds to a residual stream" in plan[name].why}


def test_a_block_whose_attention_is_defined_last_and_has_no_output_of_its_own_is_a_block():
    """Attention and MLP in parallel, one projection for both: its values are the last matrix that is defined."""

    def block():
        layers = {"ada": nn.Linear(D, 3 * D, False), "up": nn.Linear(D, 4 * D, False)}
        return nn.ModuleDict(
            {**layers, "out": nn.Linear(5 * D, D, False), "attn": Attention(D, to_q=D, to_k=D, to_v=D)}
        )

    assert writers(sf.Plan.of(nn.ModuleList(block() for _ in range(3)))) == {f"{i}.out.weight" for i in range(3)}


def test_queries_and_keys_of_a_second_stream_have_heads_and_write_nothing():
    """A text's beside a picture's; behind the last block the text is of no use, and has no output projection."""
    names = "to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj", "to_out", "to_add_out"
    blocks = [nn.ModuleDict({"attn": Attention(D, **dict.fromkeys(names[: 8 - i // 2], D))}) for i in range(3)]
    plan = sf.Plan.of(nn.ModuleList(blocks))
    assert writers(plan) == {
        f"{i}.attn.{out}.weight" for i, out in ((0, "to_add_out"), (1, "to_add_out"), (2, "to_out"))
    }
    for name in ("to_q", "to_k", "add_q_proj", "add_k_proj"):
        assert plan[f"0.attn.{name}.weight"].blocks == ((2, D // 2, D),)
    for name in ("to_v", "add_v_proj"):
        assert plan[f"0.attn.{name}.weight"].blocks == ((1, D, D),)


@pytest.mark.parametrize("inner", [D, 2 * D])
def test_keys_and_values_in_one_layer_beside_the_queries_are_cut_in_two(inner):
    plan = sf.Plan.of(Attention(D, to_q=inner, to_kv=2 * inner))
    assert plan["to_q.weight"].blocks == ((2, inner // 2, D),)
    assert plan["to_kv.weight"].role.view == PerHead(inner // 2, Fused(2), values=False)
    assert plan["to_kv.weight"].blocks == ((2, inner // 2, D), (1, inner, D))
    assert "in order by the name `to_kv`" in plan["to_kv.weight"].why


@pytest.mark.parametrize("keys", [2, 1])
def test_fused_heads_of_another_size_than_the_width_over_their_number(keys):
    layer = Attention(D, to_qkv=(2 + 2 * keys) * 12)
    layer.to_out, layer.kv_heads = nn.Linear(24, D, bias=False), keys
    view = Fused(3) if keys == 2 else Projections((24, 12, 12))
    assert sf.Plan.of(layer)["to_qkv.weight"].role.view == PerHead(12, view, values=False)


def test_queries_and_keys_that_convolutions_make_are_kernels():
    layers = {name: nn.Conv2d(D, D, 1, bias=False) for name in ("to_q", "to_k", "to_v")}
    assert set(kinds(Own(heads=2, **layers)).values()) == {"conv"}
