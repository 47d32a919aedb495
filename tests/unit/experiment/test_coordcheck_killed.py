"""A coordinate check whose runs are killed, or raise, on an executor."""

import json
from typing import Any

import pytest

from inline_executor import Inline
from surefoot.experiment.coordcheck import check
from surefoot.experiment.data.sources import load
from surefoot.experiment.errors import DataError, SweepError
from surefoot.experiment.reports.report import page
from surefoot.experiment.sweep.executors import Killed
from surefoot.experiment.training.config import TrainConfig


class Here:
    """An executor in this process, on which the runs of one width are killed."""

    workers = 2

    def __init__(self, fatal: int) -> None:
        self.fatal, self.closed = fatal, False

    def submit(self, function: Any, items: Any) -> Any:
        return [(len(items), place, function, item) for place, item in enumerate(items)]

    def wait(self, handles: Any) -> Any:
        killed = Killed("it died")
        return [(h, killed if h[3].width == self.fatal else h[2](h[3])) for h in handles]

    def close(self) -> None:
        self.closed = True


def test_runs_that_are_killed_stop_the_check_when_the_others_are_done(tmp_path):
    corpus, executor = load("markov:16"), Here(fatal=32)
    config = TrainConfig(depth=1, steps=2, batch_size=2, context=8)
    with pytest.raises(SweepError, match=r"width 32, seed 0: killed twice: it died; width 32, seed 1: killed twice"):
        check(config, corpus, tmp_path, (16, 32), (0, 1), 9.0, executor=executor, data="markov:16")
    assert executor.closed
    results = (tmp_path / "results.jsonl").read_text().splitlines()
    records = list(map(json.loads, results))
    assert [(r["width"], r["seed"]) for r in records if "failed" not in r] == [(16, 1), (16, 0)]
    assert [r for r in records if "failed" in r] == [
        {"width": 32, "seed": seed, "failed": "killed twice: it died"} for seed in (1, 0)
    ]
    assert page(tmp_path).state == "under way: 2 runs"
    assert check(config, corpus, tmp_path, (16, 32), (0, 1), 9.0, executor=Here(fatal=0), data="markov:16")["passes"]
    with pytest.raises(DataError, match=r"width 48, seed 0: DataError: .* has changed since the sweep was started"):
        check(config, corpus, tmp_path, (16, 48), (0,), 9.0, executor=Inline(), data="markov:17")
