"""Llama and the families with its names of layers, mixtures of experts included; columns as in `test_families.py`."""

import pytest
from indexing import alternate, alternate_columns, headwise, per_expert, rows, turned, whole

transformers = pytest.importorskip("transformers")

D, F, V = 24, 40, 61

BASE = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}

EMBEDDING = ("*embed_tokens.weight", "embedding", [(V, D)], whole)
HEAD = ("lm_head.weight", "head", [(V, D)], whole)
TIED = ("*embed_tokens.weight", "head", [(V, D)], whole)
NORMS_OF = ("*norm*.weight", "gain", [(D,)], whole)
QKVO = [
    ("*q_proj.weight", "linear", [(32, D)], whole),
    ("*[kv]_proj.weight", "linear", [(16, D)], whole),
    ("*o_proj.weight", "linear", [(D, 32)], whole),
]
MLP = [
    ("*mlp.gate_proj.weight", "linear", [(F, D)], whole),
    ("*mlp.up_proj.weight", "linear", [(F, D)], whole),
    ("*mlp.down_proj.weight", "linear", [(D, F)], whole),
]
EXPERTS = [
    ("*experts.gate_up_proj", "experts", [(F, D)] * 6, per_expert(rows(F, F))),
    ("*experts.down_proj", "experts", [(D, F)] * 3, per_expert()),
    ("*.gate.weight", "router", [(3, D)], whole),
]
LLAMA = [EMBEDDING, HEAD, NORMS_OF, *QKVO, *MLP]
QK_NORM = [
    ("*[qk]_norm.weight", "gain", [(8,)], whole),
    ("*layernorm.weight", "gain", [(D,)], whole),
    ("model.norm.weight", "gain", [(D,)], whole),
]

LLAMA_FAMILIES = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**BASE, head_dim=8), LLAMA),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig(**BASE, head_dim=8), LLAMA),
    "qwen3": (
        "Qwen3ForCausalLM",
        transformers.Qwen3Config(**BASE, head_dim=8),
        [EMBEDDING, HEAD, *QK_NORM, *QKVO, *MLP],
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        transformers.Gemma3TextConfig(**BASE, head_dim=8),
        [TIED, *QK_NORM[:1], ("*layernorm.weight", "gain", [(D,)], whole), QK_NORM[2], *QKVO, *MLP],
    ),
    "mixtral": (
        "MixtralForCausalLM",
        transformers.MixtralConfig(**BASE, head_dim=8, num_local_experts=3),
        [EMBEDDING, HEAD, NORMS_OF, *QKVO, *EXPERTS],
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(
            **BASE, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=F, decoder_sparse_step=1
        ),
        [EMBEDDING, HEAD, *QK_NORM, *QKVO, *EXPERTS],
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        transformers.GptOssConfig(**BASE, head_dim=8, num_local_experts=3, num_experts_per_tok=2),
        [
            EMBEDDING,
            HEAD,
            NORMS_OF,
            *QKVO,
            ("*q_proj.bias", "bias", [(32,)], whole),
            ("*[kv]_proj.bias", "bias", [(16,)], whole),
            ("*o_proj.bias", "bias", [(D,)], whole),
            ("*sinks", "scalar", [(4,)], whole),
            ("*router.weight", "router", [(3, D)], whole),
            ("*router.bias", "bias", [(3,)], whole),
            ("*experts.gate_up_proj", "experts", [(F, D)] * 6, per_expert(alternate_columns)),
            ("*experts.gate_up_proj_bias", "bias", [(F,)] * 6, per_expert(alternate)),
            ("*experts.down_proj", "experts", [(D, F)] * 3, per_expert(turned)),
            ("*experts.down_proj_bias", "bias", [(D,)] * 3, per_expert()),
        ],
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        transformers.DeepseekV3Config(
            **{**BASE, "num_key_value_heads": 4, "num_hidden_layers": 2},
            moe_intermediate_size=12,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=14,
            kv_lora_rank=12,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
        [
            EMBEDDING,
            HEAD,
            ("*q_a_layernorm.weight", "gain", [(14,)], whole),
            ("*kv_a_layernorm.weight", "gain", [(12,)], whole),
            ("*post_attention_layernorm.weight", "gain", [(D,)], whole),
            ("model.norm.weight", "gain", [(D,)], whole),
            ("*input_layernorm.weight", "gain", [(D,)], whole),
            ("*q_a_proj.weight", "linear", [(14, D)], whole),
            ("*q_b_proj.weight", "linear", [(40, 14)], whole),
            ("*kv_a_proj_with_mqa.weight", "linear", [(12, D), (4, D)], rows(12, 4)),
            ("*kv_b_proj.weight", "linear", [(24, 12), (32, 12)], headwise(4, 6, 8)),
            ("*o_proj.weight", "linear", [(D, 32)], whole),
            *MLP,
            ("*.gate.weight", "router", [(4, D)], whole),
            ("*.experts.gate_up_proj", "experts", [(12, D)] * 8, per_expert(rows(12, 12))),
            ("*.experts.down_proj", "experts", [(D, 12)] * 4, per_expert()),
            ("*shared_experts.gate_proj.weight", "linear", [(12, D)], whole),
            ("*shared_experts.up_proj.weight", "linear", [(12, D)], whole),
            ("*shared_experts.down_proj.weight", "linear", [(D, 12)], whole),
        ],
    ),
    "phi3": (
        "Phi3ForCausalLM",
        transformers.Phi3Config(**BASE),
        [
            EMBEDDING,
            HEAD,
            NORMS_OF,
            ("*qkv_proj.weight", "linear", [(D, D), (12, D), (12, D)], rows(D, 12, 12)),
            ("*o_proj.weight", "linear", [(D, D)], whole),
            ("*gate_up_proj.weight", "linear", [(F, D)] * 2, rows(F, F)),
            ("*down_proj.weight", "linear", [(D, F)], whole),
        ],
    ),
}
