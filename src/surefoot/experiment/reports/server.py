"""The live view: the page of run directories, on this machine's loopback address, made again as the runs go on.

It only reads, answers two addresses (the page and its body), opens no file that a request names, and refuses requests
that come from another site: a page elsewhere could otherwise read the runs through the visitor's browser.
"""

import functools
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from surefoot.experiment.errors import Locate, with_remedy
from surefoot.experiment.reports.page import Page, body, html, version
from surefoot.experiment.reports.report import name_of, page

ADDRESS = "127.0.0.1"
PORT, LAST_PORT = 8573, 65535


class Server(ThreadingHTTPServer):
    """Serves the live page of run directories until it is shut down. Only this machine can reach it.

    Args:
        directories: of runs; each must exist.
        port: 0: any that is free.

    Attributes:
        url: of the page.

    Raises:
        FileNotFoundError: a directory does not exist.
        OSError: the port is taken.
    """

    def __init__(self, directories: Sequence[Path], port: int = PORT) -> None:
        for directory in directories:
            if not directory.is_dir():
                begun = f"{directory} does not exist: give the run directory of a started command"
                raise with_remedy(FileNotFoundError(begun), Locate(directory))
        super().__init__((ADDRESS, port), _Handler)
        self.url: str = f"http://{ADDRESS}:{self.server_port}/"
        self._directories = tuple(directories)

    def pages(self) -> list[Page]:
        """Describe the directories; those whose files have not changed are not read again."""
        return [_page(directory, _stamp(directory)) for directory in self._directories]


def _stamp(directory: Path) -> tuple[tuple[Path, int, int], ...]:
    """A key that changes with the files of a run."""
    files = sorted([*directory.glob("*.json"), *directory.glob("*.jsonl"), *directory.glob("*/results.jsonl")])
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path in files for stat in (path.stat(),))


@functools.lru_cache(maxsize=32)
def _page(directory: Path, stamp: tuple[object, ...]) -> Page:
    return page(directory) if stamp else Page(name_of(directory), "nothing has begun here yet", "", [], [], [], {})


class _Handler(BaseHTTPRequestHandler):
    """Answers `/`, the page, and `/body?version=...`, what has changed since."""

    server: Server
    server_version, sys_version = "surefoot", ""

    def handle(self) -> None:
        """Answer; a reader who has closed the page meanwhile is no error."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a request."""
        own = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        if self.headers["Host"] not in own or self.headers["Origin"] not in (None, *(f"http://{name}" for name in own)):
            self._send(HTTPStatus.FORBIDDEN, "surefoot watch answers its own page only")
            return
        address = urlsplit(self.path)
        try:
            if address.path == "/":
                self._send(HTTPStatus.OK, html(self.server.pages(), live=True), "text/html")
            elif address.path == "/body":
                self._changed(parse_qs(address.query).get("version", [""])[0])
            else:
                self._send(HTTPStatus.NOT_FOUND, "there is only /")
        except (ValueError, OSError) as error:  # a file that is damaged, or that was deleted
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _changed(self, known: str) -> None:
        text = body(self.server.pages())
        if version(text) == known:
            self._send(HTTPStatus.NOT_MODIFIED, "")
        else:
            self._send(HTTPStatus.OK, text, "text/html", version(text))

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain", version: str = "") -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Version": version,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: two lines a second would hide what the run says."""
