"""What a folder of tokens says of itself is believed only where it fits, and every remedy that is named works."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from tokenizers import Tokenizer

from surefoot.experiment.data import shards
from surefoot.experiment.data.convert import Conversion, convert, verify
from surefoot.experiment.errors import DataError

REMEDY = "write the tokens again with surefoot tokens, into a new folder"


@pytest.fixture
def conversion(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}: " + "ab cd " * (9 + i % 5)}) + "\n" for i in range(90)))
    return Conversion(str(path), vocab=280, shard_tokens=1000, validation_one_in=5)


@pytest.fixture
def out(conversion, tmp_path):
    out = tmp_path / "out"
    convert(conversion, out)
    return out


def edit(path, **changes):
    """Write a JSON file with other values; ... for none."""
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))


FIRST = "first shard: "
EDITS = [
    ("conversion", "x"), ("documents", -1), ("documents", "90"), ("tokens", 1), ("vocab", "300"), ("vocab", -5),
    ("vocab", True), ("vocab", 1 << 17), ("layout", "raw"), ("separator", ...), ("tokenizer_sha256", ...),
    ("sha256", "0"), ("shards", []), ("shards", [3]),
    (FIRST + "mtime_ns", ...), (FIRST + "name", 7), (FIRST + "name", "../train_000000.bin"), (FIRST + "tokens", 1),
    (FIRST + "bytes", 2.5),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), EDITS, ids=lambda value: str(value))
def test_an_edited_manifest_is_damaged(key, value, out, conversion):
    path = out / "manifest.json"
    if key.startswith(FIRST):
        first, *others = json.loads(path.read_text())["shards"]
        first[key.removeprefix(FIRST)] = value
        key, value = "shards", [{name: each for name, each in first.items() if each is not ...}, *others]
    edit(path, **{key: value})
    for read in (shards.load, verify, lambda out: convert(conversion, out)):
        with pytest.raises(DataError, match=rf"manifest\.json is damaged, or another program's: {REMEDY}"):
            read(out)


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "1" * 5000, "[" * 200_000], ids=lambda text: text[:3])
def test_a_manifest_that_is_none_is_damaged(content, out):
    (out / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        shards.load(out)


def test_a_manifest_that_cannot_be_read_is_named(out):
    (out / "manifest.json").unlink()
    (out / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*manifest\.json: Is a directory"):
        shards.load(out)


@pytest.mark.parametrize("change", [{"conversion": "x"}, {"documents": None}, {"shards": [{}]}], ids=str)
def test_an_edited_journal_is_damaged(change, out, conversion):
    (out / "manifest.json").rename(out / "progress.json")
    edit(out / "progress.json", **change)
    with pytest.raises(DataError, match=rf"progress\.json is damaged, or another program's: {REMEDY}"):
        convert(conversion, out)


def grow(path):
    path.write_bytes(path.read_bytes() + b"ab")


@pytest.mark.parametrize("harm", [type(Path()).unlink, grow], ids=["missing", "grown"])
@pytest.mark.parametrize("name", ["train_000000.bin", "tokenizer.json"])
def test_a_finished_folder_is_not_done_where_a_file_is_missing_or_damaged(harm, name, out, conversion):
    harm(out / name)
    with pytest.raises(DataError, match=rf"{name}.*{REMEDY}"):
        convert(conversion, out)
    with pytest.raises(DataError, match=rf"{name}.*{REMEDY}"):
        verify(out)
    new = out.with_name("new")
    assert convert(conversion, new) == verify(new)


def test_a_copied_folder_is_done_once_it_is_verified(out, conversion):
    os.utime(out / "train_000000.bin")
    with pytest.raises(DataError, match=f"was changed or copied: check it with surefoot tokens --verify {out}"):
        convert(conversion, out)
    assert verify(out) == convert(conversion, out)


@pytest.fixture
def unfinished(out, conversion):
    """The folder as an interruption before its last files leaves it."""
    record = json.loads((out / "manifest.json").read_text())
    for shard in record["shards"]:
        if shard["name"] not in ("train_000000.bin", "val_000000.bin"):
            (out / shard["name"]).unlink()
    (out / "manifest.json").unlink()
    end = Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id("<|endoftext|>")
    done = record["shards"][:2]
    documents = sum((np.fromfile(out / shard["name"], "<u2")[512:] == end).sum() for shard in done)
    journal = {"conversion": record["conversion"], "documents": int(documents), "shards": done}
    (out / "progress.json").write_text(json.dumps(journal))
    return out


@pytest.mark.parametrize("harm", [type(Path()).unlink, grow], ids=["missing", "grown"])
def test_nothing_is_added_to_files_that_are_missing_or_damaged(harm, unfinished, conversion):
    harm(unfinished / "train_000000.bin")
    with pytest.raises(DataError, match=rf"train_000000\.bin.*{REMEDY}"):
        convert(conversion, unfinished)


def test_a_copied_folder_is_gone_on_with(unfinished, conversion, tmp_path):
    os.utime(unfinished / "train_000000.bin")
    assert convert(conversion, unfinished)["sha256"] == convert(conversion, tmp_path / "calm")["sha256"]
    shards.load(unfinished)


def test_what_is_left_of_the_journal_of_a_finished_folder_goes(out, conversion):
    """As a kill between the manifest and the journal leaves it."""
    (out / "progress.json").write_text("{}")
    convert(conversion, out)
    assert not (out / "progress.json").exists()
