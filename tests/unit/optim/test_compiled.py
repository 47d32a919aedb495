"""`compiled()`: the same steps as eager ones, in graphs that really run, one for each role and shape."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.linalg import device
from surefoot.step import step

FREE = [
    recipes.beyond_mup(), recipes.moga_row(), recipes.moga_column(3.0), recipes.muon(), recipes.scion(), recipes.lion(),
    recipes.sign_sgd(), recipes.sign_natural(), recipes.hyperball(),
]  # fmt: skip


class Model(nn.Module):
    """Eight parameters; those of one role have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 20, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.head


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
def init_state():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(recipe, advance, steps=4, stabiliser=None):
    """The parameters after steps at falling rates, and the optimizer."""
    torch.manual_seed(0)
    model = Model()
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser)
    optimizer = sf.SteepestDescent(model, plan, lr=0.1, step=advance)
    for turn in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def alike(weights, others):
    """To rounding: a step that the host watches takes shortcuts, a graph does not."""
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("recipe", FREE, ids=lambda recipe: recipe.name)
def test_one_graph_for_each_role_and_shape_with_the_same_result(recipe):
    backend = Backend()
    weights = train(recipe, sf.compiled(backend=backend))
    assert backend.graphs == 5  # embedding, both linear, three biases, gain, head
    assert backend.runs == 4 * backend.graphs
    alike(weights, train(recipe, step))


@pytest.mark.parametrize("recipe", [recipes.beyond_mup(), recipes.muon()], ids=lambda recipe: recipe.name)
def test_traced_to_the_operations_below(recipe):
    alike(train(recipe, sf.compiled(backend="aot_eager")), train(recipe, step))


@pytest.mark.parametrize("stabiliser", [sf.PostClip(1.0), sf.Rescale(1.0), sf.WeightDecay(0.5)], ids=repr)
def test_bounds_are_graphs_on_an_accelerator(monkeypatch, stabiliser):
    monkeypatch.setattr(device, "on_cpu", lambda x: False)
    backend = Backend()
    weights = train(recipes.beyond_mup(), sf.compiled(backend=backend), stabiliser=stabiliser)
    assert backend.runs
    alike(weights, train(recipes.beyond_mup(), step, stabiliser=stabiliser))


def test_a_branch_on_the_host_is_refused_and_not_left_out():
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        train(recipes.beyond_mup(), sf.compiled(backend="eager"), stabiliser=sf.PostClip(1.0))


def test_precision_is_set_around_the_graph(monkeypatch):
    """TF32 asked for outside is off while a graph runs, as it is in eager steps."""
    seen = []

    def backend(graph, inputs):
        def run(*args):
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return graph.forward(*args)

        return run

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        train(recipes.beyond_mup(), sf.compiled(backend=backend), 1)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(seen) == {"ieee"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside the compiler
def test_inductor():
    """The real compiler; it orders sums otherwise."""
    for a, b in zip(train(recipes.moga_row(), sf.compiled()), train(recipes.moga_row(), step), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
