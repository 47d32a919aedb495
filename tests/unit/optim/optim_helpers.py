"""Models with a parameter of every role, and optimizers of one parameter, for the optimizer's tests."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, SteepestDescent, recipes

RECIPES = [
    recipes.steady(),
    recipes.steady_soap(),
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.moga_column(),
    recipes.muon(),
    recipes.scion(),
    recipes.lion(),
    recipes.sign_sgd(),
    recipes.hyperball(),
]
STABILISERS = [
    sf.WeightDecay(2.0),
    sf.PostClip(0.5),
    sf.DecayedPostClip(2.0, sf.Constant(), 0.5),
    sf.PreDecay(2.0),
    sf.Rescale(0.5),
    sf.Normalise(0.5),
    sf.SpectralSphere(0.5),
    sf.Stiefel(0.5),
    sf.RowSphere(),
    sf.ColumnSphere(0.5),
    sf.Hyperball(),
]
ROLES = {"linear": (6, 4), "embedding": (9, 4), "head": (9, 4), "gain": (7,), "bias": (7,), "scalar": ()}
all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


class Small(nn.Module):
    """A parameter of every kind; `backward` uses 3 tokens of 11."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)
        self.norm = nn.LayerNorm(6)
        self.temperature = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.conv(x.mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.out(self.norm(x)) * self.temperature


class Layers(nn.Module):
    """A parameter of each role and two linear layers of one shape, without a forward pass; the head is declared."""

    def __init__(self, vocabulary=20, width=16, hidden=24, convolution=True):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.conv = nn.Conv2d(4, 6, 3, groups=2) if convolution else None
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def get_output_embeddings(self):
        return self.head


def small(seed=0):
    """A `Small` with the plan's initial values."""
    model = Small()
    Plan.of(model).initialise_(model, seed)
    return model


def backward(model, seed):
    """Gradients on random tokens of 0, 1, 2."""
    tokens = torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    return loss


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(role, value, **options):
    """A parameter with this value and an optimizer of it alone."""
    w = nn.Parameter(value.clone())
    return w, SteepestDescent([{"params": [w], "role": role}], **{"lr": 0.1, **options})


def stepped(role, value, *gradients, **options):
    """The value after a step with each gradient."""
    w, optimizer = one(role, value, **options)
    for gradient in gradients:
        w.grad = gradient.clone()
        optimizer.step()
    return w.detach()
