"""Modules of `transformers` and torchtitan whose structure is ambiguous: tables of exact class names, none imported.

A row covers subclasses, too. Classes that are not listed are placed by their structure, and their fused projections as
one matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from surefoot.discovery import fused_projections as layouts
from surefoot.discovery.kinds import Kind, Kinds
from surefoot.discovery.torch_layers import experts, linear
from surefoot.initialise import AsBuilt, Fill
from surefoot.views import AlternatingStack, FusedStack, Transposed, View

T = TypeVar("T")


def _full(name: str) -> str:
    """`gpt2.GPT2Attention` or `torchtitan.common.moe.GroupedExperts` -> the class's full name."""
    family, _, qualified = name.partition(".")
    prefix = "torchtitan.models." if family == "torchtitan" else f"transformers.models.{family}.modeling_{family}."
    return prefix + qualified


def _by_owner(rows: tuple[tuple[str, T, str], ...]) -> dict[str, list[tuple[str, T]]]:
    """Rows of (attribute, value, owners) as owner's full class name -> its (attribute, value) pairs."""
    table: dict[str, list[tuple[str, T]]] = {}
    for attribute, value, owners in rows:
        for owner in owners.split():
            table.setdefault(_full(owner), []).append((attribute, value))
    return table


_MAMBA = "mamba.MambaMixer falcon_mamba.FalconMambaMixer jamba.JambaMambaMixer"
_LATENT = """deepseek_v2.DeepseekV2Attention deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention
 glm4_moe_lite.Glm4MoeLiteAttention glm_moe_dsa.GlmMoeDsaAttention kimi_linear.KimiLinearAttention
 longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention mistral4.Mistral4Attention youtu.YoutuAttention
 axk1.AXK1Attention axk2.AXK2Attention bailing_hybrid.BailingHybridAttention dots3_note.Dots3NoteTextAttention
 glm5_next.Glm5NextTextAttention hy_v4.HYV4Attention"""

