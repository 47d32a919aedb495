"""The exit codes of the command line."""

import signal

FAILED, USAGE, DIVERGED, DATA, CHECKPOINT, BUSY = 1, 2, 3, 4, 5, 6
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

TABLE = """
exit codes:
  0    done
  1    an error of the program or the machine (a full disk, memory), or a check that does not pass (coordcheck)
  2    wrong usage: options, a configuration that cannot be run
  3    the run has diverged
  4    data: missing, damaged, too short, of another kind
  5    checkpoint: every one is damaged, or the one of --resume is damaged or missing
  6    another process writes to the directory
  130  interrupted (Ctrl-C); 143 terminated; the same command goes on from there
"""


def code_of(error: Exception) -> int:
    """The exit code of an error.

    >>> code_of(ValueError("no such option")), code_of(OSError("full disk"))
    (2, 1)
    """
    from surefoot.experiment.errors import Damaged, DataError, DirectoryInUse

    codes = {DataError: DATA, Damaged: CHECKPOINT, DirectoryInUse: BUSY, ValueError: USAGE}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)
