"""Models as people shard them: FSDP2, FSDP2 over tensor parallelism, DDP; losses and weights as in one process."""

import pytest
import torch
from sharded_cases import alone, distribute, plan_of
from sharded_cases import fsdp as rows
from sharded_cases import weights as given
from test_sharded_state import advance
from test_sharded_steps import MESHES
from threads import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.experiment.models.decoder import reference
from surefoot.mesh.groups import gather
from surefoot.monitor.layer_bounds import linear
from surefoot.monitor.moga import block_dual_norm, block_norm

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of every linear layer's output
STEPS, BATCH = 10, 4


class Network(nn.Module):
    """Enough of a decoder for every kind of parameter: a table, matrices up and down, norms, biases, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 13, (BATCH, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, plan: sf.Plan, rows: slice) -> list[torch.Tensor]:
    """Losses of this process's rows of each batch."""
    optimizer = sf.SteepestDescent(model, plan, lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, tokens(step)[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (gather(p) if isinstance(p, DTensor) else p.detach()).clone() for n, p in model.named_parameters()}


def fsdp(model: nn.Module, ranks: int, policy: OffloadPolicy | None = None) -> slice:
    options = {"mesh": init_device_mesh("cpu", (ranks,)), "offload_policy": policy or OffloadPolicy()}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    rank, each = torch.distributed.get_rank(), BATCH // ranks
    return slice(rank * each, (rank + 1) * each)


def offloaded(model: nn.Module, ranks: int) -> slice:
    """On a mesh of another device than the one that the weights are kept on, as far as a CPU alone can say so."""
    share = fsdp(model, ranks, CPUOffloadPolicy(pin_memory=False))
    for p in model.parameters():
        p.device_mesh._device_type = "meta"
    return share


def fsdp_of_tp(model: nn.Module, ranks: int) -> slice:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    return slice(2 * rank, 2 * rank + 2)


@combinations(
    pairs=True,
    dtype=[torch.float64, torch.float32],
    stabiliser=[None, sf.PostClip(1.0)],
    cut=[(fsdp, 2), (offloaded, 2), (fsdp_of_tp, 4)],
)
def test_training_is_that_of_one_process(cut, stabiliser, dtype):
    (shard, ranks), tolerance = cut, 1e-10 if dtype == torch.float64 else 2e-4
    single = Network().to(dtype)
    plan = sf.Plan.of(single, stabiliser=stabiliser)
    plan.initialise_(single)
    want = train(single, plan, slice(None))

    def work(rank):
        model = Network().to(dtype)
        rows = shard(model, ranks)
        plan.initialise_(model)
        losses = torch.stack(train(model, plan, rows))
        torch.distributed.all_reduce(losses)
        return losses / ranks, weights(model)

    for losses, after in run(ranks, work):
        torch.testing.assert_close(losses, torch.stack(want), rtol=0, atol=tolerance)
        for name, p in single.named_parameters():
            torch.testing.assert_close(after[name], p.detach(), rtol=0, atol=tolerance)


def test_a_model_on_meta_is_sharded_emptied_and_initialised():
    single = reference("gpt", width=32, depth=1, head_dim=16, vocab=24)
    plan = sf.Plan.of(single)
    plan.initialise_(single, seed=1)

    def work(rank):
        with torch.device("meta"):
            model = reference("gpt", width=32, depth=1, head_dim=16, vocab=24)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        model.to_empty(device="cpu")
        own = sf.Plan.of(model)
        assert own.hash == plan.hash
        own.initialise_(model, seed=1)
        return weights(model)

    for got in run(4, work):
        for name, p in single.named_parameters():
            assert torch.equal(got[name], p.detach()), name


def test_logits_are_held_on_shards_as_in_one_process():
    batch = torch.randint(0, 24, (4, 9), generator=torch.Generator().manual_seed(0))

    def work(rank, ranks):
        model = reference("gpt", width=32, depth=1, head_dim=16, vocab=24).double()
        plan = sf.Plan.of(model)
        plan.initialise_(model)
        if ranks > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = sf.SteepestDescent(model, plan, lr=0.3)
        sf.LogitControl(model, threshold=0.05).hold(optimizer)
        each = len(batch) // ranks
        for _ in range(4):
            loss_of(model, batch[rank * each : (rank + 1) * each]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    want = work(0, 1)
    for got in run(2, work, 2):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-6)  # maxima are kept in float32


@pytest.mark.parametrize("copies", [1, 2])
def test_logits_of_heads_that_tensor_parallelism_divides_are_held_as_in_one_process(copies):
    batch = torch.randint(0, 24, (4, 9), generator=torch.Generator().manual_seed(0))

    def work(rank, ranks):
        model = reference("llama", width=64, depth=1, head_dim=16, vocab=24).double()
        plan = sf.Plan.of(model)
        plan.initialise_(model)
        rows = slice(None)
        if ranks > 1:
            mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("dp", "tp"))
            names = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(model.blocks[0], mesh["tp"], names | {"attention.output": RowwiseParallel()})
            if copies > 1:
                fully_shard(model, mesh=mesh["dp"])
                rows = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
        optimizer = sf.SteepestDescent(model, plan, lr=0.3)
        sf.LogitControl(model, threshold=0.05).hold(optimizer)
        for _ in range(4):
            loss_of(model, batch[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    want = work(0, 1)
    for got in run(2 * copies, work, 2 * copies):
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("each", [1, 2])
def test_stages_of_a_pipeline_take_the_plan_of_the_whole_model(each):
    """Every stage steps, measures and saves its own parameters, on the one or two processes that it has."""
    plan = plan_of(recipes.steady(), sf.PostClip(1.0))
    want, dtype = alone(plan, 4, torch.float64, 0.05), torch.float64
    stages = [dict(list(given(plan, dtype).items())[i::2]) for i in range(2)]

    def stage(mesh, of):
        params = {n: nn.Parameter(distribute(w, mesh, rows(n, w.shape))) for n, w in of.items()}
        return params, sf.SteepestDescent(list(params.items()), plan, lr=0.05)

    def work(rank):
        mesh = init_device_mesh("cpu", (2, each), mesh_dim_names=("pp", "fsdp"))
        own = stages[mesh["pp"].get_local_rank()]
        first, before = stage(mesh["fsdp"], own)
        advance(first, before, range(2))
        second, optimizer = stage(mesh["fsdp"], own)
        for name, p in second.items():
            p.data.copy_(first[name].data)
        optimizer.load_state_dict(before.state_dict())
        advance(second, optimizer, range(2, 4))
        assert {name.partition("[")[0] for name in optimizer.stability()} == own.keys()
        return {n: gather(p) for n, p in second.items()}

    for got in run(2 * each, work):
        for name, w in got.items():
            torch.testing.assert_close(w, want[name], rtol=0, atol=1e-12, msg=name)


def taken_over(rank, mesh):
    """Rates and whole state of what AdamW has begun; None: in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)).double()
    device_mesh = mesh and init_device_mesh("cpu", mesh)
    for i, module in enumerate(model if mesh else ()):
        for name, p in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(distribute(p.detach(), device_mesh, rows(f"{i}.{name}", p.shape))))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    for step in range(3):
        for name, p in model.named_parameters():
            g = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name) + step))
            p.grad = distribute(g, p.device_mesh, p.placements) if mesh else g
        adamw.step()
    ours = sf.from_adamw(model, adamw)
    states = ours.state_dict()["state"].items()
    whole = {
        index: {name: gather(x) if isinstance(x, DTensor) else x for name, x in entries.items()}
        for index, entries in states
    }
    return [group["lr"] for group in ours.param_groups], whole


def test_what_adamw_began_goes_on_where_each_process_has_a_part():
    rates, state = taken_over(0, None)
    for found, parts in run(2, taken_over, (2,)):
        assert found == pytest.approx(rates, rel=1e-6)
        for index, entries in state.items():
            for name, x in entries.items():
                torch.testing.assert_close(parts[index][name], x, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["FSDP2", "HSDP"])
def test_norms_of_weights_in_a_plan_and_of_a_block_are_those_of_one_process(name):
    """Fused rows, heads and experts of which each process has some: torch would take the norms of the parts."""
    plan, (mesh, placements) = plan_of(recipes.beyond_mup(), sf.PostClip(1.2)), MESHES[name]

    def work(rank, mesh):
        model, device_mesh = nn.Module(), mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
        for each, w in given(plan, torch.float64).items():
            value = distribute(w, device_mesh, placements(each, w.shape)) if mesh else w
            model.register_parameter(each, nn.Parameter(value))
            model.get_parameter(each).grad = value
        norms = [norm(model, 2, 2, plan) for norm in (block_norm, block_dual_norm)]
        return plan.relative_to(model).hash, norms

    digest, norms = work(0, None)
    for found in run(torch.Size(mesh).numel(), work, mesh):
        assert found == (digest, pytest.approx(norms, rel=1e-9))


def rows_of_a_layer(rank):
    layer = nn.Linear(4, 6)
    for p in (layer.weight, layer.bias):
        p.data.copy_(torch.arange(p.numel()).reshape(p.shape))
    mesh, want = init_device_mesh("cpu", (2,)), (linear(layer).rms(1.0), linear(layer).weight.clone())
    for name, p in dict(layer.named_parameters()).items():
        setattr(layer, name, nn.Parameter(distribute(p.detach(), mesh, (Shard(0),))))
    return want, (linear(layer).rms(1.0), linear(layer).weight)


def test_bounds_of_a_layer_are_of_all_its_rows_not_of_those_here():
    for (want, weight), (got, other) in run(2, rows_of_a_layer):
        assert got == pytest.approx(want, rel=1e-6)
        assert torch.equal(other, weight)