_LAYOUTS: tuple[tuple[str, layouts.Layout, str], ...] = (
    ("c_attn", layouts.gpt2, """gpt2.GPT2Attention imagegpt.ImageGPTAttention
     decision_transformer.DecisionTransformerGPT2Attention"""),
    ("c_attn", layouts.fused(3), "openai.Attention"),
    ("c_attn", layouts.bigcode, "gpt_bigcode.GPTBigCodeAttention"),
    ("query_key_value", layouts.by_head("num_attention_heads"), """gpt_neox.GPTNeoXAttention
     gpt_neox_japanese.GPTNeoXJapaneseAttention"""),
    ("query_key_value", layouts.by_head("num_heads"), "bloom.BloomAttention persimmon.PersimmonAttention"),
    ("query_key_value", layouts.falcon, "falcon.FalconAttention"),
    ("in_proj", layouts.by_head("num_attention_heads"), "deberta.DisentangledSelfAttention"),
    ("qkv_proj", layouts.by_head("num_attention_heads"), "minimax.MiniMaxLightningAttention"),
    ("qkv_proj", layouts.codegen, "codegen.CodeGenAttention"),
    ("qkv_proj", layouts.grouped_queries, "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"),
    ("q_proj", layouts.by_head("num_attention_heads", 2), """qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention
     qwen3_5_moe.Qwen3_5MoeAttention qwen4_exp.Qwen4ExpTextAttention"""),  # query and gate
    ("Wqkv", layouts.fused(3), "mpt.MptAttention modernbert.ModernBertAttention"),
    ("Wqkv", layouts.dbrx, "dbrx.DbrxAttention"),
    ("att_proj", layouts.fused(3), "bark.BarkSelfAttention"),
    ("qkv", layouts.fused(3), """blip.BlipAttention blip_2.Blip2Attention instructblip.InstructBlipAttention
     instructblipvideo.InstructBlipVideoAttention sam.SamVisionAttention sam_hq.SamHQVisionAttention
     sam2.Sam2MultiScaleAttention vitdet.VitDetAttention seggpt.SegGptAttention got_ocr2.GotOcr2VisionAttention
     timesformer.TimesformerSelfAttention mgp_str.MgpstrAttention hiera.HieraMaskUnitAttention
     florence2.Florence2VisionChannelAttention florence2.Florence2VisionWindowAttention
     qwen2_vl.VisionAttention qwen2_5_vl.Qwen2_5_VLVisionAttention qwen3_vl.Qwen3VLVisionAttention
     qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen3_omni_moe.Qwen3OmniMoeVisionAttention
     qwen3_5.Qwen3_5VisionAttention qwen3_5_moe.Qwen3_5MoeVisionAttention qwen4_exp.Qwen4ExpVisionAttention
     glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention glm_image.GlmImageVisionAttention
     glm_ocr.GlmOcrVisionAttention glm5_next.Glm5NextVisionAttention ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention
     cohere_compass.CohereCompassVisionAttention dots3_note.Dots3NoteVisionAttention slanext.SLANeXtVisionAttention
     unlimited_ocr.UnlimitedOcrSamVisionAttention deepseek_ocr2.DeepseekOcr2SamVisionAttention
     pp_formulanet.PPFormulaNetVisionAttention pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention
     pp_ocrv5_server_rec.PPOCRV5ServerRecAttention pp_ocrv6_small_rec.PPOCRV6SmallRecAttention"""),
    ("to_kv", layouts.fused(2), """evolla.EvollaSequenceCompressorAttention
     granite_speech.GraniteSpeechConformerAttention granite_speech_plus.GraniteSpeechPlusConformerAttention"""),
    ("gate_up_proj", layouts.fused(2), """phi3.Phi3MLP glm.GlmMLP glm4.Glm4MLP glm4v.Glm4vTextMLP dia.DiaMLP
     zamba2.Zamba2MLP phi4_multimodal.Phi4MultimodalMLP phi4_multimodal.Phi4MultimodalAudioMLP
     dots3_note.Dots3NoteAudioMLP glm_image.GlmImageTextMLP glm_ocr.GlmOcrTextMLP esmfold2.EsmFold2SwiGLU
     minimax_m3_vl.MiniMaxM3VLDenseMLP"""),
    ("input_linear", layouts.fused(2), """granitemoeshared.GraniteMoeSharedMLP granitemoehybrid.GraniteMoeHybridMLP
     granitemoe_swa.GraniteMoeSWAMLP"""),
    ("Wi", layouts.fused(2), "modernbert.ModernBertMLP modernbert_decoder.ModernBertDecoderMLP"),
    ("kv_a_proj_with_mqa", layouts.latent, _LATENT),
    ("kv_b_proj", layouts.from_latent("num_heads"), _LATENT),
    ("in_proj", layouts.fused(2), _MAMBA),
    ("x_proj", layouts.state_input, _MAMBA),
    ("in_proj", layouts.state_space, """mamba2.Mamba2Mixer bamba.BambaMixer falcon_h1.FalconH1Mixer
     zamba2.Zamba2MambaMixer nemotron_h.NemotronHMamba2Mixer granitemoehybrid.GraniteMoeHybridMambaLayer"""),
    ("in_proj", layouts.fused(3), """lfm2.Lfm2ShortConv lfm2_moe.Lfm2MoeShortConv lfm3.Lfm3ShortConv
     lfm3_vl.Lfm3VlVisionShortConv"""),
    ("in_proj_qkvz", layouts.delta_qkvz, "qwen3_next.Qwen3NextGatedDeltaNet"),
    ("in_proj_ba", layouts.delta_ba, "qwen3_next.Qwen3NextGatedDeltaNet"),
    ("in_proj_qkv", layouts.delta_qkv, """qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
     qwen4_exp.Qwen4ExpTextGatedDeltaNet"""),
    ("wqkv", layouts.titan_queries, "torchtitan.common.attention.FusedQKVLinear"),
    ("wkv_a", layouts.latent, "torchtitan.deepseek_v3.model.Attention"),
    ("wkv_b", layouts.from_latent("n_heads"), "torchtitan.deepseek_v3.model.Attention"),
)  # fmt: skip
"""Fused projections: attribute of the linear layer, function from the owner to the layout, owners."""

