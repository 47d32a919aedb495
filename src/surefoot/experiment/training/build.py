"""The model and the device that a configuration names, and whether the model can be trained on the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surefoot.experiment.models.decoder import published, reference
from surefoot.experiment.models.layers import LearnedPositions
from surefoot.experiment.models.sizes import PUBLISHED, is_user_model
from surefoot.experiment.models.user_model import call
from surefoot.experiment.training.config import TrainConfig
from surefoot.plan import Plan

if TYPE_CHECKING:
    from surefoot.experiment.data.corpus import Corpus  # which needs numpy; `surefoot audit` does without


def pick_device(name: str) -> torch.device:
    """The device of a name.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU where there is one.

    Returns:
        The device.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU here; use --device cpu, or a CUDA build of torch")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def build(config: TrainConfig, vocab: int) -> nn.Module:
    """The model of a configuration with its constructor's initial values: one with a name, or `function(width)`.

    A user's function may draw from torch's global generator, which is seeded before the call and restored after it.

    Args:
        config: the model, its sizes, and the seed for a user's function.
        vocab: number of the data's tokens; a published model keeps its own, larger vocabulary.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: an unknown reference model, a width that is not a multiple of the head dimension, more tokens than a
            published model has, or a function that cannot be called, see `user_model.call`.
    """
    if config.model in PUBLISHED:
        if vocab > classes(config, vocab):
            raise ValueError(f"{config.model} has {classes(config, vocab)} tokens, the data {vocab}: choose other data")
        return published(config.model, config.width)
    if not is_user_model(config.model):
        return reference(config.model, config.width, config.depth, config.head_dim, vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return call(config.model, config.width)


def classes(config: TrainConfig, vocab: int) -> int:
    """The number of tokens that a model tells apart: the data's, or a published model's own."""
    return PUBLISHED[config.model].vocab if config.model in PUBLISHED else vocab


class _Undrawn(TorchFunctionMode):
    """Mode in which `nn.init.normal_` draws nothing."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call all other functions."""
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Build models on the meta device, without drawing embeddings there: torch imports its compiler to do so."""
    with torch.device("meta"), _Undrawn():
        yield


def require_model(config: TrainConfig, corpus: Corpus) -> nn.Module:
    """Refuse a model that cannot be trained, before anything is written; only a user's own is allocated.

    Args:
        config: of a run.
        corpus: its data.

    Returns:
        The model, in most cases on the meta device.

    Raises:
        ValueError: it cannot be built, it has no plan, its positions are fewer than a sequence's tokens, or a user's
            own does not make logits of the data's tokens.
    """
    name, context = config.model, config.context
    with nullcontext() if is_user_model(name) else without_memory():
        model = build(config, corpus.vocab)
    Plan.of(model)
    positions = getattr(model, "positions", None)
    if isinstance(positions, LearnedPositions) and context > positions.context:
        raise ValueError(f"a context of {context} tokens exceeds the {positions.context} learned positions of {name}")
    if is_user_model(name):
        _require_logits(name, model, corpus.vocab, context)
    return model


@torch.no_grad()
def _require_logits(name: str, model: nn.Module, vocab: int, context: int) -> None:
    """Refuse a user's model that does not map tokens `(B, T)` of this vocabulary to logits `(B, T, vocab)`."""
    tokens = torch.full((1, context), vocab - 1)
    try:
        with torch.random.fork_rng(devices=[]):
            logits = model(tokens)
    except Exception as error:  # whatever a user's own code raises
        raise ValueError(f"{name} failed on a sequence of {context} tokens below {vocab}: {error}") from error
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(shape, tuple) or shape[:-1] != (1, context) or shape[-1] < vocab:
        raise ValueError(f"{name} must return logits (batch, {context}, {vocab} or more), not {shape}")
