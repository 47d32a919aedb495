"""What `surefoot train` shows: the log on stderr, warnings, the picture of the norms, the last sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.report import write_page

if TYPE_CHECKING:
    from surefoot.experiment.files import Log
    from surefoot.experiment.training.norm_alarm import Alarm
    from surefoot.experiment.training.run import TrainResult


@contextmanager
def open_log(path: Path, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append records to the log and show them on stderr.

    A resumed run repeats the steps since its checkpoint: the first record replaces their old lines.
    """
    from surefoot.experiment.files import continued

    opened: list[Log] = []
    with ExitStack() as stack:

        def write(record: dict[str, Any]) -> None:
            if not opened:
                opened.append(stack.enter_context(continued(path, record["step"])))
            opened[0].append(record)
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
            speed = _speed(record, steps)
            print(
                f"step {record['step']}/{steps}: loss {loss}, lr {record['lr']:.3g}{speed}", file=sys.stderr, flush=True
            )

        yield write


def _speed(record: dict[str, Any], steps: int) -> str:
    """Tokens per second since the last record, and the time left at this speed."""
    if record["tokens_per_second"] is None:
        return ""
    seconds = (steps - record["step"]) * record["tokens"] / record["step"] / record["tokens_per_second"]
    return f", {record['tokens_per_second']:,.0f} tokens/s, {timedelta(seconds=round(seconds))} left"


def warn(step: int, alarm: Alarm) -> None:
    """Show an alarm of a norm."""
    print(f"surefoot train: warning: step {step}: {alarm}", file=sys.stderr, flush=True)


def draw(out: Path) -> None:
    """Draw the norms and write the page, or say what is missing for it."""
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        print(
            "surefoot: no page and no picture of the norms: that needs pip install 'surefoot[plots]'", file=sys.stderr
        )
        return
    from surefoot.experiment.reports import report

    if picture := report.draw(out):  # none if it stopped before the first measurement
        print(f"surefoot: norms: {picture}", file=sys.stderr)
    write_page(out)


def sentence(result: TrainResult, unit: str) -> str:
    """The outcome in one sentence, losses in nats a unit."""
    if result.val_loss is None or result.train_loss is None:
        return f"diverged after {result.steps} steps; try a smaller --lr"
    average = "" if result.val_loss_average is None else f"of the average {result.val_loss_average:.4f}, "
    return (
        f"validation loss {result.val_loss:.4f}, {average}training loss {result.train_loss:.4f} nats a {unit} "
        f"after {result.steps} steps in {result.seconds:.1f} s ({result.parameters:,} parameters)"
    )
