"""Small models on one GPU, several at once: the steps of a run are CUDA graphs, which read batch and rate by a counter.

A step of a small model is some nine hundred kernels of two microseconds, which Python takes ten times as long to launch
as the device to compute. Captured, they are launched at once, and graphs of several runs share the device. The weights
are those of `surefoot.experiment.training.loop.train` up to rounding. Four runs at once take 370 steps a second on an
H200, at width 64, more runs or several processes no more; one run alone that is not captured takes 50.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.models.cross_entropy import cross_entropy
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import Run, TrainResult

EAGER, UNROLL = 3, 2
"""Steps before the capture, which make states and workspaces; and those of one graph."""


@dataclass(frozen=True)
class Job:
    """A run to be taken.

    Args:
        key: what its caller knows it by.
        config: its settings.
        method: its recipe.
        corpus: its data.
        scale: factors on the rates of some roles, by their names.
    """

    key: Any
    config: TrainConfig
    method: Method
    corpus: Corpus
    scale: Mapping[str, float] = field(default_factory=dict)


@functools.lru_cache(maxsize=64)
def _windows(corpus: Corpus, seed: int, steps: int, batch: int, context: int, order: Any, device: str) -> Tensor:
    """Every batch of a run on the device: int16 `(steps, batch, context + 1)`, int32 for 32,768 words and more."""
    whole = np.empty((steps, batch, context + 1), np.int16 if corpus.vocab < 1 << 15 else np.int32)
    for step in range(steps):
        inputs, targets = corpus.batch("train", seed, step, batch, context, order=order)
        whole[step, :, :-1], whole[step, :, -1] = inputs.numpy(), targets[:, -1].numpy()
    return torch.from_numpy(whole).to(device)


class Captured:
    """A run on a stream of its own, all of whose steps are queued when it is made; on a CPU they are taken at once."""

    def __init__(self, job: Job) -> None:
        self.began = time.perf_counter()
        self.job, config = job, job.config
        self.run = Run(config, job.corpus, job.method)
        self.steps, device = config.steps, self.run.device
        sizes = config.batch_size, config.context, config.data_order, str(device)
        self.windows = _windows(job.corpus, config.seed, self.steps, *sizes)
        self.factors = torch.tensor([config.factor(step) for step in range(self.steps)], device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.peaks = []
        for group in self.run.optimizer.param_groups:
            self.peaks.append(group["initial_lr"] * job.scale.get(group.get("role", ""), 1.0))
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
            if "capturable" in group:  # of torch's optimizers
                group["capturable"] = True
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        if self.stream is None:
            self._take(self.steps)
        else:
            self._queue(self.stream)

    def _queue(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        first = min(self.steps, EAGER + (self.steps - EAGER) % UNROLL)
        with torch.cuda.stream(stream):
            self._take(first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._take(UNROLL)
        with torch.cuda.stream(stream):
            for _ in range((self.steps - first) // UNROLL):
                graph.replay()
        self.graph = graph  # its memory is in use until the last replay

    def _take(self, steps: int) -> None:
        """Take steps, each as `Run.advance`, of nothing but work for the device."""
        run = self.run
        for _ in range(steps):
            batch = self.windows.index_select(0, self.counter)[0].long()
            factor = self.factors.index_select(0, self.counter)[0]
            for group, peak in zip(run.optimizer.param_groups, self.peaks, strict=True):
                group["lr"].copy_(factor * peak)
            run.optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(run.model, batch[:, :-1], batch[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            if run.method.clip is not None:
                run.layout.processes.clip_(run.model, run.method.clip)
            run.optimizer.step()
            run.losses.index_copy_(0, self.counter, loss.detach()[None])
            self.counter += 1

    def result(self) -> TrainResult:
        """Wait for the last step, and evaluate. A loss that was not finite at any step is divergence."""
        with torch.cuda.stream(self.stream):  # does nothing without one
            if not bool(self.run.losses.isfinite().all()):
                self.run.losses.fill_(math.nan)
            self.run.step, self.run.seconds = self.steps, time.perf_counter() - self.began
            return self.run.result()


def train_all(jobs: Iterable[Job], at_once: int = 4) -> Iterator[tuple[Job, TrainResult]]:
    """Take runs, so many at once, and yield each with its result in their order.

    Args:
        jobs: the runs.
        at_once: how many are queued.

    Yields:
        A run and its outcome; its seconds contain those in which others used the device.
    """
    queue: deque[Captured] = deque()
    for job in jobs:
        if len(queue) == at_once:
            yield queue[0].job, queue.popleft().result()
        queue.append(Captured(job))
    while queue:
        yield queue[0].job, queue.popleft().result()
