"""The coordinate check: right and wrong parametrisations, its arithmetic, its run directory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from surefoot import recipes
from surefoot.experiment.coordcheck import BAND, LOGITS, check, evaluate, measure
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports import coordcheck as coordcheck_report
from surefoot.experiment.training import methods
from surefoot.experiment.training.config import TrainConfig
from surefoot.initialise import HeadNormal, UnitNormal
from surefoot.scaling import FanIn

FEW = (32, 128)
SMALL = {"batch_size": 4, "context": 32}
ALL = (64, 128, 256, 512)
Values = Callable[[int, int], float | None]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Real text that is the same on every machine: the licence."""
    return load(Path(__file__).parents[3] / "LICENSE")


def slopes_of(
    name: str,
    corpus: Corpus,
    widths: tuple[int, ...],
    seeds: int = 1,
    depth: int = 1,
    size: dict[str, int] = SMALL,
    **changes: Any,
) -> dict[str, tuple[float, float]]:
    """Layer -> slopes of a method; of a recipe, with roles changed."""
    method = methods.method(name)
    if changes:
        assert isinstance(method, methods.Steepest)
        table = {role: replace(old, **changes.get(role, {})) for role, old in method.recipe.table.items()}
        method = methods.Steepest(recipes.Recipe("changed", table))
    config = TrainConfig(depth=depth, steps=10, warmup=0.0, decay=0.0, **size)
    configs = [config.replace(width=width, seed=seed) for width in widths for seed in range(seeds)]
    summary = evaluate([measure(one, corpus, method) for one in configs])
    return {layer["layer"]: (layer["start"]["slope"], layer["change"]["slope"]) for layer in summary["layers"]}


