"""The mutations of `tests/mutations.py` still find the text that they replace."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "mutations.py"


def test_every_mutation_has_its_text():
    spec = importlib.util.spec_from_file_location("mutations", SCRIPT)
    mutations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutations)
    package = SCRIPT.parents[1] / "src" / "surefoot"
    gone = [each.name for each in mutations.MUTATIONS if each.old not in (package / each.file).read_text()]
    assert mutations.MUTATIONS
    assert not gone
