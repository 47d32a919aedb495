"""Folders of files of tokens as one array for training and one for validation.

A folder that `surefoot tokens` wrote has a manifest, which says what each file must be. Others are taken as they are.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from surefoot.experiment.data.corpus import VALIDATION_ONE_IN, Corpus
from surefoot.experiment.data.token_files import TOKENIZER, Shards, open_tokens, read_manifest, require_same
from surefoot.experiment.errors import DataError, Locate, with_remedy

PREFIX = "bin:"
ROUND = 64  # a vocabulary that nobody states is the largest token's, rounded up to a multiple of this
SAMPLES, SAMPLE = 256, 4096  # places sampled to identify a file without a manifest, and bytes at each
VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)")

GPT2_SEPARATOR = 50256


def parse(name: str) -> tuple[int | None, Path]:
    """Read `bin:PATH` or `bin:N:PATH`.

    Args:
        name: the text.

    Returns:
        `(vocab, path)`, the vocabulary's size N being None where it is missing.

    Raises:
        ValueError: no path, or a vocabulary of no tokens or of more than uint16 has.

    >>> parse("bin:50304:data/owt")[0]
    50304
    """
    match = re.fullmatch(r"bin:(?:(\d+):)?(.+)", name)
    vocab = int(match[1]) if match and match[1] else None
    if match is None or (vocab is not None and not 1 <= vocab <= 1 << 16):
        raise ValueError(f"{name}: files of tokens are {PREFIX}PATH or {PREFIX}N:PATH with a vocabulary N up to 65536")
    return vocab, Path(match[2])


def load(path: Path, vocab: int | None = None, validation_one_in: int = VALIDATION_ONE_IN) -> Corpus:
    """Open a file of tokens, or all of a folder, without reading it. A gigabyte opens in milliseconds.

    The files whose names say val, valid, validation or test are for validation; where there are none, the last part of
    the tokens is.

    Args:
        path: a file, or a folder of files `*.bin`, hidden ones left out.
        vocab: number of tokens; default: the manifest's, else the largest token's, rounded up to a multiple of 64,
            for which all files are read.
        validation_one_in: without validation files, one part in so many is for validation.

    Returns:
        The corpus; documents end with the manifest's separator, else with GPT-2's.

    Raises:
        DataError: nothing there, a file that is no such file, or not the one that the manifest describes.
    """
    manifest = read_manifest(path) or {}
    written = manifest.get("shards", [])
    require_same(path, written)
    files = [path / shard["name"] for shard in written] or _files(path)
    tokens = {file: open_tokens(file, manifest.get("layout")) for file in files}
    stated = vocab or manifest.get("vocab")
    vocab = stated or -(-(max(int(part.max()) for part in tokens.values()) + 1) // ROUND) * ROUND

    def joined(held: bool) -> Shards:
        group = [file for file in files if bool(VALIDATION.search(file.stem.lower())) == held]
        return Shards([tokens[file] for file in group], [*map(str, group)], stated)

    train, validation = joined(False), joined(True)
    if not validation.size or not train.size:
        whole = train if train.size else validation
        train, validation = whole.cut(whole.size - whole.size // validation_one_in)
    sha256, separator = manifest.get("sha256") or _fingerprint(files), manifest.get("separator", GPT2_SEPARATOR)
    tokenizer = path / TOKENIZER if (path / TOKENIZER).is_file() else None
    return Corpus(train, validation, f"{path}, {vocab} tokens", sha256, len(files), vocab, separator, tokenizer)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise with_remedy(DataError(f"{path} does not exist, or is neither a file nor a folder"), Locate(path))
    if not (files := sorted(file for file in path.glob("*.bin") if not file.name.startswith("."))):
        raise DataError(f"{path} holds no .bin files: write some with surefoot tokens IN {path}")
    return files


def _fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' sizes and of samples of them."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for place in sorted({i * max(0, size - SAMPLE) // (SAMPLES - 1) for i in range(SAMPLES)}):
                opened.seek(place)
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()
