"""What writes into a residual stream: found by structure, judged by what a model computes without it."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.discovery.find import find_kinds
from surefoot.experiment.models.decoder import reference
from surefoot.initialise import Scaled, UnitNormal
from surefoot.recipes.rules import DepthRule


def branches(model, **options):
    """Name -> number of branches, of the parameters that write."""
    kinds = find_kinds(model, **options)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: kind.branches for name in trainable if (kind := kinds[name]) and kind.branches}


def mlp(d=8, inner=16, bias=True):
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, inner, bias), nn.GELU(), nn.Linear(inner, d, bias))


class Attention(nn.Module):
    """nanoGPT's attributes: queries, keys and values in one matrix, then a projection."""

    def __init__(self, d=8):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)


class Block(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d), "c_proj": nn.Linear(4 * d, d)})


class Flat(nn.Module):
    """A block whose linear layers are its own, gate, down, up in LLaMA's first order."""

    def __init__(self, d=8):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, 2 * d, False), nn.Linear(2 * d, d, False), nn.Linear(d, 2 * d, False)


class Separate(nn.Module):
    """BERT's way: values are the last of three, and the projection is in another module."""

    def __init__(self, d=8):
        super().__init__()
        self.inner = nn.ModuleDict()
        for name in ("query", "key", "value"):
            setattr(self.inner, name, nn.Linear(d, d))
        self.output = nn.ModuleDict({"dense": nn.Linear(d, d), "norm": nn.LayerNorm(d)})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleList([mlp(), mlp()]), {"0.3.weight": 2, "0.3.bias": 2, "1.3.weight": 2, "1.3.bias": 2}),
        (
            nn.ModuleDict({"h": nn.ModuleList([Block(), Block()])}),
            {
                f"h.{i}.{name}.{part}": 4
                for i in range(2)
                for name in ("attn.c_proj", "mlp.c_proj")
                for part in ("weight", "bias")
            },
        ),
        (nn.Sequential(Flat(), Flat(), Flat()), {f"{i}.w2.weight": 3 for i in range(3)}),
        (
            nn.ModuleList([Separate(), Separate()]),
            {f"{i}.output.dense.{part}": 2 for i in range(2) for part in ("weight", "bias")},
        ),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
            {
                f"layers.{i}.{name}.{part}": 6
                for i in range(3)
                for name in ("self_attn.out_proj", "linear2")
                for part in ("weight", "bias")
            },
        ),
        (nn.ModuleList([nn.ModuleList([mlp(), mlp()]), nn.ModuleList([mlp()])]), None),
    ],
    ids=["mlp", "nanogpt", "llama order", "bert", "torch", "branches in a list"],
)
def test_the_last_matrix_of_every_branch_writes(model, expected):
    if expected is None:
        expected = {name: 3 for name, _ in model.named_parameters() if ".3." in name}
    assert branches(model, head=()) == expected


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),  # layers, not blocks
        nn.ModuleList([mlp()]),  # one block is no sum
        nn.ModuleList([mlp(8), mlp(4)]),  # stages of different widths
        nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)) for _ in range(2)]),  # nothing comes back
    ],
    ids=["layers", "one block", "stages", "narrowing"],
)
def test_what_is_no_stack_of_blocks_is_left_alone(model):
    assert branches(model, head=()) == {}


class Bare(nn.Module):
    """An MLP whose matrices are parameters of its own."""

    def __init__(self, d=8):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(d, 2 * d)), nn.Parameter(torch.randn(2 * d, d))

    def forward(self, x):
        return (x @ self.up).relu() @ self.down


class Two(nn.Module):
    """A block with a bare MLP, and another one of layers of its own in front of it."""

    def __init__(self, d=8):
        super().__init__()
        self.first, self.last, self.mlp = nn.Linear(d, 3 * d, False), nn.Linear(3 * d, d, False), Bare(d)

    def forward(self, x):
        x = x + self.last(self.first(x).relu())
        return x + self.mlp(x)


