"""`surefoot train`: its log, checkpoints and alarms, interrupted and on a full disk too."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from surefoot.cli import main
from surefoot.experiment.training.checkpoint import load

from .commands import lines, refused, start, training, undeep

TIMES = ("seconds", "tokens_per_second", "optimizer_share", "utilisation")


def untimed(result):
    return {key: value for key, value in result.items() if key not in TIMES}


def test_train_writes_log_result_and_checkpoints(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(training(out, text, "--log-every", "2", "--eval-every", "3", "--checkpoint-every", "4")) == 0
    said, _ = capsys.readouterr()
    assert "nats a byte after 6 steps" in said
    assert [record["step"] for record in lines(out / "log.jsonl")] == [2, 3, 4, 6]
    assert ["val_loss" in record for record in lines(out / "log.jsonl")] == [False, True, False, True]
    assert [record["step"] for record in lines(out / "norms.jsonl")] == [0, 2, 3, 4, 6]
    assert (out / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "tensorboard").exists()
    assert sorted(path.name for path in (out / "checkpoints").glob("*.pt")) == ["step-00000004.pt", "step-00000006.pt"]
    result = json.loads((out / "result.json").read_text())
    assert main([*training(out, text), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["optimizer_share"] == result["optimizer_share"] > 0
    assert json.loads((out / "result.json").read_text()) == again
    assert again["seconds"] == pytest.approx(result["seconds"], abs=0.01)
    assert untimed(again) == untimed(result)
    assert f"it differs in lr: there {json.loads((out / 'config.json').read_text())['lr']}, now 0.5" in refused(
        [*training(out, text), "--lr", "0.5"], capsys
    )


@pytest.mark.usefixtures("undrawn")
def test_data_that_lie_elsewhere_are_the_same_data(tmp_path, text, capsys, monkeypatch):
    assert main(training(tmp_path / "run", text, "--eval-data", f"{text}")) == 0
    monkeypatch.chdir(text.parent)
    assert main(training(tmp_path / "run", text.name, "--eval-data", text.name)) == 0
    text.write_bytes(text.read_bytes() + b"more")
    capsys.readouterr()
    said = refused(training(tmp_path / "run", text), capsys)
    assert "it differs in corpus: there" in said


def test_training_stopped_and_resumed_logs_each_step_once(tmp_path, text, capsys, signal_at):
    long = ["--steps", "20", "--log-every", "1", "--checkpoint-every", "7"]
    part, whole = tmp_path / "part", tmp_path / "whole"
    arguments = [*training(part, text), *long]
    signal_at(signal.SIGTERM, "log.jsonl", 10)
    assert main(arguments) == 143
    err = capsys.readouterr().err
    assert f"surefoot: interrupted; the same command goes on from the newest checkpoint in {part}/checkpoints" in err
    assert "step 11 of 20" in (part / "report.html").read_text()
    assert f"norms: {part}/norms.png" in err
    assert (part / "checkpoints" / "step-00000011.pt").exists()  # of the step after the tenth line of the log
    for run in (arguments, [*training(whole, text), *long]):
        assert main(run) == 0
    assert [r["step"] for r in lines(part / "norms.jsonl")] == list(range(21))
    ours, theirs = lines(part / "log.jsonl"), lines(whole / "log.jsonl")
    assert [(r["step"], r["loss"], r["lr"]) for r in ours] == [(r["step"], r["loss"], r["lr"]) for r in theirs]
    ours, theirs = (json.loads((run / "result.json").read_text()) for run in (part, whole))
    assert untimed(ours) == untimed(theirs)


@pytest.mark.usefixtures("undrawn")
def test_throughput_is_logged_and_shown(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main([*training(out, text, "--log-every", "3"), "--peak-flops", "1e12"]) == 0
    err = capsys.readouterr().err
    records, result = lines(out / "log.jsonl"), json.loads((out / "result.json").read_text())
    assert f", {records[0]['tokens_per_second']:,.0f} tokens/s, 0:00:00 left" in err
    for record in (*records, result):
        assert 0 < record["optimizer_share"] < 1
        used = record["tokens_per_second"] * record["flops_per_token"] / 1e12
        assert record["utilisation"] == pytest.approx(used, rel=1e-4)
    assert main(training(tmp_path / "other", text)) == 0
    assert lines(tmp_path / "other" / "log.jsonl")[0]["utilisation"] is None  # of a CPU's peak nothing is known


@pytest.mark.slow
def test_a_training_in_a_process_of_its_own_ends_on_sigterm(tmp_path, text):
    with start([*training(tmp_path / "run", text), "--steps", "2000", "--log-every", "1"]) as process:
        for line in process.stderr:
            if line.startswith("step 10/"):
                process.send_signal(signal.SIGTERM)
                break
        err = process.stderr.read()
        assert process.wait(timeout=30) == 143, err
    assert "surefoot: interrupted; the same command goes on" in err
    assert "Traceback" not in err


def test_training_on_a_full_disk_keeps_the_checkpoint(tmp_path, text, capsys, file_size_limit):
    file_size_limit(20_000)  # room for logs
    said = refused(training(tmp_path / "run", text), capsys, code=1)
    assert said.endswith("checkpoints/step-00000006.pt: File too large; what was saved earlier is intact")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("default")
def test_training_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main([*training(out, text), "--checkpoint-every", "3"]) == 0
    newest = out / "checkpoints" / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    first = json.loads((out / "result.json").read_text())
    capsys.readouterr()
    assert main([*training(out, text), "--checkpoint-every", "3"]) == 0
    assert f"surefoot: warning: {newest} is damaged" in capsys.readouterr().err
    assert json.loads((out / "result.json").read_text())["val_loss"] == first["val_loss"]


@pytest.mark.usefixtures("undrawn")
def test_a_training_that_diverges_says_so(tmp_path, text, capsys):
    assert main([*training(tmp_path / "run", text), "--method", "scion", "--lr", "10", "--steps", "30"]) == 3
    assert "diverged after 10 steps; try a smaller --lr" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] is None
    assert main([*training(tmp_path / "inf", text), "--method", "lion", "--lr", "1e36", "--steps", "30"]) == 3
    assert ".weight is the first parameter that is not finite" in capsys.readouterr().err


def test_training_warns_of_a_layer_that_leaves_its_band_and_report_says_it_again(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main([*training(out, text, "--log-every", "2"), "--norm-limit", "0.5"]) == 0
    err = capsys.readouterr().err
    assert "surefoot train: warning: step 0: blocks.0.mlp.up.weight: its norm, " in err
    (out / "norms.png").unlink()
    assert main(["report", f"{out}"]) == 0
    said = capsys.readouterr().out
    assert "| linear    | 6      | " in said
    assert "alarm at step 0: blocks.0.mlp.up.weight, norm " in said
    assert said.endswith(f"picture: {out}/norms.png\n")
    assert (out / "norms.png").exists()
    assert main(["report", f"{out}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"][0]["role"] == "embedding"


OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self, width, vocab=256):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, tokens):
        assert tokens.shape[1] <= 16, "block size"
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def small(width):
    return Own(width, vocab=100)

def many(width):
    return Own(width, vocab=1024)

def few(width):
    model = Own(width)
    model.register_forward_hook(lambda module, tokens, logits: logits[..., :8])
    return model

def wrapped(width):
    model = Own(width)
    model.register_forward_hook(lambda module, tokens, logits: {"logits": logits})
    return model
"""


