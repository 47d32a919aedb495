"""`surefoot report`: the table, the picture and the page of a run directory, made again; `watch`: the page, live."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot.cli import options

_EXAMPLES = """
surefoot report runs/transfer
surefoot report runs/transfer --json | jq .recipes[].drift_octaves
surefoot report runs/horizons                        the law of the best rate, and the rate to use
surefoot report runs/compare                         losses, paired differences, steps to a target
surefoot report runs/train                           norms by kind of layer, and the alarms
surefoot report runs/coordcheck
surefoot report runs/transfer --html                 writes runs/transfer/report.html, to be opened in a browser
surefoot report runs/a runs/b --html --out both.html side by side
"""
_WATCHING = """
surefoot watch runs/transfer                         then open the address that it prints
surefoot watch runs/a runs/b --open                  side by side; opens the browser
ssh -L 8573:localhost:8573 machine                   the page of another machine, at http://localhost:8573
"""


def add_to(commands: options.Commands) -> None:
    """Add both commands."""
    help = "make the table and the picture of a run directory again, finished or not"
    parser = options.command(commands, "report", run, help, _EXAMPLES)
    runs: Any = {"type": options.path, "nargs": "+", "metavar": "RUN"}
    parser.add_argument("directories", help="run directory of transfer, ladder, compare, train or coordcheck", **runs)
    help = "write an interactive page; several runs stand side by side"
    parser.add_argument("--html", action="store_true", help=help)
    help = "where the page is written (default: RUN/report.html, of several runs ./report.html)"
    parser.add_argument("--out", type=options.path, help=help)
    options.add_json(parser)
    help = "show run directories in the browser while runs go on; on this machine only, reads only"
    watching = options.command(commands, "watch", watch, help, _WATCHING)
    watching.add_argument("directories", help="run directory of transfer, train, ...", **runs)
    watching.add_argument("--port", type=options.natural, default=8573, help="0: any free one")
    watching.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and draw the picture, or write the page."""
    directories: list[Path] = arguments.directories
    if arguments.html:
        from surefoot.experiment.reports import report

        alone = directories[0] if len(directories) == 1 else Path()
        path = str(report.write(directories, arguments.out or alone / report.FILE))
        print(json.dumps(path) if arguments.json else path, file=arguments.stdout)
        return 0
    if len(directories) > 1 or arguments.out:
        raise ValueError("several runs, and --out, are for a page: add --html")
    show(directories[0], arguments)
    return 0


def watch(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    import errno
    import webbrowser

    from surefoot.experiment.reports.server import LAST_PORT, Server

    if arguments.port > LAST_PORT:
        raise ValueError(f"--port {arguments.port}: ports end at {LAST_PORT}; 0 is any that is free")
    try:
        server = Server(arguments.directories, arguments.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"port {arguments.port} is taken: give another --port, or --port 0 for any free one") from None
    arguments.resume = "the runs go on without their page"
    with server:
        print(f"surefoot: {server.url} shows the runs; Ctrl-C ends it", file=sys.stderr, flush=True)
        if arguments.open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0


@contextmanager
def reported(arguments: argparse.Namespace, data: str) -> Iterator[None]:
    """Context for a command's runs: say where they are written and what to do if they stop; show the results."""
    arguments.resume = "what was finished is kept: the same command goes on from there"
    import surefoot.experiment.reports.report  # noqa: F401, what it lacks is said before the runs

    print(f"surefoot: writing to {arguments.out}/, data: {data}", file=sys.stderr)
    yield
    show(arguments.out, arguments)
    write_page(arguments.out)


def show(directory: Path, arguments: argparse.Namespace) -> None:
    """Print a run's table, or its summary as JSON, and draw its picture, if there is anything to draw and where to."""
    from surefoot.experiment.reports import report

    kind = report.kind(directory)
    with report.legible(directory):
        summary = kind.load(directory)
        said = json.dumps(summary, indent=2, allow_nan=False) if arguments.json else kind.statement(summary)
    print(said, file=arguments.stdout, flush=True)
    if not os.access(directory, os.W_OK):
        no = "no picture: it is read-only; --html --out PATH writes a page elsewhere"
        print(f"surefoot: {directory}: {no}", file=sys.stderr)
    elif picture := report.draw(directory):
        print(f"\npicture: {picture}")


def write_page(directory: Path) -> None:
    """Write the page of a run that has ended, and say where."""
    from surefoot.experiment.reports import report

    print(f"surefoot: page: {report.write([directory], directory / report.FILE)}", file=sys.stderr)
