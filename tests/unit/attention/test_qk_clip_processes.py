"""Attention control over several processes: the largest logits are reduced, replicas stay replicas."""

import pytest
import torch
import torch.distributed as dist
from attention_helpers import TOKENS, llama, measured

import surefoot as sf
from surefoot.attention.qk_clip import LogitControl


def replica(rank, file, results):
    """One of two data-parallel processes: the same model, a batch of its own, gradients averaged."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = llama()
    optimizer = sf.SteepestDescent(model, lr=0.05)
    control = LogitControl(model, threshold=1.0)
    control.hold(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(TOKENS[rank : rank + 1]).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.SUM)
        optimizer.step()
    torch.save((model.state_dict(), measured(model, control)), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_another_process_may_have_larger_logits(monkeypatch):
    model = llama()
    control = LogitControl(model, threshold=3.0)
    elsewhere = torch.tensor([0.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0, 12.0])  # 4 heads of each layer
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: x.copy_(torch.maximum(x, elsewhere)))
    optimizer = sf.SteepestDescent(model, lr=0.0)
    control.hold(optimizer)
    control.largest = {"blocks.0.attention": torch.tensor([1.0, 1.0, 4.0, 1.0])}  # the other layer saw no batch here
    before = control.bounds()
    optimizer.step()
    for name, factors in (("blocks.0.attention", [1, 0.5, 0.75, 1]), ("blocks.1.attention", [1, 1, 1, 0.25])):
        torch.testing.assert_close(control.bounds()[name], before[name] * torch.tensor(factors))


@pytest.mark.slow
def test_replicas_with_batches_of_their_own_stay_replicas(tmp_path):
    torch.multiprocessing.spawn(replica, (tmp_path / "meeting", tmp_path), nprocs=2)
    (one, logits_one), (other, logits_other) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(logits_one[name], logits_other[name]) for name in logits_one)
    assert max(float(x.max()) for x in logits_one.values()) < 2
