"""Sdist and wheel, built and installed into an environment of their own on every Python of this machine.

torch is lent by the environment of the tests to its own Python, so that nothing is downloaded: the library runs there,
without torch the command line does on all.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*command, code=0, **environment):
    """What a command that ends with this code prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env={**BARE, **environment}, cwd="/", check=False, **pipes)
    assert done.returncode == code, done.stdout
    return done.stdout


def pythons():
    """Path of a Python of each version from 3.11 on: those of the path and of pyenv, and the one of the tests."""
    found = {sys.version_info[:2]: sys.executable}
    folders = [*os.environ["PATH"].split(os.pathsep), *Path("~/.pyenv/versions").expanduser().glob("*/bin")]
    for folder in map(Path, folders):
        for path in folder.glob("python3.*"):
            version = re.fullmatch(r"python3\.(\d+)", path.name)
            if version and int(version[1]) >= 11 and "shims" not in folder.parts:
                found.setdefault((3, int(version[1])), str(path))
    return [pytest.param(path, id=f"{major}.{minor}") for (major, minor), path in sorted(found.items())]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, and the folder it unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", f"{folder}"], cwd=ROOT, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return archive, folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", f"{folder}"]
    subprocess.run(command, cwd=sdist[1], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """A folder with torch and what it requires, of the environment of the tests, and nothing else."""
    folder, names, done = tmp_path_factory.mktemp("lent"), ["torch"], set()
    while names:
        if (name := names.pop()) in done:
            continue
        done.add(name)
        needs = [Requirement(text) for text in requires(name) or []]
        names += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in distribution(name).files} - {"..", "__pycache__"}:
            if not (folder / top).exists():  # packages may share a folder
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return folder


def installed(python, wheel, folder):
    """Bin folder of a fresh environment that holds the wheel alone."""
    run(python, "-m", "venv", f"{folder}")
    run(f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", f"{wheel}")
    return folder / "bin"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files is git's")
def test_the_sdist_holds_what_the_tests_need_and_no_traces_of_runs(sdist):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    there = {path.relative_to(sdist[1]).as_posix() for path in sdist[1].rglob("*") if path.is_file()}
    assert there - {"PKG-INFO"} >= {name for name in tracked if name}
    parts = {part for name in there for part in Path(name).parts}
    assert not parts & {"runs", "dist", "__pycache__", ".venv", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def test_the_wheel_holds_the_package_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "src" / "surefoot").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sources = {path.relative_to(ROOT / "src").as_posix() for path in files}
    ours = {name for name in names if not re.match(r"surefoot-[\d.]+\.dist-info/", name)}
    assert ours == sources >= {"surefoot/py.typed", "surefoot/experiment/reports/assets/page.html"}


@pytest.mark.parametrize("python", pythons())
def test_the_command_line_without_torch(python, wheel, tmp_path):
    place = installed(python, wheel, tmp_path / "environment")
    run(
        f"{place}/python",
        "-W",
        "error",
        "-m",
        "compileall",
        "-q",
        "-f",
        *map(str, place.parent.glob("lib/*/*/surefoot")),
    )
    out = run(f"{place}/surefoot", "--help")
    assert "not installed: numpy, scipy, tqdm, filelock, jinja2: pip install 'surefoot[cli]'" in out
    assert run(f"{place}/surefoot", code=2).startswith("surefoot: three things")
    assert run(f"{place}/surefoot", "train", "--wdith", "8", code=2).endswith("\ntry: surefoot train --width 8\n")
    assert run(f"{place}/surefoot", "train", code=1).endswith("\ntry: pip install 'surefoot[cli,plots]'\n")
    for command in ("transfer", "compare", "train", "tokens", "audit", "convert", "coordcheck", "report"):
        assert f"usage: surefoot {command}" in run(f"{place}/surefoot", command, "--help")
    assert "keller" in run(f"{place}/surefoot", "convert", "--lr", "3e-4", "--d-in", "64", "--d-out", "64")


def test_the_library_with_torch_alone(wheel, lent, tmp_path):
    place = installed(sys.executable, wheel, tmp_path / "environment")
    (library,) = place.parent.glob("lib/*/site-packages")
    (library / "lent.pth").write_text(f"{lent}\n")
    example = shutil.copy(ROOT / "examples" / "own_model.py", tmp_path)
    assert "norm of the first matrix" in run(f"{place}/python", example)
    assert "recipe steady" in run(f"{place}/surefoot", "audit", "gpt", "--width", "64")
    assert run(f"{place}/python", "-c", "import surefoot; print(surefoot.__file__)").startswith(f"{library}")