def worst(slopes: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """At the start, the logits apart, and of the change."""
    return (
        max(abs(start) for layer, (start, _) in slopes.items() if layer != LOGITS),
        max(abs(change) for _, change in slopes.values()),
    )


# Parametrisations


def test_dependencies_norms_and_steps_are_fitted_too(corpus):
    """Under the default recipe none grows; AdamW's matrices do. Logs without these numbers are read as before."""
    records = {
        name: [
            measure(
                TrainConfig(
                    width=w,
                    depth=1,
                    lr=2.0**-4 if name == "steady" else 2.0**-7,
                    method=name,
                    steps=5,
                    warmup=0.0,
                    decay=0.0,
                    **SMALL,
                ),
                corpus,
            )
            for w in FEW
        ]
        for name in ("steady", "adamw")
    }
    fits = {name: evaluate(rows)["measured"] for name, rows in records.items()}
    assert fits["steady"].keys() == {"dependency", "norm", "moved"}
    assert "blocks.0.mlp.up" in fits["steady"]["dependency"]
    weight = "blocks.0.mlp.up.weight"
    assert abs(fits["steady"]["norm"][weight]["slope"]) < 0.15
    assert abs(fits["steady"]["moved"][weight]["slope"]) < 0.15
    assert fits["adamw"]["moved"][weight]["slope"] > 0.5
    old = [{key: x for key, x in row.items() if key not in fits["adamw"]} for row in records["adamw"]]
    assert evaluate(old)["measured"] == {}
    assert evaluate(old)["layers"] == evaluate(records["adamw"])["layers"]


def test_the_default_recipe_keeps_its_scale(corpus):
    slopes = slopes_of("steady", corpus, FEW, seeds=2, size=SMALL | {"batch_size": 8})
    assert max(worst(slopes)) <= BAND, slopes
    assert slopes[LOGITS][0] == pytest.approx(-0.5, abs=0.05)


def test_standard_adamw_does_not(corpus):
    start, change = worst(slopes_of("adamw", corpus, FEW))
    assert start <= 0.15  # one seed
    assert change > 0.5


@pytest.mark.parametrize(
    ("role", "layer"),
    [
        ("linear", "blocks.0.mlp.up"),
        pytest.param("head", LOGITS, marks=pytest.mark.slow),
        pytest.param("embedding", "embedding", marks=pytest.mark.slow),
    ],
)
def test_a_rate_without_its_width_factor_is_found(role, layer, corpus):
    assert slopes_of("moga_row", corpus, FEW, **{role: {"lr_scale": FanIn()}})[layer][1] > 0.25


def test_initial_values_without_their_width_factor_are_found(corpus):
    shrunk = slopes_of("moga_row", corpus, FEW, linear={"initial": HeadNormal()}, head={"initial": UnitNormal()})
    assert shrunk["blocks.0.mlp.up"][0] == pytest.approx(-0.5, abs=0.1)
    assert shrunk[LOGITS][0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize("name", ["steady", "beyond_mup", "moga_row", "moga_column", "scion"])
def test_natural_recipes_pass_over_eight_times_the_width(name):
    assert max(worst(slopes_of(name, load(), ALL, seeds=3, depth=2, size={"method": name}))) <= BAND


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize(
    ("name", "least"), [("adamw", 1.0), ("lion", 1.0), ("sign_sgd", 1.0), ("muon", 0.3), ("frobenius_sphere", 0.2)]
)
def test_published_recipes_that_do_not(name, least):
    """Muon by its AdamW head, the Frobenius sphere by that norm: updates of low rank leave more of it as it widens."""
    assert worst(slopes_of(name, load(), ALL, seeds=2, depth=2, size={}))[1] > least


# Its arithmetic


def records(start: Values, change: Values, layer: str = "up", widths: tuple[int, ...] = ALL) -> list[dict[str, Any]]:
    return [
        {"width": width, "seed": seed, "start": {layer: start(width, seed)}, "change": {layer: change(width, seed)}}
        for width in widths
        for seed in (0, 1, 2)
    ]


def constant(width: int, seed: int) -> float:
    return 0.25


def test_a_slope_is_the_mean_over_seeds_with_an_interval():
    summary = evaluate(records(constant, lambda width, seed: 3.0 * width ** (0.5 + 0.1 * seed)))
    start, change = summary["layers"][0]["start"], summary["layers"][0]["change"]
    assert start["slope"] == pytest.approx(0, abs=1e-12)
    assert start["log2_rms"] == [-2.0] * 4
    assert change["slope"] == pytest.approx(0.6)
    assert change["ci"] == pytest.approx((0.6 - 0.2484, 0.6 + 0.2484), abs=1e-4)  # 4.303 * 0.1 / sqrt(3)
    assert (start["status"], change["status"], summary["passes"]) == ("inside", "outside", False)
    assert evaluate(records(constant, lambda width, _: width**0.6), band=0.7)["passes"]


@pytest.mark.parametrize(("slope", "passes"), [(-0.5, True), (0.09, True), (0.11, False)])
def test_logits_may_fall_at_the_start_only(slope, passes):
    def grows(width: int, seed: int) -> float:
        return width**slope

    assert evaluate(records(grows, constant, LOGITS))["passes"] == passes
    assert evaluate(records(grows, constant))["passes"] == (abs(slope) <= 0.1)
    assert evaluate(records(constant, grows, LOGITS))["passes"] == (abs(slope) <= 0.1)


@pytest.mark.parametrize(
    ("values", "status"),
    [
        (lambda width, seed: 0.0, "zero"),
        (lambda width, seed: None, "not finite"),
        (lambda width, seed: None if width == 64 else 1.0, "not finite"),
        (lambda width, seed: 0.0 if width == 64 else 1.0, "not finite"),
    ],
)
def test_values_without_a_logarithm(values, status):
    summary = evaluate(records(constant, values))
    assert summary["layers"][0]["change"]["status"] == status
    assert summary["passes"] == (status == "zero")


def test_a_model_of_other_layers_at_another_width():
    mixed = records(constant, constant, "up", (64,)) + records(constant, constant, "down", (128,))
    with pytest.raises(ValueError, match="layers differ between widths 128 and 64: down, up"):
        evaluate(mixed)


def test_what_may_be_noise_is_said():
    noisy = evaluate(records(constant, lambda width, seed: width ** (0.2 * seed)))
    assert "1 of 2 slopes leave ±0.1; 1 may be noise" in coordcheck_report.verdict(noisy)
    sure = evaluate(records(constant, lambda width, seed: width ** (-0.5 + 0.01 * seed)))
    assert coordcheck_report.verdict(sure) == "FAILS: 1 of 2 slopes leave ±0.1"


# Its run directory


def test_more_seeds_and_another_band_go_on_from_what_is_there(corpus, tmp_path):
    config = TrainConfig(depth=1, steps=2, batch_size=2, context=8)
    made: list[tuple[int, int]] = []

    def run(widths: tuple[int, ...], seeds: range, band: float, config: TrainConfig = config) -> dict[str, Any]:
        made.clear()

        def note(record: dict[str, Any]) -> None:
            made.append((record["width"], record["seed"]))

        return check(config, corpus, tmp_path, widths, seeds, band, note)

    first = run((32, 16), range(2), 9.0)
    assert made == [(16, 0), (16, 1), (32, 0), (32, 1)]
    assert first["passes"]
    assert (first["widths"], first["seeds"]) == ([16, 32], [0, 1])
    assert not run((16, 32), range(2), 1e-9)["passes"]
    assert made == []
    again = run((16, 32, 48), range(1), 9.0)
    assert made == [(48, 0)]
    assert (again["widths"], again["seeds"]) == ([16, 32, 48], [0])
    assert json.loads((tmp_path / "coordcheck.json").read_text()) == json.loads(json.dumps(again))
    with pytest.raises(ValueError, match="it differs in steps: there 2, now 3"):
        run((16, 32), range(2), 9.0, config.replace(steps=3))


def test_layers_are_the_owners_of_parameters_and_the_logits(corpus):
    record = measure(TrainConfig(width=16, depth=1, steps=1, batch_size=2, context=8), corpus)
    layers = list(record["start"])
    assert layers[0] == "embedding"
    assert layers[-1] == LOGITS
    assert "head" not in layers
    assert record["start"].keys() == record["change"].keys()


def test_routers_are_heads_whose_logits_may_fall(corpus):
    record = measure(TrainConfig(model="moe", width=16, depth=1, steps=1, batch_size=2, context=8), corpus)
    assert record["logits"] == [LOGITS, "blocks.0.mlp.router"]

    def falls(width: int, seed: int) -> float:
        return width**-0.5

    routed = [row | {"logits": record["logits"]} for row in records(falls, constant, "blocks.0.mlp.router")]
    assert evaluate(routed)["passes"]
    assert not evaluate([row | {"logits": [LOGITS]} for row in routed])["passes"]


class Tied(nn.Module):
    """A tied head whose logits are multiplied by 1/width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(256, width), nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.output_multiplier = 1 / width

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.embedding(tokens))) * self.output_multiplier


def test_logits_are_the_models_own_output(corpus, monkeypatch):
    monkeypatch.setattr("surefoot.experiment.training.build.call", lambda _, width: Tied(width))
    configs = [TrainConfig(model="a:b", width=width, steps=8, warmup=0.0, decay=0.0) for width in FEW]
    summary = evaluate([measure(config, corpus) for config in configs], band=0.15)
    assert [layer["layer"] for layer in summary["layers"]] == ["embedding", "norm", LOGITS]
    assert summary["passes"], summary
