"""Makes fenced blocks of the doctests in docstrings, so that mkdocstrings shows code. Loaded by griffe."""

import re

from griffe import Extension, Object

DOCTEST = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring whose doctests stand in fences."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
