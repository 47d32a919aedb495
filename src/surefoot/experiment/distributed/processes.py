"""The interface of a training run to the processes that it is divided over, here for one process alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.experiment.errors import CheckpointError


class Processes:
    """The processes that train a model together; this base class is one process, which has all of it.

    Attributes:
        rank: this process's number, from 0.
        count: of the processes.
        shares: how many parts a batch is cut into; processes of a tensor-parallel group have the same part.
        share: the number of this process's part.
        group: for collectives of checkpoints; None alone.
    """

    rank = 0
    count = 1
    shares = 1
    share = 0
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def place(self, model: nn.Module, device: torch.device, bfloat16: bool) -> tuple[nn.Module, bool]:
        """Move a model with all its initial values to where it is trained.

        Args:
            model: whole, on the CPU.
            device: where to train.
            bfloat16: whether the forward pass is to compute in it.

        Returns:
            The model, and whether the forward pass still needs `torch.autocast`.
        """
        return model.to(device), bfloat16

    def rows(self, count: int, part: int = 0, parts: int = 1) -> slice:
        """Which rows of a batch this process computes in one of its forward passes.

        Args:
            count: rows of the whole batch.
            part: number of the pass.
            parts: passes a step.

        Returns:
            The rows; those of all processes and passes make up the batch.

        Raises:
            ValueError: the batch does not divide evenly.

        >>> Processes().rows(8, part=1, parts=2)
        slice(4, 8, None)
        """
        each, rest = divmod(count, parts * self.shares)
        if rest:
            equal = f"{parts * self.shares} equal parts ({parts} passes on {self.shares} shares of the mesh)"
            raise ValueError(f"a batch of {count} sequences cannot be split into {equal}: choose a multiple")
        start = (part * self.shares + self.share) * each
        return slice(start, start + each)

    def average_(self, x: Tensor) -> None:
        """Put the mean over all processes in place of each one's value: the same on every process to the last bit."""

    def highest(self, value: int) -> int:
        """The largest of all processes' values: a collective, and no synchronisation with a device."""
        return value

    def finish_gradients(self, model: nn.Module) -> None:
        """Add other processes' parts of those gradients that no layer has added up."""

    def release(self, model: nn.Module) -> None:
        """Release weights that a forward pass without a backward pass has gathered."""

    def clip_(self, model: nn.Module, limit: float) -> None:
        """Scale all gradients down together until their l2 norm is at most a limit."""
        nn.utils.clip_grad_norm_(model.parameters(), limit)

    def together(self, value: Any) -> list[Any]:
        """Every process's value, by rank: a collective."""
        return [value]


ALONE = Processes()


@dataclass(frozen=True)
class Layout:
    """How the work of a step is divided; results agree up to rounding, so a run may resume under another layout.

    Args:
        processes: who takes part.
        accumulate: forward and backward passes a step, each of a part of the batch.
        recompute: whether a block's activations are computed again in the backward pass instead of being kept.
        prepare: called once with the model before its first step, for example `nn.Module.compile`.
    """

    processes: Processes = ALONE
    accumulate: int = 1
    recompute: bool = False
    prepare: Callable[[nn.Module], object] | None = None


def local_of(x: Any) -> Tensor:
    """This process's part of a tensor: all of it, or its shard of a `DTensor`."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def cut_like(x: Any, p: Any) -> Any:
    """A whole tensor of a parameter's shape, cut like the parameter; anything else as it is."""
    if not hasattr(p, "placements") or not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def agree(processes: Processes, look: Callable[[], str | Exception | None]) -> None:
    """A collective: raise on every process what one finds, a sentence as `CheckpointError`, an `OSError` as it is.

    Args:
        processes: all that call this.
        look: says what is wrong, or returns or raises one of the two.
    """
    try:
        outcome = look()
    except (CheckpointError, OSError) as error:
        outcome = error
    problems = [problem for problem in processes.together(outcome) if problem is not None]
    for problem in sorted(problems, key=lambda one: not isinstance(one, OSError)):
        raise problem if isinstance(problem, Exception) else CheckpointError(problem)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: the members of its outermost lists of modules, each once; nested lists are opened, too.

    >>> [type(block).__name__ for block in blocks_of(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])))]
    ['Linear']
    """
    blocks: dict[nn.Module, None] = {}
    for child in model.children():
        blocks |= dict.fromkeys(_members(child) if isinstance(child, nn.ModuleList) else blocks_of(child))
    return list(blocks)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """A container's modules that can be called, including those of nested containers."""
    for child in container.children():
        if type(child).forward is nn.Module.forward:
            yield from _members(child)
        else:
            yield child
