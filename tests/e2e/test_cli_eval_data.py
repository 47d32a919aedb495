"""`surefoot train --eval-data` and `--wandb`."""

import json
import sys
import types

import numpy as np
import pytest

from surefoot.cli import main
from surefoot.experiment.data import bpe
from surefoot.experiment.data.sources import evaluation, load
from surefoot.experiment.errors import DataError

from .commands import lines, refused, training

pytestmark = pytest.mark.usefixtures("undrawn")


def result(run):
    return json.loads((run / "result.json").read_text())


def test_validation_on_another_source_leaves_the_training_as_it_is(tmp_path, text, capsys):
    (tmp_path / "other.txt").write_bytes(b"a quite different sentence, with other words in it; " * 400)
    runs = {name: tmp_path / name for name in ("plain", "same", "other")}
    assert main(training(runs["plain"], text)) == 0
    for name, source in (("same", text), ("other", tmp_path / "other.txt")):
        assert main(training(runs[name], text, "--eval-data", f"{source}")) == 0
    found = {name: result(run) for name, run in runs.items()}
    assert len({each["train_loss"] for each in found.values()}) == 1
    assert found["same"]["val_loss"] == found["plain"]["val_loss"] != found["other"]["val_loss"]
    assert f"validation: {tmp_path / 'other.txt'}" in capsys.readouterr().err
    said = refused(training(runs["other"], text), capsys)
    assert "belongs to another configuration; it differs in eval_corpus: there " in said


@pytest.mark.parametrize("source", ["markov:256", "bpe:270:{text}", "{text}.none"])
def test_another_vocabulary_or_none_is_a_data_error(tmp_path, text, capsys, source):
    said = refused(training(tmp_path / "run", text, "--eval-data", source.format(text=text)), capsys, code=4)
    assert "give data of the same kind" in said or "does not exist" in said
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_too_short_is_named_with_its_own_numbers(tmp_path, text, capsys):
    short = tmp_path / "short.txt"
    short.write_bytes(text.read_bytes()[:60])
    said = refused(training(tmp_path / "run", text, "--eval-data", f"{short}"), capsys, code=4)
    assert f"{short}: 60 bytes are too few; the validation split has 6" in said


def test_a_file_of_tokens_for_validation_has_the_training_s_vocabulary_and_is_validation_as_a_whole(tmp_path, capsys):
    """As nanoGPT writes them: no manifest; the largest token of the second is not that of the first."""
    numbers = np.random.default_rng(0)
    for name, size, largest in (("train", 4000, 250), ("val", 300, 90)):
        (tmp_path / f"{name}.bin").write_bytes(numbers.integers(largest, size=size, dtype=np.uint16).tobytes())
    source, val = f"bin:256:{tmp_path}/train.bin", f"bin:{tmp_path}/val.bin"
    corpus = load(source)
    other = evaluation(val, source, corpus)
    assert (other.vocab, other.validation.size) == (256, 300)
    assert evaluation(f"bin:256:{val[4:]}", source, corpus).vocab == 256
    assert evaluation(f"bin:{tmp_path}/train.bin", source, corpus).validation.size == 400
    with pytest.raises(DataError, match="another vocabulary"):
        evaluation(f"bin:128:{val[4:]}", source, corpus)
    assert main(training(tmp_path / "run", source, "--eval-data", val)) == 0
    capsys.readouterr()
    said = refused(training(tmp_path / "x", source, "--vocab", "512"), capsys)
    assert "--vocab 512 is for --data bin:PATH; other data and bin:N:PATH have their own" in said


@pytest.mark.parametrize("source", ["", "text:"])
def test_an_empty_path_is_not_the_working_directory(tmp_path, capsys, source):
    assert "the path of the data is empty" in refused(training(tmp_path / "x", source), capsys)


def test_a_text_is_encoded_by_the_vocabulary_of_the_training_data(tmp_path, text, capsys):
    data = ["--data", f"bpe:280:{text}"]
    assert main([*training(tmp_path / "plain", text), *data]) == 0
    assert main([*training(tmp_path / "same", text, "--eval-data", f"{text}"), *data]) == 0
    assert result(tmp_path / "same")["val_loss"] == result(tmp_path / "plain")["val_loss"]
    capsys.readouterr()
    said = refused([*training(tmp_path / "x", text, "--eval-data", f"bpe:270:{text}"), *data], capsys, code=4)
    assert "give the text alone" in said


def test_a_run_is_logged_to_wandb_as_to_the_log(tmp_path, text, capsys, monkeypatch):
    sent = []
    run = types.SimpleNamespace(
        log=lambda scalars, step: sent.append((step, scalars)), finish=lambda: sent.append(None)
    )
    module = types.SimpleNamespace(init=lambda **options: sent.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    out = tmp_path / "run"
    assert main(training(out, text, "--log-every", "3", "--wandb")) == 0
    begun, *scalars, end = sent
    assert {"kind": "train", **begun["config"]} == json.loads((out / "config.json").read_text())
    logged = [(step, each["loss"]) for step, each in scalars if "loss" in each]
    assert logged == [(record["step"], record["loss"]) for record in lines(out / "log.jsonl")]
    norms = [(step, each["norm/head.weight"]) for step, each in scalars if "norm/head.weight" in each]
    assert norms == [(r["step"], r["norms"]["head.weight"][0]) for r in lines(out / "norms.jsonl")]
    assert end is None


def test_a_tokenizer_with_more_tokens_than_the_training_data_is_refused_before_it(tmp_path, text, capsys):
    tokens = np.random.default_rng(0).integers(200, size=(2, 3000), dtype=np.uint16)
    for name, part in zip(("train", "val"), tokens, strict=True):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    bpe.train([text.read_text()], 280, "text").save(str(tmp_path / "tokenizer.json"))
    run = training(tmp_path / "x", f"bin:{tmp_path}", "--eval-data", f"{text}")
    said = refused(run, capsys, code=4)
    assert f", but {tmp_path}, 256 tokens has 256: give --vocab N" in said
    assert main([*run, "--vocab", "280"]) == 0
