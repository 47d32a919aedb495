"""State, checkpoints, initial values and reports of sharded parameters."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from sharded_cases import alone, distribute, fsdp, gradient, plan_of, weights, whole
from test_sharded_steps import MESHES, both
from threads import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.optim import measuring

F64 = torch.float64


def built(plan, mesh, placements, dtype=F64, lr=0.05, **options):
    """Parameters on a mesh (None: plain ones) and their optimizer."""
    device_mesh = mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    params = {
        name: nn.Parameter(w.clone() if mesh is None else distribute(w, device_mesh, placements(name, w.shape)))
        for name, w in weights(plan, dtype).items()
    }
    return params, sf.SteepestDescent(list(params.items()), plan, lr=lr, **options)


def advance(params, optimizer, steps, dtype=F64):
    """Take these steps with the given gradients."""
    for step in steps:
        for name, p in params.items():
            g = gradient(name, p.shape, step, dtype)
            p.grad = distribute(g, p.device_mesh, p.placements) if isinstance(p, DTensor) and g is not None else g
        optimizer.step()


def full(state):
    """A state dictionary whose tensors are whole."""
    own = {i: {n: whole(x) for n, x in entry.items()} for i, entry in state["state"].items()}
    return {**state, "state": own}


CASES = {
    "default": (recipes.steady(), None, {}),
    "PostClip": (recipes.steady(), sf.PostClip(1.0), {}),
    "vectors": (recipes.steady(), sf.StreamingPostClip(1.0, 2), {}),
    "muon": (recipes.muon(), None, {}),
    "bfloat16 momentum": (recipes.steady(), None, {"precision": sf.Precision(torch.bfloat16)}),
}


@pytest.mark.parametrize("case", CASES)
def test_state_of_the_parameters_shape_is_placed_like_it_and_all_of_it_is_there_from_the_start(case):
    recipe, stabiliser, options = CASES[case]
    plan = plan_of(recipe, stabiliser, some=case != "default")

    def work(rank):
        dtype = torch.float32 if options else F64
        params, optimizer = built(plan, (4,), fsdp, dtype, **options)
        before = {p: set(optimizer.state[p]) for p in params.values()}
        for name, p in params.items():
            for key, x in optimizer.state[p].items():
                if x.ndim and x.shape == p.shape and key in ("momentum", "exp_avg", "exp_avg_sq"):
                    assert isinstance(x, DTensor), (name, key)
                    assert (x.placements, x.device_mesh) == (p.placements, p.device_mesh)
            assert optimizer.state[p]["skipped"].ndim == 0
        if case == "default":
            rows = optimizer.state[params["embedding"]]["row_sq"]
            assert isinstance(rows, DTensor)
            assert (tuple(rows.shape), rows.placements) == ((1, 11), (Shard(1),))
        advance(params, optimizer, range(2), dtype)
        assert before == {p: set(optimizer.state[p]) for p in params.values()}

    run(4, work)


@combinations(case=[*CASES], later=["FSDP2 x TP", "FSDP2", "TP", "one process"])
def test_a_saved_state_goes_on_as_one_process_would_have_on_any_mesh(case, later):
    """Saved on FSDP2 x TP after 4 steps; on to step 8 on the same mesh, on others, and in one process."""
    recipe, stabiliser, options = CASES[case]
    dtype = torch.float32 if options else F64
    plan = plan_of(recipe, stabiliser, some=case != "default")
    want = alone(plan, 8, dtype, 0.05, **options)
    tolerance = 1e-6 if options else 1e-12

    def save(rank):
        params, optimizer = built(plan, (2, 2), both, dtype, **options)
        advance(params, optimizer, range(4), dtype)
        return {n: whole(p) for n, p in params.items()}, full(optimizer.state_dict())

    values, state = run(4, save)[0]

    def resume(rank, mesh=None, placements=None):
        params, optimizer = built(plan, mesh, placements, dtype, **options)
        for name, p in params.items():
            p.data.copy_(values[name] if mesh is None else distribute(values[name], p.device_mesh, p.placements))
        optimizer.load_state_dict(state)
        advance(params, optimizer, range(4, 8), dtype)
        return {n: whole(p) for n, p in params.items()}

    for got in run(torch.Size(MESHES[later][0]).numel(), resume, *MESHES[later]) if later in MESHES else [resume(0)]:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("change", [{"momentum": sf.SOAP()}, {"geometry": sf.contrib.MeanLookahead()}], ids=str)
def test_factors_of_a_matrix_are_the_owners_and_gathered_for_a_checkpoint(change):
    table = dict(recipes.steady().table)
    table["linear"] = replace(table["linear"], **change)
    owned = table["linear"].owned
    plan = plan_of(recipes.Recipe("white", table), None)

    def work(rank, mesh, placements):
        params, optimizer = built(plan, mesh, placements)
        advance(params, optimizer, range(3))
        state = optimizer.state_dict()["state"]
        return {(i, n): whole(x) for i in state for n, x in state[i].items() if n.partition(":")[0] in owned}

    want = work(0, None, None)
    assert {name.partition(":")[0] for _, name in want} == owned != set()
    assert any(":" in name for _, name in want)  # those of unequal blocks
    for got in run(3, work, (3,), fsdp):
        for key, x in want.items():
            torch.testing.assert_close(got[key], x, rtol=0, atol=1e-12)


def test_initial_values_are_those_of_one_process_to_the_last_bit():
    plan = plan_of(recipes.steady(), None)
    model = {n: torch.zeros(x.shape) for n, x in plan.placements.items()}

    class Model(nn.Module):
        def __init__(self, values):
            super().__init__()
            for name, x in values.items():
                self.register_parameter(name, nn.Parameter(x))

    single = Model(model)
    plan.initialise_(single, seed=3)

    def work(rank, mesh, placements):
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        values = {n: distribute(x, device_mesh, placements(n, x.shape)) for n, x in model.items()}
        cut = Model(values)
        plan.initialise_(cut, seed=3)
        return {n: whole(p) for n, p in cut.named_parameters()}

    for case in MESHES.values():
        for got in run(torch.Size(case[0]).numel(), work, *case):
            for name, p in single.named_parameters():
                assert torch.equal(got[name], p.detach()), name


def test_reports_and_skipped_steps_are_the_same_on_every_rank():
    plan = plan_of(recipes.steady(), sf.PostClip(2.0))

    def work(rank, mesh, placements):
        params, optimizer = built(plan, mesh, placements)
        advance(params, optimizer, range(4))
        return optimizer.skipped(), optimizer.stability()

    skipped, numbers = work(0, None, None)
    assert skipped == {"square": 1, "three": 1, "embedding": 1, "experts": 1, "gain": 1}
    for own, report in run(4, work, (2, 2), both):
        assert own == skipped
        assert report.keys() == numbers.keys()
        for name, entry in numbers.items():
            for key, x in entry.items():
                assert report[name][key] == pytest.approx(x, rel=0.03, abs=1e-9), (name, key)


def test_each_parameter_is_measured_by_one_process_and_each_has_all_numbers(monkeypatch):
    plan, seen = plan_of(recipes.steady(), None), []
    original = measuring.stability

    def counted(weight, placement, *args):
        seen.append(tuple(weight.shape))
        return original(weight, placement, *args)

    monkeypatch.setattr(measuring, "stability", counted)

    def work(rank):
        params, optimizer = built(plan, (4,), fsdp)
        before = {name: p.detach().clone() for name, p in params.items()}
        advance(params, optimizer, range(1))
        return optimizer.stability(before)

    reports = run(4, work)
    assert all(report == reports[0] for report in reports)
    shared = [x for x in plan.placements.values() if x.shape]
    assert len(seen) == len(shared) + 4  # a scalar is nobody's part
    assert all("update_measured" in reports[0][name] for name in plan if plan[name].shape != (0, 4))


def test_factors_scale_the_part_of_each_rank():
    plan = plan_of(recipes.steady(), None)

    def work(rank):
        params, optimizer = built(plan, (2, 2), both)
        p = params["fused"]
        factor = torch.linspace(0, 1, 12, dtype=F64)[:, None].expand(12, 6)
        optimizer.scale_({p: factor})
        return whole(p), weights(plan, F64)["fused"] * factor

    for got, want in run(4, work):
        assert torch.equal(got, want)


@pytest.mark.parametrize("what", ["none", "nan"])
def test_a_gradient_that_one_rank_alone_lacks_or_spoils_stops_nobody(what):
    """None counts as zeros where each rank has a part, and as missing where it has a copy; NaN stops the parameter."""
    plan = plan_of(recipes.steady(), None, some=True)

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        results = {}
        for kind in ("cut", "copied"):
            params = {
                n: nn.Parameter(
                    distribute(w, mesh, (Replicate(), *fsdp(n, w.shape)) if kind == "copied" else both(n, w.shape))
                )
                for n, w in weights(plan, F64).items()
            }
            optimizer = sf.SteepestDescent(list(params.items()), plan, lr=0.1)
            for name, p in params.items():
                g = gradient(name, p.shape, 0, F64)
                p.grad = distribute(g, mesh, p.placements)
                if name in ("square", "embedding") and rank == 1:
                    if what == "none":
                        p.grad = None
                    else:
                        p.grad.to_local().fill_(torch.nan)
            optimizer.step()
            results[kind] = {n: whole(params[n]) for n in ("square", "embedding", "five")}, optimizer.skipped()
        return results

    before = weights(plan, F64)
    found = run(4, work)
    for result in found:
        for kind, (after, skipped) in result.items():
            assert not torch.equal(after["five"], before["five"])
            rests = what == "nan" or kind == "copied"
            for name in ("square", "embedding"):
                assert torch.equal(after[name], before[name]) == rests, (what, kind, name)
            assert skipped == ({"square": 1, "embedding": 1} if what == "nan" else {})
    assert all(
        torch.equal(found[0]["cut"][0][n], other["cut"][0][n]) for other in found for n in ("square", "embedding")
    )


def test_a_step_of_ones_own_is_refused_where_an_owner_would_take_it():
    plan = plan_of(recipes.steady(), None, some=True)

    def work(rank):
        table = sf.Plan("table", {"embedding": plan["embedding"]})
        built(table, (2,), fsdp, step=sf.compiled())
        with pytest.raises(ValueError, match=r"^square needs other processes .* leave it out"):
            built(plan, (2,), fsdp, step=sf.compiled())

    run(2, work)


def test_plain_parameters_beside_sharded_ones():
    plan = plan_of(recipes.steady(), sf.PostClip(1.0), some=True)
    want = alone(plan, 4, F64, 0.05)

    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        values = weights(plan, F64)
        params = {
            n: nn.Parameter(w if i % 2 else distribute(w, mesh, fsdp(n, w.shape)))
            for i, (n, w) in enumerate(values.items())
        }
        optimizer = sf.SteepestDescent(list(params.items()), plan, lr=0.05)
        advance(params, optimizer, range(4))
        return {n: whole(p) for n, p in params.items()}

    for got in run(2, work):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


def test_a_plain_model_needs_none_of_this():
    code = (
        "import sys, torch, surefoot as sf\n"
        "layer = torch.nn.Linear(4, 4); optimizer = sf.SteepestDescent(layer, lr=0.1)\n"
        "layer(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.state_dict()\n"
        "names = ('optim.sharding', 'optim.exchange', 'mesh.groups', 'mesh.schedule')\n"
        "print([m for m in names if 'surefoot.' + m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
