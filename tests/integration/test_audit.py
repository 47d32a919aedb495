"""`surefoot audit` of models that exist as a configuration only, and its warnings."""

import json
import time

import pytest
import torch

import surefoot as sf
from surefoot.cli import main

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.integration


def llama(folder, **sizes):
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(folder)
    return str(folder)


def test_a_model_of_seventy_billion_in_seconds(tmp_path, capsys):
    big = llama(
        tmp_path / "big",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    start = time.perf_counter()
    assert main(["audit", big, "--json"]) == 0
    assert time.perf_counter() - start < 60
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["parameters"]}
    assert len(rows) == 80 * 9 + 3
    assert rows["lm_head.weight"]["role"] == "head"
    key = rows["model.layers.79.self_attn.k_proj.weight"]
    assert (key["role"], key["fan in"], key["fan out"]) == ("linear", "8192", "1024")
    assert rows["model.norm.weight"]["fan in"] == "8192"


def test_the_file_itself_and_what_it_warns_of(tmp_path, capsys):
    folder = llama(tmp_path, hidden_size=8, intermediate_size=400, num_attention_heads=2, num_key_value_heads=1)
    assert main(["audit", f"{folder}/config.json"]) == 0
    out = capsys.readouterr().out
    assert "k_proj.weight has a side of 4" in out
    assert "mlp.up_proj.weight is 50 times as long as wide" in out


def test_files_that_describe_nothing_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nothing at all"}')
    assert main(["audit", str(tmp_path)]) == 2
    assert "not a configuration known to transformers" in capsys.readouterr().err
    transformers.LlamaConfig(architectures=["LlamaForNothing"]).save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path)]) == 2
    assert "names the architecture LlamaForNothing" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "absent.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": 64, "num_attention_heads": 7}, "The hidden size (64) is not a multiple of the number of att"),
        ({"hidden_size": "many"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": -3}, "config.json describes a model that cannot be built"),
        (
            {"architectures": ["AutoConfig"]},
            "names the architecture AutoConfig, which is no model of this transformers",
        ),
        ({"architectures": ["LlamaTokenizer"]}, "names the architecture LlamaTokenizer, which is no model"),
    ],
    ids=str,
)
def test_a_configuration_of_no_possible_model_is_refused(tmp_path, capsys, config, reason):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}))
    assert main(["audit", str(path)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("size", ["--width", "--depth", "--head-dim", "--vocab"])
def test_sizes_that_a_model_has_itself_are_refused(tmp_path, capsys, monkeypatch, size):
    folder = llama(tmp_path, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
    assert main(["audit", folder, size, "16"]) == 2
    assert f"{folder} has sizes of its own: leave {size} out" in capsys.readouterr().err
    (tmp_path / "audited.py").write_text("import torch\ndef build(width=8): return torch.nn.Linear(width, 8)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "audited:build", size, "16"]) == (0 if size == "--width" else 2)
    found = capsys.readouterr()
    assert "8x16" in found.out or f"audited:build has sizes of its own: leave {size} out" in found.err


def test_two_models_are_one_too_many(capsys):
    assert main(["audit", "llama", "--model", "gpt"]) == 2
    assert "llama and --model gpt: name one model" in capsys.readouterr().err


def test_code_beside_a_configuration_is_not_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether it shall be run"))
    for name in (tmp_path, tmp_path / "config.json"):
        assert main(["audit", str(name)]) == 2
        assert "contains custom code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_weights_far_from_norm_one_are_warned_of(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    sf.Plan.of(model).initialise_(model, seed=0)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path), "--weights", "--json"]) == 0
    assert not [line for line in json.loads(capsys.readouterr().out)["warnings"] if "has norm" in line]

    model.model.layers[0].mlp.up_proj.weight.data.mul_(100)
    model.save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path), "--weights", "--json"]) == 0
    (line,) = [line for line in json.loads(capsys.readouterr().out)["warnings"] if "has norm" in line]
    assert line.startswith("model.layers.0.mlp.up_proj.weight has norm ")
    assert 80 < float(line.split("has norm ")[1].split(":")[0]) < 130
    assert main(["audit", str(tmp_path), "--json"]) == 0
    assert "has norm" not in capsys.readouterr().out, "without --weights nothing is read"


@pytest.mark.parametrize("harm", ["absent", "cut", "renamed", "deeper"])
def test_weights_that_cannot_be_read_are_an_error(tmp_path, capsys, harm):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    told = "no readable weights"
    if harm == "absent":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif harm == "deeper":
        told = "have, unlike its configuration, model.layers.1."
        deeper = transformers.LlamaConfig(vocab_size=50, **sizes | {"num_hidden_layers": 2})
        transformers.LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
        path.write_bytes((tmp_path / "deeper" / "model.safetensors").read_bytes())
    else:
        told = "lack model.layers.0.mlp.up_proj.weight"
        tensors = safetensors.load_file(path)
        tensors["model.layers.0.mlp.other.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        safetensors.save_file(tensors, path, {"format": "pt"})
    assert main(["audit", str(tmp_path), "--weights"]) == 2
    assert told in capsys.readouterr().err