def test_a_module_with_matrices_of_its_own_is_one_branch():
    model = nn.Sequential(Two(), Two(), Two())
    found = branches(model, head=(), inputs=torch.zeros(2, 8))
    assert found == {f"{i}.{name}": 6 for i in range(3) for name in ("last.weight", "mlp.down")}


def test_a_recurrent_layer_is_one_branch():
    blocks = [nn.ModuleDict({"norm": nn.LayerNorm(8), "lstm": nn.LSTM(8, 16, proj_size=8)}) for _ in range(2)]
    assert branches(nn.ModuleList(blocks), head=())["0.lstm.weight_hr_l0"] == 2


def low_rank(layer):
    """A frozen layer and its adapter."""
    a, b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
    return nn.ModuleDict({"base": layer.requires_grad_(False), "a": a, "b": b})


def attention(names, wrap, last, d=8):
    """A block whose attention layer has these projections in wrappers, and an output behind them."""
    layers = {name: wrap(nn.Linear(d, d)) for name in names}
    return nn.ModuleDict({"attn": nn.ModuleDict({**layers, "to_out": last(nn.Linear(d, d))}), "mlp": mlp(d)})


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v")], ids=["llama", "diffusers"]
)
@pytest.mark.parametrize("wrap", [nn.Identity(), low_rank, nn.Sequential], ids=["bare", "LoRA", "one child"])
@pytest.mark.parametrize("last", [nn.Identity(), low_rank, nn.Sequential], ids=["bare", "LoRA", "one child"])
def test_queries_keys_and_values_write_in_no_wrapper(names, wrap, last):
    model = nn.ModuleList([attention(names, wrap, last) for _ in range(2)])
    found = branches(model, head=())
    assert set(found.values()) == {4}
    assert {name.split(".")[2] for name in found if ".attn." in name} == {"to_out"}
    assert not any(name.endswith(".a.weight") for name in found)


def test_adapters_of_queries_and_values_alone_write_nothing():
    block = attention(("q_proj", "k_proj", "v_proj"), low_rank, nn.Identity())
    model = nn.ModuleList([block, attention(("q_proj", "k_proj", "v_proj"), low_rank, nn.Identity())])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".a." in name or ".b." in name)
    assert branches(model, head=()) == {}


def test_each_of_two_stacks_has_branches_of_its_own():
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList([mlp() for _ in range(3)]), "decoder": nn.ModuleList([mlp(), mlp()])}
    )
    assert set(branches(model, head=()).values()) == {2, 3}
    assert branches(model, head=())["encoder.0.3.weight"] == 3


def test_an_expert_of_a_list_is_no_block():
    def block():
        return nn.ModuleDict({"attention": Attention(), "experts": nn.ModuleList([Flat() for _ in range(8)])})

    assert set(branches(nn.ModuleList([block(), block()]), head=()).values()) == {4}


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen", "moe", "tied"])
def test_without_what_writes_a_reference_model_computes_nothing_else(name):
    torch.manual_seed(0)
    model, tokens = reference(name, 32, depth=3), torch.arange(12).reshape(2, 6)
    writing = branches(model)
    assert set(writing.values()) == {6}
    with torch.no_grad():
        for parameter in writing:
            model.get_parameter(parameter).zero_()
        before = model(tokens)
        for other, parameter in model.blocks.named_parameters():
            if f"blocks.{other}" not in writing:
                parameter.normal_()
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)


def test_rate_decay_and_initial_values_fall_with_the_number_of_branches_and_the_bound_stays():
    for blocks, factor in ((1, 1.0), (2, 1.0), (4, 0.5), (16, 0.125)):
        models = reference("gpt", 32, depth=blocks), reference("gpt", 32, depth=2)
        plan, shallow = (sf.Plan.of(model) for model in models)
        plan.initialise_(models[0], seed=3)
        shallow.initialise_(models[1], seed=3)
        for name in ("blocks.0.attention.output.weight", "blocks.0.mlp.down.weight"):
            ours, usual = plan[name], shallow[name]
            block = ours.blocks[0]
            assert ours.role.lr_scale(block) == factor * usual.role.lr_scale(block)
            assert ours.role.stabiliser.rate == factor * usual.role.stabiliser.rate
            assert ours.promise.split(" while ")[0] == usual.promise.split(" while ")[0]
            torch.testing.assert_close(
                models[0].get_parameter(name), factor**0.5 * models[1].get_parameter(name), rtol=1e-6, atol=0
            )
        assert plan["blocks.0.mlp.up.weight"].role == shallow["blocks.0.mlp.up.weight"].role


