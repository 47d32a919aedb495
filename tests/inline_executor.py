"""An executor that runs in this process, one item after the other: no processes to start."""

from surefoot.experiment.sweep.executors import Raised


class Inline:
    """As `Executor`; the items are run when they are waited for.

    Attributes:
        closed: how often it was closed.
    """

    workers = 1

    def __init__(self) -> None:
        self.closed = 0

    def submit(self, function, items):
        """Each item's handle is the item."""
        self._function = function
        return list(items)

    def wait(self, handles):
        """What the function returned or raised, of the first."""
        try:
            return [(handles[0], self._function(handles[0]))]
        except Exception as error:
            return [(handles[0], Raised.of(error))]

    def close(self):
        """Nothing runs on."""
        self.closed += 1
