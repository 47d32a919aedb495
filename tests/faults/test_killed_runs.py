"""Runs whose process is killed: begun once more, then recorded as failed; no other run is lost, on any executor."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from inline_executor import Inline
from surefoot.experiment.errors import SweepError
from surefoot.experiment.files import read_lines
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.executors import Killed, Pool, Raised, guarded
from surefoot.experiment.sweep.progress import Progress
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import run

FATAL = (16, 0.0)


def note(trial):
    """A line for each start of this trial; returns how many there are."""
    path = Path(trial.settings["log"]) / f"{trial.width} {trial.log2_lr}"
    with path.open("a") as log:
        log.write(f"{os.getpid()}\n")
    return len(path.read_text().split())


def quick(trial):
    note(trial)
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def always_killed(trial):
    if (trial.width, trial.log2_lr) == FATAL:
        note(trial)
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(trial)


def killed_once(trial):
    if note(trial) == 1 and (trial.width, trial.log2_lr) == FATAL:
        os.kill(os.getpid(), signal.SIGKILL)
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def slow(trial):
    time.sleep(trial.settings["sleep"])
    return quick(trial)


def raising(trial):
    if (trial.width, trial.log2_lr) == FATAL:
        raise KeyError("no such layer")
    return quick(trial)


def leaving(trial):
    os._exit(3)


def unpicklable(trial):
    return lambda: trial


def config(log, sleep=0.0):
    return SweepConfig(("a",), (8, 16), (0,), 1, Grid((-1.0, 0.0, 1.0)), {"log": f"{log}", "sleep": sleep})


def silent(progress):
    pass


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log").mkdir()
    return tmp_path / "log"


def starts(log):
    return {tuple(map(float, path.name.split())): len(path.read_text().split()) for path in log.iterdir()}


def trials(directory):
    return [(r["width"], r["log2_lr"]) for r in read_lines(directory / "results.jsonl")]


def test_a_run_that_always_kills_its_process_is_recorded_as_failed_and_the_others_are_done(tmp_path, log):
    shown = []
    summary = run(config(log, sleep=0.2), tmp_path / "run", always_killed, workers=3, progress=shown.append)
    records = read_lines(tmp_path / "run" / "results.jsonl")
    assert len(records) == len(set(trials(tmp_path / "run"))) == 6
    (failed,) = [record for record in records if "failed" in record]
    assert (failed["width"], failed["log2_lr"]) == FATAL
    assert failed["failed"] == "killed twice: its worker process ended with SIGKILL (out of memory?)"
    assert failed["train_loss"] is failed["val_loss"] is None
    assert not failed["diverged"]
    bystanders = {trial: count for trial, count in starts(log).items() if trial != FATAL}
    assert starts(log)[FATAL] == 2
    assert set(bystanders.values()) == {1}  # they were under way beside it, and are not begun again
    (entry,) = summary["recipes"]
    assert (entry["failed"], entry["diverged"], entry["runs"]) == ([0, 1], [0, 0], [3, 3])
    assert entry["best_log2_lr"] == [pytest.approx(0, abs=1e-9), None]
    assert (entry["regret_log2_lr"], entry["regret_nats"], entry["regret_diverged"]) == (0.0, None, False)
    assert any("lr 2^0 seed 0: failed, killed twice: its worker" in progress.headline for progress in shown)


def test_a_failed_run_is_shown_and_run_again_only_when_its_line_is_deleted(tmp_path, log):
    from surefoot.experiment.reports import transfer as transfer_report
    from surefoot.experiment.reports.report import draw

    directory = tmp_path / "run"
    summary = run(config(log), directory, always_killed, workers=1, progress=silent)
    assert "failed: a 1 at width 16; killed twice, counted as diverged; to run" in str(transfer_report.table(summary))
    assert draw(directory).exists()
    before = (directory / "results.jsonl").read_text()
    run(config(log), directory, None, progress=silent)  # None cannot be run
    assert (directory / "results.jsonl").read_text() == before
    kept = [line for line in before.splitlines(keepends=True) if '"failed"' not in line]
    (directory / "results.jsonl").write_text("".join(kept))
    (entry,) = run(config(log), directory, quick, executor=Inline(), progress=silent)["recipes"]
    assert entry["failed"] == [0, 0]
    assert entry["best_log2_lr"] == pytest.approx([0, 0], abs=1e-9)


def test_a_run_that_is_killed_once_runs_again_and_is_done(tmp_path, log):
    run(config(log), tmp_path / "run", killed_once, workers=2, progress=silent)
    assert starts(log)[FATAL] == 2
    assert sorted(trials(tmp_path / "run")) == [(w, r) for w in (8, 16) for r in (-1.0, 0.0, 1.0)]
    assert not any("failed" in record for record in read_lines(tmp_path / "run" / "results.jsonl"))


def test_another_exit_is_named_and_what_cannot_be_sent_back_stops_the_sweep(tmp_path):
    one = SweepConfig(("a",), (8,), (0,), 1, Grid((0.0,)))
    run(one, tmp_path / "left", leaving, workers=1, progress=silent)
    assert {r["failed"] for r in read_lines(tmp_path / "left" / "results.jsonl")} == {
        "killed twice: its worker process ended with exit code 3"
    }
    with pytest.raises(SweepError, match=r"a, width 8, lr 2\^0, seed 0: \w+: .*pickle"):
        run(one, tmp_path / "run", unpicklable, workers=1, progress=silent)


@pytest.mark.parametrize("error", [MemoryError("3 GiB"), torch.OutOfMemoryError("3 GiB")], ids=repr)
def test_a_run_without_memory_is_as_one_that_was_killed(error):
    def run_out(item):
        raise error

    ended = guarded(run_out, None)
    assert isinstance(ended, Killed)
    assert str(ended) == f"{type(error).__name__}: 3 GiB"


def test_the_traceback_of_what_a_run_raised_is_kept(tmp_path, log):
    with pytest.raises(SweepError, match=r"a, width 16, lr 2\^0, seed 0: KeyError: 'no such layer'") as stopped:
        run(config(log), tmp_path / "run", raising, workers=1, progress=silent)
    assert isinstance(stopped.value.__cause__, Raised)
    assert 'raise KeyError("no such layer")' in str(stopped.value.__cause__)


UNGUARDED = """
import sys
from pathlib import Path
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import run

