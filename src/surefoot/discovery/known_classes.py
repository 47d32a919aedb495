"""Modules of `transformers` and torchtitan whose structure is ambiguous: tables of class names, none imported.

A row covers subclasses, too. Classes that are not listed are placed by their structure, and their fused projections as
one matrix. Layouts were read from the forward methods of transformers 5.23 and torchtitan 0.3.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from surefoot.discovery.kinds import Kind, Kinds, class_names, is_linear
from surefoot.discovery.structure import IN_ORDER, fused
from surefoot.discovery.torch_layers import experts, linear
from surefoot.initialise import AsBuilt, Fill
from surefoot.views import AlternatingStack, Fused, FusedStack, Grouped, Interleaved, Projections, Transposed, View

T = TypeVar("T")
Layout = View | Callable[[Any], View]
"""The view of a fused linear layer's weight, or a function from the module that owns the layer to it."""


def _by_head(heads: str, parts: int = 3) -> Layout:
    """Rows `(heads, parts, head_dim)`; `heads` names the attribute with their number, of the owner or its config."""
    return lambda owner: Interleaved(getattr(owner, heads, None) or getattr(owner.config, heads), parts)


def _bigcode(owner: Any) -> View:
    """GPT-BigCode: one key and value for all queries (multi-query), or one per head."""
    own = _queries(owner.embed_dim, owner.kv_dim) if owner.multi_query else Interleaved(owner.num_heads, 3)
    return Fused(2) if owner.is_cross_attention else own


