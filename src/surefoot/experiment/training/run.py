"""One model under training: what determines a run, its state, a step of it."""

import itertools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from surefoot.experiment.configs import LATER
from surefoot.experiment.data.corpus import SPLITS, Corpus
from surefoot.experiment.distributed.processes import Layout, agree, blocks_of, cut_like, local_of
from surefoot.experiment.files import finite_or_none
from surefoot.experiment.models.cross_entropy import cross_entropy
from surefoot.experiment.models.fast_linear import use_bfloat16, use_onednn
from surefoot.experiment.models.sizes import is_user_model
from surefoot.experiment.models.user_model import drawn_by
from surefoot.experiment.training.average import Average
from surefoot.experiment.training.build import build, classes, pick_device
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.methods import method as method_named
from surefoot.monitor.activations import evaluating

Record = dict[str, Any]

VALIDATION_BATCHES = 16  # of the training batch's shape
VALIDATION_SEED = 0  # the same batches for every run
TAIL = 0.1  # the last fraction of the steps, whose mean loss is `train_loss`
CHECK_EVERY = 10  # steps between two tests for divergence, each of which synchronises with the device


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run. Losses are in nats per token, None if it diverged; `seconds` excludes evaluation.

    `val_loss_average` is that of the averaged weights, None where there are none; `tokens_per_second` is of the whole
    run, `optimizer_share` of the steps that this process took and timed.
    """

    train_loss: float | None
    val_loss: float | None
    diverged: bool
    steps: int
    seconds: float
    parameters: int
    val_loss_average: float | None = None
    tokens_per_second: float | None = field(default=None, compare=False)
    optimizer_share: float | None = field(default=None, compare=False)


class Run:
    """A model under training: weights, optimizer, schedule and the losses of the steps taken. Resumes bit for bit.

    Args:
        config: settings of the run.
        corpus: the data. `batch(split, seed, step, ...)` is a pure function, so the state has no position in the data.
        method: overrides the method that `config` names.
        layout: how the work of a step is divided; default: one process, the whole batch at once.

    Raises:
        ValueError: an impossible configuration, a GPU that is missing, or a batch that the layout cannot divide.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, method: Method | None = None, layout: Layout | None = None
    ) -> None:
        self.config: TrainConfig = config
        self.corpus: Corpus = corpus
        self.layout: Layout = layout or Layout()
        processes = self.layout.processes
        processes.rows(config.batch_size, 0, self.layout.accumulate)
        method = method or method_named(config.method, config.stabiliser)
        self.method: Method = method.over(config.steps)
        self.device: torch.device = pick_device(config.device)
        model = build(config, corpus.vocab)
        self.method.initialise_(model, config.seed)
        use_onednn(model)
        if self.layout.recompute:
            plain = (each for each in blocks_of(model) if not any(isinstance(x, _BatchNorm) for x in each.modules()))
            for block in plain:  # batch norms' statistics would move twice
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.model: nn.Module
        self.model, self._autocasts = processes.place(model, self.device, config.autocast == "bfloat16")
        self.optimizer: torch.optim.Optimizer = self.method.optimizer(self.model, config.lr)
        self.scheduler: LambdaLR = LambdaLR(self.optimizer, config.factor)
        if self.layout.prepare is not None:
            self.layout.prepare(self.model)
        self._autocasts = self._autocasts and not use_bfloat16(self.model)
        self.average: Average | None = Average(self.model, config.average, config.steps) if config.average else None
        self.losses: Tensor = torch.full((config.steps,), math.nan, device=self.device)
        self.timer: AbstractContextManager[object] = nullcontext()  # of the optimizer's part of a step
        self.before: dict[str, Tensor] | None = None
        self.step: int = 0
        self.seconds: float = 0.0

    def advance(self, keep: bool = False) -> None:
        """Take one step, without synchronising with the device.

        Args:
            keep: whether to keep the weights before it in `before`, for observers; else `before` is None.
        """
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()} if keep else None
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part in range(self.layout.accumulate):
            loss = self.loss("train", self.config.seed, self.step, part, self.layout.accumulate)
            (loss / self.layout.accumulate).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / self.layout.accumulate
        self.layout.processes.finish_gradients(self.model)
        if self.method.clip is not None:
            self.layout.processes.clip_(self.model, self.method.clip)
        with self.timer:
            self.optimizer.step()
        self.scheduler.step()
        if self.average is not None:
            self.average.update(self.step)
        self.layout.processes.average_(total)  # decisions read the same loss on every process
        self.losses[self.step] = total
        self.step += 1

    def loss(
        self, split: Literal["train", "validation"], seed: int, step: int, part: int = 0, parts: int = 1
    ) -> Tensor:
        """Mean cross entropy in nats per token of this process's rows of a part of a batch, a float32 scalar."""
        config = self.config
        rows = self.layout.processes.rows(config.batch_size, part, parts)
        order = config.data_order if split == "train" else "random"
        batch = self.corpus.batch(split, seed, step, config.batch_size, config.context, rows, order)
        tokens, targets = (t.to(self.device, non_blocking=True) for t in batch)
        own = is_user_model(config.model)  # others draw nothing
        drawn = drawn_by(self.device, seed, SPLITS.index(split), step, rows.start) if own else nullcontext()
        with drawn, torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocasts):
            return cross_entropy(self.model, tokens, targets)

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss of the validation batches, of all processes; None if it is not finite."""
        parts = self.layout.accumulate
        passes = itertools.product(range(VALIDATION_BATCHES), range(parts))
        with evaluating(self.model):
            mean = torch.stack([self.loss("validation", VALIDATION_SEED, i, part, parts) for i, part in passes]).mean()
        self.layout.processes.average_(mean)
        self.layout.processes.release(self.model)
        return finite_or_none(float(mean))

    def evaluate(self) -> Record:
        """The validation loss, `val_loss`, and that of the averaged weights, `val_loss_average`, if there are such."""
        losses = {"val_loss": self.validate()}
        if self.average is not None:
            with self.average.in_place():
                losses["val_loss_average"] = self.validate()
        return losses

    def diverged(self) -> bool:
        """True if the mean of the last losses is not finite, or above twice that of a uniform guess plus one nat."""
        recent = self.losses[max(0, self.step - CHECK_EVERY) : self.step]
        uniform = math.log(classes(self.config, self.corpus.vocab))
        if is_user_model(self.config.model):  # it may have more logits, and begins at their logarithm
            uniform = max(uniform, float(self.losses[0]))
        return self.step > 0 and not float(recent.mean()) <= 2 * uniform + 1

    def not_finite(self) -> str | None:
        """The first parameter of whose weight or gradient this process holds a NaN or an infinity; None for none."""
        for name, p in self.model.named_parameters():
            if not all(local_of(t).isfinite().all() for t in (p.detach(), p.grad) if t is not None):
                return name
        return None

    def facts(self) -> dict[str, Any]:
        """The run's state apart from tensors, as JSON values."""
        return {
            "config": self.config.to_json(),
            "corpus": self.corpus.sha256,
            "step": self.step,
            "seconds": self.seconds,
            "scheduler": self.scheduler.state_dict(),
        }

    def state(self) -> dict[str, Any]:
        """The state of the run for a checkpoint: tensors, numbers, strings, lists and dictionaries."""
        return {**self.facts(), **self._with_losses(self.model.state_dict(), self.optimizer.state_dict())}

    def _with_losses(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """The states of model and optimizer with the run's own tensors: the losses, and the average if there is one."""
        average = {} if self.average is None else {"average": self.average.weights}
        return {"losses": self.losses, "model": model, "optimizer": optimizer, **average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same run.

        Args:
            state: of `state` in one process, whole on every process of a mesh.

        Raises:
            ValueError: it is of another configuration or of other data.
        """
        self._require_same_run(state)
        ours, saved = self.model.state_dict(), state["optimizer"]
        self.model.load_state_dict({name: cut_like(x, ours.get(name)) for name, x in state["model"].items()})
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries = {i: {n: cut_like(x, params[int(i)]) for n, x in of.items()} for i, of in saved["state"].items()}
        self.optimizer.load_state_dict({**saved, "state": entries})
        self.losses.copy_(state["losses"])
        if self.average is not None:
            for name, a in self.average.weights.items():
                a.copy_(cut_like(state["average"][name], a))
        self._go_on(state)

    def tensors(self) -> dict[str, Any]:
        """The run's tensors by names that are the same on every mesh; the optimizer's state complete."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return self._with_losses(*get_state_dict(self.model, self.optimizer))

    def load_folder(self, path: Path) -> None:
        """Go on from a checkpoint folder, of any mesh: a collective.

        Args:
            path: of the folder.

        Raises:
            CheckpointError: on every process, if one finds it damaged.
            ValueError: it is of another run.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        from surefoot.experiment.distributed import folders

        processes = self.layout.processes
        agree(processes, partial(folders.damage, path, processes.rank, processes.count))
        facts = folders.facts_of(path, self.facts())
        self._require_same_run(facts)
        tensors = self.tensors()
        folders.load_(path, tensors, processes.group)  # the losses and the average are overwritten where they are
        set_model_state_dict(self.model, tensors["model"])
        set_optimizer_state_dict(self.model, self.optimizer, tensors["optimizer"])
        self._go_on(facts)

    def _require_same_run(self, state: Mapping[str, Any]) -> None:
        """Refuse a state or its facts with a ValueError if they are of another run."""
        ours: dict[str, Any] = {**self.config.to_json(), "corpus": self.corpus.sha256}
        theirs = {**LATER, **state["config"], "corpus": state["corpus"]}
        differing = [f"{key} ({theirs.get(key)}, now {x})" for key, x in ours.items() if theirs.get(key) != x]
        if differing:
            raise ValueError(f"the checkpoint is of another run: it differs in {', '.join(differing)}")

    def _go_on(self, facts: Mapping[str, Any]) -> None:
        """Go on after the step of these facts, when all tensors have been restored."""
        self.scheduler.load_state_dict(facts["scheduler"])
        self.step, self.seconds = facts["step"], facts["seconds"]

    def record(self) -> Record:
        """The line of the log after the last step: step, loss, learning rate, tokens and seconds."""
        config = self.config
        tokens = self.step * config.run.tokens
        lr = config.lr * config.factor(self.step - 1)
        loss = finite_or_none(float(self.losses[self.step - 1]))
        return {"step": self.step, "loss": loss, "lr": lr, "tokens": tokens, "seconds": round(self.seconds, 3)}

    def wait(self) -> None:
        """Synchronise with the device, so that a time read next includes the work of all steps."""
        float(self.losses[-1])

    def result(self) -> TrainResult:
        """The outcome if the run ended now; evaluates the validation loss."""
        tail = self.losses[max(0, self.step - math.ceil(TAIL * self.config.steps)) : self.step]
        diverged = self.diverged()
        train_loss = None if diverged else finite_or_none(float(tail.mean()))
        losses = {"val_loss": None} if diverged else self.evaluate()
        size = sum(p.numel() for p in self.model.parameters())
        diverged = diverged or losses["val_loss"] is None
        return TrainResult(
            train_loss, diverged=diverged, steps=self.step, seconds=self.seconds, parameters=size, **losses
        )
