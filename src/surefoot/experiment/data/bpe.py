"""Byte-level BPE: a vocabulary trained on a text, and the text's tokens; only this file imports tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from surefoot.experiment.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def train(text: bytes, vocab: int) -> Tokenizer:
    """Train a tokenizer of exactly `vocab` tokens: the 256 byte values, and merges of frequent pairs in `text`.

    The result depends on the text, the size and the library's release, and not on the number of threads.

    Args:
        text: UTF-8; other bytes become replacement characters.
        vocab: number of tokens, `SMALLEST` to `LARGEST`.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the library is missing.
        DataError: the text is too short for so many tokens.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(f"{PREFIX}{vocab} needs the tokenizers library: pip install 'surefoot[bpe]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_pieces(text), trainer)
    if (size := tokenizer.get_vocab_size()) < vocab:
        raise DataError(
            f"{len(text)} bytes of training text give {size} tokens, fewer than the {vocab} of {PREFIX}{vocab}; "
            "ask for fewer or give a longer text"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: bytes) -> npt.NDArray[np.uint16]:
    """Encode a text as a vector of tokens; bytes that are not UTF-8 become replacement characters."""
    parts = [np.array(encoding.ids, dtype="<u2") for encoding in tokenizer.encode_batch_fast(_pieces(text))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype="<u2")


def _pieces(text: bytes) -> list[str]:
    whole = text.decode("utf-8", "replace")
    return [whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE)]
