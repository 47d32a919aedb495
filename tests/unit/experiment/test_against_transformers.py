"""The reference models compute what transformers' GPT-2 and LLaMA do with the same weights."""

import re

import pytest
import torch

from surefoot.experiment.models.decoder import Decoder, GPTConfig, LearnedPositions, LlamaConfig, Size

SMALL = Size(width=32, depth=2, head_dim=8, vocab=50)
GPT2 = {
    r"^embedding": "transformer.wte", r"^position_embedding": "transformer.wpe", r"^final_norm": "transformer.ln_f",
    r"^blocks": "transformer.h", "attention_norm": "ln_1", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj", "attention.output": "attn.c_proj", r"^head": "lm_head",
}  # fmt: skip
LLAMA = {
    r"^embedding": "model.embed_tokens", r"^final_norm": "model.norm", r"^blocks": "model.layers",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
    r"mlp\.(gate|up|down)": r"mlp.\1_proj", r"^head": "lm_head",
}  # fmt: skip


def renamed(name, table):
    for ours, theirs in table.items():
        name = re.sub(ours, theirs, name)
    return name


def gpt2_state(model):
    """Our weights in transformers' layout: Conv1D holds `(in, out)`, and queries, keys and values in one matrix."""
    w = model.state_dict()
    state = {renamed(name, GPT2): x.t() if re.search("mlp|output", name) else x for name, x in w.items()}
    for name in [name for name in state if ".attention." in name]:
        if "query" in name:
            parts = [state[name.replace("query", part)].t() for part in ("query", "key", "value")]
            state[name.replace("attention.query", "attn.c_attn")] = torch.cat(parts, -1)
    return {name: x for name, x in state.items() if ".attention." not in name}


def same(ours, theirs, state):
    theirs.load_state_dict(state)
    tokens = torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs.eval()(tokens).logits
        assert want.std() > 0.1
        assert (ours(tokens) - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))


def randomise_(model):
    """Gains, biases and all away from the values at which a mistake would not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16)
    ours = Decoder(GPTConfig(SMALL, positions=LearnedPositions(16), biases="all", head="tied"))
    randomise_(ours)
    same(ours, transformers.GPT2LMHeadModel(config), gpt2_state(ours))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, False), (1, True)])
def test_llama(kv_heads, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads,
        vocab_size=50, tie_word_embeddings=tied,
    )  # fmt: skip
    ours = Decoder(LlamaConfig(SMALL, intermediate=40, kv_heads=kv_heads, head="tied" if tied else "untied"))
    randomise_(ours)
    state = {renamed(name, LLAMA): x for name, x in ours.state_dict().items()}
    same(ours, transformers.LlamaForCausalLM(config), state)
