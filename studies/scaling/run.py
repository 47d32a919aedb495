"""What a step sends, computes and keeps on 8 to 4,096 processes, counted from the optimizer's own schedule.

    python studies/scaling/run.py            # a minute, no memory for weights; writes counts.json beside this file
    python studies/scaling/run.py --table    # from the committed counts, as docs/scaling.md has it

Nothing is trained or timed. It needs models on the meta device, their plans, each parameter's slabs on a mesh, and
`surefoot.mesh.schedule.schedule` of the works that an exchange would have. tests/sharded/test_schedule.py compares
counted collectives with the same schedule, to the byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.models.decoder import Decoder, LlamaConfig, Size
from surefoot.experiment.models.layers import Mixture
from surefoot.experiment.reports.style import markdown
from surefoot.mesh.groups import Cut
from surefoot.mesh.schedule import Bucket, Work, cost, schedule
from surefoot.mesh.slabs import slabs
from surefoot.optim.batching import init_state
from surefoot.optim.exchange import jobs_of
from surefoot.optim.shard import Shard as Part
from surefoot.optim.shard import chosen

COUNTS = Path(__file__).parent / "counts.json"
MODELS = {
    "7B": lambda: LlamaConfig(Size(4096, 32, 128, 32000), intermediate=11008),
    "70B": lambda: LlamaConfig(Size(8192, 80, 128, 32000), kv_heads=8, intermediate=28672),
    "400B, 128 experts": lambda: LlamaConfig(
        Size(5120, 24, 128, 200000), kv_heads=8, intermediate=8192, mixture=Mixture(experts=128, active=1)
    ),
}
RANKS = (8, 64, 512, 4096)
GROUP = 512
"""The most processes that share one copy; more hold copies, as FSDP2 is used at that size (HSDP)."""
ENTRY = 4  # bytes of float32
COLUMNS = {
    "model": ("model", ""),
    "stabiliser": ("stabiliser", ""),
    "processes": ("processes", ",d"),
    "share a copy": ("group", ",d"),
    "stepped by owners": ("exchanged", ".1%"),
    "all-to-alls": ("collectives", ",d"),
    "GB sent, mean": ("sent", ".3f"),
    "busiest": ("sent_most", ".3f"),
    "an all-gather's GB": ("gathered", ".1f"),
    "TFLOP, mean": ("tflop", ".2f"),
    "busiest / mean": ("imbalance", ".3f"),
    "GB of weights, gradients, state": ("shards", ".2f"),
    "GB of buffers": ("buffers", ".2f"),
}


def placements_of(shape: tuple[int, ...], group: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The mesh of one copy and how a parameter is cut over it: experts first along the stack, all else along rows."""
    if len(shape) == 3 and group > shape[0]:
        return (shape[0], group // shape[0]), (Shard(0), Shard(1))
    return (group,), (Shard(0),)


def works_of(model: torch.nn.Module, plan: sf.Plan, group: int) -> tuple[list[Work], int, int]:
    """The works of an exchange over a group, the entries of all parameters, and what the first process does alone."""
    works, entries, local = [], 0, 0
    for name, p in model.named_parameters():
        placement = plan[name]
        mesh, placements = placements_of(tuple(p.shape), group)
        boxes = tuple(slabs(tuple(p.shape), mesh, placements))
        way, here = chosen(placement, boxes, boxes[0].size)
        entries += p.numel()
        if not way.back:
            matrices = placement.role.geometry.couples == {-1, -2}
            local += matrices and sum(cost(*block) for block in here.blocks)
        else:
            state = init_state(placement, torch.empty(p.shape, device="meta"))
            cut = Cut(boxes, 0, tuple(range(group)), None)
            part = Part(p, placement, cut, way, here, torch.empty(boxes[0].size, device="meta"), state)
            works += jobs_of(part, torch.float32)
    return works, entries, local


def sent_bytes(buckets: list[Bucket], ranks: int) -> list[int]:
    """Bytes that each process sends to others in a step."""
    sent = [0] * ranks
    for owner, work in ((owner, work) for bucket in buckets for owner, works in enumerate(bucket) for work in works):
        for rank in range(ranks):
            if rank != owner:
                sent[rank] += work.sent * work.parts[rank].numel * work.itemsize
                sent[owner] += (work.returned * work.parts[rank].numel + work.numbers) * work.itemsize
    return sent


def row(name: str, ranks: int, bound: sf.Stabiliser | None) -> dict[str, Any]:
    """The counts of a model on so many processes."""
    group = min(ranks, GROUP)
    with torch.device("meta"):
        model = Decoder(MODELS[name]())
    works, entries, local = works_of(model, sf.Plan.of(model, recipes.steady(), stabiliser=bound), group)
    buckets = schedule(works)
    sent = sent_bytes(buckets, group)
    costs = [sum(work.cost for bucket in buckets for work in bucket[rank]) for rank in range(group)]
    held = [sum(work.box.numel for work in own) * ENTRY for bucket in buckets for own in bucket]
    exchanged = sum(work.box.numel for work in works)
    return {
        "model": name,
        "stabiliser": "the default's decay" if bound is None else str(bound),
        "processes": ranks,
        "group": group,
        "exchanged": exchanged / entries,
        "collectives": 2 * len(buckets),
        "sent": sum(sent) / group / 1e9,
        "sent_most": max(sent) / 1e9,
        "gathered": (1 - 1 / group) * exchanged * ENTRY / 1e9,
        "tflop": 2 * (sum(costs) / group + local) / 1e12,
        "imbalance": (max(costs) + local) / (sum(costs) / group + local),
        "shards": 3 * ENTRY * entries / group / 1e9,
        "buffers": 2 * (works[0].sent + works[0].returned) * max(works[0].sent, works[0].returned) * max(held) / 1e9,
    }


def table() -> str:
    """Markdown of the committed counts."""
    rows = json.loads(COUNTS.read_text(encoding="utf-8"))
    return markdown(list(COLUMNS), [[format(row[key], form) for key, form in COLUMNS.values()] for row in rows])


def main() -> None:
    """Count, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        counts = [row(name, ranks, None) for name in MODELS for ranks in RANKS]
        counts.append(row("70B", 64, sf.PostClip(2.0)))
        write_atomic(COUNTS, dumps(counts, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
