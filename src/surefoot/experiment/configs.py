"""The text of a `config.json`, read strictly, and compared with what is wanted."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MISSING = object()


def parse(text: str) -> Any:
    """Read JSON, without a key twice in one object, of which other readers take the last.

    Args:
        text: of a file.

    Returns:
        The value.

    Raises:
        ValueError: it is not JSON, or has a key twice.

    >>> parse('{"steps": 75, "steps": 150}')
    Traceback (most recent call last):
    ValueError: the key "steps" twice
    """
    return json.loads(text, object_pairs_hook=_unique)


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
        value = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not valid JSON (an object is needed, not {json.dumps(value)[:40]})")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'the key "{key}" twice')
        found[key] = value
    return found


LATER: Mapping[str, Any] = {"cooldown_shape": "linear", "average": 0.0}
"""Settings that run directories and checkpoints of earlier versions lack, with the values that they had then."""


PLACES: Mapping[str, str] = {"data": "corpus", "text": "corpus", "eval_text": "eval_corpus"}
"""Where data lie and what they are called -> the digest beside it. Where that is equal, the data are."""


def differences(there: Any, wanted: Any, key: str = "") -> list[str]:
    """The differences of two JSON values as lines "key: there X, now Y", keys dotted; `LATER` fills what is missing.

    The same data may lie in another place than before (`PLACES`).

    Args:
        there: what a file has.
        wanted: what it should have.
        key: of both.

    Returns:
        The lines; of a key that is only there, the one that may have been meant.

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
            if digest in wanted and there.get(digest) == wanted[digest]:
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
