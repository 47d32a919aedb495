"""Sweeps that are killed, interrupted, crowded out or out of disk: a clear message, nothing lost."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from inline_executor import Inline
from surefoot.experiment.errors import DirectoryInUse, SweepError
from surefoot.experiment.files import Log, locked, read_lines, write_atomic
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import load, run

SWEEP = """
import os, sys, time
from pathlib import Path
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import run

def trial(trial):
    with open(os.path.join(trial.settings["log"], f"{os.getpid()}"), "a") as log:
        log.write(f"{trial.width} {trial.log2_lr}\\n")
    time.sleep(trial.settings["sleep"])
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)

if __name__ == "__main__":
    config = SweepConfig(("a",), (8, 16), (0,), 1, Grid(tuple(range(-4, 5))),
                         {"sleep": float(sys.argv[2]), "log": sys.argv[3]})
    run(config, Path(sys.argv[1]), trial, workers=2)
"""


def silent(progress):
    pass


def quick(trial):
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def failing(trial):
    if (trial.width, trial.log2_lr) == (8, 0.0):
        raise KeyError("no such layer")
    return quick(trial)


def config(**changes):
    values = {"recipes": ("a",), "widths": (8, 16), "seeds": (0,), "steps": 1, "search": Grid((-1.0, 0.0, 1.0))}
    return SweepConfig(**{**values, **changes})


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def lines(directory):
    path = directory / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def alive(pid):
    """Whether a process runs; a zombie that waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def sweep(tmp_path):
    """Starts the sweep above in its own process; gives (directory, log of started runs, start)."""
    (tmp_path / "script.py").write_text(SWEEP)
    directory, log = tmp_path / "run", tmp_path / "log"
    log.mkdir()

    def start():
        command = [sys.executable, str(tmp_path / "script.py"), str(directory), "0.05", str(log)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, text=True)

    return directory, log, start


def started(log):
    return sum(path.read_text().count("\n") for path in log.iterdir())


def stopped_by(stop, sweep):
    directory, log, start = sweep
    process = start()
    wait_until(lambda: lines(directory) >= 4)
    stop(process)
    message = process.communicate(timeout=30)[1]
    wait_until(lambda: not any(alive(int(path.name)) for path in log.iterdir()))
    kept = lines(directory)
    assert 4 <= kept < 18
    assert started(log) - kept <= 2  # two workers: at most the runs in flight
    resumed = start()
    errors = resumed.communicate(timeout=60)[1]
    assert resumed.returncode == 0, errors
    assert lines(directory) == len(read_lines(directory / "results.jsonl")) == 18
    assert started(log) <= 18 + 2
    assert load(directory)[0]["recipes"][0]["best_log2_lr"] == pytest.approx([0, 0], abs=1e-9)
    return process.returncode, message


def test_sigkill_loses_at_most_the_runs_in_flight_and_leaves_no_orphans(sweep):
    returncode, _ = stopped_by(subprocess.Popen.kill, sweep)
    assert returncode == -signal.SIGKILL


def test_interrupt_stops_the_workers_at_once_and_can_be_resumed(sweep):
    # As a terminal does it: the workers get the signal too.
    returncode, message = stopped_by(lambda process: os.killpg(process.pid, signal.SIGINT), sweep)
    assert returncode != 0
    assert message.count("KeyboardInterrupt") == 1  # the parent's own, none from its workers


def test_a_run_that_raises_is_named_and_the_finished_ones_are_kept(tmp_path):
    with pytest.raises(SweepError, match=r"a, width 8, lr 2\^0, seed 0: KeyError: 'no such layer'"):
        run(config(), tmp_path, failing, executor=Inline(), progress=silent)
    assert lines(tmp_path) == 1
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    assert lines(tmp_path) == 6


def test_two_sweeps_cannot_share_a_directory(tmp_path):
    with locked(tmp_path), pytest.raises(DirectoryInUse, match=f"{tmp_path}.*process {os.getpid()}"):
        run(config(), tmp_path, quick, progress=silent)
    assert not (tmp_path / "results.jsonl").exists()
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)


