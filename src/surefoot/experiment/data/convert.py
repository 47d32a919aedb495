"""Converting documents into files of tokens, resumable after any interruption."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from surefoot.experiment.configs import differences
from surefoot.experiment.data import bpe, token_files
from surefoot.experiment.data.documents import HUB, SEPARATOR, documents, is_held, require, state_of
from surefoot.experiment.data.token_files import JOURNAL, MANIFEST, TOKEN, TOKENIZER, Layout, header
from surefoot.experiment.errors import DataError, OtherDirectory, with_remedy
from surefoot.experiment.files import Record, dumps, locked, replace_files, sha256_of, write_atomic

TRAINING_CHARACTERS = 1 << 26  # of the first documents, from which a vocabulary is trained
_BATCH = 1 << 22  # characters that are encoded at once

Parts = dict[str, list[npt.NDArray[np.uint16]]]
"""Tokens of documents, of the training and the validation split."""

Progress = Callable[[int, int], None]
"""Called with the number of documents and of tokens so far."""


@dataclass(frozen=True)
class Conversion:
    """What to convert, and how.

    Args:
        source: of documents, see `documents`.
        vocab: size of the BPE vocabulary that is trained; None where `tokenizer` is given.
        tokenizer: a `tokenizer.json` of the tokenizers library; None to train one.
        layout: "header" (llm.c, modded-nanogpt) or "raw" (nanoGPT).
        field: name of the text in lines, rows and data sets.
        shard_tokens: tokens after which a file is closed, at the next document's end.
        validation_one_in: one document in so many is for validation, by its text's SHA-256.
        limit: number of documents at which to stop; None for all.

    Raises:
        ValueError: an empty source, neither or both of `vocab` and `tokenizer`, or a vocabulary out of range.
    """

    source: str
    vocab: int | None = None
    tokenizer: str | None = None
    layout: Layout = "header"
    field: str = "text"
    shard_tokens: int = 100_000_000
    validation_one_in: int = 100
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("the path of the documents is empty: give a text file or folder, or hf:NAME")
        if (self.vocab is None) == (self.tokenizer is None):
            raise ValueError("give the size of a vocabulary to train, or a tokenizer's file, and not both")
        if self.vocab is not None and not bpe.SMALLEST <= self.vocab <= bpe.LARGEST:
            raise ValueError(f"a BPE vocabulary has {bpe.SMALLEST} to {bpe.LARGEST} tokens, got {self.vocab}")


def convert(conversion: Conversion, out: Path, progress: Progress | None = None) -> Record:
    """Write a folder of token files, or what is missing of it.

    After every `shard_tokens` tokens a file of training tokens and one of validation tokens are complete, and a journal
    says so: after an interruption the same call skips the documents that are in them, if the source's files have not
    changed. For a complete folder it warns if they have.

    Args:
        conversion: what to write.
        out: the folder, created if missing.
        progress: called now and then.

    Returns:
        The manifest.

    Raises:
        DataError: documents or a tokenizer that cannot be read, or no document at all.
        DirectoryInUse: another process writes to the folder.
        OSError: a file cannot be written; those before it are intact, and the same call goes on.
        ValueError: the folder holds another conversion or foreign files, or lies in the source, or that has changed
            since an interruption; a library is missing.
    """
    if out.resolve().is_relative_to(Path(conversion.source).resolve()):
        raise ValueError(f"{out} lies in {conversion.source}, whose files are all read: give a folder outside it")
    if not out.exists():
        require(conversion.source)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        wanted = asdict(conversion)
        if record := token_files.read(out, MANIFEST):
            _require_conversion(wanted, record, out)
            token_files.require_same(out, record["shards"])
            token_files.require_digest(out / TOKENIZER, record["tokenizer_sha256"])
            if _changed(record):
                warnings.warn(f"{out} was left as it was, though {conversion.source} has changed since", stacklevel=2)
        else:
            record = _converted(conversion, out, _journal(wanted, out), progress)
            write_atomic(out / MANIFEST, dumps(record, indent=1) + "\n")
        (out / JOURNAL).unlink(missing_ok=True)  # also that of a process killed in between
        return record


def _converted(conversion: Conversion, out: Path, journal: Record, progress: Progress | None) -> Record:
    """Write the files, and return the manifest's content."""
    tokenizer = _tokenizer(conversion, out)
    for parts, read in _split(conversion, tokenizer, journal, progress):
        index = len({shard["name"][-10:] for shard in journal["shards"]})
        for split, tokens in parts.items():
            if tokens:
                path = out / f"{split}_{index:06d}.bin"
                journal["shards"].append(_written(path, np.concatenate(tokens), conversion.layout))
        journal["documents"] = read
        write_atomic(out / JOURNAL, dumps(journal) + "\n")
    if not (shards := journal["shards"]):
        raise DataError(f"{conversion.source} holds no text: give a text file or folder")
    return {
        **journal,
        "tokens": sum(shard["tokens"] for shard in shards),
        "vocab": tokenizer.get_vocab_size(),
        "layout": conversion.layout,
        "separator": tokenizer.token_to_id(SEPARATOR),
        "tokenizer_sha256": sha256_of(out / TOKENIZER),
        "sha256": token_files.digest_of(shards),
    }


