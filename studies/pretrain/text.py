"""The study's text: what Debian's and PyPI's packages ship on a machine, as one file of JSON lines.

    python studies/pretrain/text.py text.jsonl
    surefoot tokens text.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000

WordNet's definitions, documentation and licences, manual pages, Perl's and Python's standard libraries, and the sources
of the packages that torch brings along; compressed files are opened, and a text that is there twice (most licences are)
is taken once. Another machine has other packages, hence another text: the sizes are printed, and results
say the digest of the tokens that they were trained on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from surefoot.experiment.files import replace_files

SOURCES = {
    "wordnet": (Path("/usr/share/wordnet"), (".noun", ".verb", ".adj", ".adv")),
    "documentation": (Path("/usr/share/doc"), ("", ".gz", ".txt", ".md", ".rst", ".html")),
    "licences": (Path("/usr/share/common-licenses"), ("",)),
    "manual pages": (Path("/usr/share/man"), (".gz",)),
    "perl": (Path("/usr/share/perl"), (".pm", ".pod", ".pl")),
    "python": (Path(sysconfig.get_path("stdlib")), (".py", ".txt", ".rst")),
    **{
        name: (Path(sysconfig.get_path("purelib")) / name, (".py", ".md", ".rst", ".txt"))
        for name in ("torch", "numpy", "scipy", "sympy", "networkx")
    },
}
"""Name -> the folder, and the ends of names that are read; "" is any name without a dot."""
SKIPPED = {"site-packages", "test", "tests", "idle_test"}  # folders: what is in them is elsewhere, or hardly a text
SHORTEST, LONGEST = 200, 500_000  # characters of a document


def texts(folder: Path, ends: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Names and contents of a folder's texts."""
    for file in sorted(folder.rglob("*")):
        end = file.suffix.lower() if "." in file.name else ""
        inside = file.relative_to(folder)
        if end not in ends or SKIPPED & {*inside.parts} or not file.is_file():
            continue
        if folder.name == "man" and not inside.parts[0].startswith("man"):
            continue  # translations
        try:
            content = gzip.decompress(file.read_bytes()) if end == ".gz" else file.read_bytes()
            text = content.decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError):
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
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                lines.append(json.dumps({"source": source, "name": name, "text": text}) + "\n")
                count, size = count + 1, size + len(text)
        print(f"{source}: {count:,} documents, {size / 1e6:.1f} MB of {folder}", file=sys.stderr)
    replace_files({out: "".join(lines).encode()})
    print(f"{out}: {len(lines):,} documents, {sum(map(len, lines)) / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
