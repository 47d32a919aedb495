"""A norm of a user's own, four methods: what schemes need beyond them follows, or is named."""

import pytest
import torch

import surefoot as sf
from laws.schemes import EVERY
from surefoot.geometry.base import Tangents


class HalfMaximum(sf.Geometry):
    """Four methods and no part."""

    couples = frozenset()

    def norm(self, w):
        return 2 * w.abs().amax((-2, -1))

    def direction(self, g):
        return g.sign() / 2

    def project(self, w, radius, cache=None):
        return w.clamp(-radius / 2, radius / 2), cache


@pytest.mark.parametrize("scheme", EVERY, ids=repr)
def test_a_norm_of_four_methods_works_under_every_scheme(scheme):
    """What more a scheme needs follows from them; the monitor's numbers, too."""
    layer = torch.nn.Linear(6, 4, bias=False)
    optimizer = sf.SteepestDescent([{"params": [layer.weight], "role": own(scheme)}], lr=0.1)
    for _ in range(3):
        layer.weight.grad = torch.randn(4, 6)
        bound = next(iter(optimizer.stability().values()))["update_upper"]
        before = layer.weight.detach().clone()
        optimizer.step()
        change = float(HalfMaximum().norm(layer.weight.detach() - before))
        assert change <= bound
        assert change > 0 or isinstance(scheme, sf.Stiefel)  # whose points under this norm are the signs alone


def own(scheme):
    return sf.Role("mine", HalfMaximum(), stabiliser=scheme)


@pytest.mark.parametrize("scheme", [sf.Free(), sf.PostClip(2.0), sf.RowSphere()], ids=repr)
@pytest.mark.parametrize("change", [lambda norm: norm, sf.geometry.NormalisedRows], ids=["plain", "adaptive"])
@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (lambda g: None, "is None"),
        (lambda g: g.sum(-1, keepdim=True), r"has shape \(1, 1, 4, 1\) and torch.float32"),  # would be broadcast
        (lambda g: g.sign().double(), r"has shape \(1, 1, 4, 6\) and torch.float64"),
    ],
)
def test_a_step_names_the_parameter_whose_direction_is_none(scheme, change, returned, what):
    class Given(HalfMaximum):
        def direction(self, g):
            return returned(g)

    layer = torch.nn.Linear(6, 4, bias=False)
    group = {"params": [*layer.named_parameters()], "role": sf.Role("mine", change(Given()), stabiliser=scheme)}
    optimizer, before = sf.SteepestDescent([group], lr=0.1), layer.weight.detach().clone()
    layer.weight.grad = torch.ones(4, 6)
    asked = r"return a tensor of shape \(1, 1, 4, 6\) and torch.float32"
    with pytest.raises(ValueError, match=rf"^weight: .*Given.*: its direction {what}: {asked}"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


def test_what_stiefel_promises_is_true_of_the_norm():
    """Under this one no matrix that it makes is orthogonal."""
    promise = sf.Placement(own(sf.Stiefel(1.0)), "as given", (6, 4)).promise
    assert promise == "extreme point (spectral: orthogonal), norm = 1, or 0 where it is 0"


def test_what_is_another_size_with_the_other_sign_is_no_norm():
    class OneSided(HalfMaximum):
        def norm(self, w):
            return (w.clamp(min=0) - 4 * w.clamp(max=0)).amax((-2, -1))

        def direction(self, g):
            return (g > 0).to(g.dtype) - (g < 0).to(g.dtype) / 4

        def project(self, w, radius, cache=None):
            return w.clamp(-radius / 4, radius), cache

    with pytest.raises(ValueError, match="homogeneous"):
        sf.check(OneSided())


def test_a_method_of_a_part_that_the_norm_does_not_derive_from_is_refused():
    """It would be passed over."""

    class Certified(HalfMaximum):
        def certificate(self, w):
            return 2 * self.norm(w)

    with pytest.raises(TypeError, match=r"Certified.* defines `certificate`: derive it from `NormBounds`"):
        sf.check(Certified())
    assert Tangents.of(Certified()).ndim == 2


class ProjectionThatIsNotANumber(sf.geometry.RowRMS):
    def project(self, w, radius, cache=None):
        nearest, cache = super().project(w, radius, cache)
        return torch.where(nearest == w, w, torch.nan), cache


class ProjectionOfZeroThatIsNone(sf.geometry.RowRMS):
    def project(self, w, radius, cache=None):
        nearest, cache = super().project(w, radius, cache)
        return torch.where((w == 0).all(), torch.nan, nearest), cache


class ProjectionWithEps(sf.geometry.RowRMS):
    def project(self, w, radius, cache=None):
        norm = w.square().mean(-1, keepdim=True).sqrt()
        return torch.where(norm <= radius, w, w * radius / (norm + 1e-4)), cache


class ProjectionToTheLargestRadius(sf.geometry.RowRMS):
    """Right where all radii are one."""

    def project(self, w, radius, cache=None):
        return super().project(w, float(torch.as_tensor(radius).max()), cache)


class NormWithEps(sf.geometry.RowRMS):
    def norm(self, w):
        return (w.square().mean(-1) + 1e-6).sqrt().amax(-1)


class NormOfTheBatch(sf.geometry.RowRMS):
    def norm(self, w):
        norm = super().norm(w)
        return norm.amax().expand(norm.shape)


class NormOfZeroThatIsNone(sf.geometry.RowRMS):
    def norm(self, w):
        return super().norm(w).square() / super().norm(w)


class NormThatIsForgotten(sf.geometry.RowRMS):
    def norm(self, w):
        return None


@pytest.mark.parametrize(
    ("geometry", "law"),
    [
        (ProjectionThatIsNotANumber(), "feasible by nan"),
        (ProjectionOfZeroThatIsNone(), "zero-safe by nan"),
        (ProjectionWithEps(), "homogeneous"),
        (ProjectionToTheLargestRadius(), "batch"),
        (NormWithEps(), "homogeneous"),
        (NormOfTheBatch(), "batch"),
        (NormOfZeroThatIsNone(), "zero-safe by nan"),
        (NormThatIsForgotten(), "shapes"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_wrong_norm_or_projection_is_named(geometry, law):
    with pytest.raises(ValueError, match=law):
        sf.check(geometry)