_WINDOWS = """sam.SamVisionAttention sam_hq.SamHQVisionAttention got_ocr2.GotOcr2VisionAttention
 vitdet.VitDetAttention seggpt.SegGptAttention"""
_BIAS_TABLE = Kind("positions", "relative-bias table: a row of logits, one a head, in steps of one size at any width")
_TOKEN = Kind("positions", "a token of the model, a row")
_ROUTER = Kind("router", "router, a head over the experts")
_EXPERT = Kind("experts", "experts, a norm each")
_TITAN_EXPERTS = "torchtitan.common.moe.GroupedExperts"
_GPT_OSS_EXPERTS = "torchtitan.gpt_oss.moe.GptOssGroupedExperts"
_CHANNELS = Kind("scalar", "a factor or shift per channel")
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
    ("rel_pos_h", _TOKEN, _WINDOWS),
    ("rel_pos_w", _TOKEN, _WINDOWS),
    ("position_embeddings", _TOKEN, "perceiver.PerceiverTrainablePositionEncoding"),
    ("time_mix_key", _CHANNELS, "rwkv.RwkvSelfAttention rwkv.RwkvFeedForward"),
    ("time_mix_receptance", _CHANNELS, "rwkv.RwkvSelfAttention rwkv.RwkvFeedForward"),
    ("time_mix_value", _CHANNELS, "rwkv.RwkvSelfAttention"),
    ("weight", _CHANNELS, "convnextv2.ConvNextV2GRN"),
    ("bias", _CHANNELS, "convnextv2.ConvNextV2GRN"),
    ("mm_input_projection_weight", Kind("linear", "projection stored (in, out)", Transposed()),
     "gemma3.Gemma3MultiModalProjector t5gemma2.T5Gemma2MultiModalProjector"),
    ("out_proj.weight", _ROUTER, "zaya.ZayaRouterMLP"),
    ("proj.weight", _ROUTER, "gemma4.Gemma4TextRouter"),
    ("gate.weight", _ROUTER, "afmoe.AfmoeTokenChoiceRouter"),
    ("classifier.weight", _ROUTER, """switch_transformers.SwitchTransformersTop1Router nllb_moe.NllbMoeTop2Router
     longcat_flash.LongcatFlashTopkRouter"""),
    ("gate.weight", _ROUTER, "torchtitan.common.moe.TokenChoiceTopKRouter"),
    ("w1_EFD", _EXPERT, _TITAN_EXPERTS),
    ("w2_EDF", _EXPERT, _TITAN_EXPERTS),
    ("w3_EFD", _EXPERT, _TITAN_EXPERTS),
    ("mlp1_weight_EGD", replace(_EXPERT, view=AlternatingStack(2)), _GPT_OSS_EXPERTS),
    ("mlp1_bias_EG", Kind("bias", "biases of experts, a norm each", AlternatingStack(2)), _GPT_OSS_EXPERTS),
    ("mlp2_weight_EDF", _EXPERT, _GPT_OSS_EXPERTS),
    ("mlp2_bias_ED", Kind("bias", "biases of experts, a norm each", FusedStack(1)), _GPT_OSS_EXPERTS),
)  # fmt: skip
"""Parameters whose kind cannot be inferred from their shape: path below the owner, kind, owners."""

_CENTRED = """gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm t5gemma.T5GemmaRMSNorm
 t5gemma2.T5Gemma2RMSNorm vaultgemma.VaultGemmaRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm
 qwen3_next.Qwen3NextRMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm step3p7.Step3p7RMSNorm
 minimax_m3_vl.MiniMaxM3VLRMSNorm qwen4_exp.Qwen4ExpTextRMSNorm muse_glimmer.MuseGlimmerTextCenteredRMSNorm
 muse_spark.MuseSparkTextCenteredRMSNorm muse_spark.MuseSparkTextInputScaledRMSNorm nemotron.NemotronLayerNorm1P
 videoprism.VideoPrismLayerNorm"""
