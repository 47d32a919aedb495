"""Copies that share the matrix signs: the weights of one process, bit for bit the same on each, by all-gathers."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_cases import alone, distribute, fsdp, gradient, plan_of, weights, whole
from test_sharded_state import advance, built
from threads import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.optim.optimizer import SteepestDescent

F64 = torch.float64


def sharing(rank, plan, steps, dtype, options):
    """Weights, state and calls of a process that has all parameters and all gradients."""
    params = {name: nn.Parameter(w.clone()) for name, w in weights(plan, dtype).items()}
    optimizer = SteepestDescent(list(params.items()), plan, lr=0.05, replicas=dist.group.WORLD, **options)
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradient(name, p.shape, step, dtype)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}, optimizer.state_dict()


@combinations(
    ranks=[2, 3],
    case=[
        (recipes.steady(), None, {}),
        (recipes.steady(), sf.PostClip(1.0), {}),
        (recipes.steady(), sf.StreamingPostClip(1.0, 2), {}),
        (recipes.muon(), sf.SpectralSphere(1.0), {}),
        (recipes.lion(), sf.Normalise(1.0), {}),
        (recipes.steady(), sf.PostClip(1.0), {"precision": sf.Precision(torch.bfloat16, sf.StochasticRounding())}),
        (recipes.lion(), None, {"precision": sf.Precision(torch.float32, sf.MasterWeights())}),
    ],
)
def test_the_weights_of_one_process(case, ranks):
    recipe, stabiliser, options = case
    plan = plan_of(recipe, stabiliser, some=bool(stabiliser or options))
    dtype = torch.bfloat16 if options else F64
    want = alone(plan, 8, dtype, 0.05, **options)
    found = run(ranks, sharing, plan, 8, dtype, options)
    for got, state in found:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12 if dtype == F64 else 0)
            assert torch.equal(got[name], found[0][0][name])
        for i, entries in state["state"].items():
            for key, x in entries.items():
                assert torch.equal(x, found[0][1]["state"][i][key]), (i, key)


def test_each_matrix_is_stepped_by_one_process_and_one_all_gather_a_bucket_brings_it():
    plan, seen, gathers = plan_of(recipes.steady(), None), [], []
    direction, gather = sf.geometry.Spectral.direction, dist.all_gather

    def counted(self, g):
        seen.append(g.shape[:-2].numel())
        return direction(self, g)

    def counted_gather(outputs, source, *args, **options):
        gathers.append(source.nbytes)
        return gather(outputs, source, *args, **options)

    with (
        mock.patch.object(sf.geometry.Spectral, "direction", counted),
        mock.patch.object(dist, "all_gather", counted_gather),
    ):
        run(2, sharing, plan, 1, F64, {})
        by_two = sum(seen)
        seen.clear()
        alone(plan, 1, F64, 0.05)
    assert by_two == sum(seen)
    dear = [x for x in plan.placements.values() if x.role.geometry.couples == {-2, -1}]
    share = 8 * sum(torch.Size(x.shape).numel() for x in dear)
    assert len(gathers) == 2  # one of each process
    assert share / 2 <= gathers[0] == gathers[1] <= 0.7 * share


def test_without_a_group_nothing_is_sent():
    plan = plan_of(recipes.steady(), None)
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
        alone(plan, 2, F64, 0.05)


def unfrozen(rank, plan, steps, late, mesh):
    """Weights after steps in which some parameters are frozen at first; on a mesh, or on copies that share signs."""
    params = {name: nn.Parameter(w.clone()) for name, w in weights(plan, F64).items()}
    if mesh:
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        cut = {name: fsdp(name, w.shape) + (Replicate(),) * (len(mesh) - 1) for name, w in params.items()}
        params = {name: nn.Parameter(distribute(w.detach(), devices, cut[name])) for name, w in params.items()}
    for name in late:
        params[name].requires_grad_(False)
    options = {} if mesh or rank is None else {"replicas": dist.group.WORLD}
    optimizer = SteepestDescent(list(params.items()), plan, lr=0.05, **options)
    assert all(params[name] not in optimizer.state for name in late)
    for step in range(steps):
        for name, p in params.items():
            p.requires_grad_(name not in late or step >= steps // 2)
            g = gradient(name, p.shape, step, F64) if p.requires_grad else None
            p.grad = g if g is None or not mesh else distribute(g, p.device_mesh, p.placements)
        optimizer.stability()
        optimizer.step()
    return {name: whole(p) if mesh else p.detach() for name, p in params.items()}


@combinations(everything=[False, True], mesh=[None, (2,), (2, 2)])
def test_what_is_unfrozen_later_trains_as_on_one_process(mesh, everything):
    plan = plan_of(recipes.steady(), sf.PostClip(1.0), some=True)
    late = [*plan] if everything else [*plan][::2]
    want = unfrozen(None, plan, 6, late, None)
    for got in run(4 if mesh == (2, 2) else 2, unfrozen, plan, 6, late, mesh):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


def test_factors_of_a_matrix_go_to_its_new_owner_when_others_are_unfrozen():
    table = dict(recipes.steady().table)
    table["linear"] = replace(table["linear"], momentum=sf.SOAP())
    plan = plan_of(recipes.Recipe("white", table), None, ("square", "one", "three", "five", "fused", "bias"))
    want = unfrozen(None, plan, 6, ["square"], None)
    for got in run(2, unfrozen, plan, 6, ["square"], (2,)):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-9)


def test_a_state_saved_before_unfreezing_goes_on_as_one_process_would_have():
    plan = plan_of(recipes.steady(), sf.PostClip(1.0))
    late = [*plan][::2]

    def trained(_, mesh):
        params, saving = built(plan, mesh, fsdp)
        for name in late:
            params[name].requires_grad_(False)
        saving = sf.SteepestDescent(list(params.items()), plan, lr=0.05)
        advance({name: p for name, p in params.items() if name not in late}, saving, range(2))
        resumed, optimizer = built(plan, mesh, fsdp)
        for name, p in resumed.items():
            p.detach().copy_(params[name].detach())
        optimizer.load_state_dict(saving.state_dict())
        advance(resumed, optimizer, range(2, 4))
        saved = optimizer.state_dict()["state"]
        return {name: whole(p.detach()) for name, p in resumed.items()}, len(saved)

    want, states = trained(None, None)
    assert states == len(plan)
    for got, count in run(2, trained, (2,)):
        assert count == states
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


def test_a_run_resumed_while_parameters_are_frozen_goes_on_when_they_are_trained_again():
    plan = plan_of(recipes.steady(), sf.PostClip(1.0))
    late = [*plan][::2]

    def trained(_, mesh):
        params, saving = built(plan, mesh, fsdp)
        advance(params, saving, range(2))
        for name in late:
            params[name].requires_grad_(False)
            params[name].grad = None
        rest = {name: p for name, p in params.items() if name not in late}
        advance(rest, saving, range(2, 3))
        resumed, _ = built(plan, mesh, fsdp)
        for name, p in resumed.items():
            p.detach().copy_(params[name].detach())
            p.requires_grad_(name not in late)
        optimizer = sf.SteepestDescent(list(resumed.items()), plan, lr=0.05)
        optimizer.load_state_dict(saving.state_dict())
        for p in resumed.values():
            p.requires_grad_(True)
        advance(resumed, optimizer, range(3, 5))
        return {name: whole(p.detach()) for name, p in resumed.items()}

    want = trained(None, None)
    for got in run(2, trained, (2,)):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


@combinations(masters=[False, True])
def test_parameters_that_are_cast_between_two_steps_take_their_state_with_them(masters):
    plan = plan_of(recipes.steady(), None)
    options = {"precision": sf.Precision(weights=sf.MasterWeights())} if masters else {}
    dtype = torch.bfloat16 if masters else F64

    def trained(_, mesh):
        params, optimizer = built(plan, mesh, fsdp, torch.float32, **options)
        advance(params, optimizer, range(1), torch.float32)
        nn.ParameterDict(params).to(dtype)
        advance(params, optimizer, range(1, 3), dtype)
        return {name: whole(p.detach()).double() for name, p in params.items()}

    want = trained(None, None)
    for got in run(2, trained, (2,)):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=2**-8 if masters else 1e-6)


def copied(state):
    state |= {p: {name: x.clone() for name, x in entries.items()} for p, entries in state.items()}


@pytest.mark.parametrize("change", [dict.clear, copied])
def test_state_that_a_loop_has_cleared_or_replaced_is_that_of_the_next_step(change):
    """ReLoRA forgets its momentum now and then; others take state to another device and back."""
    plan = plan_of(recipes.steady(), sf.PostClip(1.0), some=True)

    def trained(_, mesh):
        params, optimizer = built(plan, mesh, fsdp)
        for step in range(4):
            if step == 2:
                change(optimizer.state)
            advance(params, optimizer, range(step, step + 1))
        saved = optimizer.state_dict()["state"].values()
        kept = [whole(x["momentum"]) for x in saved if "momentum" in x]
        return {name: whole(p.detach()) for name, p in params.items()}, kept

    want, momenta = trained(None, None)
    assert momenta
    for got, own in run(2, trained, (2,)):
        torch.testing.assert_close([*got.values(), *own], [*want.values(), *momenta], rtol=0, atol=1e-12)
