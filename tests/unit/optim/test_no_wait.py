"""No step on an accelerator waits for the device: steps on a pretended one, where a tensor has no values to be read.

Tensors of a device that does not exist, without data (`FakeTensorMode`): whatever a host could only know by waiting
raises there, a branch, `item`, a boolean index, a copy from host memory. Operations that report on the host whether
they converged are refused by name.
"""

from dataclasses import replace

import pytest
import torch
from optim_helpers import Layers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.linalg import device, small_eigh

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:
    pytest.skip("torch 2.9 pretends no device", allow_module_level=True)

NAME = "pretended"
READING = (
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_eig",
    "linalg_inv",
    "_linalg_solve",
    "linalg_lstsq",
    "unique",
    "nonzero",
)


class Refuse(TorchDispatchMode):
    """Operations that wait for the device inside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        assert not name.startswith(READING), f"{name} reads a flag on the host"
        copied = name.startswith(("_to_copy", "copy_")) and not (kwargs or {}).get("non_blocking")
        out = function(*args, **(kwargs or {}))
        source = args[1] if name.startswith("copy_") else args[0] if args else None
        assert not copied or len(args) > 2 or source.device == out.device, f"{name} copies between host and device"
        return out


@pytest.fixture(scope="module", autouse=True)
def pretended():
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME)
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # for autocast, which we turn off


def steps(recipe, stabiliser=None, precision=None, dtype=torch.float32):
    """Two steps of a whole optimizer, its first included, on the pretended device."""
    model = Layers()
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser)
    with FakeTensorMode():
        parameters = {
            name: nn.Parameter(torch.empty(p.shape, dtype=dtype, device=NAME)) for name, p in model.named_parameters()
        }
        optimizer = sf.SteepestDescent(parameters.items(), plan, lr=0.1, precision=precision)
        for _ in range(2):
            for p in parameters.values():
                p.grad = torch.empty_like(p)
            with Refuse():
                optimizer.step()
    assert all(p.device.type == NAME for p in parameters.values())


_TABLE = recipes.beyond_mup().table
STREAMING = sf.Recipe("streaming", {**_TABLE, "linear": replace(_TABLE["linear"], geometry=sf.StreamingSpectral())})
_WARM = sf.contrib.ScheduledMomentum(((0, sf.Momentum(0.8)), (9, sf.Momentum(0.9, 0.5))))
SCHEDULED = sf.Recipe("scheduled", {kind: replace(role, momentum=_WARM) for kind, role in _TABLE.items()})
RECIPES = [
    recipes.steady(), recipes.steady_soap(2), recipes.beyond_mup(), recipes.moga_row(), recipes.moga_row(3.0),
    recipes.moga_column(), recipes.moga_column(4.0), recipes.muon(), recipes.muon(sf.Moonlight()), recipes.scion(),
    recipes.lion(), recipes.sign_sgd(), sf.contrib.sign_natural(), recipes.hyperball(), sf.contrib.frobenius_sphere(),
    STREAMING, SCHEDULED,
]  # fmt: skip


ALIKE = ("muon(moonlight)", "moga_column(4)", "sign_sgd")
"""Recipes whose operations are those of another here, with other numbers."""


@combinations(lambda recipe: recipe.name not in ALIKE, recipe=RECIPES)
def test_every_recipe(recipe):
    steps(recipe)


FEW = [recipes.steady(), recipes.beyond_mup(), recipes.moga_column(3.0), recipes.muon()]
BOUNDS = [
    sf.PostClip(2.0), sf.WeightDecay(0.5), sf.Rescale(2.0), sf.StreamingPostClip(2.0, 2), sf.StreamingPreDecay(0.5),
    sf.RowSphere(2.0), sf.ColumnSphere(), sf.Stiefel(2.0), sf.Hyperball(),
]  # fmt: skip


@combinations(
    lambda recipe, stabiliser: (
        stabiliser != sf.ColumnSphere()  # rows of the transposed matrix
        and BOUNDS.index(stabiliser) % len(FEW) == FEW.index(recipe)
    ),
    recipe=FEW,
    stabiliser=BOUNDS,
)
def test_every_bound_that_is_not_exact(recipe, stabiliser):
    steps(recipe, stabiliser)


@combinations(
    lambda precision, dtype: dtype == torch.bfloat16 or precision.momentum != torch.float32,
    precision=[
        sf.Precision(torch.bfloat16),
        sf.Precision(torch.int8),
        sf.Precision(weights=sf.MasterWeights()),
        sf.Precision(weights=sf.StochasticRounding()),
    ],
    dtype=[torch.float32, torch.bfloat16],
)
def test_every_precision(precision, dtype):
    steps(recipes.beyond_mup(), sf.PostClip(2.0), precision, dtype)


@pytest.mark.parametrize("stabiliser", [sf.PreDecay(0.5), sf.Normalise(2.0)], ids=repr)
def test_exact_schemes_do_wait(stabiliser):
    """As their documentation says; and this shows that the tests above would fail."""
    with pytest.raises((AssertionError, DataDependentOutputException), match=r"reads a flag on the host|_local_scalar"):
        steps(recipes.beyond_mup(), stabiliser)


def test_the_pretended_device_cannot_be_read():
    with FakeTensorMode():
        x = torch.empty(3, device=NAME)
        with pytest.raises(DataDependentOutputException):
            bool(x.any())
        with pytest.raises(DynamicOutputShapeException):
            x[x > 0]
        with Refuse(), pytest.raises((AssertionError, NotImplementedError)):
            torch.as_tensor(0.5, device=NAME)


def test_eigenvalues_of_small_matrices_come_from_jacobi_rotations(monkeypatch):
    called = []
    monkeypatch.setattr(small_eigh, "jacobi", lambda a: called.append(a.shape) or torch.linalg.eigh(a))
    with pytest.raises(AssertionError, match="_linalg_eigh reads a flag"):
        steps(recipes.beyond_mup(), sf.StreamingPostClip(2.0))
    assert called


@pytest.mark.parametrize("value", [0.1, 1e300, torch.inf])
def test_numbers_are_the_same_on_both_kinds_of_device(monkeypatch, value):
    x = torch.zeros(2)
    here = [device.scalar_like(value, x, dtype) for dtype in (None, torch.float32, torch.float64, torch.bfloat16)]
    monkeypatch.setattr(device, "on_cpu", lambda x: False)
    there = [device.scalar_like(value, x, dtype) for dtype in (None, torch.float32, torch.float64, torch.bfloat16)]
    assert [(a.dtype, float(a)) for a in here] == [(b.dtype, float(b)) for b in there]
