"""Checkpoints that survive a crash, a full disk and a flipped byte: replaced as a whole, verified on load."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from surefoot.experiment.files import replace_files

MANIFEST = ".sha256.json"
"""Suffix of the file beside a checkpoint that lists the digests it may have."""
RETAINED = 2
"""Number of checkpoints in a folder: the newest, and the one before it in case the newest is damaged."""


def save(path: Path | str, payload: Mapping[str, Any]) -> None:
    """Write a checkpoint. At every moment `path` is the old one or the new one, complete.

    The manifest is replaced before the checkpoint and lists the digests of both.

    Args:
        path: the checkpoint's file.
        payload: tensors, numbers, strings, lists and dictionaries only (`weights_only` loading).

    Raises:
        OSError: the disk is full or the folder cannot be written; an older checkpoint at `path` still loads.
    """
    path = Path(path)
    buffer = io.BytesIO()
    torch.save(dict(payload), buffer)
    data = buffer.getvalue()
    digests = [hashlib.sha256(data).hexdigest()]
    if path.exists():
        digests.append(_digest(path))
    manifest = json.dumps({"file": path.name, "sha256": digests}).encode()
    try:
        replace_files({_manifest(path): manifest, path: data})
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}; what was saved earlier is intact"
        raise OSError(error.errno, reason) from error


def load(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint after comparing its digest with the manifest's.

    Args:
        path: the checkpoint's file.

    Returns:
        What `save` was given, on the CPU.

    Raises:
        ValueError: it is damaged or has no manifest; the message names the file and the remedy.
        OSError: it cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    remedy = "delete it to resume from an older one, or start again in another folder"
    try:
        digests = list(json.loads(_manifest(path).read_bytes())["sha256"])
    except FileNotFoundError:
        raise ValueError(f"{path} cannot be verified: {_manifest(path).name} is missing; {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{_manifest(path)} is damaged, so {path.name} cannot be verified; {remedy}") from None
    if hashlib.sha256(data).hexdigest() not in digests:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one it was saved with; {remedy}")
    payload: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return payload


@final
@dataclass(frozen=True)
class Checkpoints:
    """A folder of checkpoints named by step.

    Args:
        folder: created when the first is saved.
        every: steps between two.

    Raises:
        ValueError: `every` is below 1.
    """

    folder: Path
    every: int = 100

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoints need at least one step between them, got {self.every}")

    def save(self, step: int, payload: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step, then delete all but the newest two.

        Args:
            step: number of steps taken.
            payload: as for `save`.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.folder / f"step-{step:08d}.pt", payload)
        for path in self._paths()[RETAINED:]:
            path.unlink(missing_ok=True)
            _manifest(path).unlink(missing_ok=True)

    def newest(self) -> dict[str, Any] | None:
        """Read the newest checkpoint that is intact, with a warning for each newer one.

        Returns:
            Its payload; None if there are no checkpoints.

        Raises:
            ValueError: there are checkpoints and every one is damaged.
        """
        problem: ValueError | None = None
        for path in self._paths():
            try:
                return load(path)
            except ValueError as error:
                problem = error
                warnings.warn(str(error), stacklevel=2)
        if problem is not None:
            raise problem
        return None

    def _paths(self) -> list[Path]:
        """Paths of the checkpoints, newest first."""
        files = self.folder.glob("step-*.pt") if self.folder.is_dir() else ()
        named = [path for path in files if re.fullmatch(r"step-\d+", path.stem)]
        return sorted(named, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
