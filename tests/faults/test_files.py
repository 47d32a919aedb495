"""Run directories without `fcntl`, as on Windows, and the public names before anything is imported."""

import importlib
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest

import surefoot
from surefoot.experiment.configs import differences
from surefoot.experiment.files import replace_files

WITHOUT_FCNTL = """
import os, sys
sys.modules["fcntl"] = None
del os.fchmod
open_file = os.open
def refuse_folders(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_file(path, *arguments, **options)
os.open = refuse_folders
from pathlib import Path
from surefoot.experiment.errors import DirectoryInUse
from surefoot.experiment.configs import claimed
from surefoot.experiment.files import Log, locked
directory = Path(sys.argv[1])
with claimed(directory, "train", {"steps": 3}, "log.jsonl"):
    with Log(directory / "log.jsonl") as log:
        log.append({"step": 1})
    try:
        with locked(directory):
            raise AssertionError("locked twice")
    except DirectoryInUse as error:
        print(error)
with locked(directory):
    pass
"""


def test_run_directories_need_nothing_that_windows_lacks(tmp_path):
    command = [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path} is in use by another run (process " in done.stdout
    assert "wait for it, stop it, or choose another directory" in done.stdout
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_a_file_that_cannot_be_written_is_named_and_not_its_temporary(tmp_path):
    with pytest.raises(OSError, match=r"No such file or directory: '.*/none/page\.html'"):
        replace_files({tmp_path / "none" / "page.html": b"text"})


def test_the_same_tokens_in_another_vocabulary_are_other_data():
    there = {"data": "bin:64:/a", "text": "/a, 64 tokens", "corpus": "4b2f"}
    assert differences(there, {**there, "data": "/b", "text": "/b, 64 tokens"}) == []
    found = differences(there, {**there, "data": "bin:128:/a", "text": "/a, 128 tokens"})
    assert found == ['text: there "/a, 64 tokens", now "/a, 128 tokens"']


def test_modules_of_the_package_are_there_the_first_time(monkeypatch):
    code = """
import sys, types, surefoot
for name in ("cli", "experiment", "conversion"):
    assert isinstance(getattr(surefoot, name), types.ModuleType), name
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("roles", "plan", "optim"):
        module = importlib.import_module(f"surefoot.{name}")
        monkeypatch.delattr(surefoot, name)
        assert getattr(surefoot, name) is module
    with pytest.raises(AttributeError, match="has no attribute 'no_such_module'; it has RMS"):
        _ = surefoot.no_such_module


def test_public_names_that_are_modules_are_the_packages_modules():
    for name in surefoot._api.__all__:
        value = getattr(surefoot, name)
        assert not isinstance(value, types.ModuleType) or value.__name__ == f"surefoot.{name}"
        assert isinstance(value, types.ModuleType) or find_spec(f"surefoot.{name}") is None