def _falcon(owner: Any) -> View:
    """Falcon: per key its queries, the key, the value; in the old architecture one key for all heads, or one each."""
    heads, d = owner.num_heads, owner.head_dim
    if owner.new_decoder_architecture:
        return Grouped(owner.num_kv_heads, (heads // owner.num_kv_heads * d, d, d))
    return _queries(heads, 1, d) if owner.multi_query else Interleaved(heads, 3)


def _latent(owner: Any) -> View:
    """DeepSeek: the latent of keys and values, and the rotary key."""
    return Projections((owner.kv_lora_rank, owner.qk_rope_head_dim))


def _from_latent(heads: str) -> Layout:
    """DeepSeek: per head its keys and values; `heads` names the owner's attribute with the number of heads."""
    return lambda owner: Grouped(getattr(owner, heads), (owner.qk_nope_head_dim, owner.v_head_dim))


def _queries(queries: int, keys: int, head_dim: int = 1) -> View:
    """All queries, all keys, all values."""
    return Projections((queries * head_dim, keys * head_dim, keys * head_dim))


def _state_space(owner: Any) -> View:
    """Mamba 2: gate, x, B, C, step sizes."""
    groups = owner.n_groups * owner.ssm_state_size
    return Projections((owner.intermediate_size, owner.intermediate_size, groups, groups, owner.num_heads))


def _delta_qkvz(owner: Any) -> View:
    """Gated delta net: per key its query, the key, its values and their gates."""
    values = owner.num_v_heads // owner.num_k_heads * owner.head_v_dim
    return Grouped(owner.num_k_heads, (owner.head_k_dim, owner.head_k_dim, values, values))


def _titan_queries(owner: Any) -> View:
    """torchtitan: per key its queries, the key, the value."""
    d = owner.head_dim
    return Grouped(owner.wqkv.out_features // (owner.r_dim * d), (owner.heads_per_kv * d, d, d))


_MAMBA = "MambaMixer FalconMambaMixer JambaMambaMixer"
_LATENT = """DeepseekV2Attention DeepseekV3Attention DeepseekV32Attention Glm4MoeLiteAttention GlmMoeDsaAttention
 KimiLinearAttention LongcatFlashMLA MiniCPM3Attention Mistral4Attention YoutuAttention AXK1Attention AXK2Attention
 BailingHybridAttention Dots3NoteTextAttention Glm5NextTextAttention HYV4Attention"""

_LAYOUTS: tuple[tuple[str, Layout, str], ...] = (
    ("c_attn", lambda owner: Fused(2 if owner.is_cross_attention else 3),
     "GPT2Attention ImageGPTAttention DecisionTransformerGPT2Attention"),
    ("c_attn", Fused(3), "modeling_openai.Attention"),
    ("c_attn", _bigcode, "GPTBigCodeAttention"),
    ("query_key_value", _by_head("num_attention_heads"), "GPTNeoXAttention GPTNeoXJapaneseAttention"),
    ("query_key_value", _by_head("num_heads"), "BloomAttention PersimmonAttention"),
    ("query_key_value", _falcon, "FalconAttention"),
    ("in_proj", _by_head("num_attention_heads"), "modeling_deberta.DisentangledSelfAttention"),
    ("qkv_proj", _by_head("num_attention_heads"), "MiniMaxLightningAttention"),
    ("qkv_proj", Interleaved(4, 3), "CodeGenAttention"),  # four groups (its constant `mp_num`) of query, value, key
    ("qkv_proj", lambda owner: _queries(owner.config.num_attention_heads, owner.config.num_key_value_heads,
     owner.head_dim), "Phi3Attention Phi4MultimodalAttention"),
    ("q_proj", _by_head("num_attention_heads", 2),  # query and gate
     "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention Qwen4ExpTextAttention"),
    ("Wqkv", Fused(3), "MptAttention ModernBertAttention"),
    ("Wqkv", lambda owner: _queries(owner.hidden_size, owner.num_key_value_heads * owner.head_dim), "DbrxAttention"),
    ("att_proj", Fused(3), "BarkSelfAttention"),
    ("qkv", Fused(3), """BlipAttention Blip2Attention InstructBlipAttention InstructBlipVideoAttention
     SamVisionAttention SamHQVisionAttention Sam2MultiScaleAttention VitDetAttention SegGptAttention
     GotOcr2VisionAttention TimesformerSelfAttention MgpstrAttention HieraMaskUnitAttention
     Florence2VisionChannelAttention Florence2VisionWindowAttention VisionAttention Qwen2_5_VLVisionAttention
     Qwen3VLVisionAttention Qwen3VLMoeVisionAttention Qwen3OmniMoeVisionAttention Qwen3_5VisionAttention
     Qwen3_5MoeVisionAttention Qwen4ExpVisionAttention Glm4vVisionAttention Glm4vMoeVisionAttention
     GlmImageVisionAttention GlmOcrVisionAttention Glm5NextVisionAttention Ernie4_5_VLMoeVisionAttention
     CohereCompassVisionAttention Dots3NoteVisionAttention SLANeXtVisionAttention UnlimitedOcrSamVisionAttention
     DeepseekOcr2SamVisionAttention PPFormulaNetVisionAttention PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention
     PPOCRV6SmallRecAttention"""),
    ("gate_up_proj", Fused(2), """Phi3MLP GlmMLP Glm4MLP Glm4vTextMLP DiaMLP Zamba2MLP Phi4MultimodalMLP
     Phi4MultimodalAudioMLP Dots3NoteAudioMLP GlmImageTextMLP GlmOcrTextMLP EsmFold2SwiGLU MiniMaxM3VLDenseMLP"""),
    ("input_linear", Fused(2), "GraniteMoeSharedMLP GraniteMoeHybridMLP GraniteMoeSWAMLP"),
    ("Wi", Fused(2), "ModernBertMLP ModernBertDecoderMLP"),
    ("kv_a_proj_with_mqa", _latent, _LATENT),
    ("kv_b_proj", _from_latent("num_heads"), _LATENT),
    ("in_proj", Fused(2), _MAMBA),
    ("x_proj", lambda owner: _queries(owner.time_step_rank, owner.ssm_state_size), _MAMBA),  # low-rank step size, B, C
    ("in_proj", _state_space, """Mamba2Mixer BambaMixer FalconH1Mixer Zamba2MambaMixer NemotronHMamba2Mixer
     GraniteMoeHybridMambaLayer"""),
    ("in_proj", Fused(3), "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv Lfm3VlVisionShortConv"),
    ("in_proj_qkvz", _delta_qkvz, "Qwen3NextGatedDeltaNet"),
    ("in_proj_ba", lambda owner: Grouped(owner.num_k_heads, (owner.num_v_heads // owner.num_k_heads,) * 2),
     "Qwen3NextGatedDeltaNet"),  # per key the write rates and decay rates of its value heads
    ("in_proj_qkv", lambda owner: Projections((owner.key_dim, owner.key_dim, owner.value_dim)),
     "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet"),
    ("wqkv", _titan_queries, "FusedQKVLinear"),
    ("wkv_a", _latent, "deepseek_v3.model.Attention"),
    ("wkv_b", _from_latent("n_heads"), "deepseek_v3.model.Attention"),
)  # fmt: skip
"""Fused projections: attribute of the linear layer, its layout, owners."""

_BIAS_TABLE = Kind("positions", "relative-bias table: a row of logits, one a head, in steps of one size at any width")
_ROUTER = Kind("router", "router, a head over the experts")
_EXPERT = Kind("experts", "experts, a norm each")
_EXPERT_BIAS = Kind("bias", "biases of experts, a norm each", FusedStack(1))

_KINDS: tuple[tuple[str, Kind, str], ...] = (
    ("A_log", Kind("scalar", "Mamba's state matrix: per channel"), _MAMBA),
    ("dt_proj.bias", Kind("scalar", "bias of Mamba's step size: per channel, as built", initial=AsBuilt()), _MAMBA),
    ("relative_attention_bias.weight", _BIAS_TABLE, """T5Attention MT5Attention UMT5Attention LongT5Attention
     LongT5LocalAttention LongT5TransientGlobalAttention UdopAttention Pop2PianoAttention SwitchTransformersAttention
     MPNetEncoder Pix2StructTextAttention"""),
    ("global_relative_attention_bias.weight", _BIAS_TABLE, "LongT5TransientGlobalAttention"),
    ("mm_input_projection_weight", Kind("linear", "projection stored (in, out)", Transposed()),
     "Gemma3MultiModalProjector T5Gemma2MultiModalProjector"),
    ("out_proj.weight", _ROUTER, "ZayaRouterMLP"),
    ("proj.weight", _ROUTER, "Gemma4TextRouter"),
    ("classifier.weight", _ROUTER, "SwitchTransformersTop1Router NllbMoeTop2Router LongcatFlashTopkRouter"),
    ("gate.weight", _ROUTER, "AfmoeTokenChoiceRouter TokenChoiceTopKRouter"),
    ("w1_EFD w2_EDF w3_EFD", _EXPERT, "GroupedExperts"),
    ("mlp1_weight_EGD", replace(_EXPERT, view=AlternatingStack(2)), "GptOssGroupedExperts"),
    ("mlp1_bias_EG", replace(_EXPERT_BIAS, view=AlternatingStack(2)), "GptOssGroupedExperts"),
    ("mlp2_weight_EDF", _EXPERT, "GptOssGroupedExperts"),
    ("mlp2_bias_ED", _EXPERT_BIAS, "GptOssGroupedExperts"),
)  # fmt: skip
"""Parameters whose kind cannot be inferred from their shape: paths below the owner, kind, owners."""

_CENTRED = """GemmaRMSNorm Gemma2RMSNorm Gemma3RMSNorm T5GemmaRMSNorm T5Gemma2RMSNorm VaultGemmaRMSNorm
 RecurrentGemmaRMSNorm Qwen3NextRMSNorm Qwen3_5RMSNorm Qwen3_5MoeRMSNorm Step3p7RMSNorm MiniMaxM3VLRMSNorm
 Qwen4ExpTextRMSNorm MuseGlimmerTextCenteredRMSNorm MuseSparkTextCenteredRMSNorm MuseSparkTextInputScaledRMSNorm
 NemotronLayerNorm1P VideoPrismLayerNorm"""
"""Norm layers that multiply by `1 + weight`."""

_EXPERTS = {"Llama4TextExperts": (True, True, True), "Step3p7Experts": (True, False, True)}
"""Experts without attributes for their layout: (has_gate, is_transposed, is_concatenated)."""


def _by_owner(rows: Iterable[tuple[str, T, str]]) -> dict[str, list[tuple[str, T]]]:
    """Index rows by class: an owner's name -> pairs of a path below it and the row's value."""
    table: dict[str, list[tuple[str, T]]] = defaultdict(list)
    for paths, value, owners in rows:
        for name in owners.split():
            table[name] += [(path, value) for path in paths.split()]
    return dict(table)


_LAYOUTS_OF, _KINDS_OF = _by_owner(_LAYOUTS), _by_owner(_KINDS)


def _listed(table: dict[str, list[T]], owner: nn.Module) -> list[T]:
    """The table's entries for the first of a module's classes that is listed."""
    return next((table[name] for name in class_names(owner) if name in table), [])


def layouts_of(owner: nn.Module) -> dict[str, View | None]:
    """Layouts of the fused projections that a module owns.

    Args:
        owner: any module.

    Returns:
        Attribute of the linear layer -> its view; None for a class of another version than the table's.
        For a user's class, the layers whose name tells their order, see `surefoot.discovery.structure`.
    """
    by_structure, keys = fused(owner), owner._modules.get("to_kv")
    views: dict[str, View | None] = dict([by_structure] if by_structure and by_structure[0] in IN_ORDER else [])
    if "to_q" in owner._modules and isinstance(keys, nn.Linear) and keys.out_features % 2 == 0:
        views["to_kv"] = Fused(2)  # keys, then values
    for attribute, layout in _listed(_LAYOUTS_OF, owner):
        try:
            views[attribute] = layout if isinstance(layout, View) else layout(owner)
        except AttributeError:
            views[attribute] = None
    return views


def adds_projected_tables(owner: nn.Module) -> bool:
    """True for a module that projects a table's rows to another width before it adds positions to them."""
    return not {"OPTDecoder", "MobileBertEmbeddings"}.isdisjoint(class_names(owner))


def kinds_by_class(owner: nn.Module) -> Kinds:
    """Kinds of parameters by the class of a module: its own, and those of its children.

    Args:
        owner: any module.

    Returns:
        Path below the module -> kind; None for a layer of another version than the one that is known. Empty if the
        class is not listed.
    """
    listed = class_names(owner)
    by = f"by the class {type(owner).__name__} and the name" if listed else "by its heads' rows, in order by the name"
    kinds = Kinds()
    for attribute, view in layouts_of(owner).items():
        layer, found = getattr(owner, attribute, None), Kinds(weight=None, bias=None)
        if view:
            found = {**linear(layer, view)} if is_linear(layer) else {}
        for name, kind in found.items():
            kinds[f"{attribute}.{name}"] = kind and replace(kind, why=f"{kind.why}, {by} `{attribute}`")
    for path, kind in _listed(_KINDS_OF, owner):
        kinds[path] = replace(kind, why=f"{kind.why}, {by} `{path}`")
    for name in listed:
        if name in _CENTRED.split():
            why = f"gain of {type(owner).__name__}, centred on 0 (1 + weight)"
            kinds["weight"] = Kind("gain", why, initial=Fill(0.0))
        elif name in _EXPERTS:
            kinds |= experts(owner, _EXPERTS[name])
    return kinds
