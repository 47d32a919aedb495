"""An epoch reads every document once; a window is a pure function of its number; the next epoch has another order."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from surefoot.experiment.data import epochs
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.epochs import Epochs
from surefoot.experiment.data.sources import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run


def positions(read: Epochs, seed: int, numbers: range) -> list[np.ndarray]:
    """Of the tokens of windows."""
    spans = [read.spans(seed, number) for number in numbers]
    return [np.concatenate([np.arange(start, start + length) for start, length in each]) for each in spans]


@pytest.mark.parametrize("lanes", [1, 3, 256])
@pytest.mark.parametrize("case", range(8))
def test_an_epoch_reads_every_token_once(lanes, case, monkeypatch):
    """All but the tokens at its end that are fewer than a window; documents shorter and longer than windows."""
    monkeypatch.setattr(epochs, "LANES", lanes)
    random = np.random.default_rng(case)
    ends, context = np.cumsum(random.integers(1, 20, size=2 + 5 * case)), int(random.integers(1, 6))
    read = Epochs(ends, context)
    orders = []
    for epoch in range(2):
        numbers = range(epoch * read.windows, (epoch + 1) * read.windows)
        windows = positions(read, 7, numbers)
        assert {len(window) for window in windows} == {context + 1}
        inputs = np.concatenate([window[:-1] for window in windows])
        assert len(set(inputs.tolist())) == len(inputs) > ends[-1] - 1 - context
        orders.append(inputs.tolist())
    assert case < 3 or orders[0] != orders[1], "a new order in each epoch"
    assert case < 3 or orders[0] != np.concatenate([w[:-1] for w in positions(read, 8, range(read.windows))]).tolist()


def test_a_document_is_read_from_its_start_to_its_end():
    ends = np.cumsum([50] * 2000)
    read = Epochs(ends, 10)
    windows = positions(read, 0, range(read.windows))
    lane = np.concatenate([window[:-1] for window in windows[3 :: epochs.LANES]])
    steps = np.diff(lane)
    assert set(steps[np.flatnonzero(np.diff(lane // 50))] % 50) == {1}, "a lane goes on with another one's start"
    assert (steps[np.flatnonzero(np.diff(lane // 50) == 0)] == 1).all()
    last = {int(p) // 50 for window in windows[-len(windows) // 10 :] for p in window[:-1]}
    before = {int(p) // 50 for window in windows[: -len(windows) // 10] for p in window[:-1]}
    assert len(last & before) <= 2 * epochs.LANES, "those being read when the last tenth began, or cut by two lanes"


def test_a_batch_has_the_next_windows_whatever_process_reads_which_rows():
    corpus = load(None)
    whole = corpus.batch("train", 3, 5, 8, 16, order="documents")
    parts = [corpus.batch("train", 3, 5, 8, 16, slice(start, start + 4), "documents") for start in (0, 4)]
    for together, *apart in zip(whole, *parts, strict=True):
        assert torch.equal(together, torch.cat(apart))
    assert torch.equal(whole[0][:, 1:], whole[1][:, :-1])
    text = np.asarray(corpus.train).tobytes()
    assert all(bytes(row.tolist()) in text for row in whole[0][:2])


@pytest.mark.parametrize("data", ["files", "bpe:300", "separators", "bin"])
def test_documents_are_what_the_data_say_they_are(data, tmp_path):
    """Files of a folder, also as BPE tokens; parts between separators; tokens up to GPT-2's separator."""
    texts = [bytes(97 + (i + j) % 26 for j in range(20 + i)) + b"\n" for i in range(60)]
    if data == "bin":
        tokens = np.concatenate([np.append(np.frombuffer(text, np.uint8).astype("<u2"), 50256) for text in texts])
        tokens.astype("<u2").tofile(tmp_path / "train.bin")
        tokens[:100].astype("<u2").tofile(tmp_path / "val.bin")
        corpus = load(f"bin:50304:{tmp_path / ''}", context=4)
    elif data == "separators":
        (tmp_path / "all.txt").write_bytes(b"<|endoftext|>".join(texts))
        corpus = load(tmp_path / "all.txt", context=4)
    else:
        for i, text in enumerate(texts):
            (tmp_path / f"{i:02d}.txt").write_bytes(text)
        corpus = load(f"bpe:300:{tmp_path}" if data == "bpe:300" else tmp_path, context=4)
    starts = corpus.epochs(4)._starts.tolist()
    assert starts[0] == 0
    assert len(starts) == {"bin": 60, "separators": 56}.get(data, len(starts)) > 40
    bounds = [*starts, corpus.train.size]
    assert bounds == sorted(set(bounds))
    if data == "files":
        parts = [bytes(corpus.train[a:b]) for a, b in pairwise(bounds)]
        assert all(part in texts for part in parts)


def test_the_order_is_an_option_and_a_checkpoint_of_before_means_random():
    corpus = load("markov:64")
    config = TrainConfig.of(width=16, depth=1, steps=4, batch_size=2, context=8)
    assert config.batches.data_order == "documents"
    read = [Run(config.replace(data_order=order), corpus).loss("train", 0, 0) for order in ("documents", "random")]
    assert read[0] != read[1]
    with pytest.raises(ValueError, match="data_order='sorted' is unknown; choose documents, random"):
        config.replace(data_order="sorted")


def test_evaluations_are_the_same_in_both_orders():
    text = np.arange(200, dtype=np.uint8)
    corpus = Corpus(text[:150], text[150:], "numbers", "")
    config = TrainConfig.of(width=16, depth=1, steps=4, batch_size=2, context=8)
    losses = [Run(config.replace(data_order=order), corpus).validate() for order in ("documents", "random")]
    assert losses[0] == losses[1]
