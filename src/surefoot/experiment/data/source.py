"""Names of data, as `--data` takes them. Nothing here imports torch."""

from __future__ import annotations

import re
from pathlib import Path


def absolute(path: str | None) -> str | None:
    """A value of `--data` that means the same in another working directory, for worker processes and later runs.

    Args:
        path: a path, one after `text:`, `bpe:N:`, `bin:` or `bin:N:`, or a value without a path.

    Returns:
        The value with its path made absolute.

    >>> absolute("markov:64"), absolute("bpe:512:/texts"), absolute("bin:/tokens")
    ('markov:64', 'bpe:512:/texts', 'bin:/tokens')
    """
    if path is None or re.fullmatch(r"markov:.*|bpe:\d+", path):
        return path
    kind = re.match(r"(text:|bpe:\d+:|bin:(\d+:)?)?", path)
    assert kind is not None, "all of it is optional"
    return f"{kind[0]}{Path(path[kind.end() :]).resolve()}"
