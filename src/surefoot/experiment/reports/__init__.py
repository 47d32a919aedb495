"""Tables and pictures of finished runs; no other module of the package imports Altair, which copies docstrings."""

import sys

if sys.flags.optimize > 1:
    raise ValueError("tables and pages need docstrings, which python -OO leaves out: run the same command without it")
