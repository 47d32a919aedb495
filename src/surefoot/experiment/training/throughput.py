"""How fast a run is: tokens per second, the optimizer's share of the time, FLOPs, and the part of the peak in use."""

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from surefoot.experiment.training.build import build
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Record, Run, TrainResult

PEAKS = (
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
)
"""Dense bfloat16 FLOPs per second by a part of the device's name, from NVIDIA's data sheets; the first that fits."""


class Meter:
    """The clock of a run's training, which stands still while the run is evaluated, observed and saved.

    Args:
        run: between two steps.
        times: whether the optimizer's part of each step is timed, for `window` to be read once in a while.
    """

    def __init__(self, run: Run, times: bool) -> None:
        self._run, self._timer = run, _Timer(run.device)
        if times:
            run.timer = self._timer
        self._read = run.step, run.seconds
        self._timed = self._optimizing = 0.0

    def start(self) -> None:
        """Let the clock run."""
        self._begun = time.perf_counter() - self._run.seconds

    def stop(self) -> None:
        """Let the clock stand still, with the run's `seconds` up to now: a synchronisation with the device."""
        self._run.wait()
        self._run.seconds = time.perf_counter() - self._begun

    def window(self) -> Record:
        """`tokens_per_second` and `optimizer_share` of the steps since the last call; the clock stands still."""
        run, (step, seconds) = self._run, self._read
        self._read = run.step, run.seconds
        taken = run.seconds - seconds
        optimizing = self._timer.read()
        self._timed, self._optimizing = self._timed + taken, self._optimizing + optimizing
        speed = _ratio((run.step - step) * run.config.run.tokens, taken)
        return {"tokens_per_second": speed, "optimizer_share": _ratio(optimizing, taken)}

    def of_all(self, result: TrainResult) -> TrainResult:
        """The outcome of the run with its throughput."""
        speed = _ratio(self._run.step * self._run.config.run.tokens, self._run.seconds)
        return replace(result, tokens_per_second=speed, optimizer_share=_ratio(self._optimizing, self._timed))


class _Timer:
    """Adds up the time inside `with timer`, on the device that does the work. Only reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> float:
        """Seconds since the last call."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        self._marks = []
        if self._device.type != "cuda":
            return sum(float(end - begin) for begin, end in pairs)
        torch.cuda.synchronize(self._device)
        return 1e-3 * sum(float(begin.elapsed_time(end)) for begin, end in pairs)

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()


def _ratio(part: float, whole: float) -> float | None:
    """The ratio to five digits; None where nothing was measured."""
    return float(f"{part / whole:.5g}") if part and whole > 0 else None


@dataclass(frozen=True)
class Compute:
    """What a token costs and what the devices could do.

    Args:
        flops_per_token: of forward and backward pass; None where they cannot be counted.
        peak: FLOPs per second of all devices; None where it is not known.
    """

    flops_per_token: float | None
    peak: float | None

    def at(self, tokens_per_second: float | None) -> Record:
        """`flops_per_token`, and `utilisation`, the part of the peak that the model's FLOPs are at this speed.

        >>> Compute(6e9, 312e12).at(13000.0)["utilisation"]
        0.25
        """
        used = _ratio((tokens_per_second or 0.0) * (self.flops_per_token or 0.0), self.peak or 0.0)
        return {"flops_per_token": self.flops_per_token, "utilisation": used}


def flops_per_token(config: TrainConfig, vocab: int) -> float | None:
    """FLOPs of the matrix products of one token's forward and backward pass, counted on tensors without memory.

    For a decoder with N entries of matrices (the head's among them, embeddings not) in L blocks of width d, on
    sequences of T tokens, that is `6 N + 12 L d T`: two for each multiplication, twice as many in the backward pass;
    `12 L d T` is attention's share, causality not deducted. What is computed a second time to save memory does not
    count, nor does the optimizer.

    Args:
        config: of the run.
        vocab: number of the data's tokens.

    Returns:
        The number; None, with a warning, for a user's model that needs tensors with memory.

    Source: A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", appendix B.
    """
    context = config.context
    try:
        with torch.device("meta"):
            model, tokens = build(config, vocab), torch.zeros(1, context, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError, ValueError) as error:
        name = config.model
        warnings.warn(f"the FLOPs of {name} are not counted: on the meta device it raises {error}", stacklevel=2)
        return None
    return float(counter.get_total_flops()) / context


def peak_of(device: torch.device) -> float | None:
    """FLOPs per second that a device can reach in bfloat16, of `PEAKS`; None for others and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)
