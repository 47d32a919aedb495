"""The rooms of the package in the order of their imports, and every module with the first sentence of its docstring.

`python tools/site/modules.py` prints the list that the built site has on the map of the code.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "surefoot"

LAYERS = (
    ("linalg", "mesh"),
    ("geometry",),
    ("stabilise", "momentum", "scaling", "views"),
    ("conversion", "identity", "initialise", "roles", "recipes"),
    ("contrib", "discovery"),
    ("plan",),
    ("layers",),
    ("monitor", "step"),
    ("optim",),
    ("attention",),
    ("_api",),
    ("experiment", "integrations"),
    ("cli",),
)
"""A room may import from its own row and the rows above."""

EXPERIMENT = (
    ("errors", "configs", "files", "models", "data"),
    ("distributed",),
    ("training",),
    ("sweep",),
    ("coordcheck",),
    ("reports",),
)
"""The same inside `experiment`."""


def said(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=[.])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def listed(room: str) -> list[str]:
    """A room's heading and its modules, or the line of a room that is one module."""
    if (module := PACKAGE / f"{room}.py").exists():
        return ["", f"### `{module.name}`", "", said(module)]
    modules = [path for path in sorted((PACKAGE / room).rglob("*.py")) if path.name != "__init__.py"]
    lines = [f"- `{path.relative_to(PACKAGE).as_posix()}`: {said(path)}" for path in modules]
    return ["", f"### `{room}/`", "", said(PACKAGE / room / "__init__.py"), "", *lines]


def chain(layers: tuple[tuple[str, ...], ...]) -> str:
    """`linalg, mesh <- geometry <- ...`."""
    return " <- ".join(", ".join(names) for names in layers)


def every_module() -> str:
    """Markdown: the chains of imports, then every room."""
    chains = f"Imports point one way: `{chain(LAYERS)}`, and inside `experiment`: `{chain(EXPERIMENT)}`."
    return "\n".join([chains, *(line for names in LAYERS for room in names for line in listed(room))])


if __name__ == "__main__":
    print(every_module())
