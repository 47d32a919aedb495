"""Validation on another source than the training's, in the same vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from surefoot.experiment.data import bpe, markov, shards
from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.data.manifest import TOKENIZER, read_manifest
from surefoot.experiment.errors import DataError


def evaluation(source: str, data: str | None, corpus: Corpus) -> Corpus:
    """A source whose validation split is in the vocabulary that a model is trained with.

    Args:
        source: as `load` takes it. A text beside BPE data or files of tokens is encoded by their vocabulary: that of
            `bpe:` is trained once more, that of `bin:` is the folder's `tokenizer.json`. Files of tokens without a
            manifest have the training's vocabulary, and one whose name says validation is so as a whole.
        data: the training's source, as `load` took it.
        corpus: what `load` made of it.

    Returns:
        The source's corpus.

    Raises:
        DataError: another vocabulary, or a source that cannot be read.
        ValueError: a name that is none.
    """
    data = data or ""
    kind, data_kind = _kind(source), _kind(data)
    theirs, ours = _tokenizer_of(source), _tokenizer_of(data)
    encodes = data_kind == bpe.PREFIX or ours is not None
    if encodes and not kind:
        return _encoded(load(source), data, ours, corpus)
    other = _opened(source, corpus.vocab) if kind == data_kind == shards.PREFIX else load(source)
    differ = theirs is not None and ours is not None and theirs.read_bytes() != ours.read_bytes()
    if kind != data_kind or other.vocab != corpus.vocab or (kind == bpe.PREFIX and source != data) or differ:
        remedy = "the text alone, which is encoded by their vocabulary" if encodes else "data of the same kind"
        raise DataError(f"{other.name} has another vocabulary than the training data, {corpus.name}: give {remedy}")
    return other


def _opened(source: str, vocab: int) -> Corpus:
    """Files of tokens, in this vocabulary where none is stated."""
    stated, path = shards.parse(source)
    if stated is None and read_manifest(path) is None:
        stated, source = vocab, f"{shards.PREFIX}{vocab}:{path}"
    corpus = load(source)
    if path.is_file() and shards.VALIDATION.search(path.stem.lower()):
        return replace(corpus, validation=shards.load(path, stated, validation_one_in=1).validation)
    return corpus


def _encoded(text: Corpus, data: str, tokenizer: Path | None, corpus: Corpus) -> Corpus:
    """A text's validation split in the tokens of the training's source."""
    if tokenizer is not None:
        known = bpe.read(tokenizer)
    else:
        vocab, path = bpe.parse(data)
        known = bpe.train(np.asarray(load(path).train).tobytes(), vocab)
    validation = bpe.encode(known, np.asarray(text.validation).tobytes())
    return replace(text, validation=validation, vocab=corpus.vocab)


def _kind(source: str) -> str:
    kinds = (markov.PREFIX, bpe.PREFIX, shards.PREFIX)
    return next((prefix for prefix in kinds if source.startswith(prefix)), "")


def _tokenizer_of(source: str) -> Path | None:
    """The tokenizer beside files of tokens."""
    if _kind(source) != shards.PREFIX:
        return None
    path = shards.parse(source)[1] / TOKENIZER
    return path if path.is_file() else None