def test_a_directory_of_another_configuration_is_refused_with_the_difference(tmp_path):
    run(config(settings={"depth": 2}), tmp_path, quick, executor=Inline(), progress=silent)
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"settings.depth: there 2, now 3; steps: there 1, now 5.*another dir"):
        run(config(settings={"depth": 3}, steps=5), tmp_path, quick, progress=silent)
    assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"steps": 1', '"stesp": 1', r"steps: there missing, now 1; stesp: there 1, now unknown \(steps\?\)"),
        ('"steps": 1', '"steps": 1, "colour": 2', r"differs in colour: there 2, now unknown: "),
        ('"steps": 1', '"steps": 1, "steps": 1', r'config.json is not valid JSON \(the key "steps" twice\)'),
        ('"steps": 1', '"steps": "1"', r'steps: there "1", now 1'),
        ('"steps": 1', '"steps": true', r"steps: there true, now 1"),
        ('"depth": 2', '"dpeth": 2', r"settings.dpeth: there 2, now unknown \(depth\?\)"),
    ],
)
def test_unknown_duplicate_and_mistyped_keys_are_named(tmp_path, old, new, message):
    ours = config(settings={"depth": 2})
    run(ours, tmp_path, quick, executor=Inline(), progress=silent)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        run(ours, tmp_path, quick, progress=silent)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"widths": [', '"withds": [', "config.json: widths must be a list of int, got None"),
        ('"a"', "3", "config.json: recipes must be a list of str, got "),
        ('"steps": 1', '"steps": 1, "steps": 1', 'the key "steps" twice'),
    ],
)
def test_a_damaged_configuration_of_an_unfinished_sweep_is_named(tmp_path, old, new, message):
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.fixture
def readable_only():
    """A directory that this process may read and not write, a superuser's too."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        directory = Path(folder) / "run"
        directory.mkdir(mode=0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield directory
        finally:
            os.seteuid(user)


def test_a_read_only_directory_is_named(readable_only):
    with pytest.raises(OSError, match="Permission denied") as refused:
        run(config(), readable_only, quick, executor=Inline(), progress=silent)
    assert str(readable_only) in str(refused.value)
    with pytest.raises(OSError, match="Permission denied") as refused:
        run(config(), readable_only / "new", quick, executor=Inline(), progress=silent)
    assert str(readable_only) in str(refused.value)


def test_results_without_a_configuration_are_not_adopted(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"somebody": "else"}\n')
    with pytest.raises(ValueError, match=r"no config\.json"):
        run(config(), tmp_path, quick, progress=silent)


def test_a_full_disk_names_the_file_and_keeps_whole_lines(tmp_path, file_size_limit):
    file_size_limit(600)  # the configuration and some three lines fit
    with pytest.raises(OSError, match=f"cannot append to {tmp_path}/results.jsonl"):
        run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    kept = read_lines(tmp_path / "results.jsonl")
    assert 0 < len(kept) == lines(tmp_path) < 6
    assert (tmp_path / "results.jsonl").read_bytes().endswith(b"}\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    assert read_lines(tmp_path / "results.jsonl")[: len(kept)] == kept


def test_dev_full_names_the_file(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot append to .*results.jsonl: No space left on device"):
        run(config(), tmp_path, quick, executor=Inline(), progress=silent)


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, file_size_limit):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    file_size_limit(10)
    with pytest.raises(OSError, match=f"cannot write {path}"):
        write_atomic(path, "n" * 100)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("torn", [b'{"a"', b'{"a": 3}', b"\0\0\0", b'{"a": "\xc3', b"\0\0\n"])
def test_a_torn_last_line_is_cut_off_before_the_next(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    assert read_lines(path) == [{"a": 1}]
    with Log(path) as log:
        log.append({"a": 2})
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


def test_damage_in_the_middle_is_reported_not_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\nrubbish\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_lines(path)
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize("line", [1, 6])
def test_a_record_without_a_key_is_named_not_a_key_error(tmp_path, line):
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    path = tmp_path / "results.jsonl"
    records = read_lines(path)
    del records[line - 1]["seed"], records[line - 1]["val_loss"]
    damaged = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(damaged)
    said = rf"results.jsonl, line {line} has no valid seed, val_loss: repair or remove"
    for read in (load, lambda directory: run(config(), directory, quick, executor=Inline(), progress=silent)):
        with pytest.raises(ValueError, match=said):
            read(tmp_path)
    assert path.read_text() == damaged
    records[line - 1] |= {"seed": 1.5, "val_loss": "1.2"}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_a_number_that_no_json_has_is_no_record(tmp_path):
    run(config(), tmp_path, quick, executor=Inline(), progress=silent)
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text().replace('"val_loss": 2', '"val_loss": NaN, "was": 2', 1))
    with pytest.raises(ValueError, match=r"results\.jsonl, line \d is not a JSON object"):
        load(tmp_path)


def test_records_are_strict_json(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        with pytest.raises(ValueError, match="Out of range"):
            log.append({"loss": float("nan")})
        log.append({"loss": None})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"loss": None}
