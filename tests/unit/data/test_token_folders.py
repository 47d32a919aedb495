"""Whose a folder of tokens is: nothing is taken for ours that is not, and nothing that failed stands in the way."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from surefoot.experiment.data import bpe, shards
from surefoot.experiment.data.convert import Conversion, convert
from surefoot.experiment.data.sources import load
from surefoot.experiment.errors import DataError

TEXTS = [f"document {i}: " + "ab cd " * (9 + i % 5) for i in range(60)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def conversion(source, **changes):
    return Conversion(**{"source": str(source), "vocab": 280, "shard_tokens": 600, "validation_one_in": 5} | changes)


def contents(out):
    """Every file but the manifest, whose times differ."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".bin", ".json", ".tmp")} | {
        "manifest.json": shards.load(out).sha256
    }


def test_a_call_that_failed_leaves_the_folder_to_the_next(source, tmp_path):
    out, calm, good = tmp_path / "out", tmp_path / "calm", tmp_path / "good"
    convert(conversion(source, vocab=300), calm)
    convert(conversion(source), good)
    junk, bare = tmp_path / "junk.json", tmp_path / "bare.json"
    junk.write_text("{}")
    bare.write_text(bpe.train(TEXTS, 270, "text").to_str())
    for name, given, message in (
        ("typo.jsonl", good / "tokenizer.json", r"typo\.jsonl does not exist"),
        ("in.jsonl", junk, r"junk\.json is not a tokenizers"),
        ("in.jsonl", bare, r"bare\.json has no token"),
        ("in.jsonl", tmp_path / "none.json", r"cannot read .*none\.json"),
        ("typo.jsonl", good, r"typo\.jsonl does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            convert(conversion(tmp_path / name, vocab=None, tokenizer=str(given)), out)
    convert(conversion(source, vocab=300), out)
    assert contents(out) == contents(calm)


def test_a_tokenizer_that_was_put_into_a_folder_without_tokens_is_read_there(source, tmp_path):
    out, given = tmp_path / "out", tmp_path / "out" / "tokenizer.json"
    wanted = conversion(source, vocab=None, tokenizer=str(given))
    with pytest.raises(DataError, match=r"cannot read .*; give a tokenizer\.json"):
        convert(wanted, out)
    convert(conversion(source), tmp_path / "calm")
    text = (tmp_path / "calm" / "tokenizer.json").read_bytes()
    given.write_bytes(text)
    convert(wanted, out)
    assert given.read_bytes() == text


def test_a_tokenizer_of_somebody_else_is_refused_and_left(source, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not of this conversion \(tokenizer\.json\): choose another folder"):
        convert(conversion(source), tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("out", [".", "out", "sub/../out"])
def test_a_folder_among_the_texts_is_refused(out, source, tmp_path):
    with pytest.raises(ValueError, match="give a folder outside it"):
        convert(conversion(tmp_path), tmp_path / out)
    assert list(tmp_path.iterdir()) == [source]
    convert(conversion(source), tmp_path / "beside")


class Killed(BaseException):
    """Not an error that anybody handles."""


def kill(monkeypatch, at, before):
    """Stop at a replacement of a file, before or after it; temporary files then stay, as after kill -9."""
    left, replace, unlink = [at], os.replace, Path.unlink

    def counted(*args):
        left[0] -= 1
        if before and left[0] < 0:
            raise Killed
        replace(*args)
        if left[0] < 0:
            raise Killed

    monkeypatch.setattr(os, "replace", counted)
    monkeypatch.setattr(Path, "unlink", lambda path, **kwargs: None if left[0] < 0 else unlink(path, **kwargs))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_kill_at_any_moment_leaves_what_can_be_gone_on_with(before, source, tmp_path, monkeypatch):
    """By the same call to the same files; another one has its own files, or is refused."""
    own, other = conversion(source), conversion(source, vocab=300)
    calm = {wanted: tmp_path / f"{wanted.vocab}" for wanted in (own, other)}
    for wanted, folder in calm.items():
        convert(wanted, folder)
    at, refused, killed = 0, 0, True
    while killed:
        for wanted in (own, other):
            out = tmp_path / f"out-{at}-{wanted.vocab}"
            with monkeypatch.context() as patched:
                kill(patched, at, before)
                try:
                    convert(own, out)
                    killed = False
                except Killed:
                    pass
            if wanted == other and any(out.glob("*.bin")):
                with pytest.raises(ValueError, match="holds another conversion"):
                    convert(other, out)
                refused += 1
            else:
                convert(wanted, out)
                assert contents(out) == contents(calm[wanted])
        at += 1
    assert at > 10
    assert 0 < refused < at


def test_a_folder_of_tokens_is_no_text_and_what_is_too_short_names_its_split(source, tmp_path):
    convert(conversion(source, validation_one_in=40), tmp_path / "out")
    with pytest.raises(DataError, match=r"out holds tokens, not text: --data bin:.*out$"):
        load(tmp_path / "out")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"manifest_version": 3}' * 9)
    assert load(tmp_path / "web").vocab == 256  # somebody else's
    corpus = load(f"bin:{tmp_path / 'out'}")
    with pytest.raises(DataError, match=r"Give more of the text to the validation split, or a shorter context"):
        corpus.require(corpus.validation.size)
