"""torchtitan's own models are placed as tables written by hand say, and as what they compute shows."""

import pytest
import torch
from titan_helpers import TOKENS, WQKV, SteepestDescentContainer, build, deepseek_v3, gpt_oss, plan_of

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

LAYER = {
    "attention.qkv_linear.wqkv.weight": ("linear", ((4, 64, 256), (2, 64, 256), (1, 128, 256))),
    "attention.wo.weight": ("linear", ((1, 256, 256),)),
    "feed_forward.w1.weight": ("linear", ((1, 48, 256),)),
    "feed_forward.w2.weight": ("linear", ((1, 256, 48),)),
    "feed_forward.w3.weight": ("linear", ((1, 48, 256),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
}
ENDS = {
    "tok_embeddings.weight": ("embedding", ((1, 2048, 256),)),
    "norm.weight": ("gain", ((1, 256),)),
    "lm_head.weight": ("head", ((1, 2048, 256),)),
}
EXPERTS = "moe.routed_experts.inner_experts."
DEEPSEEK = {
    "attention.wq.weight": ("linear", ((1, 3072, 256),)),
    "attention.wkv_a.weight": ("linear", ((1, 512, 256), (1, 64, 256))),
    "attention.kv_norm.weight": ("gain", ((1, 512),)),
    "attention.wkv_b.weight": ("linear", ((1, 2048, 512), (1, 2048, 512))),
    "attention.wo.weight": ("linear", ((1, 256, 2048),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
    EXPERTS + "w1_EFD": ("experts", ((8, 256, 256),)),
    EXPERTS + "w2_EDF": ("experts", ((8, 256, 256),)),
    EXPERTS + "w3_EFD": ("experts", ((8, 256, 256),)),
    "moe.router.gate.weight": ("router", ((1, 8, 256),)),
    "moe.shared_experts.w1.weight": ("linear", ((1, 512, 256),)),
    "moe.shared_experts.w2.weight": ("linear", ((1, 256, 512),)),
    "moe.shared_experts.w3.weight": ("linear", ((1, 512, 256),)),
}
GPT_OSS = {
    "attention.sinks": ("scalar", ((1, 64),)),
    "attention.qkv_linear.wqkv.weight": ("linear", ((64, 64, 256), (8, 64, 256), (1, 512, 256))),
    "attention.qkv_linear.wqkv.bias": ("bias", ((1, 4096), (1, 512), (1, 512))),
    "attention.wo.weight": ("linear", ((1, 256, 4096),)),
    "attention.wo.bias": ("bias", ((1, 256),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
    EXPERTS + "mlp1_weight_EGD": ("experts", ((16, 2880, 256),)),
    EXPERTS + "mlp1_bias_EG": ("bias", ((16, 2880),)),
    EXPERTS + "mlp2_weight_EDF": ("experts", ((8, 256, 2880),)),
    EXPERTS + "mlp2_bias_ED": ("bias", ((8, 256),)),
    "moe.router.gate.weight": ("router", ((1, 8, 256),)),
    "moe.router.gate.bias": ("bias", ((1, 8),)),
}


def of_layer(plan, number):
    """What the plan says of one layer's parameters, and of those outside the layers."""
    table = {name: (placement.role.name, placement.blocks) for name, placement in plan.placements.items()}
    prefix = f"layers.{number}."
    layer = {name.removeprefix(prefix): row for name, row in table.items() if name.startswith(prefix)}
    return layer, {name: row for name, row in table.items() if not name.startswith("layers.")}


def test_llama_is_placed_as_written_by_hand():
    assert of_layer(plan_of(build()), 0) == (LAYER, ENDS)


@pytest.mark.parametrize(
    ("family", "layer"), [(deepseek_v3, DEEPSEEK), (gpt_oss, GPT_OSS)], ids=["deepseek", "gpt-oss"]
)
def test_mixtures_are_placed_as_written_by_hand(family, layer):
    with torch.device("meta"):
        model = family.model_registry("debugmodel").model.build()
    assert of_layer(plan_of(model), 1) == (layer, ENDS)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_queries_and_keys_are_where_the_layout_says(heads):
    """Logits see their product only: queries doubled and keys halved change nothing, queries alone do."""
    outputs = {}
    for what, factors in {"before": (1, 1), "paired": (2, 0.5), "queries": (2, 1)}.items():
        model = build(heads)
        p = model.layers["0"].attention.qkv_linear.wqkv.weight
        view = plan_of(model)[WQKV].role.view
        with torch.no_grad():
            p.mul_(10)  # attention that is not flat
            q, k, v = view.split(p.clone())
            p.copy_(view.join([q * factors[0], k * factors[1], v], tuple(p.shape)))
            outputs[what] = model(TOKENS)
    torch.testing.assert_close(outputs["paired"], outputs["before"], rtol=1e-4, atol=1e-5)
    assert float((outputs["queries"] - outputs["before"]).abs().max()) > 1e-2


def test_a_pipeline_stage_has_the_head_that_it_holds():
    first, last = build(), build()
    first.lm_head = first.norm = last.tok_embeddings = None
    assert of_layer(plan_of(first), 0) == (LAYER, {"tok_embeddings.weight": ENDS["tok_embeddings.weight"]})
    assert plan_of(last)["lm_head.weight"].role.name == "head"
    optimizers = SteepestDescentContainer.Config(lr=0.1).build(model_parts=[first, last])
    assert len(optimizers) == 2
