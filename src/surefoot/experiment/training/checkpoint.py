"""Checkpoints that survive a crash, a full disk and a flipped byte: replaced as a whole, verified on load."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from surefoot.experiment.configs import CONFIG
from surefoot.experiment.distributed import FACTS, UNFINISHED
from surefoot.experiment.distributed.processes import agree
from surefoot.experiment.errors import CheckpointError, Locate, OtherDirectory, with_remedy
from surefoot.experiment.files import replace_files, sha256_of

if TYPE_CHECKING:
    from surefoot.experiment.training.run import Run

MANIFEST = ".sha256.json"
"""Suffix of the file beside a checkpoint that lists the digests it may have."""


def save(path: Path, payload: Mapping[str, Any], val_loss: float | None = None) -> None:
    """Write a checkpoint. At every moment `path` is the old one or the new one, complete.

    The manifest is replaced before the checkpoint and lists the digests of both, of the old one if it was sound.

    Args:
        path: the checkpoint's file.
        payload: tensors, numbers, strings, lists and dictionaries only (`weights_only` loading).
        val_loss: kept in the manifest.

    Raises:
        OSError: the disk is full or the folder cannot be written; an older checkpoint at `path` still loads.
    """
    buffer = io.BytesIO()
    torch.save(dict(payload), buffer)
    data = buffer.getvalue()
    digests, listed = [hashlib.sha256(data).hexdigest()], _manifest(path)
    if path.exists() and listed.exists() and (digest := sha256_of(path)) in listed.read_text(errors="replace"):
        digests.append(digest)
    manifest = json.dumps({"file": path.name, "sha256": digests, "val_loss": val_loss}).encode()
    try:
        replace_files({_manifest(path): manifest, path: data})
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}; what was saved earlier is intact"
        raise OSError(error.errno, reason) from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint after comparing its digest with the manifest's.

    Args:
        path: the checkpoint's file.

    Returns:
        What `save` was given, on the CPU.

    Raises:
        CheckpointError: its digest is not the one it was saved with, it has no manifest, or it holds what no checkpoint
            does, code of a pickle for example, which is not run; the message names the file.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        digests = list(json.loads(_manifest(path).read_bytes())["sha256"])
    except FileNotFoundError:
        raise CheckpointError(f"{path} cannot be verified: {_manifest(path).name} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{_manifest(path)} is damaged, so {path.name} cannot be verified") from None
    if hashlib.sha256(data).hexdigest() not in digests:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was saved with")
    try:
        payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # any bytes may lie there, and torch's reader raises what they make of it
        payload = None
    if not isinstance(payload, dict):
        other = "other things than tensors, numbers, strings and their lists"
        raise CheckpointError(f"{path} is not a checkpoint: it holds {other}")
    return payload


@dataclass
class Checkpoints:
    """A folder of checkpoints named by step: a file each of one process, a folder each of several.

    Either kind can be gone on from by one process and by any mesh.

    Args:
        folder: created when the first is saved.
        every: steps between two.
        keep: how many of the newest are kept; the second newest is there in case the newest is damaged.
        best: whether the one with the lowest validation loss is kept, too, of those saved at a step of an evaluation.
        background: whether several processes copy their state and write while the run goes on.
        start: where a run goes on: "auto", at the newest sound one of the folder; "never", which allows none there; or
            the path of one, a file or folder.
        on_resume: called with the path of the one that a run goes on from, by the first process.

    Raises:
        ValueError: `every` or `keep` is below 1.
    """

    folder: Path
    every: int = 100
    keep: int = 2
    best: bool = False
    background: bool = False
    start: Path | Literal["auto", "never"] = "auto"
    on_resume: Callable[[Path], None] | None = None
    _pending: ExitStack = field(default_factory=ExitStack, init=False, repr=False)
    _passed: set[Path] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoints need at least one step between them, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, got {self.keep}")

    def write(self, run: Run, val_loss: float | None = None) -> None:
        """Save a run, then delete the checkpoints that need not be kept. With several processes, a collective.

        Args:
            run: between two steps.
            val_loss: of its weights, if it was measured.

        Raises:
            OSError: this one, or one begun in the background, cannot be written.
        """
        processes = run.layout.processes
        if processes.group is None:
            self.save(run.step, run.state(), val_loss)
            return
        from surefoot.experiment.distributed import folders

        self.close()
        if processes.first:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._passed.discard(path := self.folder / _name(run.step))
        facts = {**run.facts(), "val_loss": val_loss}
        wait, step = folders.save(path, run.tensors(), facts, processes.group, self.background), run.step

        def finish() -> None:
            wait()
            if processes.first:
                self._delete_older(step)

        self._pending.callback(finish)
        if not self.background:
            self.close()

    def close(self) -> None:
        """Wait for a checkpoint that is being written in the background.

        Raises:
            OSError: it cannot be written.
        """
        self._pending.close()

    def save(self, step: int, payload: Mapping[str, Any], val_loss: float | None = None) -> None:
        """Write the checkpoint of a step as a file, then delete those that need not be kept.

        Args:
            step: number of steps taken.
            payload: as for `save`.
            val_loss: of its weights, if it was measured.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._passed.discard(path := self.folder / f"{_name(step)}.pt")
        save(path, payload, val_loss)
        self._delete_older(step)

    def resume(self, run: Run) -> None:
        """Go on where `start` says; by default with a warning for each checkpoint passed over. A collective.

        Args:
            run: of the same configuration; unchanged where there are no checkpoints.

        Raises:
            CheckpointError: every checkpoint that is there is damaged; or the one to start from is damaged or missing.
            ValueError: they are of another run; or there are some, and there may be none.
            OSError: the folder is there, and cannot be listed.
        """
        problem, processes = None, run.layout.processes
        if processes.first:
            self._clean()
        if isinstance(self.start, Path):
            self._start_from(run, self.start)
            return
        paths = processes.together(self.paths() if processes.first else [])[0]
        if paths and self.start == "never":
            message = f"{paths[0]} exists: choose another directory, or continue it with --resume auto"
            raise with_remedy(ValueError(message), OtherDirectory())
        for path in paths:
            try:
                self._restore(run, path)
                return
            except CheckpointError as error:
                problem = error
                self._passed.add(path)
                if processes.first:
                    warnings.warn(f"{error}; skipped", stacklevel=2)
        if problem is not None:
            remedy = "no other can be read: delete them to start anew, or choose another folder"
            raise with_remedy(CheckpointError(f"{problem}; {remedy}"), OtherDirectory())

    def _start_from(self, run: Run, path: Path) -> None:
        """Go on from a checkpoint that was asked for, wherever it lies."""
        whole = (path / CONFIG).exists()
        own = f"{path} is a run directory: its checkpoints lie in {path / 'checkpoints'}"
        what = own if whole else f"there is no checkpoint {path}"
        missing = f"{what}: --resume takes the path of a file step-N.pt or folder step-N"
        problem = with_remedy(CheckpointError(missing), Locate(path))
        agree(run.layout.processes, lambda: None if path.exists() and not whole else problem)
        try:
            self._restore(run, path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; resume from another, --resume PATH") from None

    def _restore(self, run: Run, path: Path) -> None:
        """Go on from one checkpoint; a `CheckpointError` on one process is raised on all."""
        if path.is_dir():
            run.load_folder(path)
        else:
            state: dict[str, Any] = {}
            agree(run.layout.processes, lambda: state.update(load(path)))
            if missing := [name for name in run.state() if name not in {*state, "average"}]:
                raise CheckpointError(f"{path} is not a checkpoint of a run: it has no {', '.join(missing)}")
            run.load_state(state)
        if self.on_resume and run.layout.processes.first:
            self.on_resume(path)

    def _clean(self) -> None:
        """Delete what killed processes have left behind: half of a checkpoint, or the digests of a deleted one."""
        digests = self.folder.glob(f"step-*{MANIFEST}")
        alone = [path for path in digests if not path.with_name(path.name.removesuffix(MANIFEST)).exists()]
        for path in (*self.folder.glob(f"*step-*{UNFINISHED}"), *alone):
            _delete(path)

    def paths(self) -> list[Path]:
        """Paths of the checkpoints, newest first. `OSError` where there is a folder that cannot be listed."""
        there = os.listdir(self.folder) if os.path.lexists(self.folder) else ()  # a link to nowhere is there
        named = [self.folder / name for name in there if re.fullmatch(r"step-\d+(\.pt)?", name)]
        return sorted(named, key=lambda path: (_step(path), path.suffix), reverse=True)

    def _delete_older(self, step: int) -> None:
        """Delete what need not be kept up to a step; later ones were passed over when the run was resumed."""
        paths = [path for path in self.paths() if _step(path) <= step]
        sound = [path for path in paths if path not in self._passed]
        kept = set(sound[: self.keep])
        losses = {path: loss for path in sound if (loss := _val_loss(path)) is not None}
        if self.best and losses:
            kept.add(min(losses, key=losses.__getitem__))
        for path in paths:
            if path not in kept:
                _delete(path)
                _delete(_manifest(path))


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _val_loss(path: Path) -> float | None:
    """The validation loss that was saved with a checkpoint, if it can be read."""
    try:
        facts = json.loads((path / FACTS if path.is_dir() else _manifest(path)).read_bytes())
        return None if facts.get("val_loss") is None else float(facts["val_loss"])
    except (OSError, ValueError, AttributeError):
        return None


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST)
