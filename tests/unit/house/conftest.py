"""The tools that build the site are importable here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tools" / "site"))
