"""Every figure in the prose of the pages is that of its table, or one that no table holds, by name."""

import re

import pytest
from doc_pages import PAGES, ROOT, name
from figures import Sentence, Value, agrees, parse, prose, uncovered
from prose_figures import FIGURES

TRANSFER, OTHER = "docs/transfer.md", "docs/other-recipes.md"
RECORDS = ("docs/log.md", "docs/decisions/", "docs/tutorial/", "docs/gallery.md", "CONTRIBUTING.md")
"""What was measured on a day that they name, or printed by a run of their own: not repeated from a table."""

NO_TABLE = [
    ("", r"Python 3\.\d+|ran on 3\.\d+|torch 2\.\d+|\d\.\d GHz|0\.9 MB", "versions and sizes"),
    ("", r"95 % (?:t )?interval", "the level of intervals"),
    ("", r"betas \(?0?\.\d, 0?\.\d+\)?|betas \.7 and \.9|for \.9, \.98|momentum \(0\.9, 0\.8\)", "settings"),
    ("", r"decay 0?\.1\b|momentum 0\.1 is|keeps 0\.9:|10 % warm-up|0\.015 of the rate|p = 1\.5", "settings"),
    (
        "",
        r"at rate 0\.05\. |bound \(0\.9\)|the 15 % of bytes|above 2\.002|at least 0\.01 of",
        "settings of a measurement",
    ),
    ("", r"[Ww]ithin 0\.1 passes|Inside 0\.1 passes|0\.01 is noise", "what counts"),
    ("", r"1\.165 for|1\.70 (?:for|times)|1\.62 eta|at most 1\.13:|RMS 0\.[27]\)?", "proven, or a definition"),
    ("docs/explanation/natural-units.md", r"by 0\.001|norm 0\.1|most 0\.1", "an example"),
    ("docs/stability.md", r"1\.7 nats for V = 256|1\.3 % above|within 5 %|2 % above", "formulas, tolerances of tests"),
    ("docs/stability.md", r"a norm by up to 5 %|by up to 10 %|1 to 6 % in bfloat16", "what was seen once; of a dtype"),
    ("docs/stability.md", r"found: \.42 at width 32, 1\.15 at 512", "found by ascent, once"),
    ("docs/compatibility.md", r"directories of 0\.2|\b2\.9 is the oldest|3\.11 and newer", "versions"),
    ("docs/data.md", r"1\.5 GB|2\.86 bytes|(?:262\.9|175\.1|92\.8) \| \d\d %", "printed by `studies/pretrain/text.py`"),
    (TRANSFER, r"0\.05 nats higher on the six seeds", "of the log"),
    (OTHER, r"0\.007 worse to 0\.002 better", "`studies/beyond/run.py --table`"),
    (OTHER, r"two rates 2 % apart|a rate half an octave beside the best costs 0\.002 to 0\.02", "single curves"),
    (TRANSFER, r"At 1\.7 billion .*? 2\.2 % longer", "of an article"),
    (OTHER, r"entropy, 2\.359", "of the language, a property"),
    (OTHER, r"leaves 0\.08 x 400 .*? at three quarters|part of the 0\.087", "the course of one run, `--same-decay`"),
]
"""Pages, patterns of what is no table's figure there, and why."""

CHECKED = [page for page in PAGES if not name(page).startswith(RECORDS)]


def spans(page, text):
    """Where a page's figures are from tables, or stand for a reason."""
    own = [each.found(text) for each in FIGURES if each.page == page]
    rows = [match.span(i) for match in own for i in range(1, 1 + len(match.groups()))]
    return rows + [
        m.span() for where, pattern, _ in NO_TABLE if where in ("", page) for m in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("sentence", FIGURES, ids=lambda each: f"{each.page}: {each.text[:60]}")
def test_a_figure_is_that_of_its_table(sentence):
    assert sentence.wrong(prose(ROOT / sentence.page)) == []


@pytest.mark.parametrize("page", CHECKED, ids=name)
def test_every_figure_of_a_page_is_of_a_table_or_stands_for_a_reason(page):
    text = prose(page)
    assert uncovered(text, spans(name(page), text)) == []


def test_no_exception_is_left_over():
    texts = {name(page): prose(page) for page in CHECKED}
    for page, pattern, _ in NO_TABLE:
        assert any(re.search(pattern, text) for where, text in texts.items() if page in ("", where)), pattern


@pytest.mark.parametrize(
    ("said", "cell", "right"),
    [
        ("0.06 ± 0.07", "+0.06 ± 0.07", True),
        ("-0.06 ± 0.07", "+0.06 ± 0.07", False),
        ("0.06 ± 0.08", "+0.06 ± 0.07", False),
        ("0.06 ± 0.07", "+0.06", False),
        ("0.1", "0.149 ± 0.2", True),
        ("0.1", "0.151", False),
        ("3.1", "2^-3.13 ± 0.2", True),
        ("17", "+17%", True),
        ("18", "+17%", False),
    ],
)
def test_a_figure_agrees_to_its_own_digits(said, cell, right):
    assert agrees(said, parse(cell)) is right


def test_figures_are_found_wherever_they_stand(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "It costs 0.12 ± 0.03\nnats (+.5 octave), 2^-3.1 ± 0.2, 7 to 9 % and -1.5.\n"
        "`x = 0.25` of [1](a0.5.md), 2^-3.25, 2.13.0.\n\n"
        "    code 0.1\n\n| a | 0.7 |\n\n"
        "<!-- begin made_up -->\n| 0.9 |\n<!-- end made_up -->\n```python\n0.8\n```\n",
        "utf-8",
    )
    text = prose(page)
    found = [each.partition(" in: ")[0] for each in uncovered(text, [])]
    assert found == ["0.12 ± 0.03", "+.5", "2^-3.1 ± 0.2", "9", "-1.5", "0.7"]
    sentence = Sentence("page.md", "It costs {} nats", lambda: [Value(0.11, 0.03)])
    assert len(sentence.wrong(text)) == 1
    assert len(uncovered(text, [sentence.found(text).span(1)])) == len(found) - 1
    with pytest.raises(AssertionError, match="has 0 times"):
        Sentence("page.md", "It gains {} nats", list).found(text)
