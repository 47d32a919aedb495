"""The study of parts beyond Muon: its search of rates, its ratio of steps, and that every part changes the training."""

import importlib
import math
import random
from pathlib import Path

import pytest
import torch

from surefoot.experiment.models.decoder import reference

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def beyond():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        yield {name: importlib.import_module(f"beyond.{name}") for name in ("variants", "run", "tables")}


def test_the_search_finds_a_quarter_octave_and_goes_on_beyond_an_edge(beyond):
    for optimum in (-3.15, -2.85, -2.4, -4.3, -1.7):
        means = {}
        while rates := beyond["run"].next_rates(means, -3.0, 4):
            means |= {rate: 2 + 0.1 * (rate - optimum) ** 2 for rate in rates}
        best = min(means, key=means.__getitem__)
        assert abs(best - optimum) <= (0.125 if abs(optimum + 3) < 0.25 else 0.25)
        assert min(means) < best < max(means)
        assert len(means) == 4 if abs(optimum + 3) < 0.75 else 4 < len(means) <= 7


def test_the_ratio_of_steps_is_where_a_line_meets_the_target(beyond):
    """Losses that fall with the log of the steps, each seed with its own offset, and noise on every run."""
    rng = random.Random(0)
    target = {seed: 1.7 + 0.01 * seed for seed in range(8)}
    exact = {n: {s: target[s] - 0.3 * math.log(n / 340) for s in target} for n in (280, 320, 360, 400)}
    assert beyond["tables"].ratio(exact, target).value == pytest.approx(340 / 400)
    noisy = {n: {s: loss + rng.gauss(0, 0.005) for s, loss in own.items()} for n, own in exact.items()}
    found = beyond["tables"].ratio(noisy, target)
    assert found.interval[0] < found.value < found.interval[1]
    assert found.value == pytest.approx(0.85, abs=0.02)
    assert beyond["tables"].ratio({n: exact[680 - n] for n in (280, 320, 360, 400)}, target).value is None


def test_every_part_is_another_training(beyond):
    """Six steps of each; parts that change the schedule alone have settings of their own."""
    ended = {}
    variants = beyond["variants"]
    for name in (*variants.SCREEN, *(f"steady+{part}" for part in variants.MORE)):
        way = variants.Way(name)
        model = reference("gpt", 16, 1, 8, 16)
        method = way.method(10)
        method.initialise_(model, 0)
        torch._foreach_mul_([p.data for p in model.parameters()], 10.0)  # as large as a floor on steps asks for
        optimizer = method.optimizer(model, 0.2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert weights.isfinite().all(), name
        ended[name] = (tuple(weights.tolist()), tuple(way.settings.items()))
    assert len(set(ended.values())) == len(ended)


def test_a_name_that_means_nothing_is_refused(beyond):
    with pytest.raises(ValueError, match=r"'steady\+rowz' is no base with parts.*rows"):
        beyond["variants"].Way("steady+rowz")
