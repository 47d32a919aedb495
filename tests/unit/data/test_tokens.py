"""Text into files of tokens: nothing lost, nothing twice, whatever interrupts it; and every reader's reading of it."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from tokenizers import Tokenizer

from surefoot.experiment.data import shards
from surefoot.experiment.data.convert import Conversion, convert, verify
from surefoot.experiment.data.documents import documents
from surefoot.experiment.errors import DataError, DirectoryInUse
from surefoot.experiment.files import locked

DOCUMENTS = [f"document {i}: {' '.join(str((i * k) % 97) for k in range(40 + i % 7))} ünï\n" for i in range(300)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(DOCUMENTS)))
    return path


def conversion(source, **changes):
    return Conversion(**{"source": str(source), "vocab": 300, "shard_tokens": 2000, "validation_one_in": 5} | changes)


def decoded(out):
    """The documents of a folder by split, read without the package: numpy and the tokenizer's file."""
    tokenizer, found = Tokenizer.from_file(str(out / "tokenizer.json")), {"train": [], "val": []}
    end = tokenizer.token_to_id("<|endoftext|>")
    for path in sorted(out.glob("*.bin")):
        tokens = np.fromfile(path, dtype="<u2")
        if np.frombuffer(path.read_bytes()[:4], "<i4")[0] == 20240520:
            tokens = tokens[512:]
        texts, own = found[path.name.split("_")[0]], []
        for token in tokens.tolist():
            if token == end:
                texts.append(tokenizer.decode(own))
                own = []
            else:
                own.append(token)
        assert not own
    return found


@pytest.mark.parametrize("layout", ["header", "raw"])
def test_every_document_is_there_once_in_order(source, tmp_path, layout):
    out = tmp_path / "out"
    manifest = convert(conversion(source, layout=layout), out)
    found = decoded(out)
    assert sorted(found["train"] + found["val"]) == sorted(DOCUMENTS)
    assert found["train"] == [text for text in DOCUMENTS if text in set(found["train"])]
    assert 30 <= len(found["val"]) <= 90  # about a fifth
    assert len(manifest["shards"]) > 6
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".bin") == [
        ".lock", "manifest.json", "tokenizer.json",
    ]  # fmt: skip
    read = shards.load(out)
    assert read.vocab == manifest["vocab"] == 300
    assert read.train.size + read.validation.size == manifest["tokens"]
    assert convert(conversion(source, layout=layout), out) == manifest  # nothing left to do


def test_a_source_that_has_changed_is_not_gone_on_with(source, tmp_path, monkeypatch):
    def interrupted(documents, tokens):
        raise KeyboardInterrupt

    out, texts = tmp_path / "out", source.read_text().splitlines(keepends=True)
    monkeypatch.setattr("surefoot.experiment.data.convert._BATCH", 20_000)
    with pytest.raises(KeyboardInterrupt):
        convert(conversion(source), out, interrupted)
    assert any(out.glob("*.bin"))
    os.utime(source, ns=(1, 1))  # the same lines, in an order of before: nothing but the time tells
    with pytest.raises(ValueError, match=r"in\.jsonl has changed since .*out was begun: choose another folder"):
        convert(conversion(source), out)
    manifest = convert(conversion(source), tmp_path / "whole")
    source.write_text("".join(texts[1:]))
    with pytest.warns(UserWarning, match=r"whole was left as it was, though .*in\.jsonl has changed since"):
        assert convert(conversion(source), tmp_path / "whole") == manifest


