"""What processes agree on before a step: which gradients are there and finite, of parameters that some or all hold."""

import pytest
import torch
import torch.distributed as dist
from sharded_cases import distribute, fsdp, gradient, plan_of, weights, whole
from threads import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.optim.optimizer import SteepestDescent

F64 = torch.float64


def own_experts(rank, shape):
    """How far this process's expert moves: with all gradients, without expert 0's, with a NaN in it; what it skips."""
    own, everyone = rank // 2, init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    expert = nn.Parameter(distribute(torch.ones(shape[own], dtype=F64), pairs["data"], (Shard(0),)))
    dense = nn.Parameter(distribute(torch.ones(8, 8, dtype=F64), everyone, (Shard(0),)))
    group = {"params": [("dense", dense), (f"expert{own}", expert)], "role": "linear"}
    optimizer, moved = SteepestDescent([group], lr=0.1), []
    for factor in (1.0, None, torch.nan):
        before, g = expert.to_local().clone(), torch.eye(*shape[own], dtype=F64)
        dense.grad = distribute(torch.eye(8, dtype=F64), everyone, (Shard(0),))
        g = g if own else None if factor is None else g * factor
        expert.grad = None if g is None else distribute(g, pairs["data"], (Shard(0),))
        optimizer.step()
        moved.append(bool((expert.to_local() != before).any()))
    return moved, optimizer.skipped()


@combinations(shape=[((8, 8), (8, 8)), ((8, 8), (6, 4))])
def test_experts_that_only_some_processes_have_rest_and_step_by_their_own_gradients(shape):
    first, _, other, _ = run(4, own_experts, shape)
    assert first == ([True, False, False], {"expert0": 1})
    assert other == ([True, True, True], {})


def without_groups(rank):
    """A vector on one axis of a mesh, beside a matrix on both: its values, at last without any group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    norm = nn.Parameter(distribute(torch.ones(8, dtype=F64), mesh["data"], (Shard(0),)))
    wide = nn.Parameter(distribute(torch.ones(8, 8, dtype=F64), mesh, (Shard(0), Shard(1))))
    groups = [{"params": [("norm", norm)], "role": "gain"}, {"params": [("wide", wide)], "role": "linear"}]
    optimizer, values = SteepestDescent(groups, lr=0.1), []
    for step in range(3):
        norm.grad = distribute(torch.full((8,), torch.nan if step == 1 else 1.0, dtype=F64), mesh["data"], (Shard(0),))
        wide.grad = distribute(torch.eye(8, dtype=F64), mesh, (Shard(0), Shard(1)))
        if step == 2:
            optimizer.param_groups.clear()
        optimizer.step()
        values.append(norm.detach().to_local().sum().item())
    return values, optimizer.skipped()


@pytest.mark.filterwarnings("ignore:step. found no gradient")
def test_parameters_of_two_meshes_step_and_no_group_is_no_error():
    first, *others = run(4, without_groups)
    assert all(other == first for other in others)
    assert first[0][0] == first[0][1] == first[0][2] != 4.0
    assert first[1] == {"norm": 1}


def removed(rank, plan, mesh):
    """Weights after steps before and after a group was taken out; on a mesh, or on copies that share signs."""
    params = {name: nn.Parameter(w.clone()) for name, w in weights(plan, F64).items()}
    if mesh:
        devices = init_device_mesh("cpu", (2,))
        params = {n: nn.Parameter(distribute(w.detach(), devices, fsdp(n, w.shape))) for n, w in params.items()}
    options = {} if mesh or rank is None else {"replicas": dist.group.WORLD}
    optimizer = SteepestDescent(list(params.items()), plan, lr=0.05, **options)
    for step in range(4):
        for name, p in params.items():
            g = gradient(name, p.shape, step, F64)
            p.grad = distribute(g, p.device_mesh, p.placements) if mesh else g
        if step == 2:
            del optimizer.param_groups[0]["params"][::2], optimizer.param_groups[-1]
        optimizer.step()
    return {name: whole(p) if mesh else p.detach() for name, p in params.items()}


@combinations(mesh=[False, True])
def test_what_is_taken_out_of_its_group_rests_as_on_one_process(mesh):
    plan = plan_of(recipes.steady(), sf.PostClip(1.0), some=True)
    want = removed(None, plan, False)
    for got in run(2, removed, plan, mesh):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)
