"""Layouts of fused projections, judged by what the model computes, not by what its source says.

Logits see queries and keys through their product only: a model whose queries are doubled and whose keys are halved
gives the same output, and one cut anywhere else does not. Likewise the up half of a gated layer and its down matrix.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import surefoot as sf
from surefoot.discovery import known_classes
from surefoot.views import Transposed

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 40, "pad_token_id": 0}
OLD = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
FALCON = {**SIZES, "bias": True, "alibi": False}
FALCON_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
PERSIMMON = SIZES | {"qk_layernorm": False}

BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 1, "n_head": 4}
MPT = {"vocab_size": 61, "d_model": 32, "n_layers": 1, "n_heads": 4}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}

FUSED = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", OLD, "c_attn", (0, 1)),
    "imagegpt": ("ImageGPTForCausalImageModeling", "ImageGPTConfig", OLD, "c_attn", (0, 1)),
    "openai": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", OLD, "c_attn", (0, 1)),
    "bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", OLD, "c_attn", (0, 1)),
    "bigcode_heads": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", OLD | {"multi_query": False}, "c_attn", (0, 1)),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", OLD | {"rotary_dim": 4}, "qkv_proj", (0, 2)),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES, "query_key_value", (0, 1)),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM, "query_key_value", (0, 1)),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", PERSIMMON, "query_key_value", (0, 1)),
    "falcon_groups": ("FalconForCausalLM", "FalconConfig", FALCON | FALCON_GROUPS, "query_key_value", (0, 1)),
    "falcon_one_key": ("FalconForCausalLM", "FalconConfig", FALCON | {"multi_query": True}, "query_key_value", (0, 1)),
    "falcon_heads": ("FalconForCausalLM", "FalconConfig", FALCON | {"multi_query": False}, "query_key_value", (0, 1)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED, "qkv_proj", (0, 1)),
    "mpt": ("MptForCausalLM", "MptConfig", MPT, "Wqkv", (0, 1)),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", GROUPED, "Wqkv", (0, 1)),
}
DEEPSEEK = GROUPED | {"num_key_value_heads": 4, "first_k_dense_replace": 1} | LATENT


def built(model, config, sizes):
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape))  # biases, too, and attention that is not flat
    return made


def outputs(model):
    tokens = torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def scaled_(model, plan, name, factors):
    """Multiply the projections of one parameter, in the order that the plan has them in."""
    p, view = model.get_parameter(name), plan[name].role.view
    blocks = [block.clone() for block in view.split(p.detach())]
    matrices = [matrix for block in blocks for matrix in block]
    assert len(matrices) >= 1 + max(factors)
    for i, factor in factors.items():
        matrices[i].mul_(factor)
    with torch.no_grad():
        p.copy_(view.join(blocks, tuple(p.shape)))


@pytest.mark.parametrize("family", FUSED)
def test_queries_and_keys_are_where_the_layout_says(family):
    model, config, sizes, attribute, (query, key) = FUSED[family]
    changes = {"paired": {query: 2.0, key: 0.5}, "queries alone": {query: 2.0}, "keys alone": {key: 0.5}}
    differences = {}
    for what, factors in changes.items():
        made = built(model, config, sizes)
        plan, before = sf.Plan.of(made, sf.recipes.beyond_mup()), outputs(made)
        names = [name for name in plan if f".{attribute}." in name]
        assert names
        for name in names:
            assert len([1 for block in plan[name].blocks for _ in range(block[0])]) == 3
            scaled_(made, plan, name, factors)
        differences[what] = float((outputs(made) - before).abs().max())
    assert differences["paired"] < 1e-4 * min(differences["queries alone"], differences["keys alone"]) + 2e-5
    assert min(differences["queries alone"], differences["keys alone"]) > 1e-2


def test_latent_values_are_where_the_layout_says():
    """DeepSeek's values: doubled, and the output matrix halved."""
    made = built("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK)
    plan, before = sf.Plan.of(made, sf.recipes.beyond_mup()), outputs(made)
    scaled_(made, plan, "model.layers.0.self_attn.kv_b_proj.weight", {1: 2.0})
    assert float((outputs(made) - before).abs().max()) > 1e-2
    scaled_(made, plan, "model.layers.0.self_attn.o_proj.weight", {0: 0.5})
    torch.testing.assert_close(outputs(made), before, rtol=1e-4, atol=2e-5)


JAMBA = GROUPED | {
    "num_hidden_layers": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "num_experts": 1,
}
GATED_QUERIES = GROUPED | {"head_dim": 8, "layer_types": ["full_attention"], "num_experts": 0}
NORMALISED = {
    "jamba": ("JambaForCausalLM", "JambaConfig", JAMBA, "mamba.x_proj.weight", (0, 1, 2)),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", GATED_QUERIES, "self_attn.q_proj.weight", (0,)),
}


@pytest.mark.parametrize("family", NORMALISED)
def test_projections_whose_scale_a_norm_undoes_are_where_the_layout_says(family):
    """Jamba norms step size, B and C each; Qwen3-Next its queries, not the gates beside them."""
    model, config, sizes, name, normed = NORMALISED[family]
    made = built(model, config, sizes)
    plan, before, name = sf.Plan.of(made, sf.recipes.beyond_mup()), outputs(made), f"model.layers.0.{name}"
    scaled_(made, plan, name, {i: 2.0 + i for i in normed})
    torch.testing.assert_close(outputs(made), before, rtol=1e-3, atol=1e-3)  # an epsilon
    with torch.no_grad():
        made.get_parameter(name)[: len(made.get_parameter(name)) // 2].mul_(3)  # a cut elsewhere
    assert float((outputs(made) - before).abs().max()) > 1e-2


HEADS, LLAMA4 = GROUPED | {"head_dim": 8}, "feed_forward.experts"
MOE = HEADS | {"num_local_experts": 3, "num_experts_per_tok": 2}
GATED = {
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED, "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
    "glm": ("GlmForCausalLM", "GlmConfig", HEADS, "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MOE, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", MOE, f"{LLAMA4}.gate_up_proj", f"{LLAMA4}.down_proj"),
}


@pytest.mark.parametrize("family", GATED)
def test_gate_and_up_of_each_expert_are_where_the_layout_says(family):
    model, config, sizes, up, down = GATED[family]
    made = built(model, config, sizes)
    plan, before, layer = sf.Plan.of(made, sf.recipes.beyond_mup()), outputs(made), "model.layers.0."
    experts = plan[layer + down].blocks[0][0]
    scaled_(made, plan, layer + up, {2 * e + 1: 2.0 + e for e in range(experts)})
    assert float((outputs(made) - before).abs().max()) > 1e-3
    scaled_(made, plan, layer + down, {e: 1 / (2.0 + e) for e in range(experts)})
    torch.testing.assert_close(outputs(made), before, rtol=1e-4, atol=2e-5)


def test_gpt_oss_alternates_gate_and_up_along_its_last_dimension():
    """Its up half is clamped and shifted by 1: only an expert whose up is -1 is silent, whatever its gate is."""
    made = built("GptOssForCausalLM", "GptOssConfig", MOE)
    plan, name = sf.Plan.of(made, sf.recipes.beyond_mup()), "model.layers.0.mlp.experts.gate_up_proj"
    experts = made.model.layers[0].mlp.experts
    assert isinstance(plan[name].role.view, Transposed)
    scaled_(made, plan, name, dict.fromkeys((1, 3, 5), 0.0))
    scaled_(made, plan, f"{name}_bias", dict.fromkeys((1, 3, 5), 0.0))
    bias = plan[f"{name}_bias"].role.view
    with torch.no_grad():
        halves = [block.clone() for block in bias.split(experts.gate_up_proj_bias)]
        halves[0][1::2] = -1
        experts.gate_up_proj_bias.copy_(bias.join(halves, tuple(experts.gate_up_proj_bias.shape)))
        experts.down_proj_bias.zero_()
    before = outputs(made)
    with torch.no_grad():
        experts.down_proj.mul_(3)  # of nothing
    torch.testing.assert_close(outputs(made), before)


(ROOT,) = importlib.util.find_spec("transformers").submodule_search_locations


SOURCES = {path.stem: path.read_text() for path in Path(ROOT, "models").glob("*/modeling_*.py")}
TITAN = {"FusedQKVLinear", "GroupedExperts", "GptOssGroupedExperts", "TokenChoiceTopKRouter", "Attention"}
"""Classes of torchtitan, checked in `test_torchtitan_layouts.py`."""


def test_every_class_of_the_registry_exists_once_and_has_the_attributes():
    rows = [
        *known_classes._LAYOUTS,
        *known_classes._KINDS,
        *(("gate_up_proj", None, name) for name in known_classes._EXPERTS),
        *(("weight", None, name) for name in known_classes._CENTRED.split()),
    ]
    for paths, _, owners in rows:
        for owner in owners.split():
            file, _, name = owner.rpartition(".")
            if name in TITAN and not file.startswith("modeling_"):
                continue
            sources = [SOURCES[file]] if file else SOURCES.values()
            found = [re.search(rf"^class {name}\b.*?(?=^class |\Z)", source, re.M | re.S) for source in sources]
            (body,) = filter(None, found)
            for path in paths.split():
                assert f"self.{path.partition('.')[0]} = " in body[0] or "LayerNorm)" in body[0], f"{owner}.{path}"


def test_the_norms_centred_on_zero_are_all_there_are():
    """`1 + weight` in the forward method of a class that is named a norm."""
    centred = set()
    for source in SOURCES.values():
        for name, body in re.findall(r"^class (\w*Norm\w*)\b(.*?)(?=^class |\Z)", source, re.M | re.S):
            if re.search(r"1\.0 \+ self\.weight|self\.weight \+ 1\.0", body):
                centred.add(name)
    assert centred == set(known_classes._CENTRED.split())
