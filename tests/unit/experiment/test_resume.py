"""A run that is stopped at any step and gone on with ends bit for bit as one that was not, on every source of data."""

import random

import pytest
import torch

from combinations import combinations
from surefoot.experiment.data import token_files
from surefoot.experiment.data.sources import load
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

STEPS = 9
TEXT = "".join(f"line {i}: {i * i % 97} {i * 31 % 89}\n" for i in range(800))


def text(folder):
    (folder / "a.txt").write_text(TEXT)
    return f"text:{folder / 'a.txt'}"


def texts(folder):
    for i in range(40):
        (folder / f"{i}.txt").write_text(TEXT[i * 100 : (i + 3) * 100])
    return str(folder)


def bpe(folder):
    pytest.importorskip("tokenizers")
    return f"bpe:280:{text(folder).removeprefix('text:')}"


def shards(folder):
    for i, name in enumerate(("train_0", "train_1", "val_0")):
        tokens = torch.randint(200, (700 + i,), generator=torch.Generator().manual_seed(i)).tolist()
        data = b"".join(token.to_bytes(2, "little") for token in tokens)
        (folder / f"{name}.bin").write_bytes((token_files.header(len(tokens)) if i else b"") + data)
    return f"bin:{folder}"


def markov(folder):
    return "markov:32"


@combinations(source=[text, texts, bpe, shards, markov], accumulate=[1, 2])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(source, accumulate, tmp_path):
    (tmp_path / "data").mkdir()
    name = source(tmp_path / "data")
    config = TrainConfig(width=16, depth=1, batch_size=4, context=16, steps=STEPS, lr=2.0**-5, seed=3)
    layout, chance = Layout(accumulate=accumulate), random.Random(f"{source.__name__}{accumulate}")
    whole = Run(config, load(name), layout=layout)
    for _ in range(STEPS):
        whole.advance()
    folder = Checkpoints(tmp_path / "run")
    for stop in sorted(chance.sample(range(1, STEPS), 2)):  # each time by another process's reading of the data
        run = Run(config, load(name), layout=layout)
        folder.resume(run)
        while run.step < stop:
            run.advance()
        folder.write(run)
    last = Run(config, load(name), layout=layout)
    folder.resume(last)
    assert 0 < last.step < STEPS
    while last.step < STEPS:
        last.advance()
    assert torch.equal(last.losses, whole.losses)
    for (place, one), other in zip(last.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other), place
    assert last.validate() == whole.validate()
