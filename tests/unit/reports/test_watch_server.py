"""The live view: its own page on the loopback address, nothing else, and nothing that a request names."""

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import run_directories as made
from surefoot.experiment.reports.server import Server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("secret")
    not_utf8 = "\udcff" if sys.platform == "linux" else ""  # a byte of a path, where one may be
    return made.sweep(tmp_path / f"odd name & <b>\N{SNOWMAN}{not_utf8}", finished=False)


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    with Server([directory], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


def test_only_this_machine_can_reach_it(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_page(server):
    status, text, headers = ask(server)
    assert status == 200
    assert "odd name &amp; &lt;b&gt;\N{SNOWMAN}" in text
    assert 'data-live="2.0"' in text
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_only_what_has_changed_is_sent_again(server, directory):
    status, text, headers = ask(server, "/body?version=")
    assert status == 200
    assert "under way: 108 runs" in text
    assert ask(server, f"/body?version={headers['X-Version']}")[:2] == (304, "")
    with (directory / "results.jsonl").open("a") as file:
        file.write(json.dumps(made.sweep_run("level", 64, -2.5, 0, -2.9)) + '\n{"half a li')
    status, text, _ = ask(server, f"/body?version={headers['X-Version']}")
    assert status == 200
    assert "under way: 109 runs" in text


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/results.jsonl", "//etc/passwd", "/config.json",
     "/body/../../secret.txt", "/\\..\\secret.txt", "/?../secret.txt%00", "/page.js"],
)  # fmt: skip
def test_no_request_opens_a_file(server, path):
    status, text, _ = ask(server, path)
    assert status == (200 if path.startswith("/?") else 404)
    assert status == 200 or text == "there is only /"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Host": "example.org"},  # a name of somebody else's that leads to this address
        {"Host": "127.0.0.1:1"},
        {"Host": ""},
    ],
)
def test_pages_from_elsewhere_get_nothing(server, headers):
    status, text, _ = ask(server, "/body?version=", **headers)
    assert (status, text) == (403, "surefoot watch answers its own page only")


def test_its_own_page_is_answered_by_either_name(server):
    for name in ("localhost", "127.0.0.1"):
        own = f"{name}:{server.server_port}"
        assert ask(server, "/body?version=", Host=own, Origin=f"http://{own}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_only_reads(server, method):
    assert ask(server, method=method)[0] == 501


def test_a_file_that_is_damaged_is_named_and_the_server_goes_on(server, directory):
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text("{")
    status, text, _ = ask(server)
    assert status == 500
    assert "config.json is not valid JSON" in text
    (directory / "config.json").write_text(config)
    assert ask(server)[0] == 200


def test_a_directory_in_which_nothing_has_begun(tmp_path):
    with Server([tmp_path], port=0) as server:
        assert [page.kind for page in server.pages()] == ["nothing has begun here yet"]
        made.training(tmp_path)
        assert [page.state for page in server.pages()] == ["finished: 60 steps"]


def test_a_directory_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: give the run directory"):
        Server([tmp_path / "none"], port=0)


def test_a_run_of_a_comparison_is_noticed(tmp_path):
    directory = made.comparison(tmp_path / "run")
    results = directory / "final" / "results.jsonl"
    final = results.read_text().splitlines(keepends=True)
    results.write_text("".join(final[:-1]))
    with Server([directory], port=0) as server:
        assert server.pages()[0].state == "under way"
        results.write_text("".join(final))
        assert server.pages()[0].state == "finished"
