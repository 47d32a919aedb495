"""One model under training: what determines a run, its state, a step of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.files import finite_or_none
from surefoot.experiment.models.decoder import published, reference
from surefoot.experiment.models.layers import Learned
from surefoot.experiment.models.sizes import PUBLISHED
from surefoot.experiment.models.user_model import call, is_own
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.methods import method as method_named
from surefoot.plan import Plan

Record = dict[str, Any]

VALIDATION_BATCHES = 16  # of the training batch's shape
VALIDATION_SEED = 0  # the same batches for every run
TAIL = 0.1  # the last fraction of the steps, whose mean loss is `train_loss`
CHECK_EVERY = 10  # steps between two tests for divergence, each of which synchronises with the device


@final
@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run. Losses are in nats per token, None if it diverged; `seconds` excludes evaluation."""

    train_loss: float | None
    val_loss: float | None
    diverged: bool
    steps: int
    seconds: float
    parameters: int


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
        config: its architecture, and its seed for a user's function.
        vocab: number of the data's tokens; a published model keeps its own, larger vocabulary.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: an unknown reference model, a width that is not a multiple of the head dimension, more tokens than a
            published model has, or a function that cannot be called, see `user_model.call`.
    """
    size = config.architecture
    if size.model in PUBLISHED:
        if vocab > classes(config, vocab):
            raise ValueError(f"{size.model} has {classes(config, vocab)} tokens, the data {vocab}: choose other data")
        return published(size.model, size.width)
    if not is_own(size.model):
        return reference(size.model, size.width, size.depth, size.head_dim, vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return call(size.model, size.width)


def classes(config: TrainConfig, vocab: int) -> int:
    """The number of tokens that a model tells apart: the data's, or a published model's own."""
    name = config.architecture.model
    return PUBLISHED[name].vocab if name in PUBLISHED else vocab


def require_model(config: TrainConfig, corpus: Corpus) -> None:
    """Refuse a model that cannot be trained, before anything is written; only a user's own is given memory.

    Args:
        config: of a run.
        corpus: its data.

    Raises:
        ValueError: it cannot be built, it has no plan, or its positions are fewer than a sequence's tokens.
    """
    with nullcontext() if is_own(config.architecture.model) else torch.device("meta"):
        model = build(config, corpus.vocab)
    Plan.of(model)
    positions = getattr(model, "positions", None)
    if isinstance(positions, Learned) and config.batches.context > positions.context:
        raise ValueError(
            f"a context of {config.batches.context} tokens exceeds the {positions.context} learned positions of "
            f"{config.architecture.model}"
        )


@final
class Run:
    """A model under training: weights, optimizer, schedule and the losses of the steps taken. Resumes bit for bit.

    Args:
        config: settings of the run.
        corpus: the data. `batch(split, seed, step, ...)` is a pure function, so the state has no position in the data.
        method: overrides the method that `config` names.
        prepare: called once with the model before its first step, for example `nn.Module.compile`.

    Raises:
        ValueError: an impossible configuration, or a GPU that is missing.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        method: Method | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.config, self.corpus = config, corpus
        self.method = method or method_named(config.optimisation.method, config.optimisation.stabiliser)
        self.device = pick_device(config.execution.device)
        model = build(config, corpus.vocab)
        self.method.initialise_(model, config.seed)
        self.model: nn.Module = model.to(self.device)
        self.optimizer = self.method.optimizer(self.model, config.optimisation.lr)
        self.scheduler = LambdaLR(self.optimizer, config.schedule.factor)
        if prepare is not None:
            prepare(self.model)
        self.losses = torch.full((config.schedule.steps,), math.nan, device=self.device)
        self.before: dict[str, Tensor] | None = None
        self.step = 0
        self.seconds = 0.0

    def advance(self, keep: bool = False) -> None:
        """Take one step, without synchronising with the device.

        Args:
            keep: the weights before it in `before`, for what observes the step; else `before` is None.
        """
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()} if keep else None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss("train", self.config.seed, self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.method.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.method.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.losses[self.step] = loss.detach()
        self.step += 1

    def loss(self, split: Literal["train", "validation"], seed: int, step: int) -> Tensor:
        """Mean cross entropy of one batch in nats per token, a float32 scalar."""
        shape, autocast = self.config.batches, self.config.execution.autocast
        batch = self.corpus.batch(split, seed, step, shape.batch_size, shape.context)
        tokens, targets = (t.to(self.device, non_blocking=True) for t in batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast == "bfloat16"):
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss of the validation batches; None if it is not finite."""
        losses = [self.loss("validation", VALIDATION_SEED, i) for i in range(VALIDATION_BATCHES)]
        return finite_or_none(float(torch.stack(losses).mean()))

    def diverged(self) -> bool:
        """True if the mean of the last losses is not finite, or above twice that of a uniform guess plus one nat."""
        recent = self.losses[max(0, self.step - CHECK_EVERY) : self.step]
        uniform = math.log(classes(self.config, self.corpus.vocab))
        return self.step > 0 and not float(recent.mean()) <= 2 * uniform + 1

    def state(self) -> dict[str, Any]:
        """The state of the run for a checkpoint: tensors, numbers, strings, lists and dictionaries."""
        return {
            "config": self.config.to_json(),
            "corpus": self.corpus.sha256,
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same run.

        Args:
            state: of `state`.

        Raises:
            ValueError: it is of another configuration or of other data.
        """
        ours: dict[str, Any] = {**self.config.to_json(), "corpus": self.corpus.sha256}
        theirs = {**state["config"], "corpus": state["corpus"]}
        differing = [
            f"{key} ({theirs.get(key)}, now {value})" for key, value in ours.items() if theirs.get(key) != value
        ]
        if differing:
            raise ValueError(f"the checkpoint is of another run: it differs in {', '.join(differing)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.losses.copy_(state["losses"])
        self.step, self.seconds = state["step"], state["seconds"]

    def record(self) -> Record:
        """The line of the log after the last step: step, loss, learning rate, tokens and seconds."""
        config = self.config
        tokens = self.step * config.batches.batch_size * config.batches.context
        lr = config.optimisation.lr * config.schedule.factor(self.step - 1)
        loss = finite_or_none(float(self.losses[self.step - 1]))
        return {"step": self.step, "loss": loss, "lr": lr, "tokens": tokens, "seconds": round(self.seconds, 3)}

    def wait(self) -> None:
        """Synchronise with the device, so that a time read next includes the work of all steps."""
        if self.step:
            float(self.losses[self.step - 1])

    def result(self) -> TrainResult:
        """The outcome if the run ended now; evaluates the validation loss."""
        tail = self.losses[max(0, self.step - math.ceil(TAIL * self.config.schedule.steps)) : self.step]
        diverged = self.diverged()
        train_loss = None if diverged else finite_or_none(float(tail.mean()))
        val_loss = None if diverged else self.validate()
        size = sum(p.numel() for p in self.model.parameters())
        return TrainResult(train_loss, val_loss, diverged or val_loss is None, self.step, self.seconds, size)
