"""Recipe x stabiliser x role, and gradients that try to break what each pair promises."""

import itertools
from dataclasses import replace

import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.geometry import Frobenius
from surefoot.plan import Placement

SCHEMES = (
    sf.Free(),
    sf.WeightDecay(0.5),
    sf.PostClip(2.0),
    sf.PostClip(2.0, 1),
    sf.PostClip(2.0, 5),
    sf.DecayedPostClip(0.5, sf.Constant(), 2.0),
    sf.Rescale(2.0),
    sf.PreDecay(0.5),
    sf.StreamingPostClip(2.0),
    sf.StreamingPostClip(2.0, 3),
    sf.StreamingPreDecay(0.5),
    sf.Normalise(2.0),
    sf.Normalise(),
    sf.Normalise(norm=Frobenius()),
    sf.SpectralSphere(2.0),
    sf.Stiefel(1.0),
    sf.contrib.CautiousDecay(0.5),
    sf.contrib.IndependentDecay(0.02),
    sf.RowSphere(),
    sf.RowSphere(1.0),
    sf.ColumnSphere(),
    sf.ColumnSphere(1.0),
    sf.Hyperball(),
)
ALIKE = (sf.PostClip(2.0, 5), sf.StreamingPostClip(2.0, 3), sf.Normalise(), sf.RowSphere(), sf.ColumnSphere(1.0))
"""Schemes that differ from one before or beside them by a number alone."""
_TABLE = recipes.beyond_mup().table
STREAMING = sf.Recipe("streaming", {**_TABLE, "linear": replace(_TABLE["linear"], geometry=sf.StreamingSpectral())})
RECIPES = (
    recipes.steady(),
    recipes.steady_soap(),
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.moga_row(3.0),
    recipes.moga_column(2.0),
    recipes.muon(),
    recipes.muon(sf.Moonlight()),
    recipes.scion(),
    recipes.lion(),
    recipes.sign_sgd(),
    sf.contrib.sign_natural(),
    recipes.hyperball(),
    recipes.mano(),
    recipes.rmnp(),
    recipes.scale(),
    recipes.normuon(),
    recipes.normalised_sgd(),
    STREAMING,
    sf.contrib.frobenius_sphere(),
)
KINDS = {"linear": (24, 64), "embedding": (20, 64), "head": (20, 64), "gain": (24,), "bias": (24,)}
RATES = {"scion": 0.0005, "scale": 0.0005, "lion": 0.003, "sign_sgd": 0.003}
_FIRST = {}
for _recipe, _kind in itertools.product(RECIPES, KINDS):
    _FIRST.setdefault((_recipe.role(_kind), _kind, RATES.get(_recipe.name)), (_recipe, _kind))
ROLES = [*_FIRST.values()]
"""Recipe and kind, where no recipe before it has the same role."""
PULLS = ("constant", "random", "aligned", "in and out", "rank one", "one column")


def pull(kind, w, fixed, step, generator):
    """A gradient of this kind for a weight."""
    if kind == "constant":
        return fixed.clone()
    if kind == "random":
        return torch.randn(w.shape, generator=generator)
    if kind == "aligned":
        return -w
    if kind == "in and out":
        return w if step // 20 % 2 else -w
    if kind == "rank one":
        return fixed[:, :1] * fixed[:1] if w.ndim > 1 else fixed
    return torch.zeros_like(w).index_fill_(-1, torch.tensor([0]), 1.0)


class Run:
    """One weight of a recipe's role under a scheme (None: the recipe's own), pulled by gradients of one kind."""

    def __init__(self, recipe, scheme, kind, gradients):
        own = recipe.role(kind)
        self.role = own if scheme is None else replace(own, stabiliser=scheme)
        self.placement = Placement(self.role, "", KINDS[kind])
        self.p = nn.Parameter(torch.zeros(KINDS[kind]))
        self.placement.fill_(self.p, "weight", 0)
        self.lr = RATES.get(recipe.name, 0.05)
        self.optimizer = sf.SteepestDescent([{"params": [("weight", self.p)], "role": self.role}], lr=self.lr)
        self.gradients, self.generator = gradients, torch.Generator().manual_seed(0)
        self.fixed = torch.randn(KINDS[kind], generator=self.generator)

    def steps(self, count):
        """The weight before and after each step, float64."""
        for step in range(count):
            before = self.p.detach().clone()
            self.p.grad = pull(self.gradients, before, self.fixed, step, self.generator)
            self.optimizer.step()
            yield before.double(), self.p.detach().double()
