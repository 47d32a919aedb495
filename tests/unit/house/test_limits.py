"""The house rules that a stranger can count: lengths of files and functions, numbers of arguments, sizes of folders."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "surefoot"
FILES = sorted(p for room in ("src", "tests", "benchmarks", "studies", "examples") for p in (ROOT / room).rglob("*.py"))
LINES, FUNCTION, FIELDS, ROOMS, FOLDER = 300, 50, 9, 24, 14


def too_long(source: str) -> list[str]:
    """Functions over the limit, and dataclasses and constructors with too many arguments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (length := node.end_lineno - node.lineno + 1) > FUNCTION:
                found.append(f"{node.name}: {length} lines")
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if node.name == "__init__" and len(args) - 1 > FIELDS:
                found.append(f"{node.name}: {len(args) - 1} arguments")
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            fields = [
                each for each in node.body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each)
            ]
            if len(fields) > FIELDS:
                found.append(f"{node.name}: {len(fields)} fields")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_constructors_are_short(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= LINES
    assert too_long(source) == []


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES}), ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_are_small(folder):
    assert len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) <= FOLDER


def test_few_rooms_at_the_top():
    rooms = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    doors = {"__main__.py", "__init__.py"}  # to cli, and to _api
    assert len([p for p in rooms if p.name not in doors]) <= ROOMS


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n" + "    x = 1\n" * 50,
        f"class A:\n    def __init__(self, {', '.join(f'x{i}' for i in range(10))}): ...",
        "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    x{i}: int\n" for i in range(10)),
    ],
    ids=["function", "constructor", "dataclass"],
)
def test_what_is_too_long_is_noticed(source):
    assert len(too_long(source)) == 1
