"""The synthetic language has the entropy it claims."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from surefoot.experiment.data import markov
from surefoot.experiment.data.sources import load


def test_measured_conditional_entropy_is_the_floor() -> None:
    symbols = 32
    text = np.frombuffer(markov.text(symbols), dtype=np.uint8).astype(np.int64)
    pairs = np.bincount(text[:-1] * symbols + text[1:], minlength=symbols**2).reshape(symbols, symbols) / (
        text.size - 1
    )
    given = pairs / pairs.sum(1, keepdims=True).clip(1e-300)
    measured = -(pairs * np.log(given.clip(1e-300))).sum()
    assert measured == pytest.approx(markov.entropy(), rel=2e-3)
    assert (pairs > 0).sum(1).max() == markov.SUCCESSORS


def test_the_text_never_changes() -> None:
    """Golden: integers only, so equal on every machine."""
    assert hashlib.sha256(markov.text(64, 4096)).hexdigest()[:16] == "b8555bf564392b50"


def test_loaded_by_name_with_its_own_vocabulary() -> None:
    corpus = load("markov:20", context=64)
    x, _ = corpus.batch("train", 0, 0, 4, 64)
    assert corpus.vocab == 20
    assert int(x.max()) < 20
    assert corpus.train.size + corpus.validation.size == markov.LENGTH
    assert corpus.unit == "token"  # in which losses are said to be, and no byte


@pytest.mark.parametrize("name", ["markov:", "markov:3", "markov:257", "markov:x"])
def test_a_bad_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="markov:N"):
        load(name)
