"""Conversions keep the steps and the decay, and come back."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot.cli import main
from surefoot.conversion import CONVENTIONS, table
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.training.methods import MupAdamW

SHAPES = [(64, 64), (768, 3072), (3072, 768), (1, 9)]


@pytest.mark.parametrize(("d_in", "d_out"), SHAPES)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(CONVENTIONS, repeat=2)))
def test_a_conversion_and_back_is_the_identity(source, target, d_in, d_out):
    start = sf.Setting(3e-3, 0.1)
    there = sf.convert(start, source, target, d_in, d_out, base_d_in=128)
    back = sf.convert(there, target, source, d_in, d_out, base_d_in=128)
    assert (back.lr, back.weight_decay) == pytest.approx((start.lr, start.weight_decay), rel=1e-12)
    assert there.lr * there.weight_decay == pytest.approx(start.lr * start.weight_decay)  # the decay of a step


@combinations(
    lambda name, shape: shape == (64, 64) or (shape[0] < shape[1]) == (name == "keller"),
    name=["keller", "moonlight"],
    shape=[(64, 64), (48, 192), (192, 48), (1, 9)],
)
def test_the_converted_setting_takes_the_same_steps(name, shape):
    """Published Muon beside natural steps with decay, both through the optimizer."""
    d_in, d_out = shape
    scale = {"keller": sf.Keller(), "moonlight": sf.Moonlight()}[name]
    published = sf.recipes.muon(scale).role("linear")
    natural = sf.convert(sf.Setting(0.02, 0.1), name, "natural", d_in, d_out)
    ours = sf.Role(
        "linear", sf.Spectral(), momentum=published.momentum, stabiliser=sf.WeightDecay(natural.weight_decay)
    )
    weights = [nn.Parameter(torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(0))) for _ in "ab"]
    optimizers = [
        sf.SteepestDescent([{"params": [weights[0]], "role": published}], lr=0.02),
        sf.SteepestDescent([{"params": [weights[1]], "role": ours}], lr=natural.lr),
    ]
    for step in range(3):
        g = torch.randn(d_out, d_in, generator=torch.Generator().manual_seed(1 + step))
        for w, optimizer in zip(weights, optimizers, strict=True):
            w.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(*(w.detach() for w in weights), rtol=1e-4, atol=1e-5)


def test_known_values():
    assert sf.convert(sf.Setting(1e-3), "adamw", "natural", 400, 100).lr == pytest.approx(
        1e-3 * 0.2 * math.sqrt(400 * 400 / 100)
    )
    assert sf.convert(sf.Setting(1e-3), "mup", "adamw", 256, 256, base_d_in=64).lr == pytest.approx(1e-3 / 4)
    assert sf.convert(sf.Setting(1e-3), "adamw", "moonlight", 5, 7) == sf.Setting(1e-3)


def test_wrong_input_is_refused_by_name():
    with pytest.raises(ValueError, match="muon"):
        sf.convert(sf.Setting(0.1), "muon", "natural", 4, 4)
    with pytest.raises(ValueError, match="d_out"):
        sf.convert(sf.Setting(0.1), "adamw", "natural", 4, 0)
    for lr, decay in ((0.0, 0.1), (math.nan, 0.1), (0.1, -1.0), (0.1, math.inf)):
        with pytest.raises(ValueError, match=r"learning rate|weight decay"):
            sf.Setting(lr, decay)


def test_the_command_prints_them_all(capsys):
    arguments = ["convert", "--lr", "3e-4", "--weight-decay", "0.1", "--d-in", "768", "--d-out", "3072"]
    assert main([*arguments, "--base-d-in", "256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == list(CONVENTIONS)
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = table(sf.Setting(3e-4, 0.1), "adamw", 768, 3072)
    assert printed == {name: {"lr": s.lr, "weight_decay": s.weight_decay} for name, s in expected.items()}
    assert "mup" not in printed
    assert main([*arguments, "--source", "mup"]) == 2
    assert "give --d-in, --d-out and --base-d-in" in capsys.readouterr().err
    assert main([*arguments[:3], "--source", "mup", "--model", "gpt2-small"]) == 2  # which has no base model
    assert "give --d-in, --d-out and --base-d-in" in capsys.readouterr().err
    assert main([*arguments[:3], "--weight-decay", "-1", *arguments[5:]]) == 2


def test_mup_goes_by_the_fan_in_of_the_same_matrix_and_agrees_with_the_baseline():
    """The baseline's rates of up and down projections, at twice its base width."""
    with pytest.raises(ValueError, match="give base_d_in"):
        sf.convert(sf.Setting(1e-3), "mup", "adamw", d_in=256, d_out=64)
    model = reference("gpt", 128, 1)
    groups = MupAdamW(base_width=64).optimizer(model, 1e-3).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for weight, base in ((model.blocks[0].mlp.up.weight, 64), (model.blocks[0].mlp.down.weight, 256)):
        d_out, d_in = weight.shape
        converted = sf.convert(sf.Setting(1e-3), "mup", "adamw", d_in, d_out, base_d_in=base)
        assert converted.lr == pytest.approx(rates[id(weight)]) == pytest.approx(5e-4)


@pytest.mark.parametrize(("lost", "stays"), [(0.1, True), (1.0, True), (1.5, True), (2.0, False), (3.0, False)])
def test_the_bound_that_is_printed_is_the_largest_norm_of_a_pull_along_the_weight(lost, stays, capsys):
    """Of a weight that loses so much of itself a step, which turns it round from 1 on."""
    assert main(["convert", "--lr", "0.1", "--weight-decay", f"{10 * lost}", "--d-in", "4", "--d-out", "4"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("natural"))
    w, eta = 0.0, float(line.split()[1])
    for _ in range(200):
        w = abs(1 - lost) * w + eta
    assert (f"{w:.4g}" in line) == stays
    assert ("no bound" in line) != stays
