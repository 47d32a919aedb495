"""Attention control on layouts of transformers: the logits of a batch come back to the threshold, head by head."""

import pytest
import torch

import surefoot as sf
from surefoot.attention.qk_clip import LogitControl

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIGS = {
    "gpt2, fused and transposed": ("GPT2", {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}),
    "gpt-neox, fused head by head": ("GPTNeoX", {**SMALL, "intermediate_size": 48}),
    "llama, grouped": ("Llama", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}),
    "qwen2, biases": ("Qwen2", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 1}),
    "bert": ("Bert", {**SMALL, "intermediate_size": 48}),
}


def build(family, options, attention="sdpa"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation=attention)
    named = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, named)(config).train()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def measured(model, control):
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    control.largest = {}
    model(torch.arange(24).reshape(2, 12) % 32)
    for handle in handles:
        handle.remove()
    (largest,) = control.largest.values()
    return largest


@pytest.mark.parametrize("name", CONFIGS)
def test_each_heads_logits_come_back_to_the_threshold_and_no_further(name):
    model = build(*CONFIGS[name])
    before = measured(model, LogitControl(model))
    assert before.shape == (4,)
    control = LogitControl(model, threshold=float(before.median()))
    (layer,) = control.pairs
    bias = [p for p_name, p in model.named_parameters() if layer in p_name and p.ndim == 1]
    for p in bias:
        torch.nn.init.normal_(p)
    before = measured(model, control)
    sf.SteepestDescent(model, lr=0.0).scale_(control.factors({layer: before}))
    torch.testing.assert_close(measured(model, control), before.clamp(max=control.threshold), rtol=1e-4, atol=0)
    assert before.max() > 1.01 * control.threshold


def test_the_eager_implementation_is_refused_with_the_remedy():
    model = build(*CONFIGS["llama, grouped"], attention="eager")
    LogitControl(model).hold(sf.SteepestDescent(model, lr=0.1))
    with pytest.raises(RuntimeError, match="attn_implementation='sdpa'"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_normalised_queries_need_no_control():
    model = build("Qwen3", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8})
    with pytest.raises(ValueError, match="need no control"):
        LogitControl(model)
