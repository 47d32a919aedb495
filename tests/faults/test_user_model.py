"""A model of the user's own that fails: whose fault it is, and where."""

import json
import sys

import pytest
import torch
from torch import nn

from surefoot.cli import main
from surefoot.experiment.models.user_model import call, drawn_by


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes `broken.py` into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("broken", None)
    yield lambda source: (tmp_path / "broken.py").write_text(source)
    sys.modules.pop("broken", None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import math\n\nmath.tua\n",
            r"importing broken from .* failed: AttributeError: module 'math'.*broken\.py, line 3",
        ),
        ("int('x')\n", r"importing broken from .* failed: ValueError: invalid literal.*broken\.py, line 1"),
        (
            "import absent_package\n",
            r"importing broken from .* failed: ModuleNotFoundError: No module named 'absent_package'",
        ),
        ("from math import tua\n", r"importing broken from .* failed: ImportError: cannot import name 'tua'"),
        ("def build(:\n", r"importing broken from .* failed: SyntaxError: "),
        ("import sys\n\nsys.exit(0)\n", r"importing broken from .* failed: SystemExit: 0 .*broken\.py, line 3"),
    ],
    ids=["attribute", "value", "package", "name", "syntax", "exit"],
)
def test_a_module_that_fails_to_import_is_not_a_missing_function(module, source, message):
    module(source)
    with pytest.raises(ValueError, match=message):
        call("broken:build")


def test_a_package_that_build_misses_is_not_an_extra_of_ours(module, capsys):
    module("def build():\n    import absent_package\n")
    assert main(["audit", "broken:build"]) == 2
    message = capsys.readouterr().err
    assert "broken:build: calling it without arguments failed: ModuleNotFoundError: No module named" in message
    assert "broken.py, line 2" in message
    assert "pip install" not in message


@pytest.mark.parametrize(
    "command",
    ["transfer --recipes steady adamw --out run", "compare --recipes steady adamw --baseline adamw --out run"],
)
def test_a_method_that_cannot_start_a_model_is_refused_before_any_run(module, tmp_path, capsys, command):
    module(
        "from torch import nn\nclass M(nn.Module):\n"
        "    def __init__(self, d):\n        super().__init__()\n"
        "        self.e, self.r, self.o = nn.Embedding(256, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, 256)\n"
        "    def forward(self, t):\n        return self.o(self.r(self.e(t))[0])\ndef build(d):\n    return M(d)\n"
    )
    (tmp_path / "text").write_text("some words, " * 500)
    words = [*command.split(), "--model", "broken:build", "--data", "text", "--context", "16", "--steps", "2"]
    assert main([*words, "--widths", "16"] if words[0] == "transfer" else [*words, "--width", "16"]) == 2
    assert "AdamW's initial values cover Linear" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_a_model_prints_is_no_part_of_the_result(module, capsys):
    module("from torch import nn\nprint('imported')\ndef build():\n    print('made')\n    return nn.Linear(2, 2)\n")
    assert main(["audit", "broken:build", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)
    assert told.err.split()[:2] == ["imported", "made"]


@pytest.mark.parametrize("command", ["train", "transfer --rates -3 -2 --workers 1 --recipes steady"])
def test_nor_is_what_it_prints_when_it_is_run(module, tmp_path, capfd, command):
    module(
        "from torch import nn\nclass M(nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
        "        self.e, self.o = nn.Embedding(256, d), nn.Linear(d, 256)\n"
        "    def forward(self, t):\n        print('seen')\n        return self.o(self.e(t))\n"
        "def build(d):\n    return M(d)\n"
    )
    (tmp_path / "text").write_text("some words, " * 500)
    width = ["--width", "8"] if command == "train" else ["--widths", "8"]
    words = ["--model", "broken:build", "--data", "text", "--context", "16", "--steps", "2", "--out", "run", "--json"]
    assert main([*command.split(), *width, *words]) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)
    assert "seen" in told.err


def test_what_is_drawn_is_of_the_key_alone_and_other_for_every_step():
    def drawn(*key):
        with drawn_by(torch.device("cpu"), *key):
            return torch.rand(4).tolist()

    state, draws = torch.get_rng_state(), [drawn(0, 0, step, 0) for step in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert [drawn(0, 0, step, 0) for step in range(3)] == draws
    assert len({*map(tuple, [*draws, drawn(1, 0, 0, 0), drawn(0, 1, 0, 0), drawn(0, 0, 0, 8)])}) == 6


def test_a_function_that_takes_no_width_says_so(module):
    module("def build():\n    return None\n")
    with pytest.raises(
        ValueError, match=r"calling it with 32 failed: TypeError: build\(\) takes 0 positional arguments"
    ):
        call("broken:build", 32)


@pytest.mark.parametrize(
    ("statement", "reason", "code"),
    [
        ("raise SystemExit(0)", "SystemExit: 0", 1),
        ("raise RuntimeError('no weights')", "RuntimeError: no weights", 1),
        ("raise ValueError('odd width')", "ValueError: odd width", 2),
    ],
)
def test_a_function_that_fails_is_named_and_no_success(module, capsys, statement, reason, code):
    module(f"def build():\n    {statement}\n")
    assert main(["audit", "broken:build"]) == code
    message = capsys.readouterr().err
    assert f"broken:build: calling it without arguments failed: {reason}" in message
    assert "broken.py, line 2" in message


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("broken:other", r"module 'broken' has no function 'other'"),
        ("absent:build", r"importing absent from /.* failed: ModuleNotFoundError: No module named 'absent'$"),
        ("absent.inner:build", r"importing absent\.inner from /.* failed: .*No module named 'absent'$"),
        ("broken.inner:build", r"importing broken\.inner from /.* failed: .*No module named 'broken\.inner'"),
        (":build", r"is not module:function"),
        ("broken:", r"is not module:function"),
        (".broken:build", r"is not module:function"),
    ],
)
def test_a_name_that_is_wrong_is_refused(module, target, message):
    module("from torch import nn\n\ndef build():\n    return nn.Linear(2, 3)\n")
    with pytest.raises(ValueError, match=message):
        call(target)
    assert isinstance(call("broken:build"), nn.Linear)
