"""On a GPU: steps that never wait, that a CUDA graph repeats, and that need the memory of a few chunks.

`test_no_wait.py` proves the first without a GPU; these are the same claims about the device itself.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from optim_helpers import Layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import surefoot as sf
from surefoot import recipes
from surefoot.optim import batching

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RECIPES = [
    recipes.steady(), recipes.steady_soap(), recipes.beyond_mup(), recipes.moga_row(), recipes.moga_column(3.0),
    recipes.muon(), recipes.scion(), recipes.lion(), recipes.sign_sgd(), sf.contrib.sign_natural(),
    recipes.hyperball(), sf.contrib.frobenius_sphere(),
]  # fmt: skip
SCHEMES = [sf.PostClip(1.5), sf.WeightDecay(0.5), sf.Rescale(1.5), sf.StreamingPostClip(1.5, 3)]


def build(recipe, stabiliser=None, lr=0.1, **options):
    torch.manual_seed(0)
    model = Layers(64, 256, 256)
    model.wide = nn.Linear(256, 1024)
    model.cuda()
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser)
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=lr, **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, optimizer


def fill(model, turn):
    """Other gradients, in the same memory."""
    generator = torch.Generator("cuda").manual_seed(turn)
    for p in model.parameters():
        p.grad.normal_(generator=generator)


def debug(mode):
    """Set what torch does when it waits for the device; it says each time that this is a prototype."""
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def no_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    debug("error")
    yield
    debug("default")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_no_recipe_waits(recipe, request):
    model, optimizer = build(recipe)
    request.getfixturevalue("no_waiting")
    for turn in range(3):
        fill(model, turn)
        optimizer.step()


@pytest.mark.parametrize("stabiliser", SCHEMES, ids=repr)
def test_no_bound_waits(stabiliser, request):
    model, optimizer = build(recipes.beyond_mup(), stabiliser)
    request.getfixturevalue("no_waiting")
    for turn in range(3):
        fill(model, turn)
        optimizer.step()


def test_waiting_is_noticed(no_waiting):
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("stabiliser", [None, sf.PostClip(1.5)], ids=repr)
def test_a_graph_repeats_the_step(recipe, stabiliser):
    """Captured once, replayed at other rates on other gradients: the weights of eager steps."""
    rate = torch.tensor(0.1, device="cuda")
    model, optimizer = build(recipe, stabiliser, lr=rate)
    twin, eager = build(recipe, stabiliser, lr=rate)
    for turn in range(2):  # states, kernels and workspaces
        for copy, its_optimizer in ((model, optimizer), (twin, eager)):
            fill(copy, turn)
            its_optimizer.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = [p.detach().clone() for p in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)), "capturing takes no step"
    for turn in range(2, 6):
        rate.fill_(0.1 / turn)
        fill(model, turn)
        graph.replay()
        fill(twin, turn)
        eager.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4)
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own, inside the compiler
def test_compiled_steps_are_the_eager_ones():
    (model, optimizer), (twin, eager) = build(recipes.beyond_mup(), step=sf.compiled()), build(recipes.beyond_mup())
    for turn in range(3):
        fill(model, turn)
        fill(twin, turn)
        optimizer.step()
        eager.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-2, rtol=0)  # float16 inside


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.PostClip(1.5)], ids=repr)
def test_a_step_needs_a_few_chunks_beyond_its_state(monkeypatch, stabiliser):
    """128 matrices of 4 MiB, 8 to a chunk: a step of all at once would need several times 512 MiB."""
    chunk = 32 << 20
    monkeypatch.setitem(batching.BATCH_BYTES, "cuda", chunk)
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda") / 32) for _ in range(128)]
    for p in params:
        p.grad = torch.randn_like(p)
    role = sf.Role("linear", sf.Spectral(), stabiliser=stabiliser)
    optimizer = sf.SteepestDescent([{"params": params, "role": role}], lr=0.1)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 16 * chunk
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.PostClip(1.5)], ids=repr)
def test_weights_and_state_that_fsdp_keeps_on_the_cpu(tmp_path, stabiliser):
    """Steps are those of a model on the CPU, up to the rounding of its gradients; nothing of them is on the GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        found = []
        for device in ("cpu", "cuda"):
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            plan = sf.Plan.of(model, stabiliser=stabiliser)
            plan.initialise_(model, seed=0)
            if device == "cuda":
                fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
            optimizer = sf.SteepestDescent(model, plan, lr=0.1)
            for turn in range(3):
                data = torch.randn(512, 64, generator=torch.Generator().manual_seed(turn)).to(device)
                (model(data) - data.flip(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((model, optimizer))
        (model, _), (kept, optimizer) = found
        held = [p.to_local() for p in kept.parameters()]
        state = [getattr(x, "_local_tensor", x) for s in optimizer.state.values() for x in s.values()]
        assert {x.device.type for x in [*held, *filter(torch.is_tensor, state)]} == {"cpu"}
        for p, q in zip(model.parameters(), held, strict=True):
            torch.testing.assert_close(p, q, atol=1e-3, rtol=0)
    finally:
        dist.destroy_process_group()
