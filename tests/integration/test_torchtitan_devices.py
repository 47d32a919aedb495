"""Our container of optimizers over torchtitan's wrappers and over two processes."""

import pytest
import torch
import torch.distributed as dist
from titan_helpers import TOKENS, WRAPPED, assert_equal, build, container, train, weights
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def wrap(model, mesh):
    """What torchtitan does to a model before it makes the optimizer."""
    for name, layer in model.layers.items():
        model.layers[name] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_on_one_device_the_wrapped_model_moves_as_the_bare_one(one_process):
    bare, wrapped = build(), wrap(build(), one_process)
    assert all(isinstance(p, DTensor) for p in wrapped.parameters())
    assert any(WRAPPED in name for name, _ in wrapped.named_parameters())
    ours, theirs = container(bare, seed=0), container(wrapped, seed=0)
    wrapped._apply(torch.clone)  # parameters moved after the optimizer was made
    assert train(bare, ours) == train(wrapped, theirs)
    assert_equal(weights(bare), weights(wrapped))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def one_of_two(rank, folder):
    """A process of two: half of the batch each, on a replicated model; then on a model that is split."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, sizes, axes in (("replicated", (2, 1), ("replicate", "shard")), ("split", (2,), ("shard",))):
        model = wrap(build(), init_device_mesh("cpu", sizes, mesh_dim_names=axes))
        train(model, container(model, seed=0), tokens=TOKENS.chunk(2)[rank])
        torch.save({n: p.full_tensor().detach() for n, p in model.named_parameters()}, f"{folder}/{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["replicated", "split"])
def test_two_devices_take_the_step_of_one(two, kind):
    model = build()
    train(model, container(model, seed=0))
    first, second = (torch.load(two / f"{kind}{rank}.pt") for rank in (0, 1))
    assert_equal(first, second)
    for (name, got), ours in zip(first.items(), model.parameters(), strict=True):
        torch.testing.assert_close(got, ours.detach(), rtol=1e-3, atol=1e-3, msg=name)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(one_of_two, (str(folder),), nprocs=2)
    return folder
