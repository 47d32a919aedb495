"""An epoch reads every document once; a window is a pure function of its number; the next epoch has another order."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from surefoot.cli import main
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


@pytest.mark.parametrize("lanes", [1, 3, 256, None])
@pytest.mark.parametrize("case", range(8))
def test_an_epoch_reads_every_token_once(lanes, case):
    """All but the tokens at its end that are fewer than a window; documents shorter and longer than windows."""
    random = np.random.default_rng(case)
    ends, context = np.cumsum(random.integers(1, 20, size=2 + 5 * case)), int(random.integers(1, 6))
    read = Epochs(ends, context, lanes)
    orders = []
    for epoch in range(2):
        numbers = range(epoch * read.windows, (epoch + 1) * read.windows)
        windows = positions(read, 7, numbers)
        assert {len(window) for window in windows} == {context + 1}
        inputs = np.concatenate([window[:-1] for window in windows])
        assert len(set(inputs.tolist())) == len(inputs) > ends[-1] - 1 - context
        orders.append(inputs.tolist())
    assert orders[0] != orders[1] or lanes == 1, "a new order in each epoch"
    assert lanes == 1 or orders[0] != np.concatenate([w[:-1] for w in positions(read, 8, range(read.windows))]).tolist()


@pytest.mark.parametrize("documents", [1, 2, epochs.FEW - 1])
def test_few_documents_are_read_in_other_orders_by_other_seeds_and_in_other_epochs(documents):
    """There are as few orders of them alone: `--seed` would draw the initial weights only."""
    read = Epochs(np.array([10] * (documents - 1) + [4000]).cumsum(), 10)
    first = [tuple(read.spans(seed, epoch * read.windows)[0]) for seed in range(3) for epoch in range(3)]
    assert len({*first}) == 9
    many = Epochs(np.array([10] * (epochs.FEW - 1) + [4000]).cumsum(), 10)
    assert many._epoch(3, 0)[2] == 0


def test_a_document_is_read_from_its_start_to_its_end_and_not_again_before_all_others(monkeypatch):
    monkeypatch.setattr(epochs, "LANES", 1)
    read = Epochs(np.cumsum([333] * 2000), 10)
    windows = positions(read, 0, range(read.windows))
    for lane in range(50):
        passes = windows[: len(windows) // 2000 * 2000]
        tokens = np.concatenate([window[:-1] for window in passes[lane::2000]])
        turns = np.flatnonzero(np.diff(tokens) != 1) + 1
        assert len(tokens) >= 320
        assert not (tokens[turns] % 333).any(), "after a document's end, another one's start"
    first = [{int(position) // 333 for position in window[:-1]} for window in windows[:2000]]
    again, seen = 0, set[int]()
    for documents in first:
        again += not documents.isdisjoint(seen)
        seen |= documents
    assert again < 100, "in the first pass windows are of new documents, but for those that two lanes share"
    monkeypatch.setattr(epochs, "LANES", 5000)
    assert [Epochs(np.array([size]), 10)._lanes for size in (601, 10**6)] == [60, 5000], "few documents, many places"


def test_a_batch_is_of_many_documents_also_where_they_are_long():
    read = Epochs(np.cumsum([1000] * 100), 10)
    for step in (0, 7, 100):
        starts = [spans[0][0] // 1000 for spans in (read.spans(0, 16 * step + row) for row in range(16))]
        assert len(set(starts)) >= 14


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
    ends = corpus.document_ends.tolist()
    assert ends[-1] == corpus.train.size
    assert len(ends) == {"bin": 60, "separators": 56}.get(data, len(ends)) > 40
    bounds = [0, *ends]
    assert bounds == sorted(set(bounds))
    if data == "files":
        parts = [bytes(corpus.train[a:b]) for a, b in pairwise(bounds)]
        assert all(part in texts for part in parts)


def test_the_order_is_an_option_and_a_checkpoint_of_before_means_random():
    corpus = load("markov:64")
    config = TrainConfig(width=16, depth=1, steps=4, batch_size=2, context=8)
    assert config.data_order == "documents"
    read = [Run(config.replace(data_order=order), corpus).loss("train", 0, 0) for order in ("documents", "random")]
    assert read[0] != read[1]
    with pytest.raises(ValueError, match="data_order='sorted' is unknown; choose documents, random"):
        config.replace(data_order="sorted")


def test_evaluations_are_the_same_in_both_orders():
    text = np.arange(200, dtype=np.uint8)
    corpus = Corpus(text[:150], text[150:], "numbers", "")
    config = TrainConfig(width=16, depth=1, steps=4, batch_size=2, context=8)
    losses = [Run(config.replace(data_order=order), corpus).validate() for order in ("documents", "random")]
    assert losses[0] == losses[1]


def test_a_run_of_more_than_one_epoch_says_so(inline, undrawn, tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    size = ["--depth", "1", "--batch-size", "8", "--context", "16", "--data", str(tmp_path / "text.txt")]
    for order, steps, said in (("documents", 40, "2.11 times"), ("documents", 4, None), ("random", 40, None)):
        out = ["--out", str(tmp_path / f"{order}_{steps}"), "--steps", str(steps), "--data-order", order]
        assert main(["train", "--width", "16", *size, *out]) == 0
        told = capsys.readouterr()
        assert (said or "times") in told.err if said else "times" not in told.err
        assert "training loss of the last tenth" in told.out
        assert "(gap " in told.out
    sweep = (
        "transfer --depth 1 --context 16 --widths 16 --recipes steady --seeds 1 --steps 2 --rates -3 --batches 8 400"
    )
    assert main([*sweep.split(), *size[-2:], "--out", str(tmp_path / "s")]) == 0
    assert "2 steps read the 2,430 bytes for training 5.27 times" in capsys.readouterr().err
