"""Equality by value and digests: tensors, objects that are no dataclass, functions; other processes, other names."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property, partial

import pytest
import torch

import surefoot as sf
from surefoot.identity import digest, key


class Scaled(sf.Geometry):
    """No dataclass, with a private attribute and a tensor."""

    couples = frozenset()

    def __init__(self, factor, table):
        self._factor, self.table = factor, table

    @cached_property
    def size(self):
        return self.table.numel()

    def norm(self, w):
        return self._factor * w.abs().amax((-2, -1))

    def direction(self, g):
        return g.sign() / self._factor

    def project(self, w, radius, cache=None):
        return w.clamp(-radius / self._factor, radius / self._factor), cache


@dataclass(frozen=True)
class Table(sf.Scale):
    """A dataclass with a tensor, which `==` would refuse to compare."""

    values: torch.Tensor

    def __call__(self, shape):
        return float(self.values[0])


def role(factor=1.0, table=(1.0, 2.0), values=(1.0, 2.0), **changes):
    geometry = Scaled(factor, torch.tensor(table))
    return sf.Role("mine", geometry, lr_scale=Table(torch.tensor(values)), **changes)


def test_roles_are_equal_if_their_fields_are():
    assert role() == role()
    assert hash(role()) == hash(role())
    other = [role(2.0), role(table=(1.0, 3.0)), role(values=(1.0, 3.0)), role(momentum=sf.Momentum(0.5)), "mine"]
    assert all(role() != each for each in other)
    assert len({role(), role(), role(2.0)}) == 2


def test_classes_of_one_name_differ():
    def make(factor):
        class Same(sf.RowRMS):
            def norm(self, w):
                return factor * super().norm(w)

        return Same()

    assert sf.Role("mine", make(1)) != sf.Role("mine", make(2))


def test_cached_properties_do_not_count():
    used, new = Scaled(1.0, torch.ones(3)), Scaled(1.0, torch.ones(3))
    assert used.size == 3
    assert key(used) == key(new)
    assert digest(used) == digest(new)


def test_a_private_name_may_be_changed_and_its_value_not():
    class _Hidden(sf.Spectral):
        pass

    class _Renamed(sf.Spectral):
        pass

    assert digest(_Hidden()) == digest(_Renamed()) == digest(sf.Spectral())
    assert digest(_Scale("a", 1)) == digest(_Scale("b", 1)) != digest(_Scale("a", 2))


class _Scale(sf.Scale):
    def __init__(self, name, value):
        setattr(self, f"_{name}", value)

    def __call__(self, shape):
        return 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (partial(max, 1), partial(max, 2)),
        (torch.float32, torch.float64),
        (None, "None"),
        (len, max),
        (lambda x, y=1: x, lambda x, y=2: x),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_differ(one, other):
    assert key(one) != key(other)
    assert digest(one) != digest(other)


def test_equal_numbers_and_orders_of_a_set_do_not_differ():
    assert digest({"a": 1, "b": 2.0}) == digest({"b": 2, "a": 1.0})
    assert digest({3, 1, 2}) == digest({2, 3, 1})
    assert digest(sf.geometry.MeanOperator(2, 2)) == digest(sf.geometry.MeanOperator(2.0, 2.0))


def test_a_digest_is_that_of_other_days_and_processes():
    """Not by addresses, nor by hashes of text, which each process has of its own."""
    value = {"b": 2, "a": (1.5, "x", None), "set": {"three", "one"}, "norm": sf.MeanOperator(1.0, 2.0)}
    assert digest(value) == "88110f52c9c35af2"


@pytest.mark.slow
def test_a_digest_is_the_same_in_every_process():
    code = "import surefoot as sf, torch; print(sf.Plan.of(torch.nn.Linear(3, 2), stabiliser=sf.PostClip(2.0)).hash)"
    here = sf.Plan.of(torch.nn.Linear(3, 2), stabiliser=sf.PostClip(2.0)).hash
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_what_has_no_value_is_refused():
    with pytest.raises(ValueError, match="meta device"):
        key(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="make its class a dataclass"):
        key(x for x in ())


def test_roles_with_tensors_and_plain_objects_are_stepped_together_and_saved():
    """One batch for equal roles; a checkpoint of another value is refused, by the parameter's name."""

    def build(*factors):
        params = [(f"p{i}", torch.nn.Parameter(torch.ones(2, 2))) for i in range(len(factors))]
        groups = [{"params": [named], "role": role(f)} for named, f in zip(params, factors, strict=True)]
        return sf.SteepestDescent(groups, lr=0.1), [p for _, p in params]

    optimizer, params = build(1.0, 1.0, 4.0)
    for p in params:
        p.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(params[0], params[1])
    assert torch.allclose(1 - params[2], (1 - params[0]) / 4)
    build(1.0, 1.0, 4.0)[0].load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"p2 in parameter group 2 .*another plan"):
        build(1.0, 1.0, 3.0)[0].load_state_dict(optimizer.state_dict())