def trial(trial):
    return TrialResult(2.0, 2.0, 0.1)

run(SweepConfig(("a",), (8,), (0,), 1, Grid((0.0,))), Path(sys.argv[1]), trial, workers=1)
"""


def test_processes_that_cannot_start_are_no_failed_runs(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "twice its worker process ended with exit code 1 before it could begin; a script that" in done.stderr
    assert read_lines(tmp_path / "run" / "results.jsonl") == []


def test_a_pool_can_be_used_again_after_it_was_closed(tmp_path, log):
    pool = Pool(2)
    for name in ("one", "two"):
        run(config(log), tmp_path / name, quick, progress=silent, executor=pool)
    assert set(starts(log).values()) == {2}


def test_a_worker_killed_while_it_waits_costs_nothing():
    pool = Pool(1)
    try:
        for _ in range(2):
            (worker,) = pool.submit(abs, [-3])
            assert pool.wait([worker]) == [(worker, 3)]
            worker.process.kill()
            worker.process.join()
    finally:
        pool.close()


def test_a_diverged_run_says_where(tmp_path):
    record = {"recipe": "a", "width": 8, "log2_lr": 0.0, "seed": 0, "diverged": True, "not_finite": "head.weight"}
    assert Progress(record, 1, 1, 0.0).headline == "a width 8 lr 2^0 seed 0: diverged, head.weight is not finite"


TWELVE = """
import sys, time
from pathlib import Path
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import run

def trial(trial):
    with open(trial.settings["log"], "a") as log:
        log.write("begun\\n")
    time.sleep(0.4)
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.4)

if __name__ == "__main__":
    executor = None
    if sys.argv[2] == "ray":
        from surefoot.experiment.sweep.clusters import Ray
        executor = Ray(2)
    config = SweepConfig(("a",), (8, 16), (0, 1), 1, Grid((-1.0, 0.0, 1.0)), {"log": sys.argv[3]})
    run(config, Path(sys.argv[1]), trial, workers=2, executor=executor)
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", pytest.param("ray", marks=pytest.mark.integration)])
def test_killed_ten_times_at_random_moments_twelve_runs_are_twelve_results(tmp_path, executor):
    if executor == "ray":
        pytest.importorskip("ray")
    (tmp_path / "script.py").write_text(TWELVE)
    begun, moments, kept = tmp_path / "begun", random.Random(2), []
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), executor, str(begun)]
    begun.touch()
    for attempt in range(10):
        before = begun.stat().st_size
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
            while attempt % 2 and begun.stat().st_size == before:  # every other time it is starting up
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.7 if attempt % 2 else 1.0))
            assert sweep.poll() is None
            sweep.kill()  # its workers end by themselves
        kept.append(len(read_lines(tmp_path / "run" / "results.jsonl")))
    assert kept == sorted(kept)
    assert 0 < kept[-1] < 12
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records = read_lines(tmp_path / "run" / "results.jsonl")
    assert Counter((r["width"], r["log2_lr"], r["seed"]) for r in records) == Counter(
        (width, rate, seed) for width in (8, 16) for rate in (-1.0, 0.0, 1.0) for seed in (0, 1)
    )
    assert not any("failed" in record for record in records)


@pytest.mark.slow
def test_workers_killed_at_random_moments_lose_no_run(tmp_path, log):
    killed, moments = [], random.Random(1)

    def kill_one(progress):
        if len(killed) < 4:
            time.sleep(moments.uniform(0, 0.3))
            worker = moments.choice(pool._busy + pool._idle)
            worker.process.kill()
            killed.append(worker)

    pool = Pool(3)
    run(config(log, sleep=0.3), tmp_path / "run", slow, progress=kill_one, executor=pool)
    assert len(killed) == 4
    assert sorted(trials(tmp_path / "run")) == [(w, r) for w in (8, 16) for r in (-1.0, 0.0, 1.0)]