def test_the_characters_of_a_separator_in_a_document_are_text(tmp_path):
    source, texts = tmp_path / "in.jsonl", [*DOCUMENTS[:40], "before <|endoftext|> after"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = convert(conversion(source), tmp_path / "out")
    found = decoded(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert manifest["documents"] == len(texts)


KILLED = """
import sys
from surefoot.experiment.data.convert import Conversion, convert
import pathlib
conversion = Conversion(sys.argv[1], vocab=300, shard_tokens=2000, validation_one_in=5)
convert(conversion, pathlib.Path(sys.argv[2]), lambda documents, tokens: print(documents, flush=True))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_files(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    calm, out = tmp_path / "calm", tmp_path / "out"
    convert(conversion(source), calm)
    generator = np.random.default_rng(0)
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", KILLED, source, out], stdout=subprocess.DEVNULL)
        time.sleep(0.25 + 0.4 * generator.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
    convert(conversion(source), out)
    for path in [*calm.glob("*.bin"), calm / "tokenizer.json"]:
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in calm.iterdir()}
    assert shards.load(out).sha256 == shards.load(calm).sha256


def test_it_goes_on_after_the_last_whole_file(source, tmp_path, monkeypatch):
    """Not from the start: the documents of finished files are not encoded again."""
    from surefoot.experiment.data import bpe

    out, encode, seen = tmp_path / "out", bpe.encode, []

    def failing(tokenizer, texts):
        seen.extend(texts)
        if len(seen) > 150:
            raise KeyboardInterrupt
        return encode(tokenizer, texts)

    monkeypatch.setattr("surefoot.experiment.data.convert._BATCH", 2000)
    monkeypatch.setattr(bpe, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(conversion(source), out)
    done = json.loads((out / "progress.json").read_text())["documents"]
    assert 0 < done < 151
    with pytest.raises(DataError, match="is not finished: run the same surefoot tokens command again"):
        shards.load(out)
    seen.clear()
    monkeypatch.setattr(bpe, "encode", lambda tokenizer, texts: seen.extend(texts) or encode(tokenizer, texts))
    convert(conversion(source), out)
    assert seen == DOCUMENTS[done:]


def test_a_full_disk_keeps_what_is_whole(source, tmp_path, file_size_limit):
    out = tmp_path / "out"
    convert(conversion(source, limit=100), tmp_path / "small")
    tokenizer = str(tmp_path / "small" / "tokenizer.json")
    wanted = conversion(source, vocab=None, tokenizer=tokenizer, shard_tokens=10_000)
    file_size_limit(15_000)
    with pytest.raises(OSError, match="File too large"):
        convert(wanted, out)
    assert not list(out.glob(".*.tmp"))
    file_size_limit(1 << 40)
    convert(wanted, out)
    assert len(decoded(out)["train"]) + len(decoded(out)["val"]) == 300


def test_a_changed_file_is_refused_until_its_digest_is_compared(source, tmp_path):
    out = tmp_path / "out"
    manifest = convert(conversion(source), out)
    shard = out / manifest["shards"][0]["name"]
    os.utime(shard)
    with pytest.raises(DataError, match=rf"{shard.name} was changed .* with surefoot tokens --verify {out}"):
        shards.load(out)
    verify(out)
    shards.load(out)
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=rf"{shard.name} is damaged: its SHA-256"):
        verify(out)
    shard.write_bytes(data[:-2])
    with pytest.raises(DataError, match=rf"{shard.name} has \d+ bytes, the manifest says"):
        shards.load(out)
    shard.unlink()
    with pytest.raises(DataError, match=rf"cannot read .*{shard.name}"):
        shards.load(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        shards.load(out)


def test_what_cannot_be_converted_is_named(source, tmp_path):
    out = tmp_path / "out"
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:7]) + lines[7][:20])
    with pytest.raises(DataError, match=r"in\.jsonl, line 8 is not valid JSON"):
        convert(conversion(source), out)
    source.write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"line 1 has no text 'text': choose --field from body"):
        convert(conversion(source), tmp_path / "other")
    source.write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"line 1: 'text' is int, not text: 3"):
        convert(conversion(source), tmp_path / "other")
    with pytest.raises(DataError, match="none does not exist"):
        convert(conversion(tmp_path / "none"), tmp_path / "third")
    assert not (tmp_path / "third").exists()
    for changes in ({"vocab": None}, {"tokenizer": "x"}, {"vocab": 3}):
        with pytest.raises(ValueError, match="vocabulary"):
            conversion(source, **changes)
    with pytest.raises(ValueError, match="the path of the documents is empty"):
        conversion("")


def test_another_conversion_a_second_writer_and_foreign_files_are_refused(source, tmp_path):
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    convert(conversion(source), out)
    with pytest.raises(ValueError, match=r"another conversion; it differs in shard_tokens: there 2000, now 99"):
        convert(conversion(source, shard_tokens=99), out)
    with locked(out), pytest.raises(DirectoryInUse):
        convert(conversion(source), out)
    foreign.mkdir()
    (foreign / "train.bin").write_bytes(b"ab")
    with pytest.raises(ValueError, match="not of this conversion"):
        convert(conversion(source), foreign)


def test_a_tokenizer_that_cannot_be_used_is_named(source, tmp_path):
    given = tmp_path / "given.json"
    wanted = conversion(source, vocab=None, tokenizer=str(given))
    with pytest.raises(DataError, match=r"cannot read .*given\.json"):
        convert(wanted, tmp_path / "a")
    given.write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizers-library file"):
        convert(wanted, tmp_path / "b")
    from surefoot.experiment.data import bpe

    given.write_text(bpe.train(DOCUMENTS, 300, "text").to_str())
    with pytest.raises(DataError, match=r"has no token <\|endoftext\|>"):
        convert(wanted, tmp_path / "c")


def test_folders_and_text_files_with_separators(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("one<|endoftext|>two")
    (tmp_path / "in" / "a.bin").write_bytes(b"no\0text")
    (tmp_path / "in" / ".hidden").write_text("hidden")
    (tmp_path / "in" / "sub" / "c.jsonl").write_text('{"text": "three"}\n\n{"text": ""}\n{"text": "four"}\n')
    assert list(documents(str(tmp_path / "in"))) == ["one", "two", "three", "four"]
    assert list(documents(str(tmp_path / "in"), skip=3)) == ["four"]


def test_text_in_another_encoding_is_warned_of(tmp_path):
    (tmp_path / "latin.txt").write_bytes("le café, le café".encode("latin1"))
    with pytest.warns(UserWarning, match=r"latin.txt is not UTF-8 \(at byte 6\); .*iconv"):
        assert list(documents(str(tmp_path / "latin.txt"))) == ["le caf\ufffd, le caf\ufffd"]


@pytest.mark.integration
def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": list(range(300))}), path)
    assert list(documents(str(path))) == DOCUMENTS
    with pytest.raises(DataError, match="has no text 'body': choose --field from text, n"):
        list(documents(str(path), "body"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"in\.parquet is damaged"):
        list(documents(str(path)))


def test_the_hub_is_streamed_and_one_that_cannot_be_reached_is_named(monkeypatch):
    """With a stand-in for the library: its calls are those of `datasets`, see the next test."""

    def load_dataset(name, config, *, split, streaming):
        assert (split, streaming) == ("train", True)
        if name == "gone":
            raise ConnectionError("no network")
        return [{"text": f"{name} {config} {i}" * (i != 1)} for i in range(5)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents("hf:some/name:small", skip=2)) == [
        "some/name small 3",
        "some/name small 4",
    ]  # of those that are not empty
    with pytest.raises(DataError, match="cannot read hf:gone: ConnectionError: no network"):
        list(documents("hf:gone"))
    with pytest.raises(DataError, match="hf:some has no text 'body': choose --field from text"):
        list(documents("hf:some", "body"))


@pytest.mark.integration
def test_a_hub_without_a_network(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot read hf:nobody/nothing"):
        list(documents("hf:nobody/nothing"))
