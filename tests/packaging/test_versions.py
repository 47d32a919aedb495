"""One version, wherever it is written; and the extras likewise."""

import re
import sys
import tomllib
from pathlib import Path

import surefoot
from surefoot.cli import _EXTRAS

ROOT = Path(__file__).parents[2]
sys.path.append(f"{ROOT / 'tools'}")
import release  # noqa: E402


def first(pattern, name):
    """The groups of a pattern's first line in a file."""
    return re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE).groups()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == surefoot.__version__
    assert first(r"^version: (.*)$", "CITATION.cff") == (surefoot.__version__,)
    assert first(r"^## (\S+), ", "CHANGELOG.md") == (surefoot.__version__,)


def test_a_release_needs_its_tag_in_every_place_and_nothing_unreleased(tmp_path):
    for name in release.PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    tag, log = f"v{surefoot.__version__}", tmp_path / "CHANGELOG.md"
    log.write_text(
        f"# Changelog\n\n## Unreleased\n\n## {surefoot.__version__}, 2026-01-01\n\n- All.\n", encoding="utf-8"
    )
    assert not release.obstacles(tag, tmp_path)
    assert len(release.obstacles("v9.9.9", tmp_path)) == len(release.PLACES)
    log.write_text(log.read_text(encoding="utf-8").replace("Unreleased\n", "Unreleased\n\n- More.\n"), encoding="utf-8")
    (waits,) = release.obstacles(tag, tmp_path)
    assert "- More." in waits
    (tmp_path / "CITATION.cff").write_text("version: 0.0.1\n", encoding="utf-8")
    assert "CITATION.cff has version 0.0.1" in release.obstacles(tag, tmp_path)[0]


def test_the_newest_version_has_the_date_of_its_citation():
    assert first(r"^## \S+, (\S+)$", "CHANGELOG.md") == first(r'^date-released: "(.*)"$', "CITATION.cff")


def test_the_extras_that_help_names_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra, packages in _EXTRAS.items():
        names = [re.split("[>=]", package)[0].removesuffix("-python").replace("-", "_") for package in extras[extra]]
        assert sorted(names) == sorted(packages)
