"""Reports of odd run directories: nothing finished, hopeless, noisy, damaged, somebody else's, the present one."""

import json
import socket
import struct
import threading
from pathlib import Path

import pytest

import run_directories as made
from surefoot.cli import main
from surefoot.experiment import configs
from surefoot.experiment.reports.page import html
from surefoot.experiment.reports.report import KINDS, draw, page, write
from surefoot.experiment.reports.server import Server
from surefoot.experiment.sweep.sweep import load


def rewritten(directory: Path, losses) -> Path:
    """A sweep whose losses are others: of recipe, rate and seed; it diverged where there is none."""
    path = directory / "results.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        loss = losses(record["recipe"], record["log2_lr"], record["seed"])
        record |= {"val_loss": loss, "train_loss": loss, "diverged": loss is None}
    made.lines(path, records)
    (directory / "summary.json").unlink(missing_ok=True)
    return directory


def flat(recipe, log2_lr, seed):
    """A mean that is nearly level under seeds that are not: the interval of its vertex is wider than floats are."""
    return 2.0 + 1e-9 * (log2_lr + 2.9) ** 2 + 0.01 * (seed - 1) * log2_lr


def test_a_sweep_that_only_diverged_has_a_table_and_no_picture(tmp_path, capsys):
    directory = rewritten(made.sweep(tmp_path / "run"), lambda *_: None)
    assert draw(directory) is None
    assert main(["report", f"{directory}"]) == 0
    said = capsys.readouterr().out
    assert "| falling | no result" in said
    assert "picture" not in said


def test_a_sweep_without_a_finished_run_has_no_seeds_and_no_edge(tmp_path, capsys):
    directory = made.sweep(tmp_path / "run", finished=False)
    (directory / "results.jsonl").write_text("")
    assert main(["report", f"{directory}"]) == 0
    said = capsys.readouterr().out
    assert "n = 0 seeds: no intervals" in said
    assert "edge, divergence" not in said


def test_seeds_are_those_of_the_recipe_that_has_most(tmp_path, capsys):
    directory = made.sweep(tmp_path / "run", finished=False)
    lines = (directory / "results.jsonl").read_text().splitlines(keepends=True)
    (directory / "results.jsonl").write_text("".join(line for line in lines if "level" in line))
    assert main(["report", f"{directory}"]) == 0
    said = capsys.readouterr().out
    assert "n = 3 seeds, \N{PLUS-MINUS SIGN}" in said
    assert "\nUNFINISHED: a best rate is of a sweep that has finished" in said


def test_a_sweep_that_has_lost_lines_since_its_summary_has_not_finished(tmp_path, capsys):
    directory, law = made.sweep(tmp_path / "run"), made.horizons(tmp_path / "law")
    for there in (directory, law / "horizon_100"):
        assert load(there)[0]["finished"]
        lines = (there / "results.jsonl").read_text().splitlines(keepends=True)
        (there / "results.jsonl").write_text("".join(lines[:-1]))
    assert main(["report", f"{directory}"]) == main(["report", f"{law}"]) == 0
    assert "UNFINISHED" in (said := capsys.readouterr().out)
    assert "no law (100 steps: unfinished)" in said


@pytest.mark.slow  # a picture of 600 decades
def test_an_interval_beyond_the_range_of_a_float(tmp_path, capsys):
    directory = rewritten(made.sweep(tmp_path / "run", recipes=("level",), widths=(32, 64)), flat)
    assert main(["report", f"{directory}"]) == 0
    assert "level: lr = 0.134 at width 64 (9.33e-302 to 1.07e+301)" in capsys.readouterr().out
    assert page(directory).facts[1].value == "9.33e-302 to 1.07e+301"
    assert html([page(directory)])


def test_the_same_of_a_law(tmp_path, capsys):
    directory = made.horizons(tmp_path / "run")
    for there in directory.glob("horizon_*"):
        made.write(rewritten(there, lambda recipe, x, seed: flat(recipe, x, seed)) / "summary.json", load(there)[0])
    assert main(["report", f"{directory}"]) == 0
    assert "level: lr = 0.134 at 1600 steps (9.33e-302 to 1.07e+301)" in capsys.readouterr().out
    assert html([page(directory)])


