"""Tokens of a text in a fixed split, and the batches that a step reads of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.experiment.data.epochs import Epochs, Positions, at_random
from surefoot.experiment.data.token_files import Shards
from surefoot.experiment.errors import DataError

if TYPE_CHECKING:
    from surefoot.experiment.data.bpe import Tokenizer

Split = Literal["train", "validation"]
Tokens = npt.NDArray[np.unsignedinteger[Any]]
SPLITS: tuple[Split, ...] = ("train", "validation")  # a split's index is part of its random key
VALIDATION_ONE_IN = 10  # a tenth of a file's bytes, or of a folder's files, is validation


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of a text, by default its bytes, in a fixed training and validation split.

    Args:
        train: tokens of the training split, in the smallest unsigned dtype that can represent the vocabulary.
        validation: tokens of the validation split, likewise.
        name: a description of the text for messages.
        sha256: of the training array's bytes followed by the validation array's (for one file: the file's own hash); of
            files of tokens, that of the manifest.
        files: number of files read.
        vocab: 256, the byte values; fewer for a synthetic language, more for a BPE vocabulary.
        ends: position after each document of the training split; or the token that ends one, which the first batch of
            documents looks for (a second for two gigabytes); default: the split is one document.
        tokenizer: the tokenizer of a text's tokens, or its file; None without one.

    Attributes:
        epochs_of: the orders of documents asked for so far, by context.
    """

    train: Tokens | Shards
    validation: Tokens | Shards
    name: str
    sha256: str
    files: int = 1
    vocab: int = 256
    ends: Positions | int | None = None
    tokenizer: Tokenizer | Path | None = None
    epochs_of: dict[int, Epochs] = field(default_factory=dict, init=False, repr=False)

    @property
    def size(self) -> int:
        """Number of tokens of both splits."""
        return self.train.size + self.validation.size

    @property
    def unit(self) -> str:
        """Name of a token in messages: "byte" or "token"."""
        return "byte" if self.train.dtype == np.uint8 and self.vocab == 256 else "token"

    def require(self, context: int, splits: Sequence[Split] = SPLITS) -> None:
        """Raise DataError unless the splits have at least `context + 1` tokens; ValueError for a context below 1."""
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        for split in splits:
            size = self._tokens(split).size
            if size < context + 1:
                few = f"the {split} split has {size}, and a context of {context} needs {context + 1}"
                least = f"{VALIDATION_ONE_IN * (context + 1)} {self.unit}s"
                remedy = f"Give a text of at least {least}, or a shorter context"
                if self.size >= VALIDATION_ONE_IN * (context + 1):
                    remedy = f"Give more of the text to the {split} split, or a shorter context"
                raise DataError(f"{self.name}: {self.size} {self.unit}s are too few; {few}. {remedy}")

    def batch(
        self,
        split: Split,
        seed: int,
        step: int,
        batch_size: int,
        context: int,
        rows: slice = slice(None),
        order: Literal["documents", "random"] = "random",
    ) -> tuple[Tensor, Tensor]:
        """Read windows of a split as inputs, and the windows one token later as targets. A pure function.

        In random order they are those of `at_random`; by documents, row `i` of a step is window `step * batch_size + i`
        of `Epochs`: every document of the training split is read once before one is read again.

        Args:
            split: "train" or "validation".
            seed: 0 or more; use a fixed one for validation, to compare runs of several seeds.
            step: 0 or more.
            batch_size: number of windows.
            context: tokens per window.
            rows: which of the windows are read; default: all.
            order: "random", or "documents" for the training split.

        Returns:
            `(inputs, targets)`, both `(batch_size, context)` int64, or as many as there are rows.

        Raises:
            ValueError: an unknown split, or a negative number.
            DataError: a text too short for the context, or a token outside the vocabulary.

        >>> text = np.arange(100, dtype=np.uint8)
        >>> corpus = Corpus(text[:90], text[90:], "numbers", "")
        >>> x, y = corpus.batch("train", seed=0, step=3, batch_size=2, context=4)
        >>> torch.equal(y, x + 1)
        True
        """
        if not (0 <= seed < 2**64 and 0 <= step < 2**64 and batch_size >= 1):
            raise ValueError(f"seed and step are below 2**64, batch_size is positive; got {seed}, {step}, {batch_size}")
        text = self._tokens(split)
        self.require(context)
        if order == "documents":
            assert split == "train", "evaluations compare runs on the same windows of many documents"
            epochs, numbers = self.epochs(context), range(step * batch_size, (step + 1) * batch_size)[rows]
            windows = np.stack([_joined(text, epochs.spans(seed, number)) for number in numbers])
        else:
            starts = at_random(seed, SPLITS.index(split), step, batch_size, rows, text.size - context)
            windows = _windows(text, starts, context + 1)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def epochs(self, context: int) -> Epochs:
        """The order in which documents are read, kept for later calls."""
        if context not in self.epochs_of:
            self.epochs_of[context] = Epochs(self.document_ends, context)
        return self.epochs_of[context]

    @functools.cached_property
    def document_ends(self) -> Positions:
        """The position after each document of the training split."""
        if isinstance(self.train, Shards) and isinstance(self.ends, int):
            return self.train.ends(self.ends)
        return self.ends if isinstance(self.ends, np.ndarray) else np.array([self.train.size])

    def _tokens(self, split: Split) -> Tokens | Shards:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
        return self.train if split == "train" else self.validation


def _joined(text: Tokens | Shards, spans: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([_windows(text, np.array([start]), length)[0] for start, length in spans])


def _windows(text: Tokens | Shards, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    if isinstance(text, Shards):
        return text.windows(starts, length)
    return np.asarray(text[starts[:, None] + np.arange(length)], dtype=np.int64)
