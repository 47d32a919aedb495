"""The reference models: shapes, causality, tying, sizes, published counts, wrong configurations."""

import copy

import pytest
import torch
import torch.nn.functional as F

import surefoot as sf
from surefoot.experiment.models import decoder
from surefoot.experiment.models.decoder import Decoder, GPTConfig, LlamaConfig, Rope, Size, published, reference
from surefoot.experiment.models.layers import LearnedPositions, Mixture, MixtureOfExperts
from surefoot.layers import InNormLinear

SMALL = Size(width=32, depth=2, head_dim=8, vocab=50)
VARIANTS = {
    "gpt": lambda: Decoder(GPTConfig(SMALL)),
    "gpt in-norm": lambda: Decoder(GPTConfig(SMALL, norm="in", biases="all")),
    "gpt2": lambda: Decoder(GPTConfig(SMALL, positions=LearnedPositions(16), biases="all", head="tied")),
    "gpt scaled": lambda: Decoder(GPTConfig(SMALL, head="tied_scaled", base_head_dim=4)),
    "llama": lambda: Decoder(LlamaConfig(SMALL)),
    "qwen": lambda: Decoder(LlamaConfig(SMALL, qk_norm=True)),
    "moe": lambda: Decoder(LlamaConfig(SMALL, mixture=Mixture(experts=4, active=2))),
    "llama grouped": lambda: Decoder(LlamaConfig(SMALL, kv_heads=2, intermediate=40)),
    "llama in-norm": lambda: Decoder(LlamaConfig(SMALL, norm="in", head="tied_scaled")),
}


@pytest.fixture(params=VARIANTS)
def model(request):
    torch.manual_seed(0)
    return VARIANTS[request.param]()


