"""Bounds of whole blocks: never below the largest number that ascent finds, and near it."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.experiment.models.decoder import Decoder, GPTConfig, Size, reference
from surefoot.monitor.layer_bounds import forward_bound
from surefoot.monitor.maxima import largest_rms


def hf():
    """The library transformers, where it is installed; else the test is skipped."""
    return pytest.importorskip("transformers")


TOKENS = torch.arange(32).reshape(2, 16)
SIZES = ((3.0, 0.5), (2.0, 0.5), (2.0, 0.25), (1.0, 0.25))
"""Norms and biases of four layers."""

LOOSE = 25
"""How far a bound may be above what ascent finds, on random matrices, whose leading directions do not meet."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def unit(x: Tensor) -> Tensor:
    """Vectors of RMS 1."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def largest(value: Callable[[Tensor], Tensor], x: Tensor, steps: int = 100) -> float:
    """The largest value found by ascent over inputs of RMS 1."""
    best = -math.inf
    for _ in range(steps):
        x = unit(x).detach().requires_grad_(True)
        values = value(x)
        best = max(best, float(values.detach().max()))
        (gradient,) = torch.autograd.grad(values.sum(), x)
        x = x.detach() + 0.5 * unit(gradient)
    return best


def rms_of(y: Tensor) -> Tensor:
    return y.square().mean(-1).sqrt()


def config(kind: type, **options):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
    rest = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 32}
    return kind(**sizes, **rest, **options)


FOREIGN = {
    "gpt2": lambda: hf().GPT2LMHeadModel(hf().GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=32)),
    "llama": lambda: hf().LlamaForCausalLM(config(hf().LlamaConfig, intermediate_size=24, num_key_value_heads=2)),
    "phi3": lambda: hf().Phi3ForCausalLM(config(hf().Phi3Config, intermediate_size=24, num_key_value_heads=2)),
    "neox": lambda: hf().GPTNeoXForCausalLM(config(hf().GPTNeoXConfig, intermediate_size=24)),
    "phi": lambda: hf().PhiForCausalLM(config(hf().PhiConfig, intermediate_size=24)),
    "bert": lambda: hf().BertForMaskedLM(config(hf().BertConfig, intermediate_size=24)),
    "gpt": lambda: reference("gpt", 32),
    "biased": lambda: Decoder(GPTConfig(Size(32, 1, 16, 32), biases="all")),
    "reference llama": lambda: reference("llama", 32),
    "qwen": lambda: reference("qwen", 32),
}
EMBEDDINGS = {
    "gpt2": "transformer.wte",
    "neox": "gpt_neox.embed_in",
    **dict.fromkeys(("llama", "phi3", "phi"), "model.embed_tokens"),
}
BLOCKS = {  # the MLP, None if there is none; the attention
    "gpt2": ("transformer.h.0.mlp", "transformer.h.0.attn"),
    "llama": ("model.layers.0.mlp", "model.layers.0.self_attn"),
    "phi3": ("model.layers.0.mlp", "model.layers.0.self_attn"),
    "neox": ("gpt_neox.layers.0.mlp", "gpt_neox.layers.0.attention"),
    "phi": ("model.layers.0.mlp", "model.layers.0.self_attn"),
    "bert": (None, "bert.encoder.layer.0.attention.self"),
    "gpt": ("blocks.0.mlp", "blocks.0.attention"),
    "biased": ("blocks.0.mlp", "blocks.0.attention"),
    "reference llama": ("blocks.0.mlp", "blocks.0.attention"),
    "qwen": ("blocks.0.mlp", "blocks.0.attention"),
}


def build(family: str) -> tuple[nn.Module, nn.Module]:
    """A model with biases, before and after a change."""
    torch.manual_seed(0)
    model = FOREIGN[family]().eval()
    sf.Plan.of(model).initialise_(model, seed=0)
    before = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and "bias" in name:
                p.add_(torch.randn_like(p), alpha=0.3)
            elif p.ndim == 2:
                p.add_(torch.randn_like(p) * p.square().mean().sqrt(), alpha=0.3)
    return before, model


@pytest.mark.parametrize("family", [name for name, (mlp, _) in BLOCKS.items() if mlp])
def test_an_mlp_is_bounded(family):
    before, model = build(family)
    name = BLOCKS[family][0]
    numbers = sf.measure(model, TOKENS, before=before, plan=sf.Plan.of(model), names=[name])[name]
    block, old = model.get_submodule(name), before.get_submodule(name)
    x = torch.randn(64, model.get_submodule(EMBEDDINGS.get(family, "embedding")).embedding_dim, generator=seeded())
    forward = largest(lambda x: rms_of(block(x)), x)
    update = largest(lambda x: rms_of(block(x) - old(x)), x)
    assert forward <= numbers["forward_bound"] <= LOOSE * forward
    assert update <= numbers["update_bound"] <= LOOSE * update
    nearby = 0.01 * unit(torch.randn(x.shape, generator=seeded()))
    ratio = largest(lambda x: rms_of(block(x * 0.99 + nearby) - block(x * 0.99)) / 0.01, x)
    assert ratio <= numbers["dependency_bound"] <= LOOSE * ratio


def test_the_bound_of_an_mlp_is_attained():
    """Layers whose leading directions meet, an input along them and a bias in the same direction."""

    class Relu(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    block, old = Relu(), Relu()
    with torch.no_grad():
        for layer, (size, bias) in zip((block.fc1, old.fc1, block.fc2, old.fc2), SIZES, strict=True):
            layer.weight.fill_(size / layer.in_features)
            layer.bias.fill_(bias)
    numbers = sf.measure(block, torch.ones(3, 4), before=old, plan=sf.Plan.of(block), names=[""])[""]
    assert numbers["forward_bound"] == pytest.approx(2.0 * (3.0 + 0.5) + 0.25)
    assert numbers["forward_bound"] == pytest.approx(numbers["forward"])
    assert numbers["dependency_bound"] == pytest.approx(6.0)
    assert numbers["update_bound"] == pytest.approx(numbers["update"])


@pytest.mark.parametrize("family", BLOCKS)
def test_attention_is_bounded(family):
    _, model = build(family)
    name = BLOCKS[family][1]
    calls = []
    hook = model.get_submodule(name).register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    numbers = sf.measure(model, TOKENS, plan=sf.Plan.of(model), names=[name])[name]
    hook.remove()
    args, options, _ = calls[0]
    inputs = args[0] if args else options["hidden_states"]

    def forward(x: Tensor) -> Tensor:
        given = ((x, *args[1:]), options) if args else ((), {**options, "hidden_states": x})
        y = model.get_submodule(name)(*given[0], **given[1])
        return rms_of(y[0] if isinstance(y, tuple) else y)

    found = largest(forward, torch.randn(inputs.shape, generator=seeded()))
    assert found <= numbers["forward_bound"] <= LOOSE * found


def test_attention_that_adds_its_input_has_no_bound():
    sizes = {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 4}
    model = hf().BloomForCausalLM(hf().BloomConfig(**sizes))
    name = "transformer.h.0.self_attention"
    numbers = sf.measure(model, TOKENS, plan=sf.Plan.of(model), names=[name])[name]
    assert numbers["forward"] > 0.9  # that of the input, as the weights are near 0
    assert "forward_bound" not in numbers


def test_attention_that_adds_its_values_up_has_no_bound():
    informer = pytest.importorskip("transformers.models.informer.modeling_informer")
    torch.manual_seed(0)
    layer = informer.InformerProbSparseAttention(16, 2, is_decoder=True, sampling_factor=1, bias=False).eval()
    layer.v_proj.weight.data.copy_(torch.eye(16))
    layer.out_proj.weight.data.copy_(torch.eye(16))
    y = layer(torch.ones(1, 40, 16), attention_mask=torch.zeros(1, 1, 40, 40))[0]
    assert rms_of(y).max() > 10
    assert forward_bound(layer) is None


def test_the_bound_of_a_gated_mlp_grows_because_the_maximum_does():
    found, bounds = [], []
    for width in (32, 128):
        model = reference("llama", width)
        sf.Plan.of(model).initialise_(model, seed=0)
        mlp = model.blocks[0].mlp
        numbers = sf.measure(model, TOKENS, plan=sf.Plan.of(model), names=["blocks.0.mlp"])
        bounds.append(numbers["blocks.0.mlp"]["forward_bound"])
        aligned = unit(mlp.gate.weight.detach()) + unit(mlp.up.weight.detach())  # with a row of both
        found.append(largest(lambda x, mlp=mlp: rms_of(mlp(x)), aligned[:64], steps=10))
    assert found[1] > 1.4 * found[0]
    assert bounds[1] < 2.2 * bounds[0]


class Own(nn.Module):
    """Named like an MLP, computes something else."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return 2 * self.down(F.gelu(self.up(x)))


