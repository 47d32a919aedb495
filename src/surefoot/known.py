"""Modules of `transformers` that cannot be told by their structure: exact class names, none of them imported here.

Read from the forward methods of transformers 5.23. A row holds for subclasses, too; a class that is not listed is
placed by its structure, and a fused projection of it as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from surefoot.initialise import AsBuilt, Fill
from surefoot.kinds import Kind, conv1d, experts
from surefoot.views import Fused, Grouped, Interleaved, Projections, View

T = TypeVar("T")

Layout = Callable[[Any], View]
"""The owner of a projection -> how its rows are shared."""


def _fused(parts: int) -> Layout:
    return lambda owner: Fused(parts)


def _gpt2(owner: Any) -> View:
    return Fused(2 if owner.is_cross_attention else 3)


def _by_head(heads: str, parts: int = 3) -> Layout:
    """Rows `(heads, parts, head_dim)`; the number of heads is an attribute of the owner or of its config."""
    return lambda owner: Interleaved(getattr(owner, heads, None) or getattr(owner.config, heads), parts)


def _grouped_queries(owner: Any) -> View:
    """All queries, all keys, all values."""
    keys = owner.config.num_key_value_heads * owner.head_dim
    return Projections((owner.config.num_attention_heads * owner.head_dim, keys, keys))


def _dbrx(owner: Any) -> View:
    keys = owner.num_key_value_heads * owner.head_dim
    return Projections((owner.hidden_size, keys, keys))


def _bigcode(owner: Any) -> View:
    if owner.is_cross_attention:
        return Fused(2)
    one_key = Projections((owner.embed_dim, owner.kv_dim, owner.kv_dim))
    return one_key if owner.multi_query else Interleaved(owner.num_heads, 3)


def _falcon(owner: Any) -> View:
    """Each key's queries, the key, the value; or, before that architecture, one key for all, or one each."""
    heads, d = owner.num_heads, owner.head_dim
    if owner.new_decoder_architecture:
        return Grouped(owner.num_kv_heads, (heads // owner.num_kv_heads * d, d, d))
    return Projections((heads * d, d, d)) if owner.multi_query else Interleaved(heads, 3)


def _latent(owner: Any) -> View:
    """The latent of keys and values, and the rotary key."""
    return Projections((owner.kv_lora_rank, owner.qk_rope_head_dim))


def _from_latent(owner: Any) -> View:
    """Keys and values, head by head."""
    return Grouped(owner.num_heads, (owner.qk_nope_head_dim, owner.v_head_dim))


def _state_input(owner: Any) -> View:
    """Mamba: the step size's low rank, B, C."""
    return Projections((owner.time_step_rank, owner.ssm_state_size, owner.ssm_state_size))


def _state_space(owner: Any) -> View:
    """Mamba 2: gate, x, B, C, the step sizes."""
    groups = owner.n_groups * owner.ssm_state_size
    return Projections((owner.intermediate_size, owner.intermediate_size, groups, groups, owner.num_heads))


def _delta_qkvz(owner: Any) -> View:
    each = owner.num_v_heads // owner.num_k_heads * owner.head_v_dim
    return Grouped(owner.num_k_heads, (owner.head_k_dim, owner.head_k_dim, each, each))


def _delta_ba(owner: Any) -> View:
    each = owner.num_v_heads // owner.num_k_heads
    return Grouped(owner.num_k_heads, (each, each))


def _delta_qkv(owner: Any) -> View:
    return Projections((owner.key_dim, owner.key_dim, owner.value_dim))


def _full(name: str) -> str:
    """`gpt2.GPT2Attention` -> the class's full name."""
    family, _, qualified = name.partition(".")
    return f"transformers.models.{family}.modeling_{family}.{qualified}"


def _by_owner(rows: tuple[tuple[str, T, str], ...]) -> dict[str, list[tuple[str, T]]]:
    """Rows of (what, value, owners) as owner's full name -> its (what, value) pairs."""
    found: dict[str, list[tuple[str, T]]] = {}
    for what, value, owners in rows:
        for owner in owners.split():
            found.setdefault(_full(owner), []).append((what, value))
    return found


_MAMBA = "mamba.MambaMixer falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer"
_LATENT = """deepseek_v2.DeepseekV2Attention deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention
 glm4_moe_lite.Glm4MoeLiteAttention glm_moe_dsa.GlmMoeDsaAttention kimi_linear.KimiLinearAttention
 longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention mistral4.Mistral4Attention youtu.YoutuAttention"""

_LAYOUTS: tuple[tuple[str, Layout, str], ...] = (
    ("c_attn", _gpt2, """gpt2.GPT2Attention imagegpt.ImageGPTAttention
     decision_transformer.DecisionTransformerGPT2Attention"""),
    ("c_attn", _fused(3), "openai.Attention"),
    ("c_attn", _bigcode, "gpt_bigcode.GPTBigCodeAttention"),
    ("query_key_value", _by_head("num_attention_heads"), """gpt_neox.GPTNeoXAttention
     gpt_neox_japanese.GPTNeoXJapaneseAttention"""),
    ("query_key_value", _by_head("num_heads"), "bloom.BloomAttention persimmon.PersimmonAttention"),
    ("query_key_value", _falcon, "falcon.FalconAttention"),
    ("in_proj", _by_head("num_attention_heads"), "deberta.DisentangledSelfAttention"),
    ("qkv_proj", _by_head("num_attention_heads"), "minimax.MiniMaxLightningAttention"),
    ("qkv_proj", lambda owner: Interleaved(4, 3), "codegen.CodeGenAttention"),  # its mp_num
    ("qkv_proj", _grouped_queries, "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"),
    ("q_proj", _by_head("num_attention_heads", 2), "qwen3_next.Qwen3NextAttention"),  # query and gate
    ("Wqkv", _fused(3), "mpt.MptAttention modernbert.ModernBertAttention"),
    ("Wqkv", _dbrx, "dbrx.DbrxAttention"),
    ("att_proj", _fused(3), "bark.BarkSelfAttention"),
    ("qkv", _fused(3), """blip.BlipAttention blip_2.Blip2Attention instructblip.InstructBlipAttention
     instructblipvideo.InstructBlipVideoAttention sam.SamVisionAttention sam_hq.SamHQVisionAttention
     sam2.Sam2MultiScaleAttention vitdet.VitDetAttention seggpt.SegGptAttention got_ocr2.GotOcr2VisionAttention
     timesformer.TimesformerSelfAttention mgp_str.MgpstrAttention hiera.HieraMaskUnitAttention
     florence2.Florence2VisionChannelAttention florence2.Florence2VisionWindowAttention
     qwen2_vl.VisionAttention qwen2_5_vl.Qwen2_5_VLVisionAttention qwen3_vl.Qwen3VLVisionAttention
     qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen3_omni_moe.Qwen3OmniMoeVisionAttention
     glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention"""),
    ("to_kv", _fused(2), "evolla.EvollaSequenceCompressorAttention granite_speech.GraniteSpeechConformerAttention"),
    ("gate_up_proj", _fused(2), """phi3.Phi3MLP glm.GlmMLP glm4.Glm4MLP glm4v.Glm4vTextMLP dia.DiaMLP zamba2.Zamba2MLP
     phi4_multimodal.Phi4MultimodalMLP phi4_multimodal.Phi4MultimodalAudioMLP"""),
    ("input_linear", _fused(2), "granitemoeshared.GraniteMoeSharedMLP granitemoehybrid.GraniteMoeHybridMLP"),
    ("Wi", _fused(2), "modernbert.ModernBertMLP modernbert_decoder.ModernBertDecoderMLP"),
    ("kv_a_proj_with_mqa", _latent, _LATENT),
    ("kv_b_proj", _from_latent, _LATENT),
    ("in_proj", _fused(2), _MAMBA),
    ("x_proj", _state_input, _MAMBA),
    ("in_proj", _state_space, """mamba2.Mamba2Mixer bamba.BambaMixer falcon_h1.FalconH1Mixer zamba2.Zamba2MambaMixer
     nemotron_h.NemotronHMamba2Mixer granitemoehybrid.GraniteMoeHybridMambaLayer"""),
    ("in_proj", _fused(3), "lfm2.Lfm2ShortConv lfm2_moe.Lfm2MoeShortConv"),
    ("in_proj_qkvz", _delta_qkvz, "qwen3_next.Qwen3NextGatedDeltaNet"),
    ("in_proj_ba", _delta_ba, "qwen3_next.Qwen3NextGatedDeltaNet"),
    ("in_proj_qkv", _delta_qkv, "qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet"),
)  # fmt: skip
"""Projections fused in one linear layer: the attribute that holds it, how its rows are shared, its owners."""

_BIAS_TABLE = Kind("positions", "relative-bias table: a row of logits, one a head, in steps of one size at any width")
_TOKEN = Kind("positions", "a token of the model, a row")
_ROUTER = Kind("router", "router, a head over the experts")
_STEP_SIZE = Kind("scalar", "bias of Mamba's step size: per channel, as built", initial=AsBuilt())

_KINDS: tuple[tuple[str, Kind, str], ...] = (
    ("A_log", Kind("scalar", "Mamba's state matrix: per channel"), _MAMBA),
    ("dt_proj.bias", _STEP_SIZE, _MAMBA),
    ("relative_attention_bias.weight", _BIAS_TABLE, """t5.T5Attention mt5.MT5Attention umt5.UMT5Attention
     longt5.LongT5Attention longt5.LongT5LocalAttention longt5.LongT5TransientGlobalAttention udop.UdopAttention
     pop2piano.Pop2PianoAttention switch_transformers.SwitchTransformersAttention mpnet.MPNetEncoder
     pix2struct.Pix2StructTextAttention"""),
    ("global_relative_attention_bias.weight", _BIAS_TABLE, "longt5.LongT5TransientGlobalAttention"),
    ("relative_position_bias_table", _BIAS_TABLE, """beit.BeitRelativePositionBias swin.SwinRelativePositionBias
     clap.ClapAudioSelfAttention"""),
    ("mask_token", _TOKEN, """dinov2.Dinov2Embeddings dinov2_with_registers.Dinov2WithRegistersEmbeddings
     tipsv2.Tipsv2VisionEmbeddings rf_detr.RfDetrDinov2Embeddings"""),
    ("latents", _TOKEN, "perceiver.PerceiverEmbeddings idefics2.Idefics2PerceiverResampler"),
    ("proj.weight", _ROUTER, "gemma4.Gemma4TextRouter"),
    ("gate.weight", _ROUTER, "afmoe.AfmoeTokenChoiceRouter"),
    ("classifier.weight", _ROUTER, """switch_transformers.SwitchTransformersTop1Router nllb_moe.NllbMoeTop2Router
     longcat_flash.LongcatFlashTopkRouter"""),
)  # fmt: skip
"""Parameters whose use their shape does not tell: path below the owner, kind, owners."""

_CENTRED = """gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm t5gemma.T5GemmaRMSNorm
 t5gemma2.T5Gemma2RMSNorm vaultgemma.VaultGemmaRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm
 qwen3_next.Qwen3NextRMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm step3p7.Step3p7RMSNorm
 minimax_m3_vl.MiniMaxM3VLRMSNorm"""
"""Norms that multiply by `1 + weight`."""

_EXPERTS = {
    "llama4.Llama4TextExperts": (True, True, True),
    "step3p7.Step3p7Experts": (True, False, True),
}
"""Experts that do not say their layout: (has_gate, is_transposed, is_concatenated)."""


_CONV1D = "transformers.pytorch_utils.Conv1D"
_LAYOUTS_OF = _by_owner(_LAYOUTS)
_KINDS_OF = _by_owner(_KINDS)
_CENTRED_NAMES = frozenset(map(_full, _CENTRED.split()))
_EXPERTS_OF = {_full(name): layout for name, layout in _EXPERTS.items()}


def _names(module: nn.Module) -> list[str]:
    """The full names of a module's class and its bases."""
    return [f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__]


def layouts(owner: nn.Module) -> dict[str, View | None]:
    """Attribute of a module -> how the rows of the linear layer there are shared; None where this version differs."""
    rows = next((_LAYOUTS_OF[name] for name in _names(owner) if name in _LAYOUTS_OF), [])
    found: dict[str, View | None] = {}
    for attribute, layout in rows:
        try:
            found[attribute] = layout(owner)
        except AttributeError:
            found[attribute] = None
    return found


def kinds_below(owner: nn.Module) -> list[tuple[str, Kind]]:
    """Paths of parameters below a module, and their kinds."""
    return next((_KINDS_OF[name] for name in _names(owner) if name in _KINDS_OF), [])


def by_class(module: nn.Module, layout: View | None = None) -> dict[str, Kind]:
    """Parameter name -> kind for modules of a class that is known here."""
    names = set(_names(module))
    if _CONV1D in names:
        return conv1d(module, layout)
    if names & _CENTRED_NAMES:
        why = f"gain of {type(module).__name__}, centred on 0 (1 + weight)"
        return {"weight": Kind("gain", why, initial=Fill(0.0))}
    return next((experts(module, _EXPERTS_OF[name]) for name in names & _EXPERTS_OF.keys()), {})
