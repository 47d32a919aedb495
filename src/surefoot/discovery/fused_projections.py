"""Layouts of fused projections, read from the forward methods of transformers 5.23 and torchtitan 0.3.

Most functions take the module that owns a fused linear layer and return the view of that layer's weight; the others
return such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.views import Fused, Grouped, Interleaved, Projections, View

Layout = Callable[[Any], View]
"""From the owner of a fused linear layer to the view of its weight."""


def fused(parts: int) -> Layout:
    """Equal projections, concatenated."""
    return lambda owner: Fused(parts)


def gpt2(owner: Any) -> View:
    """GPT-2: queries, keys, values; in cross attention keys and values."""
    return Fused(2 if owner.is_cross_attention else 3)


def by_head(heads: str, parts: int = 3) -> Layout:
    """Rows `(heads, parts, head_dim)`; `heads` names the attribute with their number, of the owner or its config."""
    return lambda owner: Interleaved(getattr(owner, heads, None) or getattr(owner.config, heads), parts)


def grouped_queries(owner: Any) -> View:
    """Phi-3: all queries, all keys, all values."""
    keys = owner.config.num_key_value_heads * owner.head_dim
    return Projections((owner.config.num_attention_heads * owner.head_dim, keys, keys))


def dbrx(owner: Any) -> View:
    """DBRX: all queries, all keys, all values; sizes are attributes of the module, not of its config."""
    keys = owner.num_key_value_heads * owner.head_dim
    return Projections((owner.hidden_size, keys, keys))


def bigcode(owner: Any) -> View:
    """GPT-BigCode: one key and value for all queries (multi-query), or one per head."""
    if owner.is_cross_attention:
        return Fused(2)
    one_key = Projections((owner.embed_dim, owner.kv_dim, owner.kv_dim))
    return one_key if owner.multi_query else Interleaved(owner.num_heads, 3)


def falcon(owner: Any) -> View:
    """Falcon: per key its queries, the key, the value; in the old architecture one key for all heads, or one each."""
    heads, d = owner.num_heads, owner.head_dim
    if owner.new_decoder_architecture:
        return Grouped(owner.num_kv_heads, (heads // owner.num_kv_heads * d, d, d))
    return Projections((heads * d, d, d)) if owner.multi_query else Interleaved(heads, 3)


def latent(owner: Any) -> View:
    """DeepSeek: the latent of keys and values, and the rotary key."""
    return Projections((owner.kv_lora_rank, owner.qk_rope_head_dim))


def from_latent(heads: str) -> Layout:
    """DeepSeek: per head its keys and values; `heads` names the owner's attribute with the number of heads."""
    return lambda owner: Grouped(getattr(owner, heads), (owner.qk_nope_head_dim, owner.v_head_dim))


def state_input(owner: Any) -> View:
    """Mamba: the low-rank step size, B, C."""
    return Projections((owner.time_step_rank, owner.ssm_state_size, owner.ssm_state_size))


def state_space(owner: Any) -> View:
    """Mamba 2: gate, x, B, C, step sizes."""
    groups = owner.n_groups * owner.ssm_state_size
    return Projections((owner.intermediate_size, owner.intermediate_size, groups, groups, owner.num_heads))


def delta_qkvz(owner: Any) -> View:
    """Gated delta net: per key its query, the key, its values and their gates."""
    values = owner.num_v_heads // owner.num_k_heads * owner.head_v_dim
    return Grouped(owner.num_k_heads, (owner.head_k_dim, owner.head_k_dim, values, values))


def delta_ba(owner: Any) -> View:
    """Gated delta net: per key the write rates and decay rates of its value heads."""
    values = owner.num_v_heads // owner.num_k_heads
    return Grouped(owner.num_k_heads, (values, values))


def delta_qkv(owner: Any) -> View:
    """Gated delta net: all queries, all keys, all values."""
    return Projections((owner.key_dim, owner.key_dim, owner.value_dim))


def codegen(owner: Any) -> View:
    """CodeGen: four groups (its constant `mp_num`) of query, value, key."""
    return Interleaved(4, 3)


def titan_queries(owner: Any) -> View:
    """torchtitan: per key its queries, the key, the value."""
    d = owner.head_dim
    return Grouped(owner.wqkv.out_features // (owner.r_dim * d), (owner.heads_per_kv * d, d, d))
