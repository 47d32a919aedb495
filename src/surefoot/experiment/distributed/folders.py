"""Checkpoints as folders that every mesh can read: torch.distributed.checkpoint behind a manifest of SHA-256 digests.

torch loads a flipped byte without a word and runs whatever a pickle in `.metadata` says. So a folder gets its final
name when it is complete and on the disk, with a manifest of all its files, which is compared before anything is opened;
and pickles may build nothing but descriptions of tensors.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from surefoot.experiment.distributed import FACTS, UNFINISHED
from surefoot.experiment.errors import CheckpointError
from surefoot.experiment.files import dumps, sha256_of, sync_directory, write_atomic

MANIFEST = "manifest.json"
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}  # fmt: skip
"""Names that a `.metadata` may refer to, by module, besides dtypes."""


class _Writer(FileSystemWriter):
    """Writes a folder under a temporary name; when all processes have written, adds the manifest and renames it."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(path.with_name(path.name + UNFINISHED), thread_count=1)
        self._final, self._facts = path, facts

    def storage_meta(self) -> StorageMeta:
        """As torch's, without the path, which does not concern who reads the folder."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As torch's, with the digests of the files beside the result of each entry."""
        written = super().write_data(plan, planner).wait()
        files = {result.storage_data.relative_path for result in written}
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result((written, {name: sha256_of(Path(self.path) / name) for name in sorted(files)}))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """As torch's, then write facts and manifest and rename the folder: called by one process."""
        super().finish(metadata, [written for written, _ in results])
        folder = Path(self.path)
        write_atomic(folder / FACTS, dumps(dict(self._facts)))
        digests = {name: sha256_of(folder / name) for name in (".metadata", FACTS)}
        for _, own in results:
            digests |= own
        write_atomic(folder / MANIFEST, dumps({"sha256": digests}, indent=1))
        aside = self._final.with_name(self._final.name + ".damaged" + UNFINISHED)
        if self._final.exists():  # it was passed over when the run was resumed
            shutil.rmtree(aside, ignore_errors=True)
            self._final.rename(aside)
        folder.rename(self._final)
        sync_directory(self._final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def save(
    path: Path, tensors: Mapping[str, Any], facts: Mapping[str, Any], group: Any, background: bool
) -> Callable[[], None]:
    """Write a checkpoint: a collective of all processes of the group. At every moment `path` is absent or complete.

    Args:
        path: the folder, in one that exists and that all processes see.
        tensors: nested dictionaries of tensors, `DTensor` among them, numbers and strings.
        facts: JSON values, the same on every process.
        group: process group that communicates through host memory.
        background: whether to copy the tensors and write while the caller goes on.

    Returns:
        A function that waits until the folder is there.

    Raises:
        OSError: it could not be written; if in the background, raised by the function that waits.
    """
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(path.with_name(path.name + UNFINISHED), ignore_errors=True)
    torch.distributed.barrier(group)
    write: Any = state_dict_saver.async_save if background else state_dict_saver.save
    with _writing(path):
        pending = write(dict(tensors), storage_writer=_Writer(path, facts), process_group=group)

    def wait() -> None:
        with _writing(path):
            pending.result()

    return wait if background else lambda: None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context for writing a checkpoint: errors become an `OSError` that names it."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        raise OSError(f"cannot write {path}: {_first(error)}; what was saved earlier is intact") from error


def _first(error: BaseException) -> BaseException:
    """The error of one process, from torch's collection of all processes' errors."""
    failed: BaseException = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return failed


def damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint, by its manifest; nothing of it is opened but the manifest.

    Args:
        folder: of the checkpoint.
        share: which part of the files to compare.
        shares: number of such parts.

    Returns:
        A sentence that names the file; None if this part is sound.

    Raises:
        OSError: a file is there and cannot be read, which says nothing about its content.
    """
    try:
        digests = json.loads((folder / MANIFEST).read_bytes())["sha256"]
        there = {path.name for path in folder.iterdir()} - {MANIFEST}
        if there != digests.keys() or not {".metadata", FACTS} <= there:
            return f"{folder} is damaged: its files differ from {MANIFEST}: {sorted(there ^ digests.keys())}"
        for name in sorted(digests)[share::shares]:
            if sha256_of(folder / name) != digests[name]:
                return f"{folder / name} is damaged: its SHA-256 has changed since it was saved"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} cannot be verified: {MANIFEST} is missing or damaged ({type(error).__name__}: {error})"
    return None


def facts_of(folder: Path, names: Collection[str]) -> dict[str, Any]:
    """The facts of a checkpoint that was verified; `CheckpointError` where some of these names are missing."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not facts.keys() >= {*names}:
        raise CheckpointError(f"{folder / FACTS} is damaged: it lacks some of {', '.join(names)}")
    return facts


def load_(folder: Path, tensors: dict[str, Any], group: Any = None) -> None:
    """Read a checkpoint that was verified into tensors: a collective of all processes, of any mesh.

    Args:
        folder: of the checkpoint.
        tensors: dictionaries of the same form as those saved; tensors are overwritten, other entries replaced.
        group: as for `save`; None in one process.

    Raises:
        CheckpointError: its manifest fits, and its contents are not a checkpoint's, or not one of these tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_loader.load(
                tensors, storage_reader=_Reader(folder), planner=_Planner(), process_group=group, no_dist=group is None
            )
    except (CheckpointException, RuntimeError, pickle.PickleError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_first(error)}") from None


class _Reader(FileSystemReader):
    """As torch's, with an unpickler that builds descriptions of tensors only, and files of this folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of all tensors."""
        folder = Path(self.path)
        try:
            with (folder / ".metadata").open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            for name in {place.relative_path for place in metadata.storage_data.values()}:
                if Path(name).name != name or not (folder / name).is_file():
                    raise pickle.UnpicklingError(f"it names {name!r}, which is not in the folder")
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise CheckpointError(f"{folder / '.metadata'} is not a description of tensors: {error}") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_InPython: Any = pickle._Unpickler
"""The implementation in C does not let BUILD be overridden."""


class _Unpickler(_InPython):  # type: ignore[misc]
    """Builds instances of the allowed classes, and changes nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """A class of the list; UnpicklingError for all others."""
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath  # where other programs saved to
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        """Give an instance its attributes; UnpicklingError for a class or a function, which others use, too."""
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it changes a class or a function")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _Planner(DefaultLoadPlanner):
    """As torch's, but entries that are no tensors are read by an unpickler that builds numbers and strings only."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Read an entry by torch's allow-list."""
        name = read_item.dest_index.fqn
        try:
            entry = torch.load(value, weights_only=True)
        except Exception as error:  # torch's own kinds, one for each way to be no such entry
            raise CheckpointError(f"{name} is neither a number nor a string") from error
        set_element(self.original_state_dict, self.mappings[name], entry)