def verify(path: Path) -> Record:
    """Compare every file of a folder with its digest, and record its modification time where they agree.

    Args:
        path: a folder that `convert` wrote.

    Returns:
        The manifest.

    Raises:
        DataError: there is no manifest, or a file is missing or is not the one that was written.
    """
    record = token_files.read_manifest(path)
    if record is None:
        raise DataError(f"{path} has no {MANIFEST} to compare its files with")
    _compare(path, record["shards"])
    token_files.require_digest(path / TOKENIZER, record["tokenizer_sha256"])
    write_atomic(path / MANIFEST, dumps(record, indent=1) + "\n")
    return record


def _compare(folder: Path, shards: list[Record]) -> None:
    """Refuse files that differ from those written, and record the others' modification times."""
    for shard in shards:
        file = folder / shard["name"]
        token_files.require_digest(file, shard["sha256"])
        shard["mtime_ns"] = file.stat().st_mtime_ns


def _not_here(message: str) -> ValueError:
    """An error whose remedy is another folder."""
    return with_remedy(ValueError(f"{message}: choose another folder"), OtherDirectory())


def _require_conversion(wanted: Record, there: Record, out: Path) -> None:
    """Refuse a folder of another conversion."""
    if differing := differences(there["conversion"], wanted):
        raise _not_here(f"{out} holds another conversion; it differs in {'; '.join(differing)}")


def _changed(there: Record) -> bool:
    """Whether a source's files have changed since a folder was begun.

    An earlier version did not note them; sources on the hub, whose empty rows it counted, too, count as changed.
    """
    source: str = there["conversion"]["source"]
    return there["files"] != state_of(source) if "files" in there else source.startswith(HUB)


def _journal(wanted: Record, out: Path) -> Record:
    """How far an earlier call came; one that wrote no tokens yet leaves the folder to any conversion."""
    there = token_files.read(out, JOURNAL)
    tokens = sorted(out.glob("*.bin"))
    if there is None and (foreign := [*tokens, *out.glob(TOKENIZER)]):
        raise _not_here(f"{out} holds files not of this conversion ({foreign[0].name})")
    for half in out.glob(".*.tmp"):  # of a process that was killed
        half.unlink()
    if there is not None and tokens:
        _require_conversion(wanted, there, out)
        if _changed(there):
            raise _not_here(f"{wanted['source']} has changed since {out} was begun")
        _compare(out, there["shards"])
        return there
    journal = {"conversion": wanted, "files": state_of(wanted["source"]), "documents": 0, "shards": []}
    write_atomic(out / JOURNAL, dumps(journal) + "\n")  # before anything else: from now on the folder is ours
    return journal


