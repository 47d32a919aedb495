"""Which width a residual stream has, and what only looks like a stack of blocks."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import surefoot as sf
from surefoot.experiment.models.decoder import reference


def mlp(d):
    return nn.Sequential(nn.Linear(d, 4 * d, False), nn.GELU(), nn.Linear(4 * d, d, False))


def writers(model):
    """Names of the weights that write into a stream."""
    plan = sf.Plan.of(model, head=())
    return {name for name in plan if "adds to a residual stream" in plan[name].why}


@pytest.mark.parametrize("context", [4, 3], ids=["of the MLP's inner width", "of another width"])
def test_a_projection_of_something_else_in_front_is_not_the_stream(context):
    blocks = [nn.ModuleDict({"ada": nn.Linear(context * 8, 16, False), "mlp": mlp(8)}) for _ in range(3)]
    assert writers(nn.ModuleList(blocks)) == {f"{i}.mlp.2.weight" for i in range(3)}


def test_gates_of_a_recurrent_layer_write_nothing():
    layers = [nn.LSTM(8, 8) for _ in range(4)]
    assert writers(nn.ModuleList(layers)) == set()


def test_experts_behind_their_router_are_no_stack_and_blocks_before_a_head_are():
    experts = nn.ModuleDict({"gate": nn.Linear(8, 3), "experts": nn.ModuleList(mlp(8) for _ in range(3))})
    assert writers(nn.ModuleDict({"inp": nn.Linear(5, 8), "moe": experts})) == set()
    classes = nn.ModuleDict({"blocks": nn.ModuleList(mlp(8) for _ in range(3)), "classes": nn.Linear(8, 3)})
    assert writers(classes) == {f"blocks.{i}.2.weight" for i in range(3)}


def test_a_gate_in_an_attention_layer_is_not_what_writes():
    def attention():
        names = "q_proj", "k_proj", "v_proj", "aggregate", "output_gate", "gate_proj", "in_proj_z"
        return nn.ModuleDict({name: nn.Linear(8, 8, False) for name in names})

    blocks = [nn.ModuleDict({"attention": attention(), "mlp": mlp(8)}) for _ in range(2)]
    expected = {f"{i}.{end}.weight" for i in range(2) for end in ("attention.aggregate", "mlp.2")}
    assert writers(nn.ModuleList(blocks)) == expected


def test_the_norms_of_a_block_say_its_stream_where_the_first_matrix_reads_another_width():
    """An output projection that is defined first, and an MLP of experts."""

    def block():
        mixer = nn.ModuleDict({"out": nn.Linear(16, 8, False), "qkv": nn.Linear(8, 48, False), "b": nn.Linear(8, 2)})
        norms = {name: nn.LayerNorm(8) for name in ("before", "behind")}
        return nn.ModuleDict({"mixer": mixer, **norms})

    assert writers(nn.ModuleList(block() for _ in range(3))) == {f"{i}.mixer.out.weight" for i in range(3)}


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, lambda x: torch.compile(checkpoint_wrapper(x))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_put_around_a_block_or_a_part_of_it_changes_nothing(wrap):
    bare = sf.Plan.of(reference("gpt", 16, 3, 8, 11)).hash
    model = reference("gpt", 16, 3, 8, 11)
    for i, block in enumerate(model.blocks):
        block.mlp = wrap(block.mlp)
        model.blocks[i] = wrap(block)
    assert sf.Plan.of(model).hash == bare


def test_what_ends_in_another_width_is_no_block():
    """An ensemble of regressors, the layers of a head in a list."""
    regressor = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert writers(nn.ModuleList(nn.Sequential(*regressor) for _ in range(3))) == set()
    boxes = [nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])}) for _ in range(3)]
    assert writers(nn.ModuleList(boxes)) == set()


class Mixer(nn.Module):
    """An MLP along tokens and one along channels, which add to one stream."""

    def __init__(self, tokens, d, inner, first="tokens"):
        super().__init__()
        both = {"tokens": (tokens, inner), "channels": (d, 4 * d)}
        for name in sorted(both, key=first.__ne__):
            width, hidden = both[name]
            setattr(self, name, nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)))
            setattr(self, f"before_{name}", nn.LayerNorm(d))

    def forward(self, x):
        x = x + self.tokens(self.before_tokens(x).mT).mT
        return x + self.channels(self.before_channels(x))


@pytest.mark.parametrize("inner", [16, 12], ids=["inside as wide as the stream", "inside of another width"])
@pytest.mark.parametrize("first", ["tokens", "channels"])
def test_mixers_of_tokens_and_of_channels_add_to_one_stream(inner, first):
    """What does not write changes nothing once what writes is zero."""
    model, x = nn.Sequential(*(Mixer(9, 16, inner, first) for _ in range(3))), torch.randn(2, 9, 16)
    found = writers(model)
    assert found == {
        f"{i}.{name}.2.{p}" for i in range(3) for name in ("tokens", "channels") for p in ("weight", "bias")
    }
    plan = sf.Plan.of(model, head=())
    assert all(plan[name].why.endswith("one of 6 branches") for name in found)
    with torch.no_grad():
        for name in found:
            model.get_parameter(name).zero_()
    torch.testing.assert_close(model(x), x, rtol=0, atol=0)


def test_what_another_layer_of_the_block_reads_is_no_stream():
    """A small MLP of what conditions a block, and the layer that takes its outputs."""

    def block():
        return nn.ModuleDict(
            {"time": mlp(5), "ada": nn.Linear(5, 16, False), "norm": nn.LayerNorm(8), "mlp": mlp(8), "up": mlp(8)}
        )

    assert writers(nn.ModuleList(block() for _ in range(3))) == {
        f"{i}.{e}.2.weight" for i in range(3) for e in ("mlp", "up")
    }


def test_an_mlp_of_the_logits_biases_writes_nothing_though_it_is_as_wide_inside_as_the_stream():
    """Swin 2's."""

    def block():
        attention = {"cpb_mlp": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), "qkv": nn.Linear(8, 24)}
        return nn.ModuleDict({"attn": nn.ModuleDict({**attention, "proj": nn.Linear(8, 8, False)}), "mlp": mlp(8)})

    assert writers(nn.ModuleList(block() for _ in range(3))) == {
        f"{i}.{name}.weight" for i in range(3) for name in ("attn.proj", "mlp.2")
    }


def test_a_gate_of_several_layers_writes_only_where_no_projection_does():
    def block(**projection):
        names = {name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj")}
        gate = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8, False))
        return nn.ModuleDict(
            {"norm": nn.LayerNorm(8), "attn": nn.ModuleDict({**names, **projection, "gate_proj": gate})}
        )

    ended = nn.ModuleList([block(o_proj=nn.Linear(8, 8, False)) for _ in range(3)])
    assert writers(ended) == {f"{i}.attn.o_proj.weight" for i in range(3)}
    gates_alone = nn.ModuleList([block() for _ in range(3)])
    assert writers(gates_alone) == {f"{i}.attn.gate_proj.1.weight" for i in range(3)}
