"""The same with processes and gloo, and torch.distributed.checkpoint between meshes."""

import io
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from sharded_cases import alone, fsdp, gradient, plan_of, sharded, weights, whole
from test_sharded_models import Network, loss_of, tokens
from test_sharded_steps import both
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import surefoot as sf
from surefoot import recipes

pytestmark = pytest.mark.slow
F64 = torch.float64


def start(rank: int, ranks: int, port: int, results: Any, function: Any, args: tuple[Any, ...]) -> None:
    """One process: joins the group, calls the function, sends what it returns."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        buffer = io.BytesIO()
        torch.save(function(rank, *args), buffer)  # a tensor in a queue dies with its process
        results.put((rank, buffer.getvalue(), None))
    except BaseException:
        results.put((rank, b"", traceback.format_exc()))
        return
    dist.barrier()
    dist.destroy_process_group()


def spawn(ranks: int, function: Any, *args: Any) -> list[Any]:
    """`function(rank, *args)` in processes; their results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["surefoot.experiment.training.loop", "torch.distributed.fsdp"])
    results = context.Queue()
    processes = [context.Process(target=start, args=(i, ranks, port, results, function, args)) for i in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get(timeout=200) for _ in range(ranks)]
    for process in processes:
        process.join(60)
    failures = [error for _, _, error in found if error]
    assert not failures, failures[0]
    return [torch.load(io.BytesIO(result)) for _, result, _ in sorted(found)]


@pytest.mark.parametrize(
    ("stabiliser", "mesh", "placements"),
    [(None, (2,), fsdp), (sf.PostClip(1.0), (2,), fsdp), (sf.PostClip(1.0), (2, 2), both)],
    ids=["default", "PostClip", "FSDP2 x TP, PostClip"],
)
def test_steps_by_gloo(stabiliser, mesh, placements):
    plan = plan_of(recipes.steady(), stabiliser)
    want = alone(plan, 8, F64, 0.05)
    found = spawn(torch.Size(mesh).numel(), sharded, plan, mesh, placements, 8, F64, 0.05, {})
    for got in found:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


class Given(torch.nn.Module):
    """Parameters by name, as torch's state dictionaries want them in a module."""

    def __init__(self, plan: sf.Plan, mesh: Any, placements: Any) -> None:
        from sharded_cases import distribute

        super().__init__()
        for name, w in weights(plan, F64).items():
            value = w if mesh is None else distribute(w, mesh, placements(name, w.shape))
            self.register_parameter(name, torch.nn.Parameter(value))


def resumed(rank: int, plan: sf.Plan, mesh: Any, placements: Any, path: str, steps: range, save: bool) -> Any:
    """Load what was saved, take steps, save."""
    from sharded_cases import distribute

    device_mesh = mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
    model = Given(plan, device_mesh, placements)
    optimizer = sf.SteepestDescent(model, plan, lr=0.05)
    if not save:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in steps:
        for name, p in model.named_parameters():
            g = gradient(name, p.shape, step, F64)
            p.grad = distribute(g, device_mesh, p.placements) if isinstance(p, DTensor) and g is not None else g
        optimizer.step()
    if save:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    return {n: whole(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("stabiliser", [None, sf.PostClip(1.0), sf.StreamingPostClip(1.0, 2)], ids=str)
def test_a_distributed_checkpoint_goes_on_on_other_meshes_and_in_one_process(stabiliser, tmp_path):
    plan = plan_of(recipes.steady(), stabiliser)
    want = alone(plan, 8, F64, 0.05)
    path = str(tmp_path / "step-4")
    spawn(4, resumed, plan, (2, 2), both, path, range(4), True)
    assert Path(path, ".metadata").exists()
    later = (path, range(4, 8), False)
    found = [*spawn(4, resumed, plan, (2, 2), both, *later), *spawn(2, resumed, plan, (2,), fsdp, *later)]
    for got in [*found, *spawn(1, resumed, plan, None, None, *later)]:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12, msg=name)


def replicas(rank: int, ranks: int, stabiliser: sf.Stabiliser | None) -> dict[str, torch.Tensor]:
    """Ten steps under DistributedDataParallel."""
    torch.manual_seed(0)
    model = Network().double()
    plan = sf.Plan.of(model, stabiliser=stabiliser)
    plan.initialise_(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = sf.SteepestDescent(wrapped, plan, lr=0.05)
    for step in range(10):
        batch = tokens(step)
        loss_of(wrapped, batch.chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("stabiliser", [None, sf.PostClip(1.0)], ids=str)
def test_replicas_stay_together(stabiliser):
    single, two = spawn(1, replicas, 1, stabiliser)[0], spawn(2, replicas, 2, stabiliser)
    for name, w in single.items():
        torch.testing.assert_close(two[0][name], w, rtol=0, atol=1e-10)
        assert torch.equal(two[0][name], two[1][name])
