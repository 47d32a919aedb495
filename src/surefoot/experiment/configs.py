"""A run directory's `config.json`: the kind of run, and its settings, compared with what is wanted."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import Locate, OtherDirectory, with_remedy
from surefoot.experiment.files import dumps, locked, write_json

CONFIG = "config.json"
KINDS = ("transfer", "extrapolate", "ladder", "compare", "train", "coordcheck")
"""Kinds of runs; "extrapolate" is `transfer` over horizons, batches or depths."""

_MISSING = object()


def read(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: of the file.

    Returns:
        The object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds another value; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: the command of its run writes it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not valid JSON (an object is needed, not {json.dumps(value)[:40]})")
    return value


def read_if_there(path: Path) -> dict[str, Any]:
    """The object that a file holds, as `read`; empty where there is no file."""
    return read(path) if path.exists() else {}


def kind_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """Find the kind of run that a directory holds.

    Args:
        directory: of a run, finished or not.

    Returns:
        One of `KINDS`, and the rest of `config.json`.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: `config.json` is damaged, or was written by another program.
    """
    path = directory / CONFIG
    if not path.exists():
        raise with_remedy(FileNotFoundError(f"{directory} is no run directory: it has no {CONFIG}"), Locate(directory))
    config = read(path)
    # Earlier versions did not write the kind: the first of these keys that is present tells it.
    kinds = {"axis": "extrapolate", "rates_per_recipe": "compare", "recipes": "transfer", "width": "train"}
    kinds |= {"method": "coordcheck"}
    kind = config.pop("kind", None) or next((kind for key, kind in kinds.items() if key in config), None)
    if kind not in KINDS:
        raise ValueError(f"{path} is not from transfer, ladder, compare, train or coordcheck")
    return kind, config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; refused if a key comes twice, of which other readers take the last.

    >>> json.loads('{"steps": 75, "steps": 150}', object_pairs_hook=_unique)
    Traceback (most recent call last):
    ValueError: the key "steps" twice
    """
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f'the key "{key}" twice')
    return dict(pairs)


LATER: Mapping[str, Any] = {"cooldown_shape": "linear", "average": 0.0, "data_order": "random"}
"""Settings that run directories and checkpoints of earlier versions lack, with the values that they had then."""


_VOCABULARY = re.compile(r", \d+ (?:BPE )?tokens$")
PLACES: Mapping[str, str] = {"data": "corpus", "text": "corpus", "eval_text": "eval_corpus"}
"""Key of a data path or name -> key of its digest: data are the same if digest and vocabulary are."""


def differences(there: Any, wanted: Any, key: str = "") -> list[str]:
    """The differences of two JSON values as lines "key: there X, now Y", keys dotted; `LATER` fills what is missing.

    The same data may lie in another place than before (`PLACES`).

    Args:
        there: what a file has.
        wanted: what it should have.
        key: of both.

    Returns:
        The lines; for a key that only the file has, the key that may have been meant.

    >>> differences({"steps": 75, "settings": {"depth": 2}}, {"steps": 150, "settings": {"depth": 2}})
    ['steps: there 75, now 150']
    >>> differences({"stesp": 75}, {"steps": 75})
    ['steps: there missing, now 75', 'stesp: there 75, now unknown (steps?)']
    >>> differences({"data": "/a", "corpus": "4b2f"}, {"data": "/b", "corpus": "4b2f"})
    []
    """
    if isinstance(there, dict) and isinstance(wanted, dict):
        lines = []
        for name in sorted(there.keys() | wanted.keys()):
            dotted, digest = f"{key}.{name}".lstrip("."), PLACES.get(name)
            vocabularies = [_VOCABULARY.findall(str(config.get(name))) for config in (there, wanted)]
            if digest in wanted and there.get(digest) == wanted[digest] and vocabularies[0] == vocabularies[1]:
                continue
            if name in wanted:
                lines += differences(there.get(name, LATER.get(name, _MISSING)), wanted[name], dotted)
            else:
                meant = "".join(f" ({close}?)" for close in difflib.get_close_matches(name, wanted, n=1))
                lines.append(f"{dotted}: there {json.dumps(there[name])}, now unknown{meant}")
        return lines
    if there == wanted and isinstance(there, bool) == isinstance(wanted, bool):  # in Python 1 == True
        return []
    return [f"{key}: there {'missing' if there is _MISSING else json.dumps(there)}, now {json.dumps(wanted)}"]


@contextmanager
def claimed(directory: Path, kind: str, config: Mapping[str, Any], data: str) -> Iterator[None]:
    """Make a run directory, lock it for one writer, and make it belong to one configuration.

    `config.json` is written with the kind of run, or compared with what is wanted.

    Args:
        directory: created if missing.
        kind: of run, one of `KINDS`.
        config: JSON values.
        data: name of the file of results.

    Raises:
        ValueError: the directory is a file, belongs to another configuration (the message names the keys that differ),
            or has results and no `config.json`, or one that is damaged.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
    """
    if directory.is_file():
        message = f"{directory} is a file, but a run needs a directory: choose another name"
        raise with_remedy(ValueError(message), OtherDirectory())
    directory.mkdir(parents=True, exist_ok=True)
    wanted, begun = json.loads(dumps({"kind": kind, **config})), (directory / CONFIG).exists()
    with locked(directory):
        try:
            _claim(directory, wanted, data)
        except ValueError as error:
            message = f"{error}: choose another directory, or repeat the arguments it was started with to resume it"
            raise with_remedy(ValueError(message), OtherDirectory()) from None
        try:
            yield
        except ValueError:  # of the arguments, such as the checkpoint of another run to start from
            if not (begun or (directory / data).exists()):
                (directory / CONFIG).unlink(missing_ok=True)
            raise


def _claim(directory: Path, wanted: dict[str, Any], data: str) -> None:
    path = directory / CONFIG
    if path.exists():
        if differing := differences({"kind": wanted["kind"], **read(path)}, wanted):  # an earlier version names no kind
            raise ValueError(f"{directory} belongs to another configuration; it differs in {'; '.join(differing)}")
    elif (directory / data).is_file() and (directory / data).stat().st_size:
        raise ValueError(f"{directory} holds {data} but no {CONFIG}")
    else:
        write_json(path, wanted)
