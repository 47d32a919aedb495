"""Model families of transformers, each parameter against a table written by hand.

A row of a table says which parameters it is of, their role, how many matrices `(out, in)` or vectors one is made of,
and which entries those are (`whole`, `turned`, ...: plain indexing, none of the library's views). From these the norm
of one step is measured in float64.
"""

import fnmatch
import math

import pytest
import torch

import surefoot as sf

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

D, F, V, LR = 24, 40, 61, 2.0**-6


# --- how a parameter is made of matrices (out, in) or vectors ------------------------------------------------


def whole(w):
    return [w]


def turned(w):
    return [w.T]


def flat(w):
    """A kernel's patch matrix."""
    return [w.flatten(1)]


def entries(w):
    return [w.flatten()]


def rows(*sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return lambda w: [w[a : a + n] for a, n in zip(starts, sizes, strict=True)]


def columns(*sizes):
    return lambda w: [x.T for x in rows(*sizes)(w.T)]


def headwise(heads, *sizes):
    """Rows (head, part, size): a matrix for each part."""
    of = [part for _ in range(heads) for part, size in enumerate(sizes) for _ in range(size)]
    return lambda w: [w[[i for i, p in enumerate(of) if p == part]] for part in range(len(sizes))]


def each(split=whole):
    return lambda w: [part for expert in w for part in split(expert)]


def alternate(w):
    return [w[0::2], w[1::2]]


def alternate_columns(w):
    return [w[:, 0::2].T, w[:, 1::2].T]


# --- norms in natural units ----------------------------------------------------------------------------------


def rms(w):
    return w.square().mean(-1).sqrt()


def spectral(w):
    return torch.linalg.matrix_norm(w, 2) * math.sqrt(w.shape[1] / w.shape[0])


NORMS = {
    "linear": (spectral, 1),
    "conv": (spectral, 1),
    "experts": (spectral, 1),
    "embedding": (lambda w: rms(w).max(), 1),
    "positions": (lambda w: rms(w).max(), 1),
    "head": (lambda w: w.shape[1] * rms(w).max(), 16),
    "router": (lambda w: w.shape[1] * rms(w).max(), 16),
    "gain": (lambda w: w.abs().max(), 0.25),
    "bias": (rms, 0.25),
    "scalar": (lambda w: w.abs().max(), 1),
}
"""Role -> norm of a matrix or a vector, and the default recipe's factor on the learning rate."""

BY_ROWS = {"embedding", "positions", "head", "router"}


# --- the families --------------------------------------------------------------------------------------------

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
    ("*experts.gate_up_proj", "experts", [(F, D)] * 6, each(rows(F, F))),
    ("*experts.down_proj", "experts", [(D, F)] * 3, each()),
    ("*.gate.weight", "router", [(3, D)], whole),
]
LLAMA = [EMBEDDING, HEAD, NORMS_OF, *QKVO, *MLP]
QK_NORM = [
    ("*[qk]_norm.weight", "gain", [(8,)], whole),
    ("*layernorm.weight", "gain", [(D,)], whole),
    ("model.norm.weight", "gain", [(D,)], whole),
]

