"""One version, wherever it is written; and the extras likewise."""

import re
import tomllib
from pathlib import Path

import surefoot
from surefoot.cli import _EXTRAS

ROOT = Path(__file__).parents[2]


def first(pattern, name):
    """The groups of a pattern's first line in a file."""
    return re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE).groups()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == surefoot.__version__
    assert first(r"^version: (.*)$", "CITATION.cff") == (surefoot.__version__,)
    assert first(r"^## (\S+), ", "CHANGELOG.md") == (surefoot.__version__,)


def test_the_newest_version_has_the_date_of_its_citation():
    assert first(r"^## \S+, (\S+)$", "CHANGELOG.md") == first(r'^date-released: "(.*)"$', "CITATION.cff")


def test_the_extras_that_help_names_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, packages in _EXTRAS.items():
        names = [re.split("[>=]", package)[0].removesuffix("-python").replace("-", "_") for package in extras[extra]]
        assert sorted(names) == sorted(packages)