def test_what_is_not_the_formula_has_no_bound():
    torch.manual_seed(0)
    model = nn.Sequential(Own(), Own())
    numbers = sf.measure(model, torch.randn(4, 8), plan=sf.Plan.of(model), names=["0"])
    assert not any("bound" in key for key in numbers["0"])
    assert {"forward_bound", "dependency_bound"} <= numbers["0.up"].keys()


def test_a_linear_layer_with_a_bias():
    layer = nn.Linear(6, 4)
    before = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.add_(torch.randn(4, 6, generator=seeded()))
        layer.bias.add_(1.0)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    numbers = sf.measure(layer, unit(x), before=before, plan=sf.Plan.of(layer))[""]
    update = largest(lambda x: rms_of(layer(x) - before(x)), x)
    assert largest_rms(layer(unit(x))) <= numbers["forward_bound"]
    assert 0.7 * numbers["update_bound"] <= update <= numbers["update_bound"]


def test_heads_of_different_size_count_by_their_mean_square():
    """A head that doubles half of the input and one that returns nothing: an input in the first's span is doubled."""
    layer = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([torch.eye(4), torch.eye(4), torch.diag(torch.tensor([2.0, 2.0, 0, 0]))]))
        layer.out_proj.weight.copy_(torch.eye(4))
    x = math.sqrt(2) * torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
    numbers = sf.measure(layer, {"query": x, "key": x, "value": x}, plan=sf.Plan.of(layer))[""]
    assert numbers["forward"] == pytest.approx(2.0)
    assert numbers["forward_bound"] == pytest.approx(2.0)
