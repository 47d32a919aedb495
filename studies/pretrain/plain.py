"""Text out of what packages hold: web pages, manual pages, Info manuals, sources; and what of it is a document."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

SHORTEST, LONGEST = 200, 16_000  # characters of a document

HTML = re.compile(r"\.(x?html?|page|docbook)$")
ROFF = re.compile(r"\.[1-9][a-z]*$")
INFO = re.compile(r"\.info(-\d+)?$")
PROSE = re.compile(r"\.(txt|rst|md|pod|texi|adoc)$|" + "|".join(each.pattern for each in (HTML, ROFF, INFO)))
CODE = re.compile(
    r"\.(py|pyx|pl|pm|c|h|cc|cpp|hpp|ipp|tcc|rs|go|js|ts|rb|el|lisp|rkt|scrbl|m|mac|R|vim|lua|sh|java|hs|yml|rst|md|ly)$"
)
_FOREIGN = re.compile(r"\b(der|die|und|les|des|une|el|los|las|que|para|il|che|och|nie|het|een)\b")
_ENGLISH = re.compile(r"\b(the|and|of|is|to|in|if)\b")
_COMMENT = re.compile(
    r"(?:#![^\n]*\n)?\s*(?:/\*.*?\*/|(?:[ \t]*(?://|#(?!include|define|if)|;|--|%|\")[^\n]*(?:\n|$))+)\s*", re.DOTALL
)
"""At the top of a source file."""
_ROFF = [
    (r"\\f(\[[^\]]*\]|\(..|.)|\\s[-+]?\d+|\\[&|^%/,:!]|\\\n|\\\".*", ""),  # fonts, sizes, widths, comments
    (r"\\\(bu|\\\[bu\]", "*"),
    (r"\\\((aq|cq|oq)|\\\[(aq|cq|oq)\]", "'"),
    (r"\\\((dq|lq|rq)|\\\[(dq|lq|rq)\]", '"'),
    (r"\\\((em|en|mi|hy)|\\\[(em|en|mi|hy)\]", "-"),
    (r"\\\*\(\w\w|\\\*\[\w+\]|\\\*\S", ""),
    (r"\\\((ha|ti)|\\\[(ha|ti)\]", "^"),
    (r"\\\(\S\S|\\\[\w+\]|\\[hvwzn]'[^']*'", ""),
    (r"\\[ ~0]", " "),
    (r"\\-", "-"),
    (r"\\[e\\]", r"\\"),
    (r"\\(?=[.'`])", ""),
]
_SILENT = set("TH RS RE Dd Os Dt so ds de nr if ie el rm ad ft Bl ta tr in".split())  # noqa: SIM905
_HEADINGS, _PARAGRAPHS = {"SH", "SS", "Sh", "Ss"}, {"PP", "P", "LP", "Pp", "TP", "IP", "sp", "It", "HP"}
_INLINE = re.compile(r"\b(Ar|Fl|Op|Cm|Pa|Ns|Xr|Fa|Va|Em|Li|Ql|Dv|Er|Ft|Fn|Vt|Ic|Sy) ")


def plain(name: str, content: bytes) -> str:
    """The text of a file, by the end of its name; empty where it is no text."""
    text = content.decode("utf-8", "ignore").replace("\r\n", "\n")
    formats = ((HTML, of_html), (INFO, of_info), (ROFF, of_roff))
    text = next((convert for ends, convert in formats if ends.search(name)), without_licence)(text)
    return "" if "\0" in text else text


def of_html(text: str) -> str:
    """The text of a page: blocks on lines of their own, `<pre>` as it is."""
    text = re.sub(r"(?is)<!--.*?-->|<(script|style|head|nav|footer|header|button|svg)\b.*?</\1\s*>", " ", text)
    if main := re.search(r"(?i)<main\b|<[^<>]+role=.main.", text):
        text = re.split(r"(?i)</main\b|<div[^<>]+class=.sphinxsidebar", text[main.start() :], maxsplit=1)[0]
    parts = re.split(r"(?is)(<pre\b.*?</pre\s*>)", text)
    blocks = r"(?i)</?(p|div|h\d|section|table|ul|ol|dl|blockquote|title|note|steps|figure)\b[^<>]*>"
    for index in range(0, len(parts), 2):
        part = re.sub(blocks, "\n\n", re.sub(r"\s+", " ", parts[index]))
        parts[index] = re.sub(r"(?i)<(br|li|tr|dt|dd|hr|item)\b[^<>]*>", "\n", re.sub(r"(?i)</t[dh]>", " ", part))
    text = html.unescape(re.sub(r"<[^<>]*>", "", "".join(parts)))
    return tidy(text.replace("\xa0", " ").replace("¶", "").replace("\uf0c1", ""))


def of_roff(text: str) -> str:
    """The text of a manual page: headings and paragraphs on lines of their own, what a macro marks as it is."""
    text = "\n".join(line for row in text.split("\n") if (line := _roff_line(row)) is not None)
    for pattern, text_of in _ROFF:
        text = re.sub(pattern, text_of, text)
    return tidy(text)


def _roff_line(line: str) -> str | None:
    if not line.startswith((".", "'")):
        return line
    macro, _, rest = line[1:].strip().partition(" ")
    if macro in _SILENT or macro.startswith("\\"):
        return None
    if macro in _HEADINGS:
        rest = "\n" + rest.strip('"') + "\n"
    elif macro == "IP":
        rest = "\n" + re.sub(r" \S+$", "", rest)
    elif macro in _PARAGRAPHS:
        rest = "\n" + (rest if macro == "It" else "")
    return _INLINE.sub("", rest.replace('"', ""))


def of_info(text: str) -> str:
    """An Info manual without the headers of its nodes and its tables, pictures and indices."""
    text = re.sub(r"\0\x08\[.*?\0\x08\]", "", text, flags=re.DOTALL)
    nodes = [node.lstrip("\n").partition("\n")[2] for node in text.split("\x1f")[1:]]
    return tidy("\n".join(node for node in nodes if "\x7f" not in node))


def tidy(text: str) -> str:
    """No spaces at the ends of lines, and no two empty lines."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+(?=\n)|(?<=\n) (?=\S)", "", text)).strip() + "\n"


