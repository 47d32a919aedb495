"""Break the library on purpose, one way at a time, and see the tests fail: `python tests/mutations.py [name ...]`.

Each mutation of `mutation_table.py` replaces one piece of text in a temporary copy of `src` (an assertion fails where
the text is gone) and runs the tests that must notice. Exit code 1 names the mutations that survived. It takes about
twenty minutes; the test suite itself does not run it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutation_table import Mutation
from mutation_table_more import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]


def passes(source: Path, tests: list[str]) -> bool:
    """Whether the tests pass on this copy of the package; the first failure ends the run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import surefoot; print(surefoot.__file__)"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(source)), f"the tests would run on {where.strip()}, not on {source}"
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):  # 2 and up: no test ran, which proves nothing
        raise RuntimeError(f"pytest could not run {tests}:\n{result.stdout}{result.stderr}")
    return result.returncode == 0


def survives(mutation: Mutation) -> bool:
    """Whether the tests still pass with the mutation in place."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "surefoot" / mutation.file
        text = file.read_text()
        assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.file} has {mutation.old!r} not exactly once"
        file.write_text(text.replace(mutation.old, mutation.new))
        return passes(source, [mutation.tests])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="part of a mutation's name; default: all of them")
    names = parser.parse_args().names
    chosen = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    if not chosen:
        parser.error("no such mutation; choose among: " + ", ".join(m.name for m in MUTATIONS))
    assert passes(ROOT / "src", sorted({m.tests for m in chosen})), "the tests fail before anything is broken"
    survivors = []
    for mutation in chosen:
        alive = survives(mutation)
        print(f"{'SURVIVED' if alive else 'caught':9} {mutation.name}", flush=True)
        survivors += [mutation.name] * alive
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
