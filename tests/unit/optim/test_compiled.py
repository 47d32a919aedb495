"""`compiled()`: the steps of eager optimizers, in graphs that run, one for each role and shape."""

from dataclasses import replace

import pytest
import torch
from optim_helpers import Layers
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.linalg import device
from surefoot.step import step

_TABLE = recipes.beyond_mup().table
STREAMING = sf.Recipe("streaming", {**_TABLE, "linear": replace(_TABLE["linear"], geometry=sf.StreamingSpectral())})
RECIPES = [
    recipes.steady(), recipes.steady_soap(), recipes.beyond_mup(), recipes.moga_row(), recipes.moga_column(3.0),
    recipes.muon(), recipes.scion(), recipes.lion(), recipes.sign_sgd(), sf.contrib.sign_natural(),
    recipes.hyperball(), sf.contrib.frobenius_sphere(), STREAMING,
]  # fmt: skip
BY_DEFAULT = (
    "steady",
    "moga_column(3)",
    "lion",
    "hyperball",
    "streaming",
)  # norms of every kind, no momentum's average twice


class Backend:
    """Runs a graph as it is, and counts graphs and runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(recipe, advance, steps=4, stabiliser=None):
    """The parameters after steps at falling rates, and the optimizer."""
    torch.manual_seed(0)
    model = Layers(convolution=False)
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser)
    optimizer = sf.SteepestDescent(model, plan, lr=0.1, step=advance)
    for turn in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_close(weights, others):
    """To rounding: an eager step on a CPU takes shortcuts that depend on values, a graph does not."""
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@combinations(lambda recipe: recipe.name in BY_DEFAULT, recipe=RECIPES)
def test_one_graph_for_each_role_and_shape_with_the_same_result(recipe):
    backend = Backend()
    weights = train(recipe, sf.compiled(backend=backend))
    assert backend.graphs == 6  # embedding, both linear layers, biases of few inputs and another, gain, head
    assert backend.runs == 4 * backend.graphs
    assert_close(weights, train(recipe, step))


@combinations(lambda recipe: recipe.name.startswith("muon"), recipe=[recipes.beyond_mup(), recipes.muon()])
def test_traced_to_the_operations_below(recipe):
    assert_close(train(recipe, sf.compiled(backend="aot_eager")), train(recipe, step))


@combinations(
    lambda stabiliser: isinstance(stabiliser, sf.PostClip),
    stabiliser=[sf.PostClip(1.0), sf.Rescale(1.0), sf.WeightDecay(0.5)],
)
def test_bounds_are_graphs_on_an_accelerator(monkeypatch, stabiliser):
    monkeypatch.setattr(device, "on_cpu", lambda x: False)
    backend = Backend()
    weights = train(recipes.beyond_mup(), sf.compiled(backend=backend), stabiliser=stabiliser)
    assert backend.runs
    assert_close(weights, train(recipes.beyond_mup(), step, stabiliser=stabiliser))


def step_of_one_layer(backend, stabiliser=None):
    layer = nn.Linear(4, 6, bias=False)
    plan = sf.Plan.of(layer, stabiliser=stabiliser)
    layer.weight.grad = torch.ones(6, 4)
    sf.SteepestDescent(layer, plan, lr=0.1, step=sf.compiled(backend=backend)).step()


def test_a_branch_on_the_host_is_refused():
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        step_of_one_layer("eager", sf.PostClip(1.0))


def test_precision_is_set_around_the_graph(monkeypatch):
    """TF32 asked for outside is off while a graph runs, as it is in eager steps."""
    precisions = []

    def backend(graph, inputs):
        def run(*args):
            precisions.append(torch.backends.cuda.matmul.fp32_precision)
            return graph.forward(*args)

        return run

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        step_of_one_layer(backend)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(precisions) == {"ieee"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside the compiler
def test_inductor():
    """The real compiler; it orders sums otherwise."""
    for a, b in zip(train(recipes.moga_row(), sf.compiled()), train(recipes.moga_row(), step), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps_in", ["step", "train"])
def test_torch_compile_runs_the_step_as_it_is(steps_in):
    """`torch.compile` of the step, or of what calls it: the bits of the eager step."""

    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 64))
        optimizer = sf.SteepestDescent(model, lr=0.1)
        take = {"step": optimizer.step, "train": lambda: [optimizer.step(), optimizer.zero_grad()]}[steps_in]
        take = torch.compile(take, backend="eager") if compiled else take
        for _ in range(2):
            model(torch.arange(64)).square().mean().backward()
            take()
        return [*model.parameters()]

    assert all(map(torch.equal, trained(compiled=True), trained(compiled=False)))
