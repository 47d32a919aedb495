"""Byte-level BPE: a vocabulary trained on a text, and the text's tokens; only this file imports tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from surefoot.experiment.errors import DataError, importing, reading

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizer  # for the annotations of other modules, too

PREFIX = "bpe:"
SMALLEST, LARGEST = 257, 1 << 16  # sizes of a vocabulary: the byte values and one merge; the range of uint16
_PIECE = 1 << 16  # characters per piece: pieces are encoded in parallel, and no token spans two of them


def parse(name: str) -> tuple[int, str | None]:
    """Read `bpe:N` or `bpe:N:PATH`.

    Args:
        name: the text.

    Returns:
        `(vocab, path)`: the vocabulary's size N and PATH, None where it is missing.

    Raises:
        ValueError: not a whole number from `SMALLEST` to `LARGEST`, or an empty path.

    >>> parse("bpe:4096"), parse("bpe:512:notes/a.txt")
    ((4096, None), (512, 'notes/a.txt'))
    """
    size, colon, path = name.removeprefix(PREFIX).partition(":")
    if not size.isdecimal() or not SMALLEST <= int(size) <= LARGEST or (colon and not path):
        raise ValueError(f"{name}: a BPE vocabulary is {PREFIX}N or {PREFIX}N:PATH with N from {SMALLEST} to {LARGEST}")
    return int(size), path or None


def train(texts: Iterable[str], vocab: int, source: str, special: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` tokens: the 256 byte values, and merges of frequent pairs in the texts.

    The result depends on the texts, the size and the library's release, and not on the number of threads.

    Args:
        texts: read once.
        vocab: number of tokens, `SMALLEST` to `LARGEST`, the special ones included.
        source: name of the texts, for error messages.
        special: tokens that no text is encoded as, the first ones of the vocabulary.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the library is missing.
        DataError: the texts are too short for so many tokens.
    """
    with importing("bpe", f"{PREFIX}{vocab} needs the tokenizers library:"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    if (size := tokenizer.get_vocab_size()) < vocab:
        small = "ask for fewer" if size > SMALLEST + len(special) else "is it empty, or not UTF-8 text?"
        raise DataError(f"{source} yields {size} tokens, fewer than the {vocab} requested: {small}")
    return tokenizer


def read(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, without its settings for cutting and padding a model's inputs.

    Args:
        path: the file.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the library is missing.
        DataError: the file cannot be read, or is no tokenizer.
    """
    with importing("bpe", f"{path} needs the tokenizers library:"):
        from tokenizers import Tokenizer
    with reading(path, "give a tokenizer.json"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no class of its own for it
        raise DataError(f"{path} is not a tokenizers-library file: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def byte_ends(tokenizer: Tokenizer, tokens: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Where each token of a text ends in the text's bytes: the alphabet has one character for each byte."""
    lengths = {index: len(token) for token, index in tokenizer.get_vocab().items()}
    return np.array([lengths[index] for index in range(len(lengths))])[tokens].cumsum()


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.uint16]]:
    """Encode texts, each as a vector of tokens, on all cores."""
    cut = [_pieces(text) for text in texts]
    flat = [piece for parts in cut for piece in parts]
    encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    empty = np.zeros(0, dtype="<u2")
    return [np.concatenate([empty, *(np.array(next(encoded).ids, dtype="<u2") for _ in parts)]) for parts in cut]


def _pieces(text: str) -> list[str]:
    """A text in parts that are encoded in parallel."""
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
