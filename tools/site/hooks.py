"""What mkdocs does not do itself: formulas, the command line's options, and a look that no page asks other hosts.

Formulas are LaTeX between dollars, as GitHub reads them, and become MathML here: browsers draw that by themselves, so
the site has neither a script nor fonts for them, and a formula that cannot be read ends the build.
"""

import argparse
import logging
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from modules import every_module

LOG = logging.getLogger("mkdocs.hooks.site")  # a warning ends a strict build
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
HELP = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?(?:https?:)?//[^"'\s>]*"""
    r"""|<link\b[^>]*?\bhref=["']?(?:https?:)?//[^"'\s>]*|url\(["']?(?:https?:)?//[^)]*|@import\s+["'](?:https?:)?//[^"']*"""
)


def mathml(formula: str, display: str, page: str) -> str:
    """A formula as MathML; what latex2mathml does not know it passes through with its backslash or `&`: a warning."""
    written = convert(formula, display=display)
    if "\\" in written or "&<" in written:
        LOG.warning("%s: no MathML for the formula %s", page, formula)
    return written


def on_page_content(html: str, *, page: Any, **_: object) -> str:
    """Formulas of a page."""
    display = {"span": "inline", "div": "block"}
    return FORMULA.sub(lambda it: mathml(unescape(it[2]).strip(), display[it[1]], page.file.src_path), html)


def options_of(command: str) -> str:
    """`surefoot COMMAND --help`."""
    from surefoot.cli import _parser

    os.environ["COLUMNS"] = "100"  # the width that argparse wraps at
    parsers = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return parsers.choices[command].format_help()


def on_page_markdown(markdown: str, **_: object) -> str:
    """The options of a command in the place of `<!-- help: COMMAND -->`, all modules in that of `<!-- modules -->`."""
    markdown = markdown.replace("<!-- modules -->", every_module())
    return HELP.sub(lambda found: f"```text\n{options_of(found[1])}```", markdown)


def fetched(text: str) -> list[str]:
    """What a page or a style sheet makes a browser load from another host."""
    return FETCHED.findall(text)


def on_post_build(*, config: Any, **_: object) -> None:
    """Look at every page and style sheet that was built."""
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in fetched(path.read_text("utf-8")):
                LOG.warning("%s loads something from another host: %s", path.name, found)
