"""Validation on another source than the training's, in the same vocabulary."""

from __future__ import annotations

from dataclasses import replace

from surefoot.experiment.data import bpe, markov
from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.errors import DataError


def evaluation(source: str, data: str | None, corpus: Corpus) -> Corpus:
    """A source whose validation split is in the vocabulary that a model is trained with.

    Args:
        source: as `load` takes it. A text beside BPE data is encoded by their vocabulary, which is trained once more.
        data: the training's source, as `load` took it.
        corpus: what `load` made of it.

    Returns:
        The source's corpus.

    Raises:
        DataError: another vocabulary, or a source that cannot be read.
    """
    other = load(source)
    data = data or ""
    kind, own = _kind(source), _kind(data)
    if own == bpe.PREFIX and not kind and other.unit == "byte":
        vocab, path = bpe.parse(data)
        tokenizer = bpe.train(load(path).train.tobytes(), vocab)
        validation = bpe.encode(tokenizer, other.validation.tobytes())
        return replace(other, validation=validation, vocab=vocab)
    if kind != own or other.vocab != corpus.vocab or (kind == bpe.PREFIX and source != data):
        remedy = (
            "the text alone, which is encoded by their vocabulary" if own == bpe.PREFIX else "data of the same kind"
        )
        raise DataError(f"{other.name} has another vocabulary than the training data, {corpus.name}: give {remedy}")
    return other


def _kind(source: str) -> str:
    return next((prefix for prefix in (markov.PREFIX, bpe.PREFIX) if source.startswith(prefix)), "")
