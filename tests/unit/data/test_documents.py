"""Documents: what is damaged is named with file and line, and nothing is left out in silence."""

import os

import pytest

from surefoot.experiment.data.documents import documents
from surefoot.experiment.errors import DataError


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(r'{"text": "hello \ud83d world \udc00"}' "\n" r'{"text": "\ud83d\ude00"}' "\n")
    assert list(documents(str(path))) == ["hello � world �", "\U0001f600"]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 200_000, '"\\ud83d'], ids=["digits", "depth", "half"])
def test_a_line_that_cannot_be_read_is_named(value, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "more": ' + value + "}\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 2 is not valid JSON: repair or remove this line"):
        list(documents(str(path)))


def test_an_unreadable_subfolder_is_not_skipped_in_silence(tmp_path, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match=r"cannot read .*closed: Permission denied; give a readable text"):
        list(documents(str(tmp_path)))


def test_the_files_of_a_folder_are_in_order_without_hidden_ones(tmp_path):
    for name in ("b/2", "a.b/1", "a/0", ".git/x", "b/.hidden", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(documents(str(tmp_path))) == ["a/0", "a.b/1", "b/2", "c"]


def test_a_suffix_in_capitals_is_that_suffix(tmp_path):
    (tmp_path / "IN.JSONL").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(str(tmp_path / "IN.JSONL"))) == ["one", "two"]
