"""What processes agree on before a step: which gradients are there and finite, of parameters that some or all hold."""

import pytest
import torch
import torch.distributed as dist
from sharded_cases import distribute, fsdp, gradient, plan_of, weights, whole
from threads import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.mesh.groups import as_dtensor
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import warn_once

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


def sums(rank, n):
    """A gain and a matrix whose gradients are partial sums: their values as those are missing, whole or infinite."""
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("data", "tensor"))
    laid = {"gain": (Replicate(), Replicate()), "linear": (Shard(0), Replicate())}
    shapes = {"gain": (8,), "linear": (8, 8)}
    params = {k: nn.Parameter(distribute(torch.ones(shapes[k], dtype=F64), mesh, where)) for k, where in laid.items()}
    optimizer = SteepestDescent([{"params": [(k, p)], "role": k} for k, p in params.items()], lr=0.1)
    values = {k: [] for k in params}
    for step in range(5):
        for k, p in params.items():
            part = torch.arange(p.to_local().numel(), dtype=F64).reshape(p.to_local().shape).sin()
            part = part * (1.0 if step != 3 else 5e307 / abs(part).max())  # too large as the sum of two only
            g = as_dtensor(part * (0.25 + rank % 2 / 2), mesh, [*laid[k][:1], Partial()], shapes[k])
            p.grad = None if step in (0, 2) and rank % 2 else g
        optimizer.step()
        for k, p in params.items():
            values[k].append(whole(p).clone())
    del optimizer.param_groups[0]  # the gain's, whose gradient is left on some processes only
    params["gain"].grad = None if rank % 2 else params["gain"].grad
    optimizer.step()
    return values, optimizer.skipped()


def test_partial_sums_are_summed_and_rest_where_one_is_missing_or_the_sum_is_infinite():
    """Also where a process has never seen the gradient (the first step), which must not leave the others waiting."""
    (first, skipped), *others = run(4, sums, 4)
    assert skipped == {"gain": 1, "linear": 1}
    assert all(torch.equal(x, y) for other, _ in others for k in first for x, y in zip(first[k], other[k], strict=True))
    for values in first.values():
        assert [bool((x != y).any()) for x, y in zip([torch.ones(()), *values], values, strict=False)] == [
            False, True, False, False, True
        ]  # fmt: skip


def half_precision(rank):
    """Float16 weights after gradients whose sum exceeds float16, and after infinite entries: finite, moved, skipped."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for laid, parts in ((Replicate(), (4e4, 4e4)), (Shard(0), (1.0, torch.inf))):
        w = nn.Parameter(distribute(torch.ones(8, 8).half(), mesh, (laid,)))
        optimizer = SteepestDescent([{"params": [("w", w)], "role": "linear"}], lr=0.1)
        part, kind = torch.full_like(w.to_local(), parts[rank]), Partial() if laid.is_replicate() else laid
        w.grad = as_dtensor(part, mesh, (kind,), (8, 8))
        optimizer.step()
        found.append((bool(whole(w).isfinite().all()), bool((whole(w) != 1).any()), optimizer.skipped()))
    return found


def test_half_precision_is_summed_in_float32_and_rests_where_it_is_infinite():
    assert run(2, half_precision) == [[(True, True, {}), (True, False, {"w": 1})]] * 2


def test_a_process_group_of_several_axes_is_made_once():
    assert run(8, groups_made) == [[False, False]] * 8


def groups_made(rank):
    """Whether a plan's second and third look at a parameter make groups."""
    mesh, layer = init_device_mesh("cpu", (2, 2, 2)), nn.Linear(6, 8, bias=False)
    plan = sf.Plan.of(layer, head=())
    layer.weight = nn.Parameter(distribute(layer.weight.data, mesh, (Replicate(), Shard(0), Shard(1))))
    made = []
    for _ in range(3):
        plan.relative_to(layer)
        made.append(len(dist.distributed_c10d._world.pg_map))
    return [made[1] > made[0], made[2] > made[1]]


def after_an_error(rank):
    """Whether a step moves two weights, one owned by each, as if the one before, which raised, had not been."""
    moved, mesh, weights = [], init_device_mesh("cpu", (2,)), torch.arange(64, dtype=F64).reshape(8, 8).cos()
    for raises in (False, True):
        params = [nn.Parameter(distribute(weights + i, mesh, (Shard(0),))) for i in range(2)]
        optimizer = SteepestDescent([{"params": params, "role": "linear"}], lr=0.1)
        for p in params:
            p.grad = distribute(weights.sin(), mesh, (Shard(0),))
        if raises:
            (exchange,) = optimizer._sharding.exchanges
            batch, exchange._batch = exchange._batch, None  # no function: every owner raises
            with pytest.raises(TypeError):
                optimizer.step()
            exchange._batch = batch
        optimizer.step()
        moved.append(torch.stack([whole(p) for p in params]))
    return torch.allclose(*moved)  # the momentum is longer; its direction is not


def test_a_step_after_one_that_raised_is_taken():
    assert run(2, after_an_error) == [True, True]


def built_too_early(rank):
    """What is said of a sharded layer without values, and of factors of another shape, on every process."""
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(distribute(layer.weight.data, mesh, (Shard(0),)))
    with pytest.raises(ValueError, match=r"weight has no values yet: make the optimizer after to_empty"):
        SteepestDescent(layer, sf.Plan.of(layer, head=()), lr=0.1)
    w = nn.Parameter(distribute(torch.ones(8, 6), mesh, (Shard(0),)))
    optimizer = SteepestDescent([{"params": [("w", w)], "role": "linear"}], lr=0.1)
    for factors in (torch.ones(1, 6), torch.ones(())):
        with pytest.raises(ValueError, match=r"scale_: factors of shape .* for w, of \(8, 6\)"):
            optimizer.scale_({w: factors})
    return bool((whole(w) == 1).all())


def test_what_cannot_be_stepped_or_scaled_is_refused_on_all_processes():
    assert run(2, built_too_early) == [True, True]


def one_without_gradients(rank):
    """Whether a process warns that nothing moves while others' gradients move its rows, too."""
    w = nn.Parameter(distribute(torch.ones(8, 8), init_device_mesh("cpu", (2,)), (Shard(0),)))
    optimizer = SteepestDescent([{"params": [("w", w)], "role": "linear"}], lr=0.1)
    w.grad = None if rank else distribute(torch.eye(8), w.device_mesh, (Shard(0),))
    optimizer.step()


def test_a_process_without_gradients_is_not_told_that_nothing_moves(caplog):
    warn_once.cache_clear()
    run(2, one_without_gradients)
    assert "nothing moves" not in caplog.text
