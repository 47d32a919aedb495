"""What measuring makes of a module's calls: inputs that are written to, caches, NaN, indices, norms over two axes."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.experiment.coordcheck import _outputs


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Position(nn.Module):
    """Adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x += self.table
        return x


def test_an_input_that_is_written_to():
    layer = Position()
    before = copy.deepcopy(layer)
    with torch.no_grad():
        layer.table += 1.0
    x = torch.tensor([[1.0] * 4, [3.0] * 4])
    measured = sf.measure(layer, x, before=before)[""]
    numbers = {"input": 3.0, "input_smallest": 1.0, "forward": 5.0, "dependency": 1.0, "update": 1.0}
    assert measured == pytest.approx(numbers, rel=3e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_cache_of_keys_and_values_has_those_of_the_model_alone():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4))
    before = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    ids, names = torch.randint(50, (3, 7), generator=seeded()), ["model.layers.0.self_attn", "model.layers.1"]
    with_cache, without = (
        sf.measure(model, {"input_ids": ids, "use_cache": use}, before=before, names=names) for use in (True, False)
    )
    for name in names:
        assert with_cache[name] == pytest.approx(without[name], rel=1e-5)


def test_an_argument_that_cannot_be_copied_is_passed_on():
    class Noisy(nn.Linear):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return super().forward(x)

    layer, x = Noisy(3, 3), torch.randn(4, 3, generator=seeded())
    measured = sf.measure(layer, (x, seeded()), before=copy.deepcopy(layer))[""]
    assert measured["update"] == 0
    assert measured["forward"] > 0


@pytest.mark.parametrize("factors", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_call_that_is_not_finite_is_not_lost(factors):
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return sum((self.layer(factor * x) for factor in factors), torch.tensor(0.0))

    measured = sf.measure(Calls(), torch.randn(3, 4, generator=seeded()))["layer"]
    assert math.isnan(measured["input"])
    assert math.isnan(measured["forward"])


class Router(nn.Module):
    """Returns indices first, as some models' routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, generator=seeded()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = (x @ self.weight.T).softmax(-1).topk(2)
        return indices, values


def test_indices_are_no_activations():
    router, x = Router(), torch.randn(5, 4, generator=seeded())
    measured = sf.measure(router, x, before=copy.deepcopy(router))[""]
    values = router(x)[1].detach()
    assert measured["forward"] == pytest.approx(float(values.square().mean(-1).sqrt().max()))
    assert measured["update"] == 0
    assert torch.equal(_outputs(router, x, {"": "router"})["router"], values.flatten())


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_two_dimensions_couples_their_vectors(kind):
    layer = kind((5, 4))
    x = torch.randn(3, 5, 4, generator=seeded()) * torch.tensor([1e-3, 1, 1, 1, 1])[:, None]
    measured = sf.measure(layer, x, plan=sf.Plan.of(layer))[""]
    with torch.no_grad():
        y = layer(x)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    ratios = [float((y[a] - y[b]).norm() / (x[a] - x[b]).norm()) for a, b in pairs]
    assert measured["dependency"] == pytest.approx(max(ratios), rel=1e-5)
    assert measured["forward"] > 1  # of one of five vectors, which share an RMS of 1
    assert "forward_bound" not in measured


def single(d: int, row: int, column: int) -> Tensor:
    weight = torch.zeros(d, d)
    weight[row, column] = 1
    return weight


@pytest.mark.parametrize(("d", "positions"), [(64, 3), (1024, 3), (64, 64), (256, 256)])
def test_the_dependency_of_attention_grows_with_its_logits_and_positions_at_norms_of_one(d, positions):
    """Inputs of RMS at most 1, all matrices of norm 1: why there is no bound that the width or the length leaves."""
    layer = nn.MultiheadAttention(d, 1, bias=False, batch_first=True)
    x, step, few = torch.zeros(positions, d), torch.zeros(positions, d), positions == 3
    # two positions pull a third one apart, or all look at the first one
    x[0, 0], step[2 if few else 0, 1 if few else 2] = math.sqrt(d), 0.01
    x[1:, 1] = 0 if few else math.sqrt(d)
    x[1, 0] = -math.sqrt(d) if few else 0
    matrices = [single(d, 0, 1), single(d, 0, 0), single(d, 2, 0 if few else 2)]
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat(matrices))
        layer.out_proj.weight.copy_(torch.eye(d))
    pair = torch.stack([x, x + step])
    numbers = sf.measure(layer, (pair, pair, pair), plan=sf.Plan.of(layer))[""]
    assert numbers["dependency"] > (0.6 * math.sqrt(d) if few else 0.9 * math.sqrt(positions - 1))
    assert "dependency_bound" not in numbers
