"""The import direction of the package, read from its source: a room may import from its own row and the rows above.

No torch is imported here, so that `make check` stays quick.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from modules import EXPERIMENT, LAYERS

ROOT = Path(__file__).parents[3] / "src" / "surefoot"

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LEVEL["__init__"] = LEVEL["_api"]  # the root re-exports the public names, lazily
LEVEL["__main__"] = LEVEL["cli"]
INNER = {f"experiment.{name}": level for level, names in enumerate(EXPERIMENT) for name in names}

ANYWHERE = {*sys.stdlib_module_names, "surefoot", "torch"}
ON_TOP = {"filelock", "numpy", "scipy", "tqdm"}
"""What experiment and cli may import besides."""

ONLY_IN = {
    "jinja2": "experiment.reports.page",
    "altair": "experiment.reports",
    "vl_convert": "experiment.reports",
    "tokenizers": "experiment.data.bpe",
    "datasets": "experiment.data.documents",
    "pyarrow": "experiment.data.documents",
    "transformers": "cli.hf_config integrations",
    "wandb": "experiment.training.boards",
    "lightning": "integrations",
    "torchtitan": "integrations",
    "ray": "experiment.sweep.clusters",
    "submitit": "experiment.sweep.clusters",
}
"""Packages that these rooms or modules alone may import."""

FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path, root: Path = ROOT) -> str:
    """Dotted and relative to the package: `experiment.fit`; a package's `__init__` goes by the package's name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path) for path in FILES}


def imported(source: str) -> set[str]:
    """Absolute dotted names that a source imports, at any depth; `from a import b` gives `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inner(name: str) -> str:
    """The package's module that an absolute name refers to; a public name of the root is `_api`'s."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in MODULES:
            return ".".join(parts[:end])
    return "_api" if parts else "__init__"


def room(module: str) -> int:
    """The row of a module of `experiment`; the lowest for whatever lies outside."""
    return INNER.get(".".join(module.split(".")[:2]), -1)


def inside(module: str, name: str) -> bool:
    """Whether a module is the named one or a part of it."""
    return f"{module}.".startswith(f"{name}.")


def points_upward(module: str, target: str) -> bool:
    """Whether one module of the package may not import another: it lies in a higher row, or beside `experiment`."""
    here, there = (LEVEL[name.split(".")[0]] for name in (module, target))
    if here == there and inside(module, "experiment"):
        return not inside(target, "experiment") or room(target) > room(module)
    return there > here


def allowed(module: str, name: str) -> bool:
    """Whether a module may import an absolute dotted name."""
    package = name.split(".")[0]
    if package == "surefoot":
        return not points_upward(module, inner(name))
    if package in ONLY_IN:
        return any(inside(module, room) for room in ONLY_IN[package].split())
    return package in ANYWHERE or (package in ON_TOP and module.split(".")[0] in ("experiment", "cli"))


def violations(module: str, source: str) -> list[str]:
    """What a module imports and may not."""
    return [name for name in sorted(imported(source)) if not allowed(module, name)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path):
    module = module_name(path)
    assert module.split(".")[0] in LEVEL, f"{module} has no layer: add it to LAYERS, or put it where it belongs"
    assert not module.startswith("experiment.") or room(module) >= 0, f"{module} has no layer in EXPERIMENT"
    assert violations(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("linalg.polar", "from surefoot.geometry import RMS"),
        ("linalg.ops", "import triton.language as tl"),
        ("geometry.vectors", "from surefoot.momentum import Momentum"),
        ("views", "from surefoot import roles"),
        ("plan", "def late():\n    from surefoot.optim.optimizer import SteepestDescent"),
        ("monitor.weights", "import surefoot.optim.optimizer"),
        ("optim.optimizer", "from surefoot import Plan"),
        ("optim.batching", "import numpy as np"),
        ("_api", "from surefoot.experiment.sweep.fit import parabola"),
        ("experiment.sweep.fit", "from surefoot.cli import main"),
        ("experiment.sweep.fit", "import altair as alt"),
        ("experiment.training.loop", "import yaml"),
        ("experiment.data.corpus", "from tokenizers import Tokenizer"),
        ("experiment.models.decoder", "from surefoot.experiment.training.run import Run"),
        ("experiment.training.loop", "from surefoot.experiment.sweep.fit import parabola"),
        ("experiment.sweep.sweep", "from surefoot.experiment.reports import transfer"),
        ("discovery.find", "from surefoot.plan import Plan"),
        ("cli.audit", "import vl_convert"),
    ],
)
def test_a_wrong_import_is_noticed(module, source):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("geometry.vectors", "from surefoot.linalg.polar import msign"),
        ("optim.optimizer", "import torch\nimport math"),
        ("experiment.reports.transfer", "import altair as alt"),
        ("experiment.training.loop", "from surefoot import recipes\nimport numpy"),
        ("cli.audit", "from surefoot import Plan\nfrom surefoot.experiment.models.decoder import reference"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert violations(module, source) == []


def test_no_two_modules_import_each_other():
    graph = {
        module_name(path): {inner(name) for name in imported(path.read_text()) if name.split(".")[0] == "surefoot"}
        for path in FILES
        if module_name(path) not in ("__init__", "_api")
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"cycle: {' -> '.join((*above, module))}"
        if module in done or module not in graph:
            return
        for other in sorted(graph[module] - {module}):
            if not module.startswith(f"{other}.") and not other.startswith(f"{module}."):  # a package and its part
                visit(other, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(graph)


def test_import_surefoot_does_not_import_torch():
    code = "import surefoot, sys; print(sorted({'torch', 'numpy', 'scipy', 'altair', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_audit_needs_torch_alone():
    absent = ("numpy", "scipy", "tqdm", "filelock", "jinja2", "altair")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from surefoot.cli import main\n"
    code += "sys.exit(main(['audit', 'gpt', '--width', '64']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", [p for p in FILES if LEVEL.get(module_name(p).split(".")[0], 9) < LEVEL["_api"]], ids=module_name
)
def test_below_the_public_names_nothing_is_asked_of_the_package_itself(path):
    """`from surefoot import x` imports every public name first: a circle when x is one of their modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "surefoot"]
