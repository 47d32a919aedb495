"""Text as tokens of a byte-level BPE vocabulary, trained on the training split; tokenizers is imported here only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX = "bpe:"
SMALLEST, LARGEST = 257, 1 << 16  # the byte values and one merge; as many as uint16 holds
_PIECE = 1 << 16  # characters encoded at once: pieces run in parallel, and no token spans two of them


def parse(name: str) -> tuple[int, str | None]:
    """The vocabulary's size and the text's path of `bpe:N` or `bpe:N:PATH`.

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
    """A tokenizer of exactly `vocab` tokens: the 256 byte values, and the merges that `text` suggests.

    A function of the text, the size and the library's release; the number of threads does not matter.

    Raises:
        ValueError: the library is missing, or the text has too few merges.
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
    if (found := tokenizer.get_vocab_size()) < vocab:
        raise ValueError(
            f"{len(text)} bytes of training text give {found} tokens, fewer than the {vocab} of {PREFIX}{vocab}; "
            "ask for fewer or give a longer text"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: bytes) -> npt.NDArray[np.uint16]:
    """The tokens of a text; bytes that are not UTF-8 become replacement characters."""
    parts = [np.array(encoding.ids, dtype="<u2") for encoding in tokenizer.encode_batch_fast(_pieces(text))]
    return np.concatenate(parts) if parts else np.zeros(0, dtype="<u2")


def _pieces(text: bytes) -> list[str]:
    whole = text.decode("utf-8", "replace")
    return [whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE)]
