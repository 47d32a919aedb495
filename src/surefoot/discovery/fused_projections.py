"""How the owners of fused projections share their rows, read from the forward methods of transformers 5.23
and torchtitan 0.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.views import Fused, Grouped, Interleaved, Projections, View

Layout = Callable[[Any], View]
"""The owner of a projection -> how its rows are shared."""


def fused(parts: int) -> Layout:
    """Equal projections end to end."""
    return lambda owner: Fused(parts)


def gpt2(owner: Any) -> View:
    """Queries, keys, values; of cross attention keys and values."""
    return Fused(2 if owner.is_cross_attention else 3)


def by_head(heads: str, parts: int = 3) -> Layout:
    """Rows `(heads, parts, head_dim)`; the number of heads is an attribute of the owner or of its config."""
    return lambda owner: Interleaved(getattr(owner, heads, None) or getattr(owner.config, heads), parts)


def grouped_queries(owner: Any) -> View:
    """All queries, all keys, all values."""
    keys = owner.config.num_key_value_heads * owner.head_dim
    return Projections((owner.config.num_attention_heads * owner.head_dim, keys, keys))


def dbrx(owner: Any) -> View:
    """All queries, all keys, all values."""
    keys = owner.num_key_value_heads * owner.head_dim
    return Projections((owner.hidden_size, keys, keys))


def bigcode(owner: Any) -> View:
    """One key and value for all queries, or one each."""
    if owner.is_cross_attention:
        return Fused(2)
    one_key = Projections((owner.embed_dim, owner.kv_dim, owner.kv_dim))
    return one_key if owner.multi_query else Interleaved(owner.num_heads, 3)


def falcon(owner: Any) -> View:
    """Each key's queries, the key, the value; or, before that architecture, one key for all, or one each."""
    heads, d = owner.num_heads, owner.head_dim
    if owner.new_decoder_architecture:
        return Grouped(owner.num_kv_heads, (heads // owner.num_kv_heads * d, d, d))
    return Projections((heads * d, d, d)) if owner.multi_query else Interleaved(heads, 3)


def latent(owner: Any) -> View:
    """The latent of keys and values, and the rotary key."""
    return Projections((owner.kv_lora_rank, owner.qk_rope_head_dim))


def from_latent(heads: str) -> Layout:
    """Keys and values, head by head; the number of heads is an attribute of the owner."""
    return lambda owner: Grouped(getattr(owner, heads), (owner.qk_nope_head_dim, owner.v_head_dim))


def state_input(owner: Any) -> View:
    """Mamba: the step size's low rank, B, C."""
    return Projections((owner.time_step_rank, owner.ssm_state_size, owner.ssm_state_size))


def state_space(owner: Any) -> View:
    """Mamba 2: gate, x, B, C, the step sizes."""
    groups = owner.n_groups * owner.ssm_state_size
    return Projections((owner.intermediate_size, owner.intermediate_size, groups, groups, owner.num_heads))


def delta_qkvz(owner: Any) -> View:
    """Gated delta net: key by key its query, key, values and their gates."""
    each = owner.num_v_heads // owner.num_k_heads * owner.head_v_dim
    return Grouped(owner.num_k_heads, (owner.head_k_dim, owner.head_k_dim, each, each))


def delta_ba(owner: Any) -> View:
    """Gated delta net: key by key the rates of writing and of decay."""
    each = owner.num_v_heads // owner.num_k_heads
    return Grouped(owner.num_k_heads, (each, each))


def delta_qkv(owner: Any) -> View:
    """Gated delta net: all queries, all keys, all values."""
    return Projections((owner.key_dim, owner.key_dim, owner.value_dim))


def codegen(owner: Any) -> View:
    """Four groups of query, value, key: its constant `mp_num`."""
    return Interleaved(4, 3)


def titan_queries(owner: Any) -> View:
    """Key by key its queries, the key, the value."""
    d = owner.head_dim
    return Grouped(owner.wqkv.out_features // (owner.r_dim * d), (owner.heads_per_kv * d, d, d))
