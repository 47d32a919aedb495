"""`surefoot report --html`, the page that every command leaves, and `surefoot watch`."""

import re
import signal
import socket
import threading
import urllib.request

import pytest

import run_directories as made
from surefoot.cli import main
from surefoot.experiment.reports.server import Server

from .commands import refused, start, training

ADDRESS = r"http://127\.0\.0\.1:\d+/"


def test_a_page_of_one_run_lies_beside_it(tmp_path, capsys):
    run = made.sweep(tmp_path / "run")
    assert main(["report", f"{run}", "--html"]) == 0
    assert capsys.readouterr().out.strip() == f"{run / 'report.html'}"
    assert "Rate to use" in (run / "report.html").read_text()


def test_several_runs_in_one_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [
        f"{kind(tmp_path / name)}"
        for name, kind in (("a", made.sweep), ("b", made.training), ("c", made.check), ("d", made.horizons))
    ]
    assert main(["report", *runs, "--html"]) == 0
    assert (tmp_path / "report.html").read_text().count("<article") == 4
    assert main(["report", *runs, "--html", "--out", "other.html"]) == 0
    assert (tmp_path / "other.html").exists()
    capsys.readouterr()
    assert "add --html" in refused(["report", *runs], capsys)


def test_what_cannot_be_written_leaves_the_page_that_was_there(tmp_path, file_size_limit, capsys):
    run = made.sweep(tmp_path / "run")
    (run / "report.html").write_text("before")
    file_size_limit(1000)
    assert refused(["report", f"{run}", "--html"], capsys, code=1)
    assert (run / "report.html").read_text() == "before"


def test_training_leaves_a_page_with_its_machine(tmp_path, text, capsys):
    assert main(training(tmp_path / "run", text)) == 0
    assert f"page: {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text()
    for part in ("finished: 6 steps", "Norms by kind of layer", "Machine and versions", "torch"):
        assert part in page


def test_watch_serves_until_it_is_interrupted(tmp_path, monkeypatch, capsys):
    serve, pages = Server.serve_forever, []

    def serve_until_ctrl_c(server):
        thread = threading.Thread(target=serve, args=(server, 0.01))
        thread.start()
        with urllib.request.urlopen(re.search(ADDRESS, capsys.readouterr().err)[0], timeout=60) as reply:
            pages.append(reply.read().decode())
        server.shutdown()
        thread.join()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Server, "serve_forever", serve_until_ctrl_c)
    assert main(["watch", f"{made.training(tmp_path / 'run', finished=False)}", "--port", "0"]) == 130
    assert "step 60 of 60" in pages[0]
    assert "the runs go on without their page" in capsys.readouterr().err


@pytest.mark.slow
def test_watch_in_a_process_of_its_own(tmp_path):
    run = made.training(tmp_path / "run", finished=False)
    with start(["watch", f"{run}", "--port", "0"]) as process:
        assert process.stderr is not None
        found = re.search(ADDRESS, process.stderr.readline())
        assert found
        with urllib.request.urlopen(found[0], timeout=60) as reply:
            assert "step 60 of 60" in reply.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "the runs go on without their page" in process.stderr.read()


def test_watch_says_what_is_wrong(tmp_path, capsys):
    assert "does not exist: give the run directory" in refused(["watch", f"{tmp_path / 'none'}"], capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{taken.getsockname()[1]}"
        assert f"port {port} is taken" in refused(["watch", f"{tmp_path}", "--port", port], capsys)
    assert "are required: RUN" in refused(["watch"], capsys)
