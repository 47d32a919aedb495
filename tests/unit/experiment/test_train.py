"""The training loop: schedule, determinism, losses, divergence, records, exact resume."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from combinations import combinations
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.models import fast_linear
from surefoot.experiment.sweep.config import Trial
from surefoot.experiment.sweep.worker import run_trial
from surefoot.experiment.training.build import pick_device
from surefoot.experiment.training.checkpoint import Checkpoints, load
from surefoot.experiment.training.config import Schedule, TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import METHODS
from surefoot.experiment.training.run import Run

KINDS_OF_STATE = {
    "steady", "steady_soap", "shampoo_muon", "normuon", "wion", "muon", "lion", "hyperball", "mano", "adamw",
    "mup_adamw",
}  # fmt: skip
"""Methods with a momentum, an average of other things, or a stabiliser of each kind."""
TINY = TrainConfig(width=16, depth=1, steps=12, batch_size=4, context=16, lr=2.0**-5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width must be at least 1.*, got 0"),
        ({"steps": -1}, "steps must be at least 1"),
        ({"lr": math.nan}, "lr must lie between 0 and"),
        ({"warmup": 1.5}, "warmup must lie between 0 and 1, got 1.5"),
        ({"decay": -0.1}, "decay must lie"),
        ({"cooldown_shape": "cosine"}, "cooldown_shape='cosine' is unknown; choose linear, sqrt or power:P"),
        ({"cooldown_shape": "power"}, "choose linear, sqrt or power:P with P above 0"),
        ({"cooldown_shape": "power:-1"}, "cooldown_shape='power:-1' is unknown"),
        ({"device": "tpu"}, "device='tpu' is unknown; choose cpu, cuda, auto"),
        ({"autocast": "float16"}, "autocast='float16' is unknown"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TINY.replace(**change)


def test_settings_are_flat_in_files():
    keys = "model width depth head_dim method stabiliser lr seed steps batch_size context warmup decay device autocast"
    assert set(TINY.to_json()) == {*keys.split(), "cooldown_shape", "average", "data_order"}
    assert TrainConfig(**TINY.to_json()) == TINY
    assert TINY.replace(seed=3, width=32) == TrainConfig(**{**TINY.to_json(), "seed": 3, "width": 32})
    with pytest.raises(TypeError, match="'depht'"):
        TINY.replace(depht=3)


def test_a_gpu_that_is_missing_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="no GPU here"):
        pick_device("cuda")
    assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", ["linear", "sqrt", "power:1.5"])
def test_schedule_rises_to_one_and_falls_to_zero(steps, warmup, decay, shape):
    factors = [Schedule(steps, warmup, decay, shape).factor(step) for step in range(steps + 1)]
    top = factors.index(max(factors))
    assert factors[top] == 1
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert all(factor > 0 for factor in factors[:-1])
    assert factors[-1] == 0


def test_optimizer_follows_the_schedule(corpus):
    run = Run(TINY.replace(method="mup_adamw", decay=0.5), corpus)
    for step in range(TINY.steps):
        factor = TINY.replace(decay=0.5).factor(step)
        rates = [group["lr"] / group["initial_lr"] for group in run.optimizer.param_groups]
        assert rates == pytest.approx([factor] * len(rates))
        run.advance()


def test_same_seed_same_run(corpus):
    first, second = train(TINY, corpus), train(TINY, corpus)
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert train(TINY.replace(seed=1), corpus).val_loss != first.val_loss


def test_training_does_not_touch_the_global_generator_between_steps(corpus):
    run = Run(TINY, corpus)
    state = torch.get_rng_state()
    run.advance()
    assert torch.equal(state, torch.get_rng_state())


def test_losses_are_what_they_are_said_to_be(corpus):
    records = []
    result = train(TINY, corpus, on_step=records.append, log_every=1)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert result.train_loss == pytest.approx(np.mean([r["loss"] for r in records[-2:]]))  # 10 % of 12, rounded up
    assert records[0]["loss"] == pytest.approx(math.log(256), rel=0.02)
    assert [record["tokens"] for record in records] == [64 * step for step in range(1, 13)]
    assert records[-1]["lr"] == TINY.lr * TINY.factor(11)
    assert result.val_loss < records[0]["loss"]
    assert not result.diverged


def test_validation_is_the_same_for_every_seed_and_asked_for_on_the_way(corpus):
    records = []
    result = train(TINY, corpus, on_step=records.append, log_every=5, eval_every=6)
    assert [record["step"] for record in records] == [5, 6, 10, 12]
    assert ["val_loss" in record for record in records] == [False, True, False, True]
    assert records[-1]["val_loss"] == result.val_loss


def test_loss_is_computed_in_float32_under_autocast(corpus, monkeypatch):
    monkeypatch.setattr(fast_linear, "LEAST", {torch.bfloat16: 0})
    run = Run(TINY.replace(autocast="bfloat16"), corpus)
    assert run.loss("train", 0, 0).dtype == torch.float32
    run.advance()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    exact, rounded = train(TINY, corpus).val_loss, train(TINY.replace(autocast="bfloat16"), corpus).val_loss
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert rounded != exact


@pytest.mark.parametrize("method", ["adamw", "beyond_mup", "steady"])
@pytest.mark.parametrize("lr", [1e9, 1e30])
def test_divergence_is_a_result(corpus, method, lr):
    result = train(TINY.replace(method=method, lr=lr, steps=200), corpus)
    assert result.diverged
    assert result.train_loss is None
    assert result.val_loss is None
    assert result.steps < 200


def test_a_loss_that_is_not_a_number_ends_the_run(corpus):
    run = Run(TINY, corpus)
    run.advance()
    assert not run.diverged()
    run.losses[0] = math.nan
    assert run.diverged()
    assert run.result().val_loss is None


@combinations(lambda method: method in KINDS_OF_STATE, method=[*METHODS])
def test_resume_is_exact(corpus, method, tmp_path):
    config = TINY.replace(method=method, steps=10)
    whole = Run(config, corpus)
    for _ in range(10):
        whole.advance()
    half = Run(config, corpus)
    for _ in range(5):
        half.advance()
    folder = Checkpoints(tmp_path)
    folder.save(5, half.state())
    resumed = Run(config, corpus)
    folder.resume(resumed)
    for _ in range(5):
        resumed.advance()
    assert_equal(whole.state(), resumed.state())


def assert_equal(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), path
    else:
        assert a == b, path


class Stop(Exception):
    pass


def test_an_interrupted_training_ends_as_an_uninterrupted_one(corpus, tmp_path):
    whole = train(TINY, corpus, checkpoints=Checkpoints(tmp_path / "whole", every=4))

    def stop(record):
        if record["step"] == 7:
            raise Stop

    part = Checkpoints(tmp_path / "part", every=4)
    with pytest.raises(Stop):
        train(TINY, corpus, on_step=stop, log_every=1, checkpoints=part)
    steps = []
    resumed = train(TINY, corpus, on_step=lambda record: steps.append(record["step"]), log_every=1, checkpoints=part)
    assert steps == list(range(5, 13))
    assert replace(whole, seconds=0) == replace(resumed, seconds=0)
    ours, theirs = (load(Checkpoints(tmp_path / name).paths()[0]) for name in ("part", "whole"))
    assert_equal({**ours, "seconds": 0}, {**theirs, "seconds": 0})


def test_a_finished_training_only_evaluates_again(corpus, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = train(TINY, corpus, checkpoints=checkpoints)
    records = []
    assert replace(train(TINY, corpus, on_step=records.append, checkpoints=checkpoints), seconds=first.seconds) == first
    assert records == []


def test_checkpoints_of_another_run_are_refused(corpus, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    train(TINY, corpus, checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"another run.*lr \(0.03125, now 0.5\)"):
        train(TINY.replace(lr=0.5), corpus, checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"corpus \(fox, now cat\)"):
        train(TINY, replace(corpus, sha256="cat"), checkpoints=checkpoints)


def test_a_method_can_be_varied(corpus):
    shrunk = replace(METHODS["adamw"], weight_decay=20.0)
    plain = train(TINY.replace(method="adamw"), corpus)
    assert train(TINY.replace(method="adamw"), corpus, method=shrunk).val_loss != plain.val_loss


def test_a_model_can_be_prepared_and_a_compiled_one_trains_alike(corpus):
    config = TrainConfig(width=16, depth=1, steps=4, batch_size=2, context=8)
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = train(config, corpus, layout=Layout(prepare=lambda model: model.compile(backend=compiler)))
    assert graphs, "the compiled path is the one that runs"
    plain = train(config, corpus)
    assert compiled.val_loss == pytest.approx(plain.val_loss, abs=1e-5)


def test_a_trial_trains_as_the_loop_does(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog, " * 100)
    settings = {"depth": 1, "batch_size": 4, "context": 16, "data": str(path), "text": "fox"}
    trial = Trial("adamw", 16, -6.0, 1, 3, settings)
    threads = torch.get_num_threads()
    try:
        first, second = run_trial(trial), run_trial(trial)
    finally:
        torch.set_num_threads(threads)
    assert first.val_loss == second.val_loss
    assert first.val_loss < 7
    with pytest.raises(ValueError, match=r"text\.txt has changed"):
        run_trial(replace(trial, settings={**settings, "corpus": "0"}))
