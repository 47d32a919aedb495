"""The examples run; README and gallery show them as they are, and what the gallery says they print, they print."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from surefoot.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## (\w+)\.py\n.*?```python\n(.*?)\n```\n.*?```text\n(.*?)\n```\n", re.MULTILINE | re.DOTALL)
SHOWN = {name: (code, output) for name, code, output in SECTION.findall(PAGE)}
SCRIPTS = {
    path.stem: path for path in (ROOT / "examples").glob("*.py") if "Picture(__doc__)" in path.read_text("utf-8")
}
NUMBER = re.compile(r"\d+\.\d+%?|\d+%")
NEEDS = {"cnn": "sklearn", "vit": "sklearn", "hf_llama": "transformers"}
QUICK = ("lora", "moe", "own_norm")  # the others take more than 3 s


def test_own_model_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    assert names["loss"].item() < 1.0  # from log 256 = 5.5
    assert "SteepestDescent" not in capsys.readouterr().out  # the plan is a table, not a repr


def test_a_model_of_ones_own_is_swept(inline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sizes = ["--widths", "16", "64", "--steps", "4", "--rates", "-5", "-4", "-3", "--context", "8", "--batch-size", "2"]
    model = ["--model", "examples.own_width:build", "--recipe", "beyond_mup"]
    assert main(["transfer", *model, *sizes, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["settings"]["model"] == "examples.own_width:build"
    assert all(loss < 6 for loss in summary["recipes"][0]["best_loss"])


def test_readme_shows_the_example() -> None:
    code = (ROOT / "examples" / "own_model.py").read_text().split('"""\n', 1)[1].strip()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code in [block.strip() for block in blocks]


def differences(shown: str, printed: str) -> list[str]:
    """What differs: texts and whole numbers at all, other numbers by a unit of their last digit and 5 %."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return [f"{shown!r} became {printed!r}"]
    wrong = []
    for old, new in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        number, unit = float(old.rstrip("%")), 10.0 ** -len(old.rstrip("%").partition(".")[2])
        if not math.isclose(float(new.rstrip("%")), number, rel_tol=0, abs_tol=1.001 * unit + 0.05 * number):
            wrong.append(f"{old} became {new}")
    return wrong


@pytest.fixture
def one_thread():
    """One thread, as fast as two on models this small, and the process's own number again afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example as its command line would, in this process, which has torch already."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--picture", str(picture)])
    runpy.run_path(str(SCRIPTS[name]), run_name="__main__")


def marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name in QUICK else [pytest.mark.slow]
    return [*slow, pytest.mark.integration] if NEEDS.get(name) == "transformers" else slow


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in sorted(SCRIPTS)])
def test_the_output_is_reproduced(name, tmp_path, monkeypatch, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    run(name, tmp_path / "picture.png", monkeypatch)
    assert differences(SHOWN[name][1], capsys.readouterr().out.strip()) == []
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_every_example_as_it_is():
    assert sorted(SHOWN) == sorted(SCRIPTS)
    for name, path in SCRIPTS.items():
        source = path.read_text("utf-8")
        text, code = source.removeprefix('"""').split('"""\n', 1)
        assert text.strip() in PAGE, f"run tools/gallery.py: the text of {name} has changed"
        assert SHOWN[name][0] == code.strip(), f"run tools/gallery.py: {name} has changed"
        assert source.count("\n") < 60
        assert (ROOT / "docs" / "images" / "gallery" / f"{name}.png").exists()


@pytest.mark.parametrize(
    "printed",
    [
        "width 64: loss 1.10 -> 0.50, 90% right",
        "width 32: loss 1.10 -> 0.50, 90 right",
        "width 32: loss 1.17 -> 0.50, 90% right",
        "width 32: loss 1.10 -> 0.55, 90% right",
        "width 32: loss 1.10 -> 0.50, 84% right",
        "width 32: loss 1.10 -> nan, 90% right",
    ],
)
def test_another_output_is_noticed(printed):
    shown = "width 32: loss 1.10 -> 0.50, 90% right"
    assert differences(shown, "width 32: loss 1.15 -> 0.48, 94% right") == []
    assert len(differences(shown, printed)) == 1
