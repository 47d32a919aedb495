"""Every block of Python in the pages runs, a page's in one namespace; every `surefoot` command is one that parses."""

import re
import shlex
import sys

import pytest
import torch
from doc_pages import ROOT, blocks, name, with_blocks

import surefoot as sf
from surefoot.cli import _parser
from surefoot.cli.exit_codes import Misuse
from surefoot.experiment.models.decoder import reference

ELSEWHERE = {
    "docs/integrations.md": ("tests/integration/test_trainers.py", "tests/integration/test_torchtitan.py"),
    "docs/gallery.md": ("tests/e2e/test_examples.py",),
}
"""Pages whose blocks have tests of their own."""

GIVEN = {
    "docs/performance.md": ("model",),
    "docs/stability.md": ("model",),
    "docs/scaling.md": ("model", "plan", "fully_shard"),
}
"""Pages whose blocks begin in the middle, and what they are given: `sf`, `torch` and these."""

NEEDS = {"docs/how-to/fine-tuning.md": "transformers"}
"""Pages that need a package that `make setup` does not install."""

PYTHON = [page for page in with_blocks("python") if name(page) not in ELSEWHERE]


def marked(page):
    marks = [pytest.mark.integration] if name(page) in NEEDS else []
    return pytest.param(page, id=name(page), marks=marks)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """What torchrun tells the one process that it starts."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def given(page):
    """The namespace that a page's blocks begin with."""
    model = reference("llama", width=32)
    values = {"model": model, "plan": sf.Plan.of(model), "fully_shard": lambda module: module}
    names = GIVEN.get(name(page), ())
    return {**({"sf": sf, "surefoot": sf, "torch": torch} if names else {}), **{each: values[each] for each in names}}


@pytest.mark.parametrize("page", [marked(page) for page in PYTHON])
def test_the_python_of_a_page_runs(page, processes, tmp_path, monkeypatch):
    if name(page) in NEEDS:
        pytest.importorskip(NEEDS[name(page)])
    monkeypatch.chdir(tmp_path)  # what a page saves is not left in the checkout
    threads, space = torch.get_num_threads(), {"__name__": "page", **given(page)}
    torch.manual_seed(0)
    try:
        for count, code in enumerate(blocks(page, "python"), 1):
            sys.modules.setdefault("page", type(sys)("page"))  # where dataclasses look for the types of their fields
            exec(compile(code, f"{name(page)}, block {count}", "exec"), space)
    finally:
        sys.modules.pop("page", None)
        torch.set_num_threads(threads)
    optimizers = [value for value in space.values() if isinstance(value, torch.optim.Optimizer)]
    assert all(torch.isfinite(p).all() for each in optimizers for group in each.param_groups for p in group["params"])


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_blocks_have_tests_that_read_them(page):
    for test in ELSEWHERE[page]:
        source = (ROOT / test).read_text("utf-8")
        assert page.removeprefix("docs/") in source
        assert re.search(r"\bexec\(|run_path\(|subprocess\.run\(", source)


def commands(page):
    """The `surefoot` command lines of a page, as arguments."""
    text = "".join(blocks(page, "console")).replace("\\\n", " ")
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    given = [each[each.index("surefoot") + 1 :] for each in words if "surefoot" in each]
    return [arguments for arguments in given if arguments != ["--help"]]  # which prints and exits


@pytest.mark.parametrize("page", with_blocks("console"), ids=name)
def test_the_commands_of_a_page_are_ones(page):
    for arguments in commands(page):
        assert _parser().parse_args(arguments).command == arguments[0]


def test_commands_are_found_and_wrong_ones_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ torchrun -m surefoot train --width 8 \\\n  --no-such 3  # or so\noutput\n```\n")
    (arguments,) = commands(page)
    assert arguments == ["train", "--width", "8", "--no-such", "3"]
    with pytest.raises(Misuse, match="--no-such"):
        _parser().parse_args(arguments)
