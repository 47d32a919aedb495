"""What goes wrong with files, data and runs, by kind: the command line gives each its own exit code."""


class DirectoryInUse(RuntimeError):
    """Another process is writing to the run directory."""


class SweepError(RuntimeError):
    """A run of a sweep raised; results of finished runs are written, and the same sweep goes on from there."""


class Damaged(ValueError):
    """A checkpoint on the disk is not what was written."""


class DataError(ValueError):
    """Data that are missing, damaged or of another kind than was asked for; the message names them and the remedy."""
