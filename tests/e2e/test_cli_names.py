"""Names on the command line: published models and their sizes, methods with a value."""

import json

import pytest

from combinations import combinations
from surefoot.cli import _parser, main
from surefoot.cli.transfer import configure
from surefoot.experiment.models.sizes import PUBLISHED
from surefoot.experiment.training.methods import method
from surefoot.geometry import MeanOperator

from .commands import lines, refused, sweep, training

SIZES = {  # name -> parameters, of transformers' models, and the widths and depths of their papers
    "gpt2-small": (124_439_808, 768, 12),
    "gpt2-medium": (354_823_168, 1024, 24),
    "gpt2-large": (774_030_080, 1280, 36),
    "gpt2-xl": (1_557_611_200, 1600, 48),
    "llama-130m": (134_105_856, 768, 12),
}
COMMANDS = ("transfer", "train", "coordcheck")


@combinations(lambda name: name != "gpt2-large", name=[*SIZES])
def test_audit_knows_every_published_model(name, capsys):
    parameters, width, _ = SIZES[name]
    assert main(["audit", name.replace("-", "_"), "--recipes", "moga_row:1.5"]) == 0
    out = capsys.readouterr().out
    assert f" parameters, {parameters:,} entries, recipe moga_row(1.5), plan " in out
    assert "\nMeanOperator(p=1.5, q=inf): layers compose at every width, smoothness does not grow\n" in out
    assert main(["audit", "--model", name, "--width", f"{width}", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["smoothness"] == {"Spectral": 0.5}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_every_published_model(name, command):
    for spelling in (name, name.replace("-", "_")):
        chosen = _parser().parse_args([command, "--model", spelling])
        assert chosen.model in (name, spelling)
        assert (chosen.depth, chosen.head_dim) == (None, None)
    assert (PUBLISHED[name].width, PUBLISHED[name].depth) == SIZES[name][1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "gpt2-xl", "--width", "64"], "gpt2-xl has width 1600, not 64: leave it out"),
        (["train", "--model", "gpt2_xl", "--depth", "2"], "gpt2-xl has depth 48, not 2"),
        (["audit", "llama-130m", "--vocab", "256"], "llama-130m has vocab 32000, not 256"),
        (["audit", "llama-130m", "--head-dim", "16"], "llama-130m has head_dim 64, not 16"),
        (["transfer", "--model", "gpt2-small", "--depth", "2"], "gpt2-small has depth 12, not 2"),
        (["transfer", "--model", "gpt2-small", "--widths", "96"], "not a multiple of the head dimension 64"),
        (["coordcheck", "--model", "gpt2-small", "--head-dim", "16"], "gpt2-small has head_dim 64, not 16"),
        (["train", "--model", "gpt2-small", "--context", "1025"], "exceeds the 1024 learned positions of gpt2-small"),
        (["convert", "--lr", "1", "--model", "gpt2-xl", "--d-in", "3"], "gpt2-xl has its own matrices"),
        (["convert", "--lr", "1", "--d-in", "3"], "a matrix needs --d-in and --d-out, or name a published model"),
        (["train", "--model", "gpt3"], "argument --model: 'gpt3' is unknown; choose one of gpt, llama"),
    ],
)
def test_sizes_that_contradict_a_published_model_are_refused(arguments, message, tmp_path, text, capsys):
    own = [] if arguments[0] in ("audit", "convert") else ["--out", f"{tmp_path / 'out'}", "--data", f"{text}"]
    assert message in refused([*arguments, *own], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "transfer", "ladder", "compare", "coordcheck"])
@pytest.mark.parametrize("size", ["--depth", "--head-dim"])
def test_sizes_that_a_model_of_ones_own_does_not_read_are_refused(command, size, tmp_path, text, capsys):
    target = ["--to-width", "256"] if command == "ladder" else []
    own = ["--out", f"{tmp_path / 'out'}", "--data", f"{text}", *target]
    message = refused([command, "--model", "examples.own_width:build", size, "16", *own], capsys)
    assert f"examples.own_width:build has sizes of its own: leave {size} out" in message
    assert not (tmp_path / "out").exists()


def test_convert_has_a_table_for_each_shape_of_a_published_model(capsys):
    assert main(["convert", "--lr", "6e-4", "--model", "llama_130m", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert set(tables) == {"768x768", "2048x768", "768x2048"}
    assert main(["convert", "--lr", "6e-4", "--d-in", "2048", "--d-out", "768", "--json"]) == 0
    assert tables["768x2048"] == json.loads(capsys.readouterr().out)


def test_a_sweep_of_a_published_model_has_its_shape_at_every_width(tmp_path, text):
    common = ["transfer", "--model", "gpt2_small", "--data", f"{text}", "--out", f"{tmp_path / 'out'}"]
    alone = configure(_parser().parse_args(common))
    assert alone.widths == (768,)
    assert {name: alone.settings[name] for name in ("model", "depth", "head_dim")} == {
        "model": "gpt2-small", "depth": 12, "head_dim": 64,
    }  # fmt: skip
    assert configure(_parser().parse_args([*common, "--widths", "128", "64"])).widths == (64, 128)


def test_a_method_with_a_value_keeps_its_text_as_its_name(tmp_path, text, capsys):
    out = tmp_path / "run"
    arguments = training(out, text, "--recipes", "moga_row:1.5")
    assert main(arguments) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["method"], config["lr"]) == ("moga_row:1.5", 2.0**-4)
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0  # resumed: nothing is left to do
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert 'it differs in method: there "moga_row:1.5", now "moga_row"' in refused(
        training(out, text, "--recipes", "moga_row"), capsys
    )


def test_a_sweep_of_methods_with_values(inline, tmp_path, text):
    out = tmp_path / "sweep"
    assert main([*sweep(out, text, "--recipes", "moga_row:1.5", "moga_column:3", steps=1)]) == 0
    assert {record["recipe"] for record in lines(out / "results.jsonl")} == {"moga_row:1.5", "moga_column:3"}
    bracket = configure(_parser().parse_args(["transfer", "--recipes", "moga_row:3", "adamw", "--data", f"{text}"]))
    assert bracket.search.centres == {"moga_row:3": -4.0, "adamw": -6.0}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_a_recipe_refuses_is_refused_before_anything_is_written(command, tmp_path, text, capsys):
    out = tmp_path / "out"
    message = refused([command, "--recipes", "moga_row:0.5", "--out", f"{out}", "--data", f"{text}"], capsys)
    assert "'moga_row:0.5': MeanOperator needs 1 <= p <= q" in message
    assert not out.exists()


@pytest.mark.parametrize("text", ["moga_row:1", "moga_row:1.5", "moga_row:inf", "moga_column:3"])
def test_the_value_is_the_recipes_exponent(text):
    name, value = text.split(":")
    p, q = (float(value), float("inf")) if name == "moga_row" else (1, float(value))
    assert method(text).recipe.role("linear").geometry == MeanOperator(p, q)


def test_help_lists_the_names(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "moga_row, moga_column, wion may take a value, as in moga_row:1.5" in out
    assert ", ".join(SIZES).replace("-", "") in out.replace("- ", "").replace("-", "")  # wrapped at hyphens
