"""Files of tokens: what others write is read token for token; what is damaged is named."""

import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from surefoot.experiment.data import shards
from surefoot.experiment.data.sources import load
from surefoot.experiment.errors import DataError

TOKENS = [50256] + [(7 * i * i + 3 * i) % 50257 for i in range(4999)]


def nanogpt(path, tokens):
    """As nanoGPT's data/*/prepare.py does: `np.array(ids, dtype=np.uint16).tofile(path)`, without numpy."""
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))


def modded(path, tokens, magic=20240520, version=1, count=None):
    """As the data scripts of llm.c and modded-nanogpt do: 256 words of 4 bytes, then the tokens."""
    words = [magic, version, len(tokens) if count is None else count] + [0] * 253
    path.write_bytes(struct.pack("<256i", *words) + struct.pack(f"<{len(tokens)}H", *tokens))


def all_of(found):
    return found.windows(np.array([0]), found.size)[0].tolist()


@pytest.mark.parametrize("write", [nanogpt, modded])
def test_files_of_others_are_read_token_for_token(write, tmp_path):
    write(tmp_path / "train.bin", TOKENS)
    write(tmp_path / "val.bin", TOKENS[:70])
    found = shards.load(tmp_path)
    assert all_of(found.train) == TOKENS
    assert all_of(found.validation) == TOKENS[:70]
    assert (found.vocab, found.files) == (50304, 2)  # 50257, rounded up
    assert shards.load(tmp_path, 60000).vocab == 60000


def test_several_shards_are_one_array_and_windows_go_over_their_ends(tmp_path):
    for i, part in enumerate((TOKENS[:11], TOKENS[11:12], TOKENS[12:900])):
        modded(tmp_path / f"fineweb_train_{i:06d}.bin", part)
    modded(tmp_path / "fineweb_val_000000.bin", TOKENS[:70])
    found = shards.load(tmp_path, 50257)
    starts = np.array([0, 9, 10, 11, 880, 4])
    assert found.train.windows(starts, 20).tolist() == [TOKENS[s : s + 20] for s in starts]
    assert (found.train.size, found.validation.size) == (900, 70)


def test_without_a_file_for_validation_the_last_tenth_is(tmp_path):
    nanogpt(tmp_path / "contest.bin", TOKENS)  # no word of its own: "test" is part of it
    nanogpt(tmp_path / "data.bin", TOKENS[:99])
    found = shards.load(tmp_path)
    whole = TOKENS + TOKENS[:99]
    assert all_of(found.train) + all_of(found.validation) == whole
    assert found.validation.size == len(whole) // 10
    assert all_of(shards.load(tmp_path / "data.bin").train) == TOKENS[:90]


def test_batches_are_a_function_of_seed_step_and_row(tmp_path):
    nanogpt(tmp_path / "data.bin", TOKENS)
    corpus = load(f"bin:50304:{tmp_path / 'data.bin'}")
    x, y = corpus.batch("train", 1, 5, 8, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    again = load(f"bin:50304:{tmp_path / 'data.bin'}")
    for rows in (slice(0, 3), slice(3, 8)):
        for whole, part in zip((x, y), again.batch("train", 1, 5, 8, 16, rows), strict=True):
            assert torch.equal(part, whole[rows])
    assert not torch.equal(x, corpus.batch("train", 1, 6, 8, 16)[0])
    assert corpus.unit == "token"
    with pytest.raises(DataError, match=r"data\.bin, 50304 tokens: 5000 tokens are too few"):
        corpus.require(600)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc", r"odd number of bytes \(3\)"),
        (struct.pack("<256i", 20240520, 2, *[0] * 254) + b"ab", "header of version 2"),
        (struct.pack("<256i", 20240520, 1, 5, *[0] * 253) + b"ab", "holds 1 tokens, and its header says 5"),
        (struct.pack("<256i", 20240520, 1, 0, *[0] * 253), "holds no tokens"),
        (struct.pack("<256i", 20240521, 1, 1, *[0] * 253) + b"ab", "magic number 20240521, not 20240520"),
        (struct.pack("<256i", 20240801, 7, 1, *[0] * 253) + b"abcd", "magic number 20240801, not 20240520"),
        (struct.pack("<256i", 20240521, 1, 4096 ^ 5000, *[0] * 253) + b"ab" * 5000, "magic number 20240521"),
        (struct.pack("<256i", 20240521, 1, 5000, *[0] * 253) + b"ab" * 3000, "magic number 20240521"),
        (struct.pack("<256i", 20240520, 1, 5000, *[0] * 253)[:1000], "a header that is cut off after 1000 bytes"),
        (struct.pack("<256i", 20240520, 1, 5000, *[0] * 253)[:6], "a header that is cut off after 6 bytes"),
    ],
)
def test_damaged_files_are_named(content, message, tmp_path):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.bin.*{message}"):
        shards.load(tmp_path)


def test_hidden_files_are_left_out(tmp_path):
    nanogpt(tmp_path / "train.bin", TOKENS)
    nanogpt(tmp_path / "._train.bin", TOKENS[:500])  # as macOS writes them beside others
    found = shards.load(tmp_path)
    assert (found.files, found.train.size + found.validation.size) == (1, len(TOKENS))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="none does not exist"):
        shards.load(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no \.bin files: .* surefoot tokens"):
        shards.load(tmp_path)


def test_a_token_outside_the_vocabulary_is_named_with_its_file(tmp_path):
    nanogpt(tmp_path / "train_0.bin", [1, 2, 3, 4] * 30)
    nanogpt(tmp_path / "train_1.bin", [1, 2, 900, 4] * 30)
    corpus = load(f"bin:64:{tmp_path}")
    with pytest.raises(DataError, match=r"train_1\.bin holds the token 900, outside the vocabulary of 64"):
        corpus.batch("train", 0, 0, 64, 8)


@pytest.mark.parametrize("name", ["bin:", "bin:0:a", "bin:70000:a"])
def test_a_name_that_is_none(name):
    with pytest.raises(ValueError, match="files of tokens are bin:PATH or bin:N:PATH"):
        shards.parse(name)


def test_two_files_that_differ_anywhere_sampled_are_different_data(tmp_path):
    nanogpt(tmp_path / "data.bin", TOKENS)
    first = shards.load(tmp_path, 50304).sha256
    assert shards.load(tmp_path, 60000).sha256 == first
    nanogpt(tmp_path / "data.bin", [*TOKENS[:-1], 0])
    assert shards.load(tmp_path, 50304).sha256 != first


MEASURE = """
import sys, time, resource
from surefoot.experiment.data.sources import load
import surefoot.experiment.data.shards
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
corpus = load(f"bin:50304:{sys.argv[1]}")
opened = time.perf_counter() - start
corpus.batch("train", 0, 0, 8, 1024)
start = time.perf_counter()
for step in range(5):
    corpus.batch("train", 0, step, 512, 1024)
seconds = (time.perf_counter() - start) / 5
print(opened, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
def test_a_gigabyte_opens_at_once_and_stays_on_the_disk(tmp_path):
    """Under 0.1 s and 50 MB, and a batch of 512 x 1024 tokens takes milliseconds. The file is sparse: zeros."""
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(1 << 30)
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    seconds, megabytes, batch = map(float, done.stdout.split())
    assert seconds < 0.1
    assert megabytes < 50 + 2 * 5 * 2560 * 4 / 1024  # and the pages of five batches, 4 kB a row or two
    assert batch < 0.05
