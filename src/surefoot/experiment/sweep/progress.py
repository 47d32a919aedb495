"""What a sweep shows on stderr while it runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm


@dataclass(frozen=True)
class Progress:
    """The state of a sweep after a trial.

    Args:
        record: of the trial that has just finished.
        finished: number of trials that are done.
        expected: number of trials in all; an estimate while a search goes on.
        seconds_left: estimated wall time.
    """

    record: dict[str, Any]
    finished: int
    expected: int
    seconds_left: float

    @property
    def headline(self) -> str:
        """The trial and its outcome in one line."""
        r = self.record
        if r["diverged"]:
            outcome = "diverged" + (f", {r['not_finite']} is not finite" if "not_finite" in r else "")
        else:
            outcome = f"failed, {r['failed']}" if "failed" in r else f"loss {r['val_loss']:.3f}"
        return f"{r['recipe']} width {r['width']} lr 2^{r['log2_lr']:g} seed {r['seed']}: {outcome}"

    @property
    def left(self) -> str:
        """The time left, in minutes and seconds.

        >>> Progress({}, 1, 2, 200.0).left
        'about 3:20 left'
        """
        minutes, seconds = divmod(round(self.seconds_left), 60)
        return f"about {minutes}:{seconds:02d} left"


Callback = Callable[[Progress], None]


@contextmanager
def on_stderr() -> Iterator[Callback]:
    """Show progress on stderr: a bar on a terminal, one line per finished trial in a log file or a pipe."""
    if not sys.stderr.isatty():
        yield lambda p: print(f"[{p.finished}/{p.expected}] {p.headline}, {p.left}", file=sys.stderr, flush=True)
        return
    layout = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt} runs, {postfix}"
    with tqdm(bar_format=layout, file=sys.stderr, dynamic_ncols=True, total=1, leave=False) as bar:

        def move(progress: Progress) -> None:
            bar.total, bar.n = progress.expected, progress.finished
            bar.set_postfix_str(f"{progress.left} · {progress.headline}", refresh=True)

        yield move
