"""Log of a run's norms: `norms.jsonl`, the layers' bands in `layers.json`, and the alarms."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from surefoot.experiment.files import Record, continued, finite_or_none, write_json
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.norm_alarm import MARGIN, Alarm, Alarms, Layer
from surefoot.experiment.training.run import Run
from surefoot.optim.measuring import of_weights
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Placement, Plan

NORMS, LAYERS = "norms.jsonl", "layers.json"
DIGITS = 6  # significant digits of a norm in the log and in the alarms: those of float32
Numbers = Mapping[str, float]


class Norms:
    """Stability numbers of a run's parameters in natural units, for any optimizer. Measuring changes no training state.

    `SteepestDescent.stability` gives bounds from its stabiliser and the size of its next step. Under torch's own
    optimizers the numbers are those of the weights under the default plan, and there is no bound on the next step.

    Args:
        run: the run to measure.
        limit: upper end of the band of a layer without a bound, in the role's unit; where the default recipe's factor
            on the learning rate is above 1, times that factor (20 for heads, which grow as much faster).

    Attributes:
        bounds_updates: whether the `update` numbers are bounds on the run's own next step.
        layers: the band of each parameter, by name.
    """

    def __init__(self, run: Run, limit: float) -> None:
        natural = Plan.of(run.model)
        self._run, self._natural = run, natural
        self._vectors: dict[Tensor, dict[str, Tensor]] = {}
        self.bounds_updates: bool = isinstance(run.optimizer, SteepestDescent)
        plan = run.method.plan(run.model) if isinstance(run.method, Steepest) else natural
        self.layers: dict[str, Layer] = {name: _layer(plan[name], natural[name], limit) for name in natural}

    def measure(self) -> dict[str, Numbers]:
        """Return the stability numbers of each parameter that has entries, by name."""
        own, before = self._run.optimizer, self._run.before
        if isinstance(own, SteepestDescent):
            numbers = own.stability(before)
        else:
            numbers = of_weights(self._run.model, self._natural, before, self._vectors)
        return {name: numbers[name] for name in self.layers if numbers[name]}


def _layer(placement: Placement, natural: Placement, limit: float) -> Layer:
    """Return the band of a parameter; of several blocks the largest numbers, since its norm is the largest, too."""
    unit = max(map(natural.role.radius_unit, natural.blocks))
    bound = max(scheme.bound for scheme in placement.stabilisers)
    if math.isfinite(bound):
        return Layer(placement.role.name, unit, bound, bound * MARGIN)
    longer = max(1.0, *natural.lr_scales)
    return Layer(placement.role.name, unit, None, limit * unit * longer)


class NormLog(ExitStack):
    """Writes `norms.jsonl`, a line per measurement, and `layers.json`. Use as a context manager.

    A line has `step`; `lr`, the rate of the next step; `norms`, name -> `[lower, upper]`, bounds on the norm;
    `dependency`, likewise where it differs from the norm (tables, biases); `loss_bounds`, of each LM head; `moved`,
    name -> norm of what the last step changed; `updates`, name -> upper bound on what the next one can change, for
    `SteepestDescent` only; `alarms`, if there are any. A number that is not finite is None.

    Norms of tables and vectors and all of `moved` are functions of the weights. `norms` of matrices under the spectral
    norm, and `updates` under decay and `PostClip`, are bounds by estimates that improve from line to line: a resumed
    run, whose weights are bit for bit the unbroken one's, starts them anew, so that these bounds may differ (a norm by
    up to 5 %, what a step can change under `PostClip` by up to 10 %).

    Args:
        run: the run to measure. If it was resumed, the lines from its step on are deleted: they are written again.
        directory: an existing run directory.
        limit: see `Norms`.
        warn: called with the step and each new alarm.

    Raises:
        OSError: a file cannot be written.
        ValueError: a line of an earlier `norms.jsonl` is no JSON object.
    """

    def __init__(self, run: Run, directory: Path, limit: float, warn: Callable[[int, Alarm], None]) -> None:
        super().__init__()
        self._run, self._norms, self._warn = run, Norms(run, limit), warn
        write_json(directory / LAYERS, {name: asdict(layer) for name, layer in self._norms.layers.items()})
        self._times = [*accumulate(map(run.config.factor, range(run.config.steps)), initial=0.0)]
        self._alarms = Alarms(self._norms.layers, self._times[-1])
        self._log = self.enter_context(continued(directory / NORMS, run.step))
        for line in self._log.records:  # alarms raised before the run was resumed are not raised again
            self._raised(line)

    def write(self) -> Record:
        """Measure the run, append the line, warn, and return the line."""
        line = _line(self._run, self._norms)
        if alarms := self._raised(line):
            line["alarms"] = [asdict(alarm) for alarm in alarms]
        self._log.append(line)
        for alarm in alarms:
            self._warn(line["step"], alarm)
        return line

    def _raised(self, line: Record) -> list[Alarm]:
        """The alarms that a line raises."""
        return self._alarms.update(self._times[line["step"]], {name: low for name, (low, _) in line["norms"].items()})


def _line(run: Run, measured: Norms) -> Record:
    numbers = measured.measure()
    norms = {name: _pair(row, "forward") for name, row in numbers.items()}
    dependency = {name: _pair(row, "dependency") for name, row in numbers.items()}
    lr = run.config.lr * run.config.factor(run.step)
    line: Record = {"step": run.step, "lr": lr, "norms": norms}
    if differing := {name: pair for name, pair in dependency.items() if pair != norms[name]}:
        line["dependency"] = differing
    if heads := {name: row for name, row in numbers.items() if "loss_forward_upper" in row}:
        line["loss_bounds"] = {name: _loss(row, measured.bounds_updates) for name, row in heads.items()}
    if run.before is not None:
        line["moved"] = {name: _short(row["update_measured"]) for name, row in numbers.items()}
    if measured.bounds_updates:
        line["updates"] = {name: _short(row["update_upper"]) for name, row in numbers.items()}
    return line


def _loss(row: Numbers, bounds_updates: bool) -> dict[str, float | None]:
    """The numbers of the loss behind a head, without the update's where it is not known."""
    names = [name for name in row if name.startswith("loss_") and (bounds_updates or "update" not in name)]
    return {name.removeprefix("loss_"): _short(row[name]) for name in names}


def _pair(row: Numbers, number: str) -> list[float | None]:
    return [_short(row[f"{number}_lower"]), _short(row[f"{number}_upper"])]


def _short(value: float) -> float | None:
    return finite_or_none(float(f"{value:.{DIGITS}g}"))
