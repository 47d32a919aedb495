"""The BPE vocabulary: deterministic, of the size asked for, lossless."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from surefoot.experiment.data import bpe
from surefoot.experiment.data.sources import absolute, load

TEXT = "".join(f"def f{i}(x, größe):\n    return x ** {i * i} + größe  # 雪 {i % 7}\n\n" for i in range(400)).encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes(TEXT)
    return path


def test_corpus_is_of_the_size_asked_for_and_says_tokens(file: Path) -> None:
    corpus, text = load(f"bpe:400:{file}", context=16), load(file)
    assert corpus.vocab == 400
    assert corpus.train.dtype == np.uint16
    assert 256 <= max(corpus.train.max(), corpus.validation.max()) < 400
    assert corpus.train.size < text.train.size / 2
    assert corpus.name == f"{file}, 400 BPE tokens"
    assert (corpus.unit, text.unit) == ("token", "byte")
    x, y = corpus.batch("train", 0, 0, 4, 16)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    assert int(x.max()) >= 256


def test_same_text_same_tokens_and_the_hash_tells_them_apart(file: Path) -> None:
    first, again, other = (load(f"bpe:{size}:{file}") for size in (300, 300, 301))
    assert np.array_equal(first.train, again.train)
    assert first.sha256 == again.sha256
    assert len({first.sha256, other.sha256, load(file).sha256}) == 3


def test_the_validation_split_does_not_reach_the_vocabulary(file: Path) -> None:
    before = load(f"bpe:300:{file}")
    file.write_bytes(TEXT[: load(file).train.size] + b"z" * load(file).validation.size)
    after = load(f"bpe:300:{file}")
    assert np.array_equal(after.train, before.train)
    assert after.sha256 != before.sha256


@pytest.mark.parametrize("unseen", [TEXT, "Ελληνικά \r\n\t\0 🦶".encode(), b"x" * (1 << 16), b""])
def test_tokens_decode_to_the_text(unseen: bytes) -> None:
    tokenizer = bpe.train([TEXT.decode()], 300, "text")
    (tokens,) = bpe.encode(tokenizer, [unseen.decode()])
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == unseen.decode()


def test_bytes_that_are_no_text_are_replaced(file: Path) -> None:
    file.write_bytes(TEXT + b"a\xffb")
    with pytest.warns(UserWarning, match=r"text.py is not UTF-8 \(at byte [\d,]+\); invalid bytes become U\+FFFD"):
        corpus = load(f"bpe:300:{file}")
    assert isinstance(corpus.tokenizer, Tokenizer)
    assert corpus.tokenizer.decode(corpus.validation.tolist()).endswith("\n\na\N{REPLACEMENT CHARACTER}b")


def test_documents_that_are_no_utf_8_end_where_they_end(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_bytes((f"@@{i:02d} " + "café über straße " * 20 + "end.\n").encode("latin-1"))
    with pytest.warns(UserWarning, match="is not UTF-8"):
        corpus = load(f"bpe:280:{tmp_path}")
    assert isinstance(corpus.tokenizer, Tokenizer)
    starts, ends = [0, *corpus.document_ends[:-1]], corpus.document_ends
    documents = [corpus.tokenizer.decode(corpus.train[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
    assert all(text.startswith("@@") and text.endswith("end.\n") for text in documents)


def test_a_text_of_too_few_merges_says_how_many_it_has(file: Path) -> None:
    file.write_bytes(b"abab" * 100)
    with pytest.raises(ValueError, match=r"text\.py yields \d+ tokens, fewer than the 5000 requested: ask for fewer"):
        load(f"bpe:5000:{file}")
    with pytest.raises(ValueError, match=r"nothing yields 256 tokens, .*: is it empty, or not UTF-8 text"):
        bpe.train([], 300, "nothing")


def test_too_few_tokens_for_the_context_are_called_tokens(file: Path) -> None:
    with pytest.raises(ValueError, match=r"BPE tokens: \d+ tokens are too few; .* at least 100010 tokens"):
        load(f"bpe:300:{file}", context=10_000)


def test_a_missing_library_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'surefoot\[bpe\]'"):
        load(f"bpe:300:{file}")


@pytest.mark.parametrize("name", ["bpe:", "bpe:256", "bpe:65537", "bpe:-300", "bpe:many:text", "bpe:300:"])
def test_a_bad_name_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*bpe:N:PATH with N from 257 to 65536"):
        load(name)


def test_a_path_that_is_missing_is_named_without_the_prefix() -> None:
    with pytest.raises(ValueError, match=r"^nowhere does not exist"):
        load("bpe:300:nowhere")


def test_the_path_within_a_name_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["bpe:300:a:b", "bpe:300", "markov:20", "a", None]
    assert [absolute(path) for path in given] == [
        f"bpe:300:{tmp_path}/a:b",
        "bpe:300",
        "markov:20",
        f"{tmp_path}/a",
        None,
    ]


def test_a_tokenizer_that_cuts_or_pads_encodes_all_of_a_text(tmp_path: Path) -> None:
    text = TEXT.decode()
    trained = bpe.train([text], 300, "text")
    whole = bpe.encode(trained, [text])
    trained.enable_truncation(16)
    trained.enable_padding(length=32)
    (tmp_path / "tokenizer.json").write_text(trained.to_str())
    assert np.array_equal(bpe.encode(bpe.read(tmp_path / "tokenizer.json"), [text]), whole)
