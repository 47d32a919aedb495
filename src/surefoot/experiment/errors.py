"""What goes wrong with files and data, by kind: the command line gives each its own exit code."""


class DirectoryInUse(RuntimeError):
    """Another process is writing to the run directory."""


class Damaged(ValueError):
    """A checkpoint on the disk is not what was written."""


class DataError(ValueError):
    """Data that are missing, damaged or of another kind than was asked for; the message names them and the remedy."""
