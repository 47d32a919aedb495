"""transformers' weights in the reference models: the same logits, and errors that name what does not fit."""

import copy

import pytest
import torch

from surefoot.experiment.models.decoder import GPT, GPTConfig, Learned, Llama, LlamaConfig, Size
from surefoot.experiment.models.pretrained import load_gpt2_, load_llama_

SMALL = Size(width=32, depth=2, head_dim=8, vocab=50)


def gpt2():
    return GPT(GPTConfig(SMALL, positions=Learned(16), biases="all", head="tied"))


def tokens():
    return torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(0))


def gpt2_state(model):
    """A state in transformers' layout, made from our own model by independent code."""
    state, w = {}, model.state_dict()
    state["transformer.wte.weight"], state["transformer.wpe.weight"] = (
        w["embedding.weight"],
        w["position_embedding.weight"],
    )
    for i in range(model.config.size.depth):
        ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        for kind in ("weight", "bias"):
            state[f"{theirs}ln_1.{kind}"] = w[f"{ours}attention_norm.{kind}"]
            state[f"{theirs}ln_2.{kind}"] = w[f"{ours}mlp_norm.{kind}"]
            for a, b in (("attn.c_proj", "attention.output"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                state[f"{theirs}{a}.{kind}"] = w[f"{ours}{b}.{kind}"].t().contiguous()
            parts = [w[f"{ours}attention.{p}.{kind}"].t() for p in ("query", "key", "value")]
            state[f"{theirs}attn.c_attn.{kind}"] = torch.cat(parts, -1)
        state[f"{theirs}attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # old checkpoints hold the causal mask
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = w[f"final_norm.{kind}"]
    return state


def test_gpt2_weights_round_trip_and_errors_leave_the_model_alone():
    source, target = gpt2(), gpt2()
    state = gpt2_state(source)
    before = copy.deepcopy(target.state_dict())
    broken = {
        "missing: .*h.1.mlp.c_fc.bias": {k: v for k, v in state.items() if k != "transformer.h.1.mlp.c_fc.bias"},
        "left over: .*transformer.h.2.ln_1.weight": state | {"transformer.h.2.ln_1.weight": torch.ones(32)},
        "c_fc.weight of shape": state | {"transformer.h.0.mlp.c_fc.weight": torch.zeros(128, 32)},
        "lm_head.weight differs from transformer.wte.weight": state | {"lm_head.weight": torch.zeros(50, 32)},
    }
    for message, bad in broken.items():
        with pytest.raises(ValueError, match=message):
            load_gpt2_(target, bad)
        assert all(torch.equal(before[k], v) for k, v in target.state_dict().items())
    load_gpt2_(target, state)
    assert torch.equal(source(tokens()), target(tokens()))


def randomise_(model):
    """Gains, biases and all away from the values at which a mistake would not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_gpt2_matches_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16)
    ).eval()
    randomise_(theirs)
    ours = gpt2()
    load_gpt2_(ours, theirs.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.1
        assert (ours(tokens()) - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, False), (1, True)])
def test_llama_matches_transformers(kv_heads, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=50,
        tie_word_embeddings=tied,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    randomise_(theirs)
    head = "tied" if tied else "untied"
    ours = Llama(LlamaConfig(SMALL, intermediate=40, kv_heads=kv_heads, head=head))
    load_llama_(ours, theirs.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.1
        assert (ours(tokens()) - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))
    with pytest.raises(ValueError, match=r"left over: .*lm_head\.extra"):
        load_llama_(ours, dict(theirs.state_dict()) | {"lm_head.extra": torch.zeros(1)})
