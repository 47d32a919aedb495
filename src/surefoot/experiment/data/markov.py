"""A synthetic language of known entropy, from integers only: the same on every machine and in every release.

It is a Markov chain over symbols. Each symbol has `SUCCESSORS` possible successors, chosen at random for that symbol,
with probabilities proportional to 1/rank (Zipf). The probabilities are the same for every symbol, so the entropy rate,
a lower bound of any model's expected loss, is the entropy of one row, whatever the chain's stationary distribution.
"""

import bisect
import itertools
import math

import numpy as np

PREFIX = "markov:"
SUCCESSORS = 16
LENGTH = 1 << 20
_WEIGHTS = tuple((1 << 16) // (rank + 1) for rank in range(SUCCESSORS))


def symbols_of(name: str) -> int:
    """Read the number of symbols N of `markov:N`.

    Args:
        name: the text.

    Returns:
        N.

    Raises:
        ValueError: not a whole number from `SUCCESSORS` to 256.

    >>> symbols_of("markov:64")
    64
    """
    text = name.removeprefix(PREFIX)
    if not text.isdecimal() or not SUCCESSORS <= int(text) <= 256:
        raise ValueError(f"{name}: the synthetic language is {PREFIX}N with N symbols, {SUCCESSORS} to 256")
    return int(text)


def entropy() -> float:
    """Compute the entropy rate.

    Returns:
        Nats per symbol.

    >>> round(entropy(), 4)
    2.3589
    """
    total = sum(_WEIGHTS)
    return -sum(w / total * math.log(w / total) for w in _WEIGHTS)


def text(symbols: int, length: int = LENGTH) -> bytes:
    """Draw `length` symbols of the chain; 0.3 s for the default length.

    Args:
        symbols: number of symbols N, at least `SUCCESSORS` and at most 256.
        length: number of symbols to draw.

    Returns:
        One byte per symbol, 0 to N - 1.

    >>> text(16, 8) == text(16, 16)[:8]
    True
    """
    order = np.random.Philox(key=[symbols, 0]).random_raw(symbols * symbols).reshape(symbols, symbols)
    table = order.argsort(axis=1, kind="stable")[:, :SUCCESSORS].tolist()
    bounds = list(itertools.accumulate(_WEIGHTS))
    out, state = bytearray(), 0
    for draw in (np.random.Philox(key=[symbols, 1]).random_raw(length) % np.uint64(bounds[-1])).tolist():
        state = table[state][bisect.bisect_right(bounds, draw)]
        out.append(state)
    return bytes(out)