def tokens(batch=3, length=10, vocab=50, seed=0):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_logits_have_shape_and_every_parameter_a_gradient(model):
    logits = model(tokens())
    assert logits.shape == (3, 10, 50)
    F.cross_entropy(logits.flatten(0, 1), tokens(seed=1).flatten()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.any(), name


def test_later_tokens_do_not_change_earlier_logits(model):
    x = tokens()
    changed = x.clone()
    changed[:, 6] = (x[:, 6] + 1) % 50
    before, after = model(x), model(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert ((before[:, 6:] - after[:, 6:]).abs().amax(-1) > 1e-5).all()  # and later ones do see it


def test_rows_of_a_batch_do_not_mix(model):
    assert torch.allclose(model(tokens())[1:2], model(tokens()[1:2]), atol=1e-5)


def test_order_of_tokens_matters(model):
    """Without positions the last logits would not notice a permutation of the tokens before."""
    x = tokens(batch=1)
    swapped = x[:, [3, 1, 2, 0, 4, 5, 6, 7, 8, 9]]
    assert x[0, 0] != x[0, 3]
    assert (model(x)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-4


def test_every_module_runs_in_bfloat16_autocast_and_float64(model):
    reference_logits = model(tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(tokens())
    assert low.dtype == torch.bfloat16
    assert 0 < (low - reference_logits).abs().max() < 0.1 * reference_logits.abs().max()
    high = copy.deepcopy(model).double()(tokens())
    assert torch.allclose(high.float(), reference_logits, atol=1e-5)


def test_input_and_output_embeddings(model):
    assert model.get_input_embeddings().weight.shape == (50, 32)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    assert (head.weight is model.get_input_embeddings().weight) == (model.config.head != "untied")


def test_meta_model_becomes_real_without_untying(model):
    with torch.device("meta"):
        meta = type(model)(model.config)
    assert all(p.is_meta for p in meta.parameters())
    assert meta(tokens().to("meta")).shape == (3, 10, 50)
    real = meta.to_empty(device="cpu")
    real.load_state_dict(model.state_dict())
    assert not list(real.buffers())  # nothing that to_empty would leave without a value
    assert count(real) == count(model)
    assert torch.equal(real(tokens()), model(tokens()))


def test_in_norm_model_has_no_other_norm_and_in_norms_everywhere():
    model = reference("llama", 64, norm="in")
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    assert all(isinstance(m, InNormLinear) for m in linears)
    assert not [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm)]


def test_learned_positions_have_an_end():
    model = VARIANTS["gpt2"]()
    assert model(tokens(length=16)).shape == (3, 16, 50)
    with pytest.raises(ValueError, match="17 tokens exceed the model's 16 learned positions"):
        model(tokens(length=17))


# --- heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen", "moe"])
def test_scaled_tie_is_the_plain_tie_times_one_over_width(name):
    torch.manual_seed(0)
    plain, scaled = reference(name, 64, head="tied"), reference(name, 64, head="tied_scaled")
    scaled.load_state_dict(plain.state_dict())
    assert plain.output_multiplier is None
    assert scaled.output_multiplier == 1 / 64
    assert torch.allclose(scaled(tokens()), plain(tokens()) / 64, atol=1e-7)
    assert count(plain) == count(scaled) == count(reference(name, 64)) - 256 * 64


def test_untied_head_has_no_multiplier():
    assert reference("gpt", 32).output_multiplier is None


def test_tie_survives_copies_and_moves():
    model = reference("gpt", 32, head="tied")
    for other in (copy.deepcopy(model), reference("gpt", 32, head="tied").double()):
        assert other.head.weight is other.embedding.weight
        assert len(list(other.parameters())) == len(list(model.parameters()))


# --- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-130m", 134_105_856),
    ],
)
def test_published_parameter_counts(name, parameters):
    with torch.device("meta"):
        assert count(published(name)) == parameters


def test_study_model_is_the_one_of_the_defaults():
    model = reference("gpt", 64)
    assert model.config == GPTConfig(Size(64, 2, 16, 256), "pre", "untied", None, Rope(), "none")
    names = {name.split(".")[-1] for name, _ in model.named_parameters()}
    assert names == {"weight"}  # no bias, no learned position
    gains = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(gains) == 5
    assert count(model) == 2 * 256 * 64 + 2 * 12 * 64**2 + 5 * 64


@pytest.mark.parametrize(("width", "inner"), [(32, 88), (64, 168), (128, 344), (768, 2048), (4096, 10920)])
def test_inner_width_of_llama(width, inner):
    assert LlamaConfig(Size(width, 1, 16, 256)).inner == inner
    assert inner / width == pytest.approx(8 / 3, rel=0.04)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: reference("gtp", 64), "unknown reference model 'gtp'; choose from gpt, llama, qwen, moe, tied"),
        (lambda: published("gpt3"), "gpt2-small, gpt2-medium"),
        (lambda: reference("gpt", 0), "width must be at least 1, got 0"),
        (lambda: reference("gpt", 32, depth=0), "depth must be at least 1"),
        (lambda: reference("gpt", 32, head_dim=-16), "head_dim must be at least 1"),
        (lambda: reference("gpt", 32, vocab=0), "vocab must be at least 1"),
        (lambda: reference("gpt", 40), "width 40 is not a multiple of the head dimension 16: use width 32, 48"),
        (lambda: reference("gpt", 8), "use width 16, or a head dimension that divides it"),
        (lambda: reference("llama", 33, head_dim=11), "even head dimension"),
        (lambda: reference("gpt", 32, norm="post"), "norm='post' is unknown; choose from pre, in"),
        (lambda: reference("llama", 32, head="both"), "untied, tied, tied_scaled"),
        (lambda: GPTConfig(SMALL, biases="some"), "none, all"),
        (lambda: Decoder(LlamaConfig(SMALL, kv_heads=3)), "3 key-value heads.*divisor of 4"),
        (lambda: Decoder(LlamaConfig(SMALL, kv_heads=0)), "0 key-value heads"),
        (lambda: LlamaConfig(SMALL, intermediate=0), "intermediate must be at least 1, got 0"),
        (lambda: Rope(base=0.5), "base"),
        (lambda: reference("gpt", 32, base_head_dim=0), "positive"),
    ],
)
def test_wrong_configurations_say_what_to_do(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_public_names_exist():
    assert all(hasattr(decoder, name) for name in decoder.__all__)


def test_a_mixture_is_the_weighted_sum_of_its_best_experts():
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(Mixture(5, 2), 8, 12), torch.randn(3, 4, 8)
    expected = torch.zeros(3, 4, 8)
    for i in range(3):
        for t in range(4):
            logits = x[i, t] @ layer.router.weight.T
            chosen = logits.argsort(descending=True)[:2]
            for weight, e in zip(logits[chosen].softmax(-1), chosen, strict=True):
                gate, up = (layer.experts.gate_up_proj[e] @ x[i, t]).chunk(2)
                expected[i, t] += weight * (layer.experts.down_proj[e] @ (F.silu(gate) * up))
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_the_mixture_is_placed_expert_by_expert():
    plan = sf.Plan.of(reference("moe", 32))
    placements = {name.removeprefix("blocks.0."): plan[name] for name in plan if name.startswith("blocks.0.")}
    assert placements["mlp.router.weight"].role.name == "router"
    assert placements["mlp.experts.gate_up_proj"].blocks == ((8, 88, 32),)  # gate and up of four experts
    assert placements["mlp.experts.down_proj"].blocks == ((4, 32, 88),)
    assert placements["attention.query_norm.weight"].role.name == "gain"
    assert sf.Plan.of(reference("tied", 32))["embedding.weight"].role.name == "embedding"


def test_queries_and_keys_of_qwen_have_rms_one_before_the_gain():
    model, mean_squares = reference("qwen", 32), []
    for norm in (model.blocks[0].attention.query_norm, model.blocks[0].attention.key_norm):
        norm.register_forward_hook(lambda _m, _i, y: mean_squares.append(y.square().mean(-1)))
    model(torch.zeros(1, 5, dtype=torch.int64))
    assert len(mean_squares) == 2
    assert all(torch.allclose(y, torch.ones_like(y), atol=1e-3) for y in mean_squares)


def test_experts_that_cannot_be_are_refused():
    for active in (0, 3):
        with pytest.raises(ValueError, match=f"active must be from 1 to 2, not {active}"):
            Mixture(2, active)
    with pytest.raises(ValueError, match="norm='pre'"):
        LlamaConfig(SMALL, norm="in", mixture=Mixture(2, 1))
