"""`python -m surefoot`, the same as the command `surefoot`; `torchrun -m surefoot` starts it on several processes."""

import sys

from surefoot.cli import main

sys.exit(main())
