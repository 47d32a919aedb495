"""Values that are fused with queries and keys have a role of their own: they start and move as in a layer of theirs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from discovery_helpers import of_class
from torch import nn

from surefoot import Plan, SquareNormal, SteepestDescent, per_head, recipes

D, HEAD = 64, 8


def owner(family, name, rows, heads=8, **attributes):
    """An attention module of transformers with one fused layer."""
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=attributes.get("num_kv_heads", heads))
    full = f"transformers.models.{family}.modeling_{family}.{name}"
    layer = {"Phi3Attention": "qkv_proj", "FalconAttention": "query_key_value"}.get(name, "c_attn")
    fused = {layer: nn.Linear(D, rows, bias=False)}
    return of_class(full, **fused, config=config, num_heads=heads, head_dim=D // heads, embed_dim=D, **attributes)


FUSED = {
    "Phi-3, one key": (owner("phi3", "Phi3Attention", 80, num_kv_heads=1), 9, 8),
    "Phi-3, two keys": (owner("phi3", "Phi3Attention", 96, num_kv_heads=2), 10, 16),
    "Falcon, one key": (
        owner("falcon", "FalconAttention", 80, new_decoder_architecture=False, multi_query=True),
        *(9, 8),
    ),
    "Falcon, one group": (owner("falcon", "FalconAttention", 80, new_decoder_architecture=True, num_kv_heads=1), 9, 8),
    "Falcon, two groups": (
        owner("falcon", "FalconAttention", 96, new_decoder_architecture=True, num_kv_heads=2),
        *(10, 16),
    ),
    "GPT-BigCode": (
        owner("gpt_bigcode", "GPTBigCodeAttention", 80, is_cross_attention=False, multi_query=True, kv_dim=8),
        *(9, 8),
    ),
    "GPT-2, one head": (owner("gpt2", "GPT2Attention", 3 * D, heads=1, is_cross_attention=False), 2, D),
    "GPT-2": (owner("gpt2", "GPT2Attention", 3 * D, is_cross_attention=False), 16, D),
    "torch, one head": (nn.MultiheadAttention(D, 1, bias=False), 2, D),
    "torch": (nn.MultiheadAttention(D, 8, bias=False), 16, D),
}


def of_heads(head_dim):
    """The factor of queries and keys."""
    return pytest.approx(4 / head_dim**0.25, rel=1e-12)


def usual(rows):
    """The placement of a linear layer."""
    return Plan.of(nn.Linear(D, rows, bias=False))["weight"]


@pytest.mark.parametrize("case", FUSED)
def test_fused_values_have_the_rate_the_decay_and_the_initial_values_of_a_layer_of_their_own(case):
    model, heads, rows = FUSED[case]
    plan = Plan.of(model, head=())
    name, placement = next((name, plan[name]) for name in plan if "out_proj" not in name)
    *queries, values = placement.blocks
    alone, role, own = usual(rows), placement.role, placement.roles[-1]
    assert values == alone.blocks[0]
    assert sum(block[0] for block in queries) == heads
    assert placement.lr_scales == (*(of_heads(role.view.head_dim),) * len(queries), *alone.lr_scales)
    assert placement.stabilisers[-1] == alone.stabilisers[0]
    assert own.initial == alone.role.initial
    assert placement.roles[:-1] == (role,) * len(queries)
    assert role.initial == SquareNormal()
    assert (own.view, own.geometry, own.momentum) == (role.view, role.geometry, role.momentum)
    plan.initialise_(model)
    parts = role.view.split(model.get_parameter(name).detach())
    measured = torch.linalg.matrix_norm(parts[-1], 2) * (D / rows) ** 0.5
    assert 0.8 < measured < 1.2
    assert torch.equal(role.view.join(parts, placement.shape), model.get_parameter(name))


@pytest.mark.parametrize("case", ["GPT-2", "torch, one head", "Phi-3, two keys"])
def test_fused_values_have_the_bound_of_a_layer_of_their_own(case):
    model, _, rows = FUSED[case]
    plan = Plan.of(model, recipes.steady_bounded(), head=())
    placement = next(plan[name] for name in plan if "out_proj" not in name)
    alone = Plan.of(nn.Linear(D, rows, bias=False), recipes.steady_bounded())["weight"]
    assert placement.stabilisers[-1].bound == alone.stabilisers[0].bound
    assert placement.stabilisers[0].bound == 4


@pytest.mark.parametrize("case", FUSED)
def test_the_table_says_queries_keys_and_values_on_three_lines(case):
    model, _, rows = FUSED[case]
    plan = Plan.of(model, head=())
    lines = [row for row in plan.rows() if "out_proj" not in row["name"]]
    assert [row["name"].partition("[")[2] for row in lines] == ["query]", "key]", "value]"]
    pair = f"{4 / (D if 'one head' in case else HEAD) ** 0.25:.4g}"
    assert [row["lr scale"] for row in lines] == [pair, pair, f"{usual(rows).lr_scales[0]:.4g}"]
    assert (lines[0]["fan out"], lines[2]["fan out"]) == (str(D), str(rows))
    assert f"{len(plan)} parameters" in str(plan)


@pytest.mark.parametrize("case", FUSED)
def test_without_heads_all_have_one_role_and_one_line(case):
    plan = Plan.of(FUSED[case][0], recipes.steady(per_head=False), head=())
    assert [row["name"] for row in plan.rows()] == list(plan)
    assert all(set(placement.roles) == {placement.role} for placement in plan.placements.values())


def test_a_single_head_of_keys_is_told_from_one_of_values():
    """GPT-2's cross attention."""
    model = owner("gpt2", "GPT2Attention", 2 * D, heads=1, is_cross_attention=True)
    plan = Plan.of(model, head=())
    assert plan["c_attn.weight"].lr_scales == (of_heads(D), 1)
    assert [(row["name"], row["shape"]) for row in plan.rows() if "weight" in row["name"]] == [
        ("c_attn.weight[key]", f"{D}x{D} of {2 * D}x{D}"),
        ("c_attn.weight[value]", f"{D}x{D} of {2 * D}x{D}"),
    ]


def test_a_function_that_changes_the_layout_has_the_role_of_queries_everywhere():
    model = FUSED["GPT-2"][0]
    placement = Plan.of(model, head=(), overrides=[("c_attn.weight", per_head(4))])["c_attn.weight"]
    assert (placement.by_block, placement.lr_scales) == ((), (of_heads(4),))
    kept = Plan.of(model, head=(), overrides=[("c_attn.weight", lambda role: replace(role, name="own"))])
    assert [role.name for role in kept["c_attn.weight"].roles] == ["own", "own"]
    assert kept["c_attn.weight"].lr_scales == (of_heads(HEAD), 1)


def test_a_checkpoint_of_format_2_loads_but_for_heads_which_are_refused_by_name_with_the_remedy():
    model = nn.MultiheadAttention(16, 1, bias=False)
    optimizer = SteepestDescent(model, Plan.of(model, head=()), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"format": 2}
    optimizer.load_state_dict(saved)
    saved["param_groups"][0] |= {"plan": ["be14540959aa1e3e", "3d7d6248a788869c"]}
    with pytest.raises(ValueError, match=r"in_proj_weight .* resume with the version of surefoot that saved it"):
        optimizer.load_state_dict(saved)
