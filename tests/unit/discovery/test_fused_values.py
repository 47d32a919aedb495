"""Values that are fused with queries and keys start and move as values of a layer of their own."""

from types import SimpleNamespace

import pytest
import torch
from discovery_helpers import of_class
from torch import nn

from surefoot import HeadScale, Plan, SquareNormal

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


def usual(rows):
    """The placement of a linear layer."""
    return Plan.of(nn.Linear(D, rows, bias=False))["weight"]


@pytest.mark.parametrize("case", FUSED)
def test_fused_values_have_the_rate_the_decay_and_the_initial_values_of_a_layer_of_their_own(case):
    model, heads, rows = FUSED[case]
    plan = Plan.of(model, head=())
    name, placement = next((name, plan[name]) for name in plan if "out_proj" not in name)
    *queries, values = placement.blocks
    alone, role = usual(rows), placement.role
    assert values == alone.blocks[0]
    assert sum(block[0] for block in queries) == heads
    assert role.lr_scale(values) == alone.role.lr_scale(values)
    assert placement.stabilisers[-1] == alone.stabilisers[0]
    assert role.initial.describe(values) == alone.role.initial.describe(values)
    for block in queries:
        assert role.lr_scale(block) == 2
        assert role.initial.describe(block) == SquareNormal().describe(block)
    plan.initialise_(model)
    parts = role.view.split(model.get_parameter(name).detach())
    measured = torch.linalg.matrix_norm(parts[-1], 2) * (D / rows) ** 0.5
    assert 0.8 < measured < 1.2
    assert torch.equal(role.view.join(parts, placement.shape), model.get_parameter(name))


@pytest.mark.parametrize("case", ["GPT-2", "torch"])
def test_the_roles_of_square_values_are_what_they_were(case):
    plan = Plan.of(FUSED[case][0], head=())
    role = plan[next(iter(plan))].role
    assert isinstance(role.lr_scale, HeadScale)
    assert role.initial == SquareNormal()


def test_a_single_head_of_keys_and_one_of_values_stay_as_they_are():
    """GPT-2's cross attention: nothing tells the two apart."""
    model = owner("gpt2", "GPT2Attention", 2 * D, heads=1, is_cross_attention=True)
    assert isinstance(Plan.of(model, head=())["c_attn.weight"].role.lr_scale, HeadScale)
