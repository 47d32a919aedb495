"""Run every example that draws a picture, and write docs/gallery.md: what to see, the code, its output, the picture.

    python tools/gallery.py

A new example is a script in examples/ with a docstring (one line, then what the reader should see) and
`picture = Picture(__doc__)`. `tests/e2e/test_examples.py` runs it again and compares the output.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

from surefoot.experiment.files import write_atomic
from surefoot.experiment.sweep.summary import environment

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "gallery"

HEAD = """# Gallery

Small runs that show what Surefoot is for. Each is a script of under 60 lines that runs in seconds on a CPU, after `make
setup` (for `transformers`: `make setup-all`). `--picture FILE.png` draws the picture; the lines with `picture` do
nothing else. Two more: `examples/own_model.py`, in the README, and `examples/own_width.py` for `surefoot transfer`.

```console
$ source .venv/bin/activate
$ python examples/cnn.py
```

The scripts made these outputs and pictures ({cpu}, one thread, torch {torch}, {date}; seconds are CPU
time); `python tools/gallery.py` writes this page. `tests/e2e/test_examples.py` runs every script again and
compares texts and whole numbers exactly, percentages and decimal numbers to one unit of the last digit and 5 % of
the number, since processors round differently. Each runs one seed: it illustrates; [studies](transfer.md) measure.

{links}
"""

SECTION = """
## {name}

{text}

```python
{code}
```

It prints, in {seconds:.0f} s:

```text
{output}
```

![{title}](images/gallery/{stem}.png)
"""


def examples() -> list[Path]:
    """The scripts of examples/ that draw a picture."""
    return [path for path in sorted((ROOT / "examples").glob("*.py")) if "Picture(__doc__)" in path.read_text("utf-8")]


def section(path: Path) -> str:
    """Run an example, draw its picture, and return its part of the page."""
    source = path.read_text("utf-8")
    text = ast.get_docstring(ast.parse(source))
    assert text is not None, path
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, str(path), "--picture", str(PICTURES / f"{path.stem}.png")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # models this small are no faster on two
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=one_thread).stdout.strip()
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    print(f"{path.name}: {seconds:.0f} s", flush=True)
    title, code = text.splitlines()[0], source.split('"""\n', 1)[1].strip()
    return SECTION.format(
        name=path.name, stem=path.stem, title=title, text=text, code=code, output=output, seconds=seconds
    )


def main() -> None:
    """Write the page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    titles = {path: path.read_text("utf-8").splitlines()[0].strip('"') for path in examples()}
    links = "\n".join(f"- [{path.name}](#{path.stem}py): {title}" for path, title in titles.items())
    sections = [section(path) for path in titles]
    facts = environment()
    head = HEAD.format(cpu=facts["cpu"], torch=facts["torch"], date=facts["date"][:10], links=links)
    write_atomic(ROOT / "docs" / "gallery.md", head + "".join(sections))


if __name__ == "__main__":
    main()