def test_horizons_of_which_one_seed_always_diverged_have_a_page(tmp_path):
    directory = made.horizons(tmp_path / "run")
    for there in directory.glob("horizon_*"):
        made.write(rewritten(there, lambda recipe, x, seed: 2.0 if seed else None) / "summary.json", {})
    assert page(directory).charts == []
    assert page(directory).facts[0].value == "none yet"


def test_losses_near_0_have_a_logarithmic_axis(tmp_path):
    directory = made.sweep(tmp_path / "run")
    scales = page(directory).charts[0].axes["y"]
    assert scales["log"]["scale"]["domain"] == scales["linear"]["scale"]["domain"]
    rewritten(directory, lambda recipe, x, seed: 0.001 + 0.2 * (x + 2.9) ** 2)
    scales = page(directory).charts[0].axes["y"]
    assert scales["linear"]["scale"]["domain"][0] < 0
    assert "domain" not in scales["log"]["scale"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", r"config\.json is not valid JSON \(an object is needed, not \[1\]\)"),
        ("null", r"config\.json is not valid JSON \(an object is needed, not null\)"),
        ('{"model_type": "gpt2"}', r"config\.json is not from transfer, ladder, compare, train or coordcheck"),
    ],
)
def test_a_configuration_that_is_none_of_ours(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        page(tmp_path)


@pytest.mark.parametrize("kind", [made.sweep, made.horizons])
def test_a_damaged_summary_is_named(tmp_path, kind):
    directory = kind(tmp_path / "run")
    (directory / "summary.json").write_text("")
    with pytest.raises(ValueError, match=r"summary\.json is not valid JSON"):
        page(directory)


@pytest.mark.parametrize(
    ("kind", "file", "key", "said"),
    [
        (made.sweep, "results.jsonl", "val_loss", "results.jsonl, line 1"),
        (made.comparison, "summary.json", "baseline", "lack 'baseline'"),
        (made.comparison, "summary.json", "config", "lack 'config'"),
        (made.comparison, "summary.json", ..., "summary.json does not exist: the command of its run"),
        (made.training, "layers.json", None, "hold a value that cannot be"),
    ],
)
def test_what_a_file_lacks_is_said(tmp_path, capsys, kind, file, key, said):
    """A key; of `...` the file itself; of None the types of all its values."""
    directory = kind(tmp_path / "run")
    first, *others = (directory / file).read_text().splitlines()
    record = json.loads(first)
    if key is ...:
        (directory / file).unlink()
    else:
        kept = {k: 1 if key is None else v for k, v in record.items() if k != key}
        (directory / file).write_text("\n".join([json.dumps(kept), *others]))
    assert main(["report", f"{directory}"]) == (1 if key is ... else 2)
    assert said in capsys.readouterr().err
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        page(directory)


def test_a_layer_whose_norm_is_zero_at_every_line_is_drawn(tmp_path):
    directory = made.training(tmp_path / "run")
    log = [json.loads(line) for line in (directory / "norms.jsonl").read_text().splitlines()]
    for line in log:
        line["norms"]["table.weight"] = [0.0, 0.0]
    made.lines(directory / "norms.jsonl", log)
    assert "table.weight" in html([page(directory)])


def test_the_present_directory_has_its_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(made.sweep(tmp_path / "my run"))
    assert page(Path()).name == "my run"
    assert "<title>my run: Surefoot</title>" in write([Path()], Path("report.html")).read_text()


def test_a_port_that_there_is_not(tmp_path, capsys):
    assert main(["watch", f"{tmp_path}", "--port", "70000"]) == 2
    assert "--port 70000: ports end at 65535" in capsys.readouterr().err


def test_a_reader_who_has_left_is_no_error(tmp_path, capsys):
    with Server([made.sweep(tmp_path / "run")], port=0) as server:
        server.daemon_threads = False  # so that closing waits for the answers
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for request in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_port, b"GET /"):
            with socket.create_connection(("127.0.0.1", server.server_port)) as reader:
                reader.sendall(request)
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, as a tab does
        with socket.create_connection(("127.0.0.1", server.server_port)) as reader:  # taken after those before it
            reader.sendall(b"GET /no HTTP/1.1\r\n\r\n")
            assert reader.recv(1000)
        server.shutdown()
        thread.join()
    assert "Traceback" not in capsys.readouterr().err


def test_every_kind_of_run_can_be_read_and_shown():
    assert tuple(KINDS) == configs.KINDS