FAMILIES = {
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(vocab_size=V, n_embd=D, n_inner=F, n_layer=1, n_head=4, n_positions=16),
        [
            ("*wte.weight", "head", [(V, D)], whole),
            ("*wpe.weight", "embedding", [(16, D)], whole),
            ("*c_attn.weight", "linear", [(D, D)] * 3, columns(D, D, D)),
            ("*c_attn.bias", "bias", [(D,)] * 3, rows(D, D, D)),
            ("*attn.c_proj.weight", "linear", [(D, D)], turned),
            ("*c_fc.weight", "linear", [(F, D)], turned),
            ("*c_fc.bias", "bias", [(F,)], whole),
            ("*mlp.c_proj.weight", "linear", [(D, F)], turned),
            ("*c_proj.bias", "bias", [(D,)], whole),
            ("*ln_*.weight", "gain", [(D,)], whole),
            ("*ln_*.bias", "bias", [(D,)], whole),
        ],
    ),
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
            ("*experts.gate_up_proj", "experts", [(F, D)] * 6, each(alternate_columns)),
            ("*experts.gate_up_proj_bias", "bias", [(F,)] * 6, each(alternate)),
            ("*experts.down_proj", "experts", [(D, F)] * 3, each(turned)),
            ("*experts.down_proj_bias", "bias", [(D,)] * 3, each()),
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
            ("*.experts.gate_up_proj", "experts", [(12, D)] * 8, each(rows(12, 12))),
            ("*.experts.down_proj", "experts", [(D, 12)] * 4, each()),
            ("*shared_experts.gate_proj.weight", "linear", [(12, D)], whole),
            ("*shared_experts.up_proj.weight", "linear", [(12, D)], whole),
            ("*shared_experts.down_proj.weight", "linear", [(D, 12)], whole),
        ],
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        transformers.GPTNeoXConfig(**NO_GROUPS),
        [
            ("*embed_in.weight", "embedding", [(V, D)], whole),
            HEAD,
            ("*query_key_value.weight", "linear", [(D, D)] * 3, headwise(4, 6, 6, 6)),
            ("*query_key_value.bias", "bias", [(D,)] * 3, headwise(4, 6, 6, 6)),
            ("*attention.dense.weight", "linear", [(D, D)], whole),
            ("*attention.dense.bias", "bias", [(D,)], whole),
            ("*dense_h_to_4h.weight", "linear", [(F, D)], whole),
            ("*dense_h_to_4h.bias", "bias", [(F,)], whole),
            ("*dense_4h_to_h.weight", "linear", [(D, F)], whole),
            ("*dense_4h_to_h.bias", "bias", [(D,)], whole),
            ("*norm.weight", "gain", [(D,)], whole),
            ("*norm.bias", "bias", [(D,)], whole),
        ],
    ),
    "falcon": (
        "FalconForCausalLM",
        transformers.FalconConfig(
            vocab_size=V,
            hidden_size=D,
            ffn_hidden_size=F,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            bias=True,
        ),
        [
            ("*word_embeddings.weight", "head", [(V, D)], whole),
            ("*query_key_value.weight", "linear", [(D, D), (12, D), (12, D)], headwise(2, 12, 6, 6)),
            ("*query_key_value.bias", "bias", [(D,), (12,), (12,)], headwise(2, 12, 6, 6)),
            ("*attention.dense.weight", "linear", [(D, D)], whole),
            ("*attention.dense.bias", "bias", [(D,)], whole),
            ("*dense_h_to_4h.weight", "linear", [(F, D)], whole),
            ("*dense_h_to_4h.bias", "bias", [(F,)], whole),
            ("*dense_4h_to_h.weight", "linear", [(D, F)], whole),
            ("*dense_4h_to_h.bias", "bias", [(D,)], whole),
            ("*ln_*.weight", "gain", [(D,)], whole),
            ("*ln_*.bias", "bias", [(D,)], whole),
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
    "bert": (
        "BertForMaskedLM",
        transformers.BertConfig(**NO_GROUPS),
        [
            ("*word_embeddings.weight", "head", [(V, D)], whole),
            ("*position_embeddings.weight", "embedding", [(16, D)], whole),
            ("*token_type_embeddings.weight", "embedding", [(2, D)], whole),
            ("*LayerNorm.weight", "gain", [(D,)], whole),
            ("*LayerNorm.bias", "bias", [(D,)], whole),
            ("*self.*.weight", "linear", [(D, D)], whole),
            ("*self.*.bias", "bias", [(D,)], whole),
            ("*attention.output.dense.weight", "linear", [(D, D)], whole),
            ("*attention.output.dense.bias", "bias", [(D,)], whole),
            ("*intermediate.dense.weight", "linear", [(F, D)], whole),
            ("*intermediate.dense.bias", "bias", [(F,)], whole),
            ("*.[0-9].output.dense.weight", "linear", [(D, F)], whole),
            ("*.[0-9].output.dense.bias", "bias", [(D,)], whole),
            ("cls.predictions.transform.dense.weight", "linear", [(D, D)], whole),
            ("cls.predictions.transform.dense.bias", "bias", [(D,)], whole),
            ("cls.predictions.bias", "bias", [(V,)], whole),
        ],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(
            vocab_size=V, d_model=D, d_kv=8, d_ff=F, num_layers=1, num_heads=4, decoder_start_token_id=0
        ),
        [
            ("shared.weight", "head", [(V, D)], whole),
            ("*.[qkv].weight", "linear", [(32, D)], whole),
            ("*.o.weight", "linear", [(D, 32)], whole),
            ("*.wi.weight", "linear", [(F, D)], whole),
            ("*.wo.weight", "linear", [(D, F)], whole),
            ("*relative_attention_bias.weight", "positions", [(32, 4)], whole),
            ("*layer_norm.weight", "gain", [(D,)], whole),
        ],
    ),
    "vit": (
        "ViTForImageClassification",
        transformers.ViTConfig(
            hidden_size=D,
            intermediate_size=F,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
        ),
        [
            ("*cls_token", "positions", [(1, D)], lambda w: [w[0]]),
            ("*position_embeddings", "positions", [(17, D)], lambda w: [w[0]]),
            ("*projection.weight", "conv", [(D, 48)], flat),
            ("*projection.bias", "bias", [(D,)], whole),
            ("*_proj.weight", "linear", [(D, D)], whole),
            ("*_proj.bias", "bias", [(D,)], whole),
            ("*fc1.weight", "linear", [(F, D)], whole),
            ("*fc1.bias", "bias", [(F,)], whole),
            ("*fc2.weight", "linear", [(D, F)], whole),
            ("*fc2.bias", "bias", [(D,)], whole),
            ("*layernorm*.weight", "gain", [(D,)], whole),
            ("*layernorm*.bias", "bias", [(D,)], whole),
            ("classifier.weight", "linear", [(5, D)], whole),
            ("classifier.bias", "bias", [(5,)], whole),
        ],
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        transformers.WhisperConfig(
            vocab_size=V,
            d_model=D,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=F,
            decoder_ffn_dim=F,
            num_mel_bins=10,
            max_source_positions=8,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        [
            ("*decoder.embed_tokens.weight", "head", [(V, D)], whole),
            ("*decoder.embed_positions.weight", "embedding", [(16, D)], whole),
            ("*conv1.weight", "conv", [(D, 30)], flat),
            ("*conv2.weight", "conv", [(D, 72)], flat),
            ("*conv[12].bias", "bias", [(D,)], whole),
            ("*_proj.weight", "linear", [(D, D)], whole),
            ("*_proj.bias", "bias", [(D,)], whole),
            ("*fc1.weight", "linear", [(F, D)], whole),
            ("*fc1.bias", "bias", [(F,)], whole),
            ("*fc2.weight", "linear", [(D, F)], whole),
            ("*fc2.bias", "bias", [(D,)], whole),
            ("*layer_norm.weight", "gain", [(D,)], whole),
            ("*layer_norm.bias", "bias", [(D,)], whole),
        ],
    ),
    "mamba": (
        "MambaForCausalLM",
        transformers.MambaConfig(vocab_size=V, hidden_size=D, state_size=5, num_hidden_layers=1, time_step_rank=3),
        [
            ("*embeddings.weight", "head", [(V, D)], whole),
            ("*norm*.weight", "gain", [(D,)], whole),
            ("*A_log", "scalar", [(240,)], entries),
            ("*mixer.D", "scalar", [(48,)], whole),
            ("*conv1d.weight", "conv", [(1, 4)] * 48, each()),
            ("*conv1d.bias", "bias", [(48,)], whole),
            ("*in_proj.weight", "linear", [(48, D)] * 2, rows(48, 48)),
            ("*x_proj.weight", "linear", [(3, 48), (5, 48), (5, 48)], rows(3, 5, 5)),
            ("*dt_proj.weight", "linear", [(48, 3)], whole),
            ("*dt_proj.bias", "scalar", [(48,)], whole),
            ("*out_proj.weight", "linear", [(D, 48)], whole),
        ],
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        transformers.Mamba2Config(
            vocab_size=V, hidden_size=D, state_size=5, num_hidden_layers=1, num_heads=6, head_dim=8, n_groups=2
        ),
        [
            ("*embeddings.weight", "embedding", [(V, D)], whole),
            HEAD,
            ("*layers.0.norm.weight", "gain", [(D,)], whole),
            ("*mixer.norm.weight", "gain", [(48,)], whole),
            ("*norm_f.weight", "gain", [(D,)], whole),
            ("*A_log", "scalar", [(6,)], whole),
            ("*mixer.D", "scalar", [(6,)], whole),
            ("*dt_bias", "scalar", [(6,)], whole),
            ("*conv1d.weight", "conv", [(1, 4)] * 68, each()),
            ("*conv1d.bias", "bias", [(68,)], whole),
            ("*in_proj.weight", "linear", [(48, D), (48, D), (10, D), (10, D), (6, D)], rows(48, 48, 10, 10, 6)),
            ("*out_proj.weight", "linear", [(D, 48)], whole),
        ],
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        transformers.Dinov2Config(
            hidden_size=D, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4, num_labels=5
        ),
        [
            ("*cls_token", "positions", [(1, D)], lambda w: [w[0]]),
            ("*mask_token", "positions", [(1, D)], whole),
            ("*position_embeddings", "positions", [(17, D)], lambda w: [w[0]]),
            ("*projection.weight", "conv", [(D, 48)], flat),
            ("*projection.bias", "bias", [(D,)], whole),
            ("*attention.*.weight", "linear", [(D, D)], whole),
            ("*attention.*.bias", "bias", [(D,)], whole),
            ("*layer_scale*", "scalar", [(D,)], whole),
            ("*fc1.weight", "linear", [(96, D)], whole),
            ("*fc1.bias", "bias", [(96,)], whole),
            ("*fc2.weight", "linear", [(D, 96)], whole),
            ("*fc2.bias", "bias", [(D,)], whole),
            ("*norm*.weight", "gain", [(D,)], whole),
            ("*norm*.bias", "bias", [(D,)], whole),
            ("classifier.weight", "linear", [(5, 48)], whole),
            ("classifier.bias", "bias", [(5,)], whole),
        ],
    ),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def built(family):
    """The model, without dropout, and its table."""
    name, config, table = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval(), table


def loss_of(family, model):
    """The loss on one batch; its tokens leave rows of the table out."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, V // 2, (2, 8), generator=generator)
    if family in ("vit", "dinov2"):
        images = torch.randn(3, 3, 16, 16, generator=generator)
        return model(pixel_values=images, labels=torch.tensor([0, 3, 4])).loss
    if family == "whisper":
        return model(input_features=torch.randn(2, 10, 16, generator=generator), labels=tokens).loss
    return model(input_ids=tokens, labels=tokens).loss


def found(name, table):
    """The one row of the table that a name matches."""
    matches = [row for row in table if fnmatch.fnmatchcase(name, row[0])]
    assert len(matches) == 1, f"{name} matches {[row[0] for row in matches]}"
    return matches[0]


@each_family
def test_every_parameter_is_placed_as_the_table_says(family):
    model, table = built(family)
    plan, used = sf.Plan.of(model), set()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(plan) == list(trainable)
    for name, p in trainable.items():
        pattern, role, shapes, split = found(name, table)
        used.add(pattern)
        assert plan[name].role.name == role, name
        parts = split(p.detach())
        assert [tuple(part.shape) for part in parts] == shapes, name
        blocks = [block[1:] for block in plan[name].blocks for _ in range(block[0])]
        assert blocks == [tuple(part.shape) for part in parts], name
    assert used == {row[0] for row in table}  # a row that matches nothing is a mistake in the table
    with torch.device("meta"):
        meta = type(model)(model.config)
    assert sf.Plan.of(meta).hash == plan.hash


@each_family
def test_one_step_has_its_norm_in_every_part_and_lowers_the_loss(family):
    model, table = built(family)
    plan = sf.Plan.of(model)
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=LR)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    loss = loss_of(family, model)
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        change = p.detach().double() - before[name]
        if not p.requires_grad or p.grad is None:
            assert not change.any(), name
            continue
        _, role, _, split = found(name, table)
        for part, g in zip(split(change), split(p.grad), strict=True):
            check_step(name, role, part, g)
    with torch.no_grad():
        assert loss_of(family, model) < loss


def check_step(name, role, change, g):
    """The norm of one part's step is lr times the role's factor; what has no gradient rests."""
    norm, scale = NORMS[role]
    still = (g == 0).all(-1, keepdim=role in BY_ROWS) if role in BY_ROWS else (g == 0).all()
    assert not (change * still).any(), name
    if not g.any():
        return
    ratio = float(norm(change)) / (LR * scale)
    assert (0.96 if norm is spectral else 0.999) <= ratio <= 1.001, f"{name}: {ratio}"
    if role in BY_ROWS:
        each_row = rms(change[~still[:, 0]])
        torch.testing.assert_close(each_row, each_row.max().expand_as(each_row), rtol=1e-3, atol=0)


def test_rows_of_absent_tokens_rest():
    model, _ = built("llama")
    optimizer, table = sf.SteepestDescent(model, lr=LR), model.model.embed_tokens.weight
    before = table.detach().clone()
    loss_of("llama", model).backward()
    optimizer.step()
    moved = (table.detach() != before).any(-1)
    assert 3 < int(moved.sum()) <= 16
    assert not moved[V // 2 :].any()