def test_biases_that_write_have_the_rate_and_the_initial_values():
    model = nn.ModuleList([mlp() for _ in range(8)])
    plan = sf.Plan.of(model, head=())
    plan.initialise_(model)
    assert plan["0.3.bias"].role.lr_scale((1, 8)) == 0.5 * plan["0.1.bias"].role.lr_scale((1, 16))
    assert plan["0.3.bias"].role.initial == Scaled(Scaled(UnitNormal(), 48**-0.5), 0.5**0.5)
    rms = torch.stack([branch[3].bias.detach() for branch in model]).square().mean().sqrt()
    assert float(rms) == pytest.approx((0.5 / 48) ** 0.5, rel=0.3)


def test_pretrained_values_stay_as_built():
    role = sf.Role("mine", sf.Spectral())
    assert DepthRule().of(64)(role).initial == role.initial


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_a_stream_starts_at_one_size_and_a_step_moves_it_as_far_whatever_the_depth(depth):
    """The two numbers that the rule is derived from, of a stack of linear branches, in float64."""
    width, base = 32, 4
    model = nn.ModuleList(
        [nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)) for _ in range(depth)]
    ).double()
    plan = sf.Plan.of(model, head=())
    plan.initialise_(model)
    torch.manual_seed(0)
    x = torch.randn(64, width, dtype=torch.float64)

    def stream():
        h = x
        for block in model:
            h = h + block(h / h.square().mean(-1, keepdim=True).sqrt())
        return h

    start = stream()
    assert 1 <= start.detach().square().mean().sqrt() < 1.25
    optimizer = sf.SteepestDescent(model, plan, lr=1e-4)
    (start * torch.randn(width, dtype=torch.float64)).mean().backward()
    for block in model:
        block[0].weight.grad = None  # what writes alone
    optimizer.step()
    moved = (stream() - start).detach().square().mean().sqrt() / 1e-4
    limit = min(depth, base)
    assert 0.05 * limit < moved < 1.2 * limit


def test_the_plan_says_why():
    plan = sf.Plan.of(reference("gpt", 32, depth=4))
    assert plan["blocks.0.mlp.down.weight"].why.endswith("adds to a residual stream, one of 8 branches")


def test_a_name_given_in_an_override_is_taken_as_it_is():
    model = reference("gpt", 32, depth=4)
    plan = sf.Plan.of(model, overrides=[("*.mlp.down.weight", "linear")])
    usual = sf.Plan.of(reference("gpt", 32, depth=2))["blocks.0.mlp.down.weight"].role
    assert plan["blocks.0.mlp.down.weight"].role == usual
    assert plan["blocks.0.attention.output.weight"].role != usual


def test_an_override_says_how_many_branches_there_are():
    layer = nn.ModuleDict({"out": nn.Linear(8, 8)})
    plan = sf.Plan.of(layer, overrides=[("out.weight", DepthRule(base=4).of(16))])
    role = plan["out.weight"].role
    assert (role.lr_scale((1, 8, 8)), role.initial.factor) == (0.25, 0.5)
    with pytest.raises(ValueError, match="branches must be a positive integer, not 0"):
        DepthRule().of(0)
    for wrong in (0, float("nan")):
        with pytest.raises(ValueError, match="base of at least 1"):
            DepthRule(base=wrong)


def test_other_recipes_have_no_such_rate():
    shallow, deep = (sf.Plan.of(reference("gpt", 32, depth=d), recipes.beyond_mup()) for d in (2, 8))
    name = "blocks.0.mlp.down.weight"
    assert shallow[name].role == deep[name].role