def without_licence(text: str) -> str:
    """A source file without the comments at its top that speak of copyright."""
    while (comment := _COMMENT.match(text)) and re.search(r"(?i)copyright|licen[cs]e|spdx", comment[0]):
        text = text[comment.end() :]
    return text


def frame(pages: Iterable[str]) -> set[str]:
    """Lines that a tenth of the pages have: what stands around their texts."""
    lines = [{line.strip() for line in page.split("\n")} for page in pages]
    counts = Counter(line for page in lines for line in page if len(line) > 2)
    return {line for line, count in counts.items() if count > max(2, len(lines) / 10)}


def without_frame(text: str, common: set[str]) -> str:
    """The text without common lines at its ends, and without three and more of them one after another."""
    runs = groupby(text.split("\n"), lambda line: not line or line.strip() in common)
    blocks = [(known, list(block)) for known, block in runs]
    kept = [
        line
        for index, (known, block) in enumerate(blocks)
        if not (known and (index in (0, len(blocks) - 1) or sum(map(bool, block)) >= 3))
        for line in block
    ]
    return "\n".join(kept) + "\n"


def cut(text: str, longest: int = LONGEST) -> str:
    """The text up to its last line that ends in the first `longest` characters."""
    return text if len(text) <= longest else text[: text.rfind("\n", 0, longest) + 1]


def pieces(text: str, longest: int) -> Iterator[str]:
    """The text in parts, each cut at an empty line where it has one in its second half, else at a line."""
    start = 0
    while part := cut(text[start : start + longest + 1], longest):
        gap = part.rfind("\n\n")
        if start + len(part) < len(text) and gap > longest // 2:
            part = part[: gap + 2]
        yield part
        start += len(part)


def is_document(text: str) -> bool:
    """Whether it is long enough, mostly of letters, in lines, and not in another language than English."""
    solid = re.sub(r"\s+", "", text)
    if len(text) < SHORTEST or len(solid) > 500 * (text.count("\n") + 1):
        return False
    letters = len(re.sub(r"[^A-Za-z]+", "", solid))
    foreign, english = (len(pattern.findall(text)) for pattern in (_FOREIGN, _ENGLISH))
    return letters >= 0.6 * len(solid) and foreign <= english + 2
