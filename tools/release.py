"""Refuse a release that is not one: the tag, the versions and the changelog have to agree.

    python tools/release.py v0.3.0      # exit 1 names what is in the way

The version stands in pyproject.toml, src/surefoot/__init__.py and CITATION.cff; the changelog's newest entry has it and
its date, and nothing waits under "Unreleased".
"""

import re
import sys
from pathlib import Path

PLACES = {
    "pyproject.toml": r'^version = "(.*)"$',
    "src/surefoot/__init__.py": r'^__version__ = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
    "CHANGELOG.md": r"^## (\d\S*), \d{4}-\d\d-\d\d$",
}


def obstacles(tag: str, root: Path) -> list[str]:
    """What is in the way of a release by this tag; nothing if it can go."""
    found = []
    for name, pattern in PLACES.items():
        line = re.search(pattern, text := (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if line is None or tag != f"v{line[1]}":
            found.append(f"{name} has version {line and line[1]}, the tag is {tag}")
    waiting = re.search(r"^## Unreleased\s+(?!## )(\S.*)$", text, re.MULTILINE)
    return found + ([f"CHANGELOG.md has an entry under Unreleased: {waiting[1][:60]}"] if waiting else [])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if reasons := obstacles(sys.argv[1], Path(__file__).parents[1]):
        sys.exit("\n".join(reasons))
