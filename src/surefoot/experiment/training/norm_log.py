"""The stability numbers of a run: where its layers belong, `norms.jsonl`, and the alarms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import final

from surefoot.experiment.files import Log, Record, continued, dumps, write_atomic
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.norm_alarm import ROOM, Alarm, Alarms, Layer
from surefoot.experiment.training.run import Run
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Placement, Plan

NORMS, LAYERS = "norms.jsonl", "layers.json"
DIGITS = 6  # that a norm is written with, and judged by: those of float32
Numbers = Mapping[str, float]


@final
class Watch:
    """Every layer of a run in natural units, whatever its optimizer; changes nothing that trains.

    `SteepestDescent` is asked itself: it knows what its stabiliser does, and the size of its steps. For torch's own
    optimizers one that never steps looks at the weights.

    Args:
        run: the run.
        limit: where a band without a bound ends, in the role's unit; further out by the default recipe's factor on the
            learning rate where that is above 1 (16 for heads, which grow by as much more).
    """

    def __init__(self, run: Run, limit: float) -> None:
        natural = Plan.of(run.model)
        own = run.optimizer if isinstance(run.optimizer, SteepestDescent) else None
        self.steps = own is not None
        plan = run.method.plan(run.model) if isinstance(run.method, Steepest) else natural
        self._optimizer = own or SteepestDescent(run.model, natural, lr=0.0)
        self.layers = {name: _layer(plan[name], natural[name], limit) for name in natural}

    def look(self) -> dict[str, Numbers]:
        """`stability()` of each parameter that has entries; the update numbers are the run's if it `steps` so."""
        found = self._optimizer.stability()
        return {name: found[name] for name in self.layers if found[name]}


def _layer(placement: Placement, natural: Placement, limit: float) -> Layer:
    """Of a parameter of several blocks the largest numbers: its norm is the largest, too."""
    unit = max(map(natural.role.radius_unit, natural.blocks))
    bound = max(scheme.bound for scheme in placement.stabilisers)
    if math.isfinite(bound):
        return Layer(placement.role.name, unit, bound, bound * ROOM)
    longer = max(1.0, *map(natural.role.lr_scale, natural.blocks))
    return Layer(placement.role.name, unit, None, limit * unit * longer)


@final
class NormLog:
    """`norms.jsonl` of a run directory, a line a look, and `layers.json`. Use as a context manager.

    A line has `step`; `lr`, of the next step; `norms`, name -> `[lower, upper]`, upper None if nothing is proven;
    `dependency` likewise where it is not the norm (tables, biases); `updates`, name -> what the next step changes the
    output by at most, unless the steps are of torch's own optimizers; `alarms`, where there are any. A number that is
    not finite is None.

    Args:
        directory: exists.
        limit: see `Watch`.
        warn: called with the step and each alarm.

    Raises:
        OSError: a file cannot be written.
        ValueError: a line that is there is no JSON object.
    """

    def __init__(self, directory: Path, limit: float, warn: Callable[[int, Alarm], None]) -> None:
        self._directory, self._limit, self._warn = directory, limit, warn
        self._files = ExitStack()
        self._log: Log | None = None

    def look(self, run: Run) -> Record:
        """Look at the run, write the line, warn; a resumed run's older lines are dropped from this step on."""
        if self._log is None:
            self._log = self._open(run)
        line = _line(run, self._watch)
        alarms = self._alarms.look(self._times[run.step], _lower(line))
        if alarms:
            line["alarms"] = [asdict(alarm) for alarm in alarms]
        self._log.append(line)
        for alarm in alarms:
            self._warn(run.step, alarm)
        return line

    def _open(self, run: Run) -> Log:
        self._watch = Watch(run, self._limit)
        layers = {name: asdict(layer) for name, layer in self._watch.layers.items()}
        write_atomic(self._directory / LAYERS, dumps(layers, indent=2) + "\n")
        self._times = [*accumulate(map(run.config.schedule.factor, range(run.config.schedule.steps)), initial=0.0)]
        self._alarms = Alarms(self._watch.layers, self._times[-1])
        log = self._files.enter_context(continued(self._directory / NORMS, run.step))
        for line in log.records:  # what was told before the run was resumed is not told again
            self._alarms.look(self._times[line["step"]], _lower(line))
        return log

    def __enter__(self) -> NormLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def _line(run: Run, watch: Watch) -> Record:
    numbers = watch.look()
    norms = {name: _pair(row, "forward") for name, row in numbers.items()}
    dependency = {name: _pair(row, "dependency") for name, row in numbers.items()}
    lr = run.config.optimisation.lr * run.config.schedule.factor(run.step)
    line: Record = {"step": run.step, "lr": lr, "norms": norms}
    if differing := {name: pair for name, pair in dependency.items() if pair != norms[name]}:
        line["dependency"] = differing
    if watch.steps:
        line["updates"] = {name: _short(row["update_upper"]) for name, row in numbers.items()}
    return line


def _pair(row: Numbers, number: str) -> list[float | None]:
    return [_short(row[f"{number}_lower"]), _short(row[f"{number}_upper"])]


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _lower(line: Record) -> dict[str, float | None]:
    return {name: lower for name, (lower, _) in line["norms"].items()}
