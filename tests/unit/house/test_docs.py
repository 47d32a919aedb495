"""The pages agree with the tree: the list of modules names each, and what a page links and names exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from modules import every_module

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "surefoot"
DOCS = ROOT / "docs"
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES = [*TEXTS, *sorted(DOCS.rglob("*.md"))]
TESTS = {path.name for path in (ROOT / "tests").rglob("*.py")}

LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED_FILE = re.compile(r"`([\w/]+\.py)`")
FOLDER = re.compile(r"(?<![\w./-])((?:src|tests|studies|benchmarks|examples|tools)/[\w./*-]*\w)")
DOTTED = re.compile(r"(?<![\w./-])(?:surefoot|sf)((?:\.[A-Za-z_]\w*)+)")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def modules() -> list[str]:
    """Paths relative to the package; an `__init__.py` counts where it defines something."""
    paths = []
    for path in sorted(PACKAGE.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if path.name != "__init__.py" or any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body):
            paths.append(path.relative_to(PACKAGE).as_posix())
    return paths


def anchors(text: str) -> set[str]:
    """What the headings of a page are linked by."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(name: str) -> bool:
    """Whether a dotted name, without `surefoot.`, is a module or a name in one."""
    parts = name.strip(".").split(".")
    end = len(parts)
    while end and not ((base := PACKAGE.joinpath(*parts[:end])).is_dir() or base.with_suffix(".py").exists()):
        end -= 1
    if end == len(parts):
        return True
    try:
        value = importlib.import_module(".".join(["surefoot", *parts[:end]]))
    except ModuleNotFoundError:  # a module for a package that is not installed here
        return bool(
            re.search(rf"^(?:class|def) {parts[end]}\b", base.with_suffix(".py").read_text("utf-8"), re.MULTILINE)
        )
    for part in parts[end:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def missing(page: Path, text: str) -> list[str]:
    """Links, files and names in the text of a page that do not exist."""
    wrong = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if "://" not in link and not (path.exists() and (not anchor or anchor in anchors(path.read_text("utf-8")))):
            wrong.append(link)
    for file in QUOTED_FILE.findall(text):
        if not ((ROOT / file).exists() or (PACKAGE / file).exists() or file in TESTS):
            wrong.append(file)
    wrong += [path for path in FOLDER.findall(text) if not any(ROOT.glob(path))]
    return wrong + [f"surefoot{name}" for name in DOTTED.findall(text) if not exists(name)]


def test_the_list_of_modules_names_every_module_and_what_it_is_for():
    lines = [line for line in every_module().splitlines() if line.startswith("- `")]
    named = [path for line in lines for path in QUOTED_FILE.findall(line.split(": ")[0])]
    assert {*modules()} - {*named} == {path for path in modules() if "/" not in path or path.endswith("__init__.py")}
    assert [line for line in lines if len(line.split(": ", 1)[1]) < 15] == []
    assert "<!-- modules -->" in (DOCS / "map.md").read_text("utf-8")


@each_page
def test_what_a_page_names_exists(page):
    assert missing(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "[a](decisions/0000-none.md)",
        "[a](log.md#no-such-heading)",
        "`optim/bounds.py`",
        "`test_nothing.py`",
        "tests/laws/test_none.py",
        "`studies/none/*/results.jsonl`",
        "surefoot.optim.batching.unload",
        "`sf.Nothing()`",
    ],
)
def test_what_does_not_exist_is_noticed(text):
    assert len(missing(DOCS / "map.md", text)) == 1
