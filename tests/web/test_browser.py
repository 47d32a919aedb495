"""The pages in a real browser: nothing fails or leaves the machine; pointer, keyboard, contrast, phones, paper.

With `SCREENSHOTS=docs/images` the pictures of the documentation are written there.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import run_directories as made
from surefoot.experiment.reports.report import write
from surefoot.experiment.reports.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.web
KINDS = {
    "transfer": made.sweep, "extrapolate": made.horizons, "train": made.training, "coordcheck": made.check,
    "compare": made.comparison,
}  # fmt: skip
SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.shifted += entry.value; })
  .observe({ type: "layout-shift", buffered: true });
"""

Open = Callable[..., "Page"]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of run directories; whatever fails or is asked of a network fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_(*directories: Path, width: int = 1280, scheme: str = "light", url: str = "") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(SHIFTS)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        allowed = url or "file:"
        page.on(
            "request",
            lambda request: None if request.url.startswith((allowed, "data:", "blob:")) else wrong.append(request.url),
        )
        page.goto(url or f"file://{write([*directories], tmp_path / 'report.html')}")
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def section(page: Page, title: str) -> Locator:
    return page.locator("section", has=page.get_by_role("heading", name=title, exact=True))


def drawn(page: Page, act: Callable[[], object]) -> None:
    """Acts, and waits until a chart has been drawn again."""
    total = "() => [...document.querySelectorAll('section.chart')].reduce((n, s) => n + Number(s.dataset.drawn), 0)"
    before = page.evaluate(total)
    act()
    page.wait_for_function(f"({total})() > {before}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_fits_and_can_be_read_by_everybody(show, tmp_path, kind, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = show(KINDS[kind](tmp_path / kind), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.shifted") < 0.01
    assert page.locator("svg.marks").count() >= page.locator("section.chart").count() > 0
    found = axe.run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_first_thing_read_is_the_rate(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"))
    first = page.locator(".facts > div").first
    assert first.inner_text().splitlines()[:2] == ["Rate to use", "0.0335"]
    assert first.bounding_box()["y"] < 300


def test_no_column_is_cut_off_and_rates_come_before_their_powers_of_two(show, tmp_path):
    page = show(made.sweep(tmp_path / "run", recipes=("falling_moonlight_tuned", "level")))
    table = section(page, "Recipes").locator(".scroll")
    assert table.evaluate("it => it.scrollWidth - it.clientWidth") <= 0
    last = table.locator("tbody tr").first.locator("td").last.inner_text().splitlines()
    assert [line.split(":")[0] for line in last] == ["half", "twice"]
    rates = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert [text.splitlines()[0] for text in rates] == ["0.134", "0.134"]


def test_a_point_tells_its_numbers(show, tmp_path):
    page = show(made.sweep(tmp_path / "run", recipes=("level",), seeds=1))
    best = section(page, "Loss against learning rate").locator("path[aria-label*='0.13397'][aria-label*='2.062']").first
    best.hover(force=True)
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    shown = dict(zip(tip.locator("td.key").all_inner_texts(), tip.locator("td.value").all_inner_texts(), strict=True))
    assert shown == {
        "learning rate": "0.134", "log2 of it": "\N{MINUS SIGN}2.90", "loss": "2.0625", "width": "128",
        "seed": "fitted", "steps": "100",
    }  # fmt: skip


def test_one_recipe_or_all(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"))
    curves = section(page, "Loss against learning rate")
    assert curves.locator("figcaption").all_inner_texts() == ["falling", "level"]
    drawn(page, lambda: curves.get_by_label("level", exact=True).check())
    assert curves.locator("figcaption").all_inner_texts() == ["level"]
    curves.get_by_text("Numbers of this picture").click()
    curves.locator("tbody tr").first.wait_for()
    assert set(curves.locator("tbody tr td:first-child").all_inner_texts()) == {"level"}


def test_axes_are_switched(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"))
    curves = section(page, "Loss against learning rate")
    labels = "g.role-axis-label text"
    assert any(text.startswith("2^") for text in curves.locator(labels).all_text_contents())
    x = curves.get_by_role("group", name="x axis")
    drawn(page, lambda: x.get_by_label("linear").check())
    assert not any(text.startswith("2^") for text in curves.locator(labels).all_text_contents())


def test_one_layer_is_picked(show, tmp_path):
    page = show(made.training(tmp_path / "run", layers=8))
    norms = section(page, "Norms")
    assert norms.locator("figcaption").inner_text() == "every linear layer (8)"
    drawn(page, lambda: norms.get_by_label("show").select_option("table.weight"))
    assert norms.locator("figcaption").inner_text() == "table.weight"
    norms.get_by_text("Numbers of this picture").click()
    norms.locator("tbody tr").first.wait_for()
    assert set(norms.locator("tbody tr td:nth-child(2)").all_inner_texts()) == {"table.weight"}


def test_a_table_is_sorted_by_numbers_not_by_letters(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"))
    table = section(page, "Every run")
    header = table.get_by_role("button", name="width")
    for direction, expected in (("ascending", ["32", "64", "128"]), ("descending", ["128", "64", "32"])):
        header.click()
        widths = table.locator("tbody td:nth-child(2)").all_inner_texts()
        assert list(dict.fromkeys(widths)) == expected
        assert table.locator(f"th[aria-sort={direction}]").count() == 1


def test_everything_works_by_keyboard(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"))
    curves = section(page, "Loss against learning rate")
    curves.get_by_label("all", exact=True).focus()
    drawn(page, lambda: page.keyboard.press("ArrowRight"))
    assert curves.locator("figcaption").all_inner_texts() == ["falling"]
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim().slice(0, 30)"))
        if "Numbers of this picture" in page.evaluate("document.activeElement.textContent"):
            break
    page.keyboard.press("Enter")
    assert curves.locator("details.numbers").get_attribute("open") is not None
    section(page, "Recipes").get_by_role("button", name="recipe", exact=True).focus()
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort=ascending]").inner_text() == "recipe"


def test_runs_stand_side_by_side_where_there_is_room(show, tmp_path):
    runs = [made.sweep(tmp_path / "a"), made.training(tmp_path / "b"), made.check(tmp_path / "c")]
    for width, columns in ((2200, 3), (390, 1)):
        page = show(*runs, width=width)
        tops = [article.bounding_box()["y"] for article in page.locator("article").all()]
        assert len(set(tops)) == (1 if columns == 3 else 3)


def test_paper_is_white(show, tmp_path):
    page = show(made.sweep(tmp_path / "run"), scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) != "rgb(255, 255, 255)"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert page.locator(".switches").first.is_hidden()


def test_a_live_page_follows_and_keeps_what_was_chosen(show, tmp_path):
    directory = made.sweep(tmp_path / "run", recipes=("falling", "level"), finished=False)
    with Server([directory], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = show(url=server.url)
            curves = section(page, "Loss against learning rate")
            drawn(page, lambda: curves.get_by_label("level", exact=True).check())
            with (directory / "results.jsonl").open("a") as file:
                file.write(json.dumps(made.sweep_run("level", 64, -2.4, 0, -2.9)) + "\n")
            page.get_by_text("under way: 109 runs").wait_for()
            page.wait_for_selector("body[data-ready='2']")
            assert curves.locator("figcaption").all_inner_texts() == ["level"]
            assert curves.get_by_label("level", exact=True).is_checked()
            assert page.get_by_role("status").inner_text().startswith("Live: looked at")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(
    "SCREENSHOTS" not in os.environ, reason="SCREENSHOTS=docs/images writes the documentation's picture"
)
def test_a_picture_of_the_demo_for_the_documentation(show):
    page = show(ROOT / "runs" / "demo")  # of `make demo`
    page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / "page.png")
