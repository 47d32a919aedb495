"""The site: each page is in its navigation, each public name in its reference, and no page fetches from elsewhere."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import types

import pytest
from doc_pages import ROOT, blocks

import surefoot._api as api
from surefoot.cli import _parser, main

DOCS = ROOT / "docs"
IDENTIFIER = re.compile(r"^::: (surefoot\.\S+)$", re.MULTILINE)
REFERENCE = {path: path.read_text("utf-8") for path in sorted((DOCS / "reference").glob("*.md"))}
ROOMS = (api, api.contrib, api.geometry, api.layers, api.recipes, api.views)
PUBLIC = {f"{room.__name__}.{name}": getattr(room, name) for room in ROOMS for name in room.__all__}
PUBLIC |= {f"{home}.{n}": getattr(importlib.import_module(home), n) for home, ns in api.ELSEWHERE.items() for n in ns}
TUTORIAL = [line for block in blocks(DOCS / "tutorial" / "first-run.md", "console") for line in block.splitlines()]
TINY = ["--steps", "3", "--batch-size", "2", "--context", "16"]
SHORTER = {"transfer": [*TINY, "--rates", "-4", "-3", "-2", "--workers", "1"], "train": [*TINY, "--threads", "1"]}


def value_of(identifier):
    """What a dotted name of the reference stands for."""
    module, _, name = identifier.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def described():
    """Dotted names of the reference, but those of a package that is not installed."""
    named = [each for text in REFERENCE.values() for each in IDENTIFIER.findall(text)]
    assert len(named) == len(set(named))
    return {each: value_of(each) for each in named if ".integrations." not in each}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name, described):
    value = PUBLIC[name]
    if isinstance(value, types.ModuleType):
        assert any(f"`{value.__name__}`" in text for text in REFERENCE.values())
    else:
        assert any(each.endswith("." + name.rpartition(".")[2]) and it is value for each, it in described.items())


def test_nothing_else_is_in_the_reference(described):
    values = list(PUBLIC.values())
    assert [each for each, value in described.items() if not any(value is public for public in values)] == []


def test_every_page_is_in_the_navigation_once():
    named = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_every_command_has_its_options_on_the_page_of_commands():
    text = (DOCS / "reference" / "command-line.md").read_text("utf-8")
    commands = next(each.choices for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    named = re.findall(r"^## surefoot (\w+)\n\n<!-- help: (\w+) -->$", text, re.MULTILINE)
    assert named == [(name, name) for name in commands]


def test_links_stay_inside_the_site():
    """A link to a file outside docs/ would work on GitHub alone: such files are named as code."""
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8")):
            if "://" not in link:
                assert (page.parent / link).resolve().is_relative_to(DOCS), f"{page.name}: {link}"


def test_a_picture_is_shown():
    shown = {link for page in DOCS.rglob("*.md") for link in re.findall(r"images/([\w./]+)\)", page.read_text("utf-8"))}
    pictures = DOCS / "images"
    drawn = {path.relative_to(pictures).as_posix() for path in pictures.rglob("*") if path.is_file()}
    assert drawn - {"transfer.png"} <= shown <= drawn  # that one is the README's


@pytest.mark.slow
def test_the_pictures_of_the_explanations_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, str(ROOT / "tools" / "site" / "figures.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert drawn.keys() == {path.name for path in (DOCS / "images").glob("*.svg")}
    assert all(text.count("<path") > 20 for text in drawn.values())


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for line in TUTORIAL:
        command, *options = line.removeprefix("$ surefoot ").split()
        if line.startswith("$ surefoot ") and command != "--help":
            assert main([command, *options, *SHORTER.get(command, [])]) == 0, capsys.readouterr().err
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tune", "wide", "check", "bounded"}
    assert "blocks.0-1.mlp.up.weight" in capsys.readouterr().out


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built; a warning or a look at another host ends the build."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the notice of the end of mkdocs-material, as in the Makefile
    command += ["--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_built_reference_has_every_public_name(site, described):
    text = "".join(path.read_text("utf-8") for path in (site / "reference").glob("*.html"))
    assert [each for each in described if f'id="{each}"' not in text] == []
    assert "&gt;&gt;&gt; " in re.sub(r"</?span[^>]*>", "", text)  # doctests as code


@pytest.mark.slow
def test_the_built_pages_have_formulas_options_and_a_search(site):
    for name in ("natural-units", "three-numbers", "bounds"):
        page = (site / "explanation" / f"{name}.html").read_text("utf-8")
        assert "<math" in page
        assert "arithmatex" not in page
    assert "--gpus-per-run" in (site / "reference" / "command-line.html").read_text("utf-8")
    found = json.loads((site / "search" / "search_index.js").read_text("utf-8").removeprefix("var __index = "))
    assert any("SteepestDescent" in each["title"] for each in found["docs"])


def tool(name, needs):
    """A module of tools/site."""
    pytest.importorskip(needs)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools" / "site")
        return importlib.import_module(name)


@pytest.mark.integration
def test_doctests_become_blocks_of_code():
    text = "Adds.\n\n>>> 1 + 1\n2\n>>> 2\n2\n\nArgs:\n    x: a number.\n"
    fenced = "Adds.\n\n```pycon\n>>> 1 + 1\n2\n>>> 2\n2\n```\n\nArgs:\n    x: a number.\n"
    assert tool("doctests", "griffe").fenced(text) == fenced


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://unpkg.com/x"></script>',
        "<link rel=stylesheet href=//fonts.example/x.css>",
        '<img alt="a" src=http://host/x.png>',
        "body{background:url('https://host/x.png')}",
        '@import "https://host/x.css"',
    ],
)
def test_what_a_page_fetches_is_found(text):
    assert len(tool("hooks", "latex2mathml").fetched(text)) == 1
    assert (
        tool("hooks", "latex2mathml").fetched(
            '<a href="https://host/">there</a><img src="images/x.png"><script src="/x.js">'
        )
        == []
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("formula", "wrong"), [(r"\sqrt{x}", 0), (r"\nosuch{x}", 1), (r"\begin{aligned}a&b\end{aligned}", 1)]
)
def test_a_formula_that_cannot_be_read_is_a_warning(formula, wrong, caplog):
    assert "<math" in tool("hooks", "latex2mathml").mathml(formula, "block", "page.md")
    assert len(caplog.records) == wrong
