"""An average of the weights beside a run: kept in float32, evaluated in the weights' place, never trained on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from surefoot.experiment.distributed.processes import local_of
from surefoot.experiment.training.names import last_part


class Average:
    """The exponential moving average `a <- decay a + (1 - decay) w`, which starts as the weights after the first step.

    Or the mean of the weights after each step of the last part of a run; before that part, the weights themselves.

    As `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` and `get_swa_multi_avg_fn`, without a copy of
    the model: on a mesh each process averages its shards of the weights. Buffers are not averaged.

    Args:
        model: with its initial values, cut over the mesh.
        kind: kept fraction of the average, 0 to below 1; or "last:" and a part of the steps.
        steps: of the run.

    Attributes:
        weights: the average by the parameters' names, in float32 at least, cut like them.
    """

    def __init__(self, model: nn.Module, kind: float | str, steps: int) -> None:
        self._model, self._decay, part = model, kind, last_part(kind)
        self._first = None if part is None else steps - max(1, round(part * steps))
        self.weights: dict[str, Tensor] = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, 0 for the first, without a synchronisation."""
        averages = [local_of(a) for a in self.weights.values()]
        now = [w.to(a.dtype) for w, a in zip(self._here(), averages, strict=True)]
        torch._foreach_lerp_(averages, now, self._share(step))

    def _share(self, step: int) -> float:
        """The part of the weights in the average after a step; 1: they are the average."""
        if self._first is not None:
            return 1 / max(1, step + 1 - self._first)
        return 1 - float(self._decay) if step else 1.0

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Context in which the average is in the place of the model's weights, which come back bit for bit.

        Nothing that watches for writes to the weights (`PostClip`'s running bound) notices.
        """
        here = self._here()
        kept = [w.clone() for w in here]
        try:
            torch._foreach_copy_(here, [local_of(a) for a in self.weights.values()])
            yield
        finally:
            torch._foreach_copy_(here, kept)

    def _here(self) -> list[Tensor]:
        """This process's shards of the weights, with version counters of their own."""
        return [local_of(p.detach()).data for p in self._model.parameters()]
