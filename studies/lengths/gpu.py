"""The default after 1,600 steps of widths 64 to 1024, on one GPU: its best rate, and what one change does.

    python studies/lengths/gpu.py pack --data tokens --bytes bytes    # writes runs/lengths_gpu.npz, a part of each text
    python studies/lengths/gpu.py run                                 # what is missing; ten minutes of an H200
    python studies/lengths/gpu.py fresh                               # runs of run.py that take a CPU half an hour each
    python studies/lengths/gpu.py run --smoke                         # toy sizes on a CPU, to test the command

Every eleventh document of the tokens of run.py, 16 million; of bytes, as `surefoot tokens --vocab 260` writes them,
every twenty-fifth. One seed; products in TF32; decay times steps as the law has it, and where the rate of one role is
changed, so is how fast its weights decay. `fresh` are fresh seeds at width 128 after 7,680 steps, and the rates of
widths 128 and 256 after 1,600; products in float32, lines in the files of run.py. docs/transfer.md has the tables.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Steepest
from surefoot.recipes import Recipe
from surefoot.recipes.rules import with_decay

sys.path.append(str(Path(__file__).parents[1]))
from captured import Job, train_all
from lengths import run as cpu
from lengths.run import SIDES, loss_of

RESULTS = Path(__file__).with_name("gpu.jsonl")
PART = Path("runs/lengths_gpu.npz")
ONE_IN = {"tokens": 11, "bytes": 25}
STEPS, SEED = 1600, 440
RATES = (-4.5, -5.0, -4.0, -5.5, -3.5, -6.0)
DECAYED = 32.0
"""Decay times steps."""
FRESH = "steady", "moonlight_tuned", "muon_tuned"
Spec = dict[str, Any]


def spec(width: int, log2_lr: float, **more: Any) -> Spec:
    """A run: `kind` and `factor` of a role whose rate is changed, `beta` of hidden matrices, another length or text."""
    return {"width": width, "log2_lr": log2_lr, "seed": SEED, **more}


def specs() -> Iterator[Spec]:
    """All runs of the tables."""
    yield from (spec(width, rate) for rate in RATES for width in (64, 512, 256))
    yield spec(1024, -4.0)
    roles = itertools.product(("linear", "embedding", "head", "gain"), (0.5, 2.0), (64, 512))
    yield from (spec(width, -4.5, kind=kind, factor=factor) for kind, factor, width in roles)
    for width, factors in {256: (0.25, 0.5, 2.0), 512: (0.125, 0.25, 0.5), 1024: (0.0625, 0.25)}.items():
        yield from (spec(width, -4.0, kind="embedding", factor=factor) for factor in factors)
    for rate, factor in itertools.product((-4.0, -3.5), (None, 0.5, 0.25)):
        yield spec(512, rate, **_embedding(factor), steps=400)
    yield spec(512, -3.0, steps=400)
    yield from (spec(512, -4.0, **_embedding(factor), text="bytes") for factor in (None, 0.25, 0.5, 2.0))
    yield spec(512, -4.5, text="bytes")
    yield from (spec(width, rate, beta=0.95) for width, rate in ((64, -4.5), (64, -4.0), (256, -4.0), (512, -4.0)))
    yield spec(512, -4.0, **_embedding(0.25), beta=0.95)
    yield from (spec(64, -4.5, steps=7702, **more) for more in ({}, {"beta": 0.95}))


def _embedding(factor: float | None) -> Spec:
    return {} if factor is None else {"kind": "embedding", "factor": factor}


def pack(sources: Mapping[str, str]) -> None:
    """Write a part of each text into one file."""
    arrays: dict[str, np.ndarray] = {}
    for name, source in sources.items():
        corpus = load(f"bin:{source}")
        ends = corpus.document_ends
        spans = [*zip(np.concatenate([[0], ends[:-1]]), ends, strict=True)][:: ONE_IN[name]]
        parts = [corpus.train.windows(np.array([start]), int(end - start))[0] for start, end in spans]
        whole = corpus.validation.windows(np.array([0]), corpus.validation.size)[0]
        arrays |= {f"{name}_ends": np.cumsum([len(part) for part in parts]), f"{name}_vocab": np.array(corpus.vocab)}
        arrays |= {f"{name}_{k}": v.astype(np.uint16) for k, v in (("train", np.concatenate(parts)), ("held", whole))}
    PART.parent.mkdir(exist_ok=True)
    np.savez_compressed(PART, **arrays)


def unpack() -> dict[str, Corpus]:
    """Read the parts."""
    with np.load(PART) as file:
        return {
            name: Corpus(
                *(file[f"{name}_{part}"] for part in ("train", "held")), name, name,
                vocab=int(file[f"{name}_vocab"]), ends=file[f"{name}_ends"],
            )
            for name in ONE_IN
        }  # fmt: skip


def recipe(decay: float, beta: float | None) -> Recipe:
    """The default with this decay, and this momentum of hidden matrices."""
    steady = recipes.steady()
    table = {kind: with_decay(role, decay / 0.08) for kind, role in steady.table.items()}
    for kind in ("linear", "heads") if beta is not None else ():
        table[kind] = replace(table[kind], momentum=replace(table[kind].momentum, beta=beta))
    return replace(steady, table=table, horizon=None)


def job(key: Spec, corpora: Mapping[str, Corpus], **sizes: Any) -> Job:
    """The run of a spec."""
    steps = key.get("steps", STEPS)
    own = {"width": key["width"], "steps": steps, "lr": 2.0 ** key["log2_lr"], "seed": key["seed"]}
    config = TrainConfig(**{"depth": 4, "batch_size": 16, "context": 128, "device": "cuda", **own, **sizes})
    method = Steepest(recipe(DECAYED / steps, key.get("beta")))
    scale = {key["kind"]: key["factor"]} if "kind" in key else {}
    return Job(key, config, method, corpora[key.get("text", "tokens")], scale)


def records() -> list[Spec]:
    """The runs that there are."""
    return read_lines(RESULTS) if RESULTS.exists() else []


def run(smoke: bool) -> None:
    """Run what is missing, four at once."""
    torch.set_float32_matmul_precision("high")
    corpora, sizes = unpack(), {"steps": 4, "width": 32, "device": "cpu"} if smoke else {}
    there = [{k: v for k, v in record.items() if k not in SIDES} for record in records()]
    missing = [key for key in specs() if key not in there]
    for done, result in train_all(job(key, corpora, **sizes) for key in missing[:: 20 if smoke else 1]):
        record = {**done.key, **{side: getattr(result, side) for side in SIDES}}
        print(record, flush=True)
        if not smoke:
            with Log(RESULTS) as log:
                log.append(record)


def fresh(smoke: bool) -> None:
    """Run what is missing of fresh seeds and of rates over widths, as run.py would."""
    text = unpack()["tokens"]
    keys = [(name, 128, 7680, *each) for name in FRESH for each in cpu.final(name, 128, 7680)]
    keys += [("steady", width, 1600, *each) for width in (128, 256) for each in cpu.widths("steady", width, 1600)]
    keys.sort(key=lambda key: key[-1])
    missing = [key for key in keys if not cpu.measured(*key)]
    if smoke:
        missing = [(name, 32, 4, *each) for name, _, _, *each in missing[::20]]
    jobs = (Job(key, *cpu.job(*key, device="cpu" if smoke else "cuda"), text) for key in missing)
    for done, result in train_all(jobs):
        print(done.key, result) if smoke else cpu.write(*done.key, result)


def curve() -> str:
    """The mean of both losses at each width and rate, and the vertex through the lowest three."""
    plain = {(r["width"], r["log2_lr"]): loss_of(r) for r in records() if r.keys() == spec(0, 0).keys() | {*SIDES}}
    rows = []
    for width in (64, 256, 512):
        rates = sorted(RATES)
        losses = [plain[width, rate] for rate in rates]
        low = min(range(1, len(rates) - 1), key=losses.__getitem__)
        a, b, _ = np.polyfit(rates[low - 1 : low + 2], losses[low - 1 : low + 2], 2)
        rows.append([str(width), *(f"{loss:.3f}" for loss in losses), f"2^{-b / (2 * a):.2f}"])
    return markdown(["width", *(f"2^{rate:g}" for rate in sorted(RATES)), "best rate"], rows)


def changes() -> str:
    """What each change does to the mean of both losses, beside the run of the same width, rate, length and text."""
    of = {}
    for r in records():
        named = {"kind": f"{r.get('kind')} x {r.get('factor', 1):g}", "beta": f"momentum {r.get('beta', 0):g}"}
        changed = ", ".join(text for name, text in named.items() if name in r)
        of[r["width"], r["log2_lr"], r.get("steps", STEPS), r.get("text", "tokens"), changed] = loss_of(r)
    rows = [
        [changed, str(place[0]), f"2^{place[1]:g}", f"{place[2]:,}", place[3], f"{loss - of[*place, '']:+.3f}"]
        for (*place, changed), loss in of.items()
        if changed
    ]
    return markdown(["change", "width", "rate", "steps", "text", "loss"], sorted(rows, key=lambda row: row[0]))


def main() -> None:
    """Pack, or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("pack", "run", "fresh"))
    parser.add_argument("--data", help="folder of tokens")
    parser.add_argument("--bytes", help="folder of bytes")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.stage == "pack":
        pack({"tokens": options.data, "bytes": options.bytes})
    else:
        {"run": run, "fresh": fresh}[options.stage](options.smoke)


if __name__ == "__main__":
    main()
