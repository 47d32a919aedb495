"""Which windows of a split a step reads: every document once an epoch, or windows at random."""

import math
from itertools import count

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

LANES = 4096
"""At least so many lanes are read side by side, even if documents are few; docs/data.md has measured fewer."""
FEW = 16
"""Below this many documents there are so few orders of them that the first lane is drawn at random, too."""


class Epochs:
    """Windows of documents: each epoch puts the documents in a random order, one after another, and reads all of it.

    The sequence is cut into as many equal lanes as there are documents, and `LANES` at least; one window of each lane
    is read in turn. So a document is read from start to end, but its windows lie as far apart as they can: the next one
    follows when a window of every other document was read, and until then each step reads documents that are new to the
    model. A window is a pure function of its number: a run has no position in the data to save.
    The last tokens of an epoch, fewer than a window, are left out.

    Args:
        ends: position after the last token of each document, ascending: documents lie one after another.
        context: tokens that a window predicts.
        lanes: how many are read side by side; default: one for each document, and `LANES` at least.

    Attributes:
        windows: windows of an epoch.
    """

    def __init__(self, ends: Positions, context: int, lanes: int | None = None) -> None:
        self._ends, self._lengths = ends, np.diff(ends, prepend=0)
        self._context = context
        self.windows: int = (int(ends[-1]) - 1) // context
        self._lanes = min(lanes or max(LANES, len(ends)), self.windows)
        # Lanes beside each other may lie in one long document: a golden-section stride leads far away from all before.
        self._stride = next(s for s in count(round(0.618 * self._lanes)) if math.gcd(s, self._lanes) == 1)
        self._order: tuple[tuple[int, int] | None, Positions, Positions, int] = (None, ends, ends, 0)

    def spans(self, seed: int, number: int) -> list[tuple[int, int]]:
        """Where the tokens of a window lie.

        Args:
            seed: of the orders of documents.
            number: of the window, 0 for the first of the first epoch.

        Returns:
            `(start, length)` of parts of documents, which have `context + 1` tokens together: the last one is also the
            first of the lane's next window.

        >>> epochs = Epochs(np.array([3, 9]), context=2)
        >>> [epochs.spans(0, number) for number in range(epochs.windows)]
        [[(2, 1), (3, 2)], [(0, 3)], [(6, 3)], [(4, 3)]]
        """
        epoch, number = divmod(number, self.windows)
        order, ends, first = self._epoch(seed, epoch)
        shortest, longer = divmod(self.windows, self._lanes)
        place, lane = divmod(number, self._lanes)
        lane = (lane * self._stride + first) % self._lanes if place < shortest else lane
        position, rest = (lane * shortest + min(lane, longer) + place) * self._context, self._context + 1
        index, spans = int(np.searchsorted(ends, position, "right")), []
        while rest:
            left = int(ends[index]) - position
            taken = min(left, rest)
            spans.append((int(self._ends[order[index]]) - left, taken))
            index, position, rest = index + 1, position + taken, rest - taken
        return spans

    def _epoch(self, seed: int, epoch: int) -> tuple[Positions, Positions, int]:
        """The documents of an epoch in their order, the position after each in it, and the lane that is read first."""
        if self._order[0] != (seed, epoch):
            count = len(self._lengths)
            draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count + 1)
            order, first = draws[:-1].argsort(kind="stable"), int(draws[-1]) % self._lanes * (count < FEW)
            self._order = (seed, epoch), order, self._lengths[order].cumsum(), first
        return self._order[1:]


def at_random(seed: int, split: int, step: int, batch_size: int, rows: slice, positions: int) -> Positions:
    """Starts of some rows of a step's batch below `positions`, by the Philox counter generator.

    Its key is (seed, split), its counter the step. Row `i` does not depend on the batch size.
    """
    key = np.array([seed, split], dtype=np.uint64)
    counter = np.array([0, 0, 0, step], dtype=np.uint64)  # the low words count the draws of one step
    # Raw draws: unlike numpy's Generator methods, their stream never changes between releases.
    draws = np.random.Philox(key=key, counter=counter).random_raw(batch_size)[rows]
    return (draws % np.uint64(positions)).astype(np.int64)
