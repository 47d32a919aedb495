"""What studies vary of the baselines: GPT-2's initial values, and rates by role, under AdamW and under muP's."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.experiment.models.decoder import reference
from surefoot.experiment.training.methods import AdamW, MupAdamW


@pytest.fixture(scope="module")
def baselines():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "studies"))
        yield importlib.import_module("baselines")


def test_gpt2_initial_values_shrink_what_adds_to_the_residual_stream(baselines):
    model, state = reference("llama", 128, depth=8), torch.get_rng_state()
    baselines.Started(AdamW(), baselines.gpt2_).initialise_(model, 0)
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        expected = 0.02 / 4 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.02
        if p.ndim == 2:
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.03), name
        else:
            assert bool((p == 1).all()), name


def test_gpt2_initial_values_refuse_other_modules(baselines):
    with pytest.raises(ValueError, match=r"^0 is a Conv1d"):
        baselines.gpt2_(nn.Sequential(nn.Conv1d(2, 2, 1)), 0)


@pytest.mark.parametrize("method", [AdamW(), MupAdamW(base_width=32)])
def test_rates_by_role(baselines, method):
    model = reference("gpt", 32)
    factored = baselines.Factored(method, {"head": 0.5, "gain": 4.0})
    assert factored.clip == 1.0
    optimizer = factored.optimizer(model, 1e-2)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[model.head.weight] == 5e-3
    assert rates[model.final_norm.weight] == 4e-2
    assert rates[model.embedding.weight] == rates[model.blocks[0].mlp.up.weight] == 1e-2
    assert len(rates) == len(list(model.parameters()))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {p.ndim for p, decay in decays.items() if decay} == {2}
    assert {p.ndim for p, decay in decays.items() if not decay} == {1}