def _tokenizer(conversion: Conversion, out: Path) -> bpe.Tokenizer:
    """The tokenizer of the existing tokens, else the given one, or a new one, written to the folder."""
    path = out / TOKENIZER
    if not path.exists() or not any(out.glob("*.bin")):
        if conversion.tokenizer is not None:
            given = Path(conversion.tokenizer)
            given = given / TOKENIZER if given.is_dir() else given
            _usable(given)
            write_atomic(path, given.read_text(encoding="utf-8"))
        else:
            assert conversion.vocab is not None
            some = islice(documents(conversion.source, conversion.field), conversion.limit)
            texts = _until(some, TRAINING_CHARACTERS, cut=True)
            write_atomic(path, bpe.train(texts, conversion.vocab, conversion.source, [SEPARATOR]).to_str())
    return _usable(path)


def _usable(path: Path) -> bpe.Tokenizer:
    """Read a tokenizer that fits files of tokens."""
    tokenizer = bpe.read(path)
    if (size := tokenizer.get_vocab_size()) > bpe.LARGEST:
        raise DataError(f"{path} has {size} tokens, but two bytes hold {bpe.LARGEST}: choose a smaller one")
    if tokenizer.token_to_id(SEPARATOR) is None:
        raise DataError(f"{path} has no token {SEPARATOR}, which ends a document: choose a tokenizer that has it")
    tokenizer.encode_special_tokens = True  # in a document its characters are text, and no end
    return tokenizer


def _until(texts: Iterator[str], characters: int, cut: bool = False) -> Iterator[str]:
    """The next texts, until they have so many characters together; the last one is cut there, or left whole."""
    for text in texts:
        yield text[:characters] if cut else text
        characters -= len(text)
        if characters <= 0:
            return


def _split(
    conversion: Conversion, tokenizer: bpe.Tokenizer, journal: Record, progress: Progress | None
) -> Iterator[tuple[Parts, int]]:
    """Tokens of the documents that the journal lacks, for one training and one validation file at a time.

    Each pair comes with the number of documents read by then.
    """
    read, written, new = journal["documents"], sum(shard["tokens"] for shard in journal["shards"]), 0
    texts = documents(conversion.source, conversion.field, read)
    texts = islice(texts, None if conversion.limit is None else max(0, conversion.limit - read))
    separator = np.array([tokenizer.token_to_id(SEPARATOR)], dtype=TOKEN)
    parts: Parts = {"train": [], "val": []}
    while batch := [*_until(texts, _BATCH)]:
        for text, tokens in zip(batch, bpe.encode(tokenizer, batch), strict=True):
            parts["val" if is_held(text.encode(), conversion.validation_one_in) else "train"] += [tokens, separator]
            read, new = read + 1, new + tokens.size + 1
            if new >= conversion.shard_tokens:
                yield parts, read
                parts, written, new = {"train": [], "val": []}, written + new, 0
        if progress:
            progress(read, written + new)
    if new:
        yield parts, read


def _written(path: Path, tokens: npt.NDArray[np.uint16], layout: Layout) -> Record:
    """Write a file of tokens, and return what the journal says of it."""
    content = (header(tokens.size) if layout == "header" else b"") + tokens.tobytes()
    replace_files({path: content})
    return {
        "name": path.name, "tokens": tokens.size, "bytes": len(content), "mtime_ns": path.stat().st_mtime_ns,
        "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip


def absolute(conversion: Conversion) -> Conversion:
    """The same conversion with absolute paths, for any working directory."""
    source = conversion.source if conversion.source.startswith("hf:") else str(Path(conversion.source).resolve())
    tokenizer = conversion.tokenizer and str(Path(conversion.tokenizer).resolve())
    return replace(conversion, source=source, tokenizer=tokenizer)
