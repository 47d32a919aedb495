"""Sweeps on Ray and by submitit, which starts the jobs itself: the results of the pool, and what is killed."""

import os
import signal
from pathlib import Path

import pytest

from surefoot.experiment.coordcheck import check
from surefoot.experiment.data.sources import load
from surefoot.experiment.errors import SweepError
from surefoot.experiment.files import read_lines
from surefoot.experiment.sweep.clusters import Ray, Slurm
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.executors import Killed, Raised
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import run
from surefoot.experiment.sweep.worker import run_trial
from surefoot.experiment.training.config import TrainConfig

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
each = pytest.mark.parametrize("name", ["ray", "slurm"])
SMALL = {"depth": 1, "batch_size": 4, "context": 16}
FATAL = (16, 0.0)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Gives an executor by its name."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def executor(name):
        pytest.importorskip({"ray": "ray", "slurm": "submitit"}[name])
        return Ray(2) if name == "ray" else Slurm(tmp_path / "jobs", 3, 0, {}, cluster="local")

    return executor


def started(trial):
    """A line for each start of this trial; returns how many there are."""
    path = Path(trial.settings["log"]) / f"{trial.width} {trial.log2_lr}"
    with path.open("a") as log:
        log.write(f"{os.getpid()}\n")
    return len(path.read_text().split())


def dying(trial):
    """One trial dies whenever it is run, another when it is run first."""
    times = started(trial)
    if (trial.width, trial.log2_lr) == FATAL or ((trial.width, trial.log2_lr) == (8, 0.0) and times == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def raising(trial):
    if (trial.width, trial.log2_lr) == FATAL:
        raise KeyError("no such layer")
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def quick(trial):
    return TrialResult(2.0, 2 + trial.log2_lr**2, 0.1)


def threads(trial):
    import torch

    return TrialResult(float(torch.get_num_threads()), 1.0, 0.0)


def timed_out(_):
    """As submitit stops a job whose time is over: its handler of a signal raises in the middle of the run."""
    from submitit.core.utils import UncompletedJobError

    raise UncompletedJobError("Job not requeued because: timed-out and not checkpointable.")


def grid(settings, recipes=("a",), steps=1, rates=(-1.0, 0.0, 1.0)):
    return SweepConfig(recipes, (8, 16), (0,), steps, Grid(rates), settings)


def silent(progress):
    pass


def without_seconds(path, keys):
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in read_lines(path)]
    return sorted(records, key=lambda record: [record[key] for key in keys])


@each
def test_a_sweep_has_the_results_of_the_pool(name, make, tmp_path):
    settings = {**SMALL, "head_dim": 8, "data": "markov:16"}
    config = grid(settings, ("adamw", "steady"), steps=3, rates=(-7.0, -3.0))
    summaries = [
        run(config, tmp_path / where, run_trial, progress=silent, workers=2, executor=place)
        for where, place in (("pool", None), (name, make(name)))
    ]
    assert summaries[0]["recipes"] == summaries[1]["recipes"]
    pool, other = (
        without_seconds(tmp_path / where / "results.jsonl", ("recipe", "width", "log2_lr")) for where in ("pool", name)
    )
    assert pool == other
    assert len(pool) == 8
    before = (tmp_path / name / "results.jsonl").read_bytes()
    run(config, tmp_path / name, run_trial, progress=silent)  # any executor goes on where another stopped
    assert (tmp_path / name / "results.jsonl").read_bytes() == before


@each
def test_a_coordinate_check_has_the_results_of_the_pool(name, make, tmp_path):
    from surefoot.experiment.sweep.executors import Pool

    config, corpus = TrainConfig(steps=2, head_dim=8, **SMALL), load("markov:16")
    for where, place in (("pool", Pool(2)), (name, make(name))):
        check(config, corpus, tmp_path / where, (8, 16), (0, 1), executor=place, data="markov:16")
    pool, other = (without_seconds(tmp_path / w / "results.jsonl", ("width", "seed")) for w in ("pool", name))
    assert pool == other
    assert len(pool) == 4


