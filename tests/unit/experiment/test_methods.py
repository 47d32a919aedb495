"""Methods: their names, initial values and groups; muP's table by its own coordinate check."""

from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.experiment.coordcheck import evaluate, measure
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.models import sizes
from surefoot.experiment.models.decoder import REFERENCES, reference
from surefoot.experiment.training import initial_values, methods, names
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run
from surefoot.optim.create import RECIPES

FEW, WIDTHS = (32, 128), (32, 64, 128, 256)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Real text that is the same on every machine: the licence."""
    return load(Path(__file__).parents[3] / "LICENSE")


def test_command_line_names_are_the_tables():
    assert tuple(methods.METHODS) == names.METHODS
    assert tuple(n for n, m in methods.METHODS.items() if isinstance(m, methods.Steepest)) == names.RECIPES
    for name in names.RECIPES:
        assert methods.METHODS[name].recipe.name.split("(")[0] == name
    assert tuple(REFERENCES) == sizes.REFERENCES
    assert set(names.VALUES) <= set(names.RECIPES)
    assert {*names.RECIPES} == {*RECIPES, "moonlight_tuned"}  # which the command line alone has


def test_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match=r"'sgd'.*beyond_mup.*mup_adamw"):
        methods.method("sgd")


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_initialises_by_seed_and_takes_a_step(name, corpus):
    runs = [Run(TrainConfig(method=name, width=32, depth=1, lr=1e-3, seed=seed), corpus) for seed in (0, 0, 1)]
    weights = [run.model.get_parameter("blocks.0.mlp.up.weight") for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    before = {name: p.detach().clone() for name, p in runs[0].model.named_parameters()}
    runs[0].advance()
    runs[0].advance()
    moved = [name for name, p in runs[0].model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == list(before)
    assert all(bool(p.isfinite().all()) for p in runs[0].model.parameters())


def test_initial_values_leave_the_global_generator_alone():
    model = reference("gpt", 32)
    state = torch.get_rng_state()
    initial_values.torch_(model, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_torch_initial_values_have_torchs_distribution(kind):
    torch.manual_seed(0)
    ours, torchs = reference(kind, 128), reference(kind, 128)
    initial_values.torch_(ours, 0)
    for (name, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        assert not torch.equal(p, q) or p.ndim == 1, name
        scatter = 0.02 + p.numel() ** -0.5
        assert float(p.detach().std()) == pytest.approx(float(q.detach().std()), rel=scatter, abs=1e-6), name
        if p.ndim > 1 and "embedding" not in name:
            assert float(p.detach().abs().max()) == pytest.approx(float(q.detach().abs().max()), rel=0.01), name


@pytest.mark.parametrize(("head", "std"), [("tied", (3 * 64) ** -0.5), ("tied_scaled", 1.0)])
def test_a_tied_head_starts_as_a_linear_layer_unless_logits_are_divided(head, std):
    model = reference("gpt", 64, head=head)
    initial_values.torch_(model, 0)
    assert model.head.weight is model.embedding.weight
    assert float(model.head.weight.detach().std()) == pytest.approx(std, rel=0.05)


def test_baselines_refuse_other_modules():
    with pytest.raises(ValueError, match=r"^0 is a Conv1d"):
        initial_values.torch_(nn.Sequential(nn.Conv1d(2, 2, 1)), 0)


def test_adamw_decays_matrices_only():
    model = reference("gpt", 32)
    matrices, vectors = methods.AdamW(weight_decay=0.3).optimizer(model, 1e-3).param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert matrices["weight_decay"] == 0.3
    assert {p.ndim for p in vectors["params"]} == {1}
    assert vectors["weight_decay"] == 0


def test_mup_is_adamw_at_its_base_width():
    model, other = reference("gpt", 64), reference("gpt", 64)
    method = methods.MupAdamW(base_width=64)
    method.initialise_(model, 3)
    initial_values.torch_(other, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert {group["lr"] for group in method.optimizer(model, 0.5).param_groups} == {0.5}


def test_mup_scales_matrices_and_head_by_width():
    model = reference("gpt", 128)
    groups = methods.MupAdamW(base_width=32, weight_decay=0.1).optimizer(model, 1.0).param_groups
    rates = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}
    assert rates["blocks.0.mlp.down.weight"] == rates["head.weight"] == (0.25, 0.4)
    assert rates["embedding.weight"] == (1.0, 0.1)
    assert rates["final_norm.weight"] == (1.0, 0.0)


def test_mup_refuses_a_tied_head_without_a_multiplier():
    with pytest.raises(ValueError, match=r"embedding.weight.*tied_scaled"):
        methods.MupAdamW().optimizer(reference("gpt", 32, head="tied"), 1e-3)
    methods.MupAdamW().optimizer(reference("gpt", 32, head="tied_scaled"), 1e-3)


def slopes(method: methods.Method, corpus: Corpus, widths: tuple[int, ...] = FEW, seeds: int = 1) -> list[float]:
    """Of the change of every layer."""
    size = {"depth": 1, "steps": 8, "batch_size": 8, "context": 32}
    configs = [TrainConfig(width=w, lr=2.0**-8, seed=s, **size) for w in widths for s in range(seeds)]
    layers = evaluate([measure(config, corpus, method) for config in configs])["layers"]
    return [layer["change"]["slope"] for layer in layers]


@pytest.mark.parametrize(("widths", "seeds"), [(FEW, 2), pytest.param(WIDTHS, 2, marks=pytest.mark.slow)])
def test_mup_passes_its_coordinate_check(corpus, widths, seeds):
    changes = slopes(methods.MupAdamW(), corpus, widths, seeds)
    assert max(map(abs, changes)) < 0.15, changes


@pytest.mark.parametrize("widths", [FEW, pytest.param(WIDTHS, marks=pytest.mark.slow)])
def test_standard_adamw_fails_the_coordinate_check(corpus, widths):
    assert max(slopes(methods.AdamW(), corpus, widths)) > 0.4


@pytest.mark.parametrize(
    ("text", "message"),
    [("post_clap:2", "unknown stabiliser"), ("post_clip:-1", "must be positive"), ("free:1", "written free$"),
     *((text, r"written post_clip:RADIUS\[:PERIOD\]$") for text in ("post_clip", "post_clip:two", "post_clip:2:.5")),
     ("normalise:1:2", r"written normalise\[:RADIUS\]$")],
)  # fmt: skip
def test_stabilisers_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        methods.stabiliser(text)


@pytest.mark.parametrize("name", sorted(methods.STABILISERS.keys() - {"free", "hyperball"}))
def test_every_stabiliser_takes_its_number(name):
    assert 0.5 in vars(methods.stabiliser(f"{name}:0.5")).values()


def test_a_stabiliser_bounds_every_role_of_a_recipe_and_no_baseline():
    model = reference("gpt", 32)
    optimizer = methods.method("moga_row", "post_clip:1.5").optimizer(model, 0.1)
    assert {str(placement.role.stabiliser) for _, placement in optimizer._known.values()} == {
        "PostClip(radius=1.5, period=None)"
    }
    with pytest.raises(ValueError, match="without stabilisers"):
        methods.method("adamw", "post_clip:1.5")
