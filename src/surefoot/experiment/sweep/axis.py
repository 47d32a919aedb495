"""What a sweep varies in place of the width, and the words for it; nothing here imports torch or numpy."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Axis:
    """A size of a run that is not the model's width.

    Args:
        name: in `config.json`, and of the sub-directories.
        values: the field of the option that lists the values.
        target: the field of the option for the value that the law is read off at.
        setting: the setting of `TrainConfig` that differs between the sweeps.
        text: format string for a value.
        ends: what the lowest and the highest value are called.
    """

    name: str
    values: str
    target: str
    setting: str
    text: str
    ends: tuple[str, str]

    @property
    def title(self) -> str:
        """What the size is called in tables and charts.

        >>> AXES["batch"].title
        'batch size'
        """
        return self.setting.replace("_", " ")

    def folder(self, value: int) -> str:
        """The name of a value's sub-directory.

        >>> AXES["horizon"].folder(100)
        'horizon_100'
        """
        return f"{self.name}_{value}"


_AXES = (
    Axis("horizon", "horizons", "to_steps", "steps", "{} steps", ("shortest", "longest")),
    Axis("batch", "batches", "to_batch", "batch_size", "batch size {}", ("smallest", "largest")),
    Axis("depth", "depths", "to_depth", "depth", "depth {}", ("smallest", "largest")),
)
AXES = {axis.name: axis for axis in _AXES}
"""The axes by name."""


def flag(field: str) -> str:
    """The option of the command line that fills a field.

    >>> flag("to_steps")
    '--to-steps'
    """
    return "--" + field.replace("_", "-")
