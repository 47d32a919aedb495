"""The command line's first words: what it can do, and after an error the line to type next."""

import shlex
import subprocess
import sys

import pytest

from surefoot.cli import _GUIDE, _parser, main
from surefoot.cli.exit_codes import next_line
from surefoot.experiment.files import locked


def said(arguments, capsys, code=2):
    """The last line of a command that ends with this code."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage:" not in err
    return err.splitlines()[-1]


def test_without_a_command_the_three_things_are_shown_and_scripts_notice(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith(_GUIDE)


def test_every_line_of_the_guide_can_be_typed():
    lines = [line.strip() for line in _GUIDE.splitlines() if line.startswith("    ")]
    assert [_parser().parse_args(shlex.split(line)[1:]).command for line in lines] == ["transfer", "train", "compare"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("trian --width 64", "train --width 64"),
        ("zzz", "--help"),
        ("train --wdith 64", "train --width 64"),
        ("train --wdith=64 --out 'a b'", "train --width 64 --out 'a b'"),
        ("train --qqqq", "train --help"),
        ("train gpt", "train --help"),
        ("transfer --recipes steady muom", "transfer --recipes steady muon"),
        ("transfer --recipes steady stedy", "transfer --help"),
        ("train --recipe moga_rwo:1.5", "train --recipe moga_row:1.5"),
        ("compare --published mun@0.02", "compare --published muon@0.02"),
        ("transfer --executor rya", "transfer --executor ray"),
        ("train --stabiliser postclip:2", "train --stabiliser post_clip:2"),
        ("train --lr -1", "train --help"),
        ("audit --model no_such_model", "audit --help"),
        ("convert --lr 1 --d-in 3", "convert --help"),
        ("report", "report --help"),
        ("--verison", "--version"),
    ],
)
def test_wrong_usage_ends_with_the_line_to_type(typed, line, capsys):
    assert said(shlex.split(typed), capsys) == f"try: surefoot {line}"


def test_a_package_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert said(["transfer", "--executor", "ray"], capsys) == "try: pip install 'surefoot[ray]'"


def test_help_and_guide_say_which_extras_are_missing(monkeypatch, capsys):
    monkeypatch.setattr("surefoot.cli.find_spec", lambda name: None if name in ("scipy", "altair") else name)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert main([]) == 2
    told = "not installed: scipy: pip install 'surefoot[cli]'\nnot installed: altair: pip install 'surefoot[plots]'\n"
    out, err = capsys.readouterr()
    assert out.endswith(told)
    assert err.endswith(told)


def test_a_number_is_not_taken_for_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m1").touch()
    (tmp_path / "corpus.txt").write_text("a")
    assert said(["train", "--depth", "1", "--stabiliser", "post_clip:1:1:1"], capsys) == "try: surefoot train --help"
    assert said(["train", "--depth", "1", "--data", "corpus.txt"], capsys, code=4) == "try: surefoot train --help"
    (tmp_path / "train.bin").touch()
    assert said(["train", "--data", "bin:train.bin"], capsys, code=4) == "try: surefoot train --help"


def test_data_and_directories_that_are_nearly_there(tmp_path, capsys):
    (tmp_path / "corpus.txt").write_text("a")
    arguments = ["train", "--out", f"{tmp_path}/run", "--data"]
    for prefix in ("", "text:", "bpe:300:"):
        right = shlex.join([*arguments, f"{prefix}{tmp_path}/corpus.txt"])
        assert said([*arguments, f"{prefix}{tmp_path}/corpus.text"], capsys, code=4) == f"try: surefoot {right}"
    (tmp_path / "runs").mkdir()
    assert said(["report", f"{tmp_path}/rums"], capsys) == f"try: surefoot report {tmp_path}/runs"
    assert said(["train", "--data", f"{tmp_path}/zzzzzzzz"], capsys, code=4) == "try: surefoot train --help"


@pytest.fixture
def run(tmp_path, undrawn):
    """A short training run, by its arguments."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    size = "--width 16 --depth 1 --batch-size 2 --context 16 --steps 2 --threads 1"
    return ["train", "--data", f"{tmp_path}/text.txt", *size.split(), "--out", f"{tmp_path}/run"]


def test_a_directory_of_another_run_or_in_use(run, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    elsewhere = shlex.join([*run[:-1], f"{tmp_path}/run-3"])
    with locked(tmp_path / "run"):
        assert said(run, capsys, code=6) == f"try: surefoot {elsewhere}"
    (tmp_path / "run" / "config.json").write_text('{"lr": 3}')
    assert said(run, capsys) == f"try: surefoot {elsewhere}"
    (tmp_path / "run" / "config.json").unlink()
    assert main([*run, "--lr", "0.01"]) == 0
    capsys.readouterr()
    line = said([*run, "--lr", "0.01", "--resume", "never"], capsys)
    assert line == f"try: surefoot {elsewhere} --lr 0.01 --resume never"
    line = said([*run, "--lr", "0.01", "--resume", f"{tmp_path}/none.pt"], capsys, code=5)
    assert line.endswith("--resume auto")
    elsewhere = [*run[:-1], f"{tmp_path}/new"]
    line = said([*elsewhere, "--lr", "0.01", "--resume", f"{tmp_path}/none.pt"], capsys, code=5)
    assert line == "try: surefoot train --help", "nothing is there to go on from"
    assert main([*elsewhere, "--lr", "0.02"]) == 0, "the directory belongs to no configuration that was refused"
    (tmp_path / "file").touch()
    capsys.readouterr()
    fresh = shlex.join([*run[:-1], f"{tmp_path}/file-2"])
    assert said([*run[:-1], f"{tmp_path}/file"], capsys) == f"try: surefoot {fresh}"


def test_a_folder_of_tokens_in_use(run, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    with locked(tmp_path / "data"):
        line = said(["tokens", run[2], f"{tmp_path}/data/", "--vocab", "300"], capsys, code=6)
    assert line == f"try: surefoot tokens {run[2]} {tmp_path}/data-2 --vocab 300"


def test_under_torchrun_the_line_starts_with_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert said(["train", "--wdith", "8"], capsys) == "try: torchrun ... -m surefoot train --width 8"


def test_a_run_that_diverges_is_tried_at_a_lower_rate(run, tmp_path, capsys):
    assert main([*run, "--method", "adamw", "--lr", "1e36", "--steps", "20"]) == 3
    *_, line = capsys.readouterr().err.splitlines()
    right = [*run[:-1], f"{tmp_path}/run-2", "--method", "adamw", "--lr", "2.5e+35", "--steps", "20"]
    assert line == f"try: surefoot {shlex.join(right)}"
    assert main([*shlex.split(line)[2:-3], "1e-3", "--steps", "2"]) == 0


def test_one_that_has_begun_at_a_checkpoint_is_tried_from_the_start(run, tmp_path):
    words = [*run, "--lr", "0.5", "--resume", f"{tmp_path}/step-1.pt"]
    line = next_line(words, None, _parser().parse_args(words))
    assert shlex.split(line)[1:] == [*run[:-1], f"{tmp_path}/run-2", "--lr", "0.125", "--resume", "never"]


def test_a_package_of_the_command_line_that_is_missing():
    script = "import sys; sys.modules['numpy'] = None; from surefoot.cli import main; sys.exit(main(['train']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "try: pip install 'surefoot[cli,plots]'"