@each
def test_killed_runs_run_once_more_and_then_are_failed(name, make, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    (entry,) = run(grid({"log": f"{log}"}), tmp_path / "run", dying, progress=silent, executor=make(name))["recipes"]
    assert (entry["failed"], entry["diverged"], entry["runs"]) == ([0, 1], [0, 0], [3, 3])
    times = {tuple(map(float, path.name.split())): len(path.read_text().split()) for path in log.iterdir()}
    assert {trial: count for trial, count in times.items() if count != 1} == {FATAL: 2, (8, 0.0): 2}
    records = read_lines(tmp_path / "run" / "results.jsonl")
    assert len(records) == len({(r["width"], r["log2_lr"]) for r in records}) == 6
    (failed,) = [record["failed"] for record in records if "failed" in record]
    assert failed.startswith({"ray": "killed twice: its Ray worker died (W", "slurm": "killed twice: slurm job "}[name])


@each
def test_a_run_that_raises_stops_the_sweep(name, make, tmp_path):
    with pytest.raises(SweepError, match=r"a, width 16, lr 2\^0, seed 0: KeyError: 'no such layer'") as stopped:
        run(grid({}), tmp_path / "run", raising, progress=silent, executor=make(name))
    assert isinstance(stopped.value.__cause__, Raised)
    assert 'raise KeyError("no such layer")' in str(stopped.value.__cause__)


@each
def test_runs_have_one_thread(name, make, tmp_path):
    config = SweepConfig(("a",), (8,), (0,), 1, Grid((0.0,)))
    run(config, tmp_path / "run", threads, progress=silent, executor=make(name))
    assert read_lines(tmp_path / "run" / "results.jsonl")[0]["train_loss"] == 1.0


def test_a_slurm_job_whose_time_is_over_counts_as_killed(make):
    jobs = make("slurm")
    (job,) = jobs.submit(timed_out, [1])
    ((_, end),) = jobs.wait([job])
    assert isinstance(end, Killed)
    assert "timed-out and not checkpointable" in str(end)


def test_gpus_that_ray_has_not_are_refused(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"gpus-per-run 0.5: no run could start, Ray has only 0 GPUs"):
        run(grid({}), tmp_path / "run", raising, progress=silent, executor=Ray(gpus_per_run=0.5))
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127.0.0.1:1 "):
        run(grid({}), tmp_path / "run", raising, progress=silent, executor=Ray(address="127.0.0.1:1"))


SBATCH = """#!/bin/bash
# A cluster of this machine alone: the tasks of an array, or the one job, begin at once, in the background.
script=$1 job=$$
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$script")
export SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
cat "$script" >> "$(dirname "$0")/scripts"
if [ -n "$tasks" ]; then
  for task in $(seq 0 "$tasks"); do
    SLURM_JOB_ID=$job SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task bash "$script" >/dev/null 2>&1 &
  done
else
  SLURM_JOB_ID=$job bash "$script" >/dev/null 2>&1 &
fi
echo "Submitted batch job $job"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do case $1 in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
"""


def test_runs_that_can_begin_together_are_one_job_array(tmp_path, monkeypatch, make):
    pytest.importorskip("submitit")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", "#!/bin/bash\n"), ("scancel", "#!/bin/bash\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ValueError, match="--executor slurm: Unknown argument 'colour' for executor 'slurm'"):
        Slurm(tmp_path / "jobs", None, 0, {"colour": "red"})
    slurm = Slurm(tmp_path / "jobs", 4, 1, {"partition": "long", "time": 120})
    run(grid({}), tmp_path / "run", quick, progress=silent, executor=slurm)
    assert len(read_lines(tmp_path / "run" / "results.jsonl")) == 6
    scripts = (commands / "scripts").read_text()
    assert "#SBATCH --array=0-3%4" in scripts
    for option in ("--partition=long", "--time=120", "--gpus-per-node=1", "--cpus-per-task=1"):
        assert f"#SBATCH {option}\n" in scripts
