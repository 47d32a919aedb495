"""One model under training: what determines a run, its state, a step of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.models.user_model import call, is_own
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.methods import method as method_named

Device = Literal["cpu", "cuda", "auto"]
Autocast = Literal["none", "bfloat16"]
Record = dict[str, Any]

VALIDATION_BATCHES = 16  # of the training batch's shape
VALIDATION_SEED = 0  # the same batches for every run
TAIL = 0.1  # the part of the steps that `train_loss` is the mean of
CHECK_EVERY = 10  # steps between two looks at the loss, each of which waits for the device


@final
@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a run; the vocabulary is the corpus's.

    Args:
        model: a reference model's name, "gpt" or "llama", or `module:function`, which is called with the width.
        width, depth, head_dim: its size; the last two are the reference models'.
        method: a name of `methods.METHODS`.
        stabiliser: what bounds the weights, `name:value` of `methods.STABILISERS`; None is the recipe's own.
        lr: the largest learning rate of the schedule.
        seed: of initial weights and of the order of the data.
        steps: length of the run.
        batch_size, context: sequences a step, tokens a sequence.
        warmup: the part of the steps over which the rate rises linearly.
        decay: the last part of the steps over which it falls linearly to 0; 1 is all after the warm-up.
        device: "auto" takes a GPU where there is one.
        autocast: "bfloat16" runs the forward pass in it; weights and loss stay in float32.

    Raises:
        ValueError: a number out of range or an unknown choice.
    """

    model: str = "gpt"
    width: int = 64
    depth: int = 2
    head_dim: int = 16
    method: str = "beyond_mup"
    stabiliser: str | None = None
    lr: float = 2.0**-4
    seed: int = 0
    steps: int = 120
    batch_size: int = 16
    context: int = 64
    warmup: float = 0.1
    decay: float = 1.0
    device: Device = "cpu"
    autocast: Autocast = "none"

    def __post_init__(self) -> None:
        for name in ("width", "depth", "head_dim", "steps", "batch_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr must be finite and not negative, got {self.lr}")
        for name in ("warmup", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a part of the steps, between 0 and 1, got {getattr(self, name)}")
        for name, choices in (("device", Device), ("autocast", Autocast)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose {', '.join(get_args(choices))}")

    def factor(self, step: int) -> float:
        """What `lr` is multiplied by at a step: `schedule`."""
        return schedule(step, self.steps, self.warmup, self.decay)


@final
@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Losses in nats per token, None if it diverged; `seconds` without evaluation."""

    train_loss: float | None
    val_loss: float | None
    diverged: bool
    steps: int
    seconds: float
    parameters: int


def schedule(step: int, steps: int, warmup: float, decay: float = 1.0) -> float:
    """Factor on the learning rate at `step` (from 0): up linearly to 1, in the end down linearly to 0 at `steps`.

    >>> [schedule(step, 4, 0.5) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    >>> [schedule(step, 5, 0.0, decay=0.4) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    rise = round(warmup * steps)
    fall = min(steps - rise, round(decay * steps))
    if step < rise:
        return (step + 1) / rise
    return min(1.0, max(0.0, (steps - step) / max(1, fall)))


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU here; use --device cpu, or a CUDA build of torch")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def build(config: TrainConfig, vocab: int) -> nn.Module:
    """The model of a configuration, as its constructor leaves it: a reference model, or `function(width)`.

    A function of the user's own draws from torch's global generator; it is seeded here and then restored.
    """
    if not is_own(config.model):
        return reference(config.model, config.width, config.depth, config.head_dim, vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return call(config.model, config.width)


@final
class Run:
    """A model under training: weights, optimizer, schedule and losses so far; made to be resumed bit for bit.

    Args:
        config: what to run.
        corpus: the data; `batch(split, seed, step, ...)` is pure, so there is no position to remember.
        method: in place of the one that `config` names, for studies that vary it.
        prepare: called with the model before its first step, `nn.Module.compile` for one.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        method: Method | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.config, self.corpus = config, corpus
        self.method = method or method_named(config.method, config.stabiliser)
        self.device = pick_device(config.device)
        model = build(config, corpus.vocab)
        self.method.initialise_(model, config.seed)
        self.model: nn.Module = model.to(self.device)
        self.optimizer = self.method.optimizer(self.model, config.lr)
        self.scheduler = LambdaLR(self.optimizer, config.factor)
        if prepare is not None:
            prepare(self.model)
        self.losses = torch.full((config.steps,), math.nan, device=self.device)
        self.step = 0
        self.seconds = 0.0

    def advance(self) -> None:
        """Take one step, without waiting for the device."""
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
        """Mean cross entropy of one batch, a float32 scalar."""
        config = self.config
        batch = self.corpus.batch(split, seed, step, config.batch_size, config.context)
        tokens, targets = (t.to(self.device, non_blocking=True) for t in batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.autocast == "bfloat16"):
            logits = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss of the validation batches; None if it is not finite."""
        losses = [self.loss("validation", VALIDATION_SEED, i) for i in range(VALIDATION_BATCHES)]
        return _finite(float(torch.stack(losses).mean()))

    def diverged(self) -> bool:
        """Whether the last losses are not finite, or on average worse than twice a uniform guess."""
        recent = self.losses[max(0, self.step - CHECK_EVERY) : self.step]
        return self.step > 0 and not float(recent.mean()) <= 2 * math.log(self.corpus.vocab) + 1

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "config": asdict(self.config),
            "corpus": self.corpus.sha256,
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it is of another configuration or of other data.
        """
        ours: dict[str, Any] = {**asdict(self.config), "corpus": self.corpus.sha256}
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
        """The log's line at this step."""
        tokens = self.step * self.config.batch_size * self.config.context
        lr = self.config.lr * self.config.factor(self.step - 1)
        loss = _finite(float(self.losses[self.step - 1]))
        return {"step": self.step, "loss": loss, "lr": lr, "tokens": tokens, "seconds": round(self.seconds, 3)}

    def wait(self) -> None:
        """Wait for the device, so that a time read next is that of work done."""
        if self.step:
            float(self.losses[self.step - 1])

    def result(self) -> TrainResult:
        """How it ended, or stands."""
        tail = self.losses[max(0, self.step - math.ceil(TAIL * self.config.steps)) : self.step]
        diverged = self.diverged()
        train_loss = None if diverged else _finite(float(tail.mean()))
        val_loss = None if diverged else self.validate()
        size = sum(p.numel() for p in self.model.parameters())
        return TrainResult(train_loss, val_loss, diverged or val_loss is None, self.step, self.seconds, size)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