@pytest.mark.usefixtures("undrawn")
def test_training_a_model_of_ones_own_with_every_way_to_compute_a_step(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    ways = ("--accumulate", "2", "--recompute", "--autocast", "bfloat16", "--average", "0.9", "--checkpoint-every", "4")
    part, whole = tmp_path / "part", tmp_path / "whole"
    for out in (whole, part):
        own = [*undeep(training(out, text)), "--model", "own_models:Own", "--steps", "8", *ways]
        assert main(own) == 0
        if out == whole:
            shutil.copytree(whole, part, ignore=shutil.ignore_patterns("step-00000008*", "result.json"))
    ours, theirs = (json.loads((run / "result.json").read_text()) for run in (part, whole))
    assert untimed(ours) == untimed(theirs)
    assert ours["val_loss_average"] < 5.6
    assert ours["flops_per_token"] == 6 * (2 * 16 * 16 + 256 * 16)
    capsys.readouterr()
    bad = [*undeep(training(tmp_path / "bad", text)), "--model"]
    assert "tokens below 256: index out of range" in refused([*bad, "own_models:small"], capsys)
    assert "logits (batch, 16, 256 or more), not (1, 16, 8)" in refused([*bad, "own_models:few"], capsys)
    assert "tokens below 256: block size" in refused([*bad, "own_models:Own", "--context", "32"], capsys)
    assert ", not dict" in refused([*bad, "own_models:wrapped"], capsys)
    assert not (tmp_path / "bad").exists()
    more = ["--model", "own_models:many", "--steps", "11", "--lr", "1e-5"]  # its loss begins at log 1024, above what
    assert main([*undeep(training(tmp_path / "more", "markov:16")), *more]) == 0  # 16 symbols that diverge have


DRAWING = """
from torch import nn

class Drawing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        layers = nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(width, width), nn.Dropout(0.5)
        self.blocks = nn.ModuleList([nn.Sequential(*layers)])

    def forward(self, tokens):
        return self.head(self.blocks[0](self.embed(tokens)))
"""


def test_what_a_model_of_ones_own_draws_follows_from_the_seed_and_evaluation_changes_nothing(
    tmp_path, text, monkeypatch
):
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(tmp_path)
    own = ("--model", "drawing:Drawing", "--steps", "8", "--checkpoint-every", "4", "--log-every", "1")
    ways = {"whole": (), "part": (), "often": ("--eval-every", "1", "--recompute"), "other": ("--seed", "1")}
    for name, more in ways.items():
        assert main([*undeep(training(tmp_path / name, text)), *own, *more]) == 0
    for path in tmp_path.glob("part/**/step-00000008*"):
        path.unlink()
    (tmp_path / "part" / "result.json").unlink()
    assert main([*undeep(training(tmp_path / "part", text)), *own]) == 0
    results = {name: untimed(json.loads((tmp_path / name / "result.json").read_text())) for name in ways}
    assert results["whole"] == results["part"]
    assert results["often"]["train_loss"] == results["whole"]["train_loss"] != results["other"]["train_loss"]
    assert results["often"]["val_loss"] == results["whole"]["val_loss"]
    model = load(tmp_path / "often" / "checkpoints" / "step-00000008.pt")["model"]
    assert int(model["blocks.0.1.num_batches_tracked"]) == 8


def test_training_without_the_extra_leaves_picture_and_page_out_and_says_so(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr("surefoot.cli.training.find_spec", lambda name: None)
    assert main(training(tmp_path / "run", text)) == 0
    assert "no page and no picture of the norms: that needs pip install 'surefoot[plots]'" in capsys.readouterr().err
    assert (tmp_path / "run" / "norms.jsonl").exists()
    assert not (tmp_path / "run" / "norms.png").exists()


def test_the_result_is_said_before_a_picture_ends_the_process(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr("surefoot.cli.training._draw", lambda out: sys.exit(133))  # as vl_convert does without memory
    with pytest.raises(SystemExit):
        main([*training(tmp_path / "run", text), "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 6


@pytest.mark.slow
def test_python_without_docstrings_trains_and_says_what_draws_nothing(tmp_path, text):
    """Altair copies docstrings when it is imported."""

    def said(*words):
        command = [sys.executable, "-OO", "-m", "surefoot", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    out = tmp_path / "run"
    code, told = said(*training(out, text))
    assert (code, "no picture of the norms: that needs python without -OO" in told) == (0, True), told
    assert (out / "result.json").exists()
    code, told = said("report", f"{out}")
    assert (code, told.count("\n")) == (2, 2), told
    assert "error: tables and pages need docstrings, which python -OO leaves out: run the same command without" in told


@pytest.mark.usefixtures("undrawn")
def test_training_writes_to_tensorboard(tmp_path, text, capsys):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    assert main([*training(out, text, "--log-every", "2"), "--tensorboard"]) == 0
    board = events.EventAccumulator(f"{out / 'tensorboard'}")
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [
        (record["step"], pytest.approx(record["loss"])) for record in lines(out / "log.jsonl")
    ]
    norms = [(e.step, e.value) for e in board.Scalars("norm/head.weight")]
    assert norms == [(r["step"], pytest.approx(r["norms"]["head.weight"][0])) for r in lines(out / "norms.jsonl")]
    assert "update/head.weight" in board.Tags()["scalars"]


def test_tensorboard_that_is_missing_is_named_before_anything_runs(tmp_path, text, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = refused([*training(tmp_path / "run", text), "--tensorboard"], capsys, code=1)
    assert said.endswith("pip install 'surefoot[tensorboard]'")
    assert not (tmp_path / "run").exists()