"""Norm layers that multiply by `1 + weight`."""

_PROJECTED = "opt.OPTDecoder mobilebert.MobileBertEmbeddings"
"""Modules that project a table's rows to another width before they add positions to them."""

_EXPERTS = {"llama4.Llama4TextExperts": (True, True, True), "step3p7.Step3p7Experts": (True, False, True)}
"""Experts without attributes for their layout: (has_gate, is_transposed, is_concatenated)."""

_CONV1D = "transformers.pytorch_utils.Conv1D"
_LAYOUTS_OF = _by_owner(_LAYOUTS)
_KINDS_OF = _by_owner(_KINDS)
_CENTRED_NAMES = frozenset(map(_full, _CENTRED.split()))
_PROJECTED_NAMES = frozenset(map(_full, _PROJECTED.split()))
_EXPERTS_OF = {_full(name): layout for name, layout in _EXPERTS.items()}


def _names(module: nn.Module) -> list[str]:
    """Full names of a module's class and its bases, in method resolution order."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]


def _listed(table: dict[str, list[T]], owner: nn.Module) -> list[T]:
    """The table's entries of the first class of a module that is listed."""
    return next((table[name] for name in _names(owner) if name in table), [])


def layouts_of(owner: nn.Module) -> dict[str, View | None]:
    """Layouts of the fused projections that a module owns.

    Args:
        owner: any module.

    Returns:
        Attribute of the linear layer -> its view; None for a class of another version than the one that the table was
        read from. Empty if the class is not listed.
    """
    views: dict[str, View | None] = {}
    for attribute, layout in _listed(_LAYOUTS_OF, owner):
        try:
            views[attribute] = layout(owner)
        except AttributeError:
            views[attribute] = None
    return views


def order_of(owner: nn.Module) -> tuple[str, ...]:
    """The order of queries, keys and values in a fused projection."""
    values_first = _full("codegen.CodeGenAttention") in _names(owner)
    return ("query", "value", "key") if values_first else ("query", "key", "value")


def adds_projected_tables(owner: nn.Module) -> bool:
    """True for a module of a listed class, which adds tables of another width than its first one's."""
    return not _PROJECTED_NAMES.isdisjoint(_names(owner))


def is_conv1d(module: nn.Module) -> bool:
    """True for Hugging Face's `Conv1D`, a linear layer whose weight is stored `(in, out)`."""
    return _CONV1D in _names(module)


def kinds_by_class(owner: nn.Module) -> Kinds:
    """Kinds of parameters by the class of a module: its own, and those of its children.

    Args:
        owner: any module.

    Returns:
        Path below the module -> kind; None for a layer of another version than the one that is known. Empty if the
        class is not listed.
    """
    by, kinds = f"by the class {type(owner).__name__} and the name", Kinds()
    for attribute, view in layouts_of(owner).items():
        layer, found = getattr(owner, attribute, None), Kinds()
        if view is None:
            found = {"weight": None, "bias": None}
        elif isinstance(layer, nn.Module) and (is_conv1d(layer) or isinstance(layer, nn.Linear)):
            found |= linear(layer, view, is_conv1d(layer))
        for name, kind in found.items():
            kinds[f"{attribute}.{name}"] = kind and replace(kind, why=f"{kind.why}, {by} `{attribute}`")
    for path, kind in _listed(_KINDS_OF, owner):
        kinds[path] = replace(kind, why=f"{kind.why}, {by} `{path}`")
    names = set(_names(owner))
    if is_conv1d(owner):
        kinds |= linear(owner, transposed=True)
    if names & _CENTRED_NAMES:
        why = f"gain of {type(owner).__name__}, centred on 0 (1 + weight)"
        kinds["weight"] = Kind("gain", why, initial=Fill(0.0))
    for name in names & _EXPERTS_OF.keys():
        kinds |= experts(owner, _EXPERTS_OF[name])
    return kinds
