"""The code of docs/integrations.md, run: every block, then a resume in the middle that goes on bit for bit."""

import csv
import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import surefoot as sf

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # those of the trainers are theirs
]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
STEPS, CONTEXT = 6, 8
RATE = sf.recipes.steady().rate(sf.Run(STEPS, 2 * CONTEXT))  # of two sequences a step


def blocks(title):
    """The Python blocks of a section."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def build():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def dataset(count=STEPS * 2):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(32, (CONTEXT,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **options):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        **options,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_plain_pytorch():
    model = build()
    space = {"sf": sf, "model": model, "steps": 4, "batch_size": 1, "context": CONTEXT}
    (code,) = blocks("Plain PyTorch")
    exec(code, space)
    rate = sf.recipes.steady().rate(sf.Run(4, CONTEXT))
    assert space["optimizer"].param_groups[0]["initial_lr"] == rate
    before = weights(model)
    for row in dataset(4):
        model(row["input_ids"][None], labels=row["labels"][None]).loss.backward()
        space["optimizer"].step()
        space["scheduler"].step()
    assert space["optimizer"].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("index", [0, 1], ids=["optimizers=", "optimizer_cls_and_kwargs="])
def test_hugging_face_trainer_and_its_resume(tmp_path, index):
    pytest.importorskip("accelerate")

    def run(folder, resume=None, **options):
        model = build()
        space = {"sf": sf, "transformers": transformers, "model": model, "dataset": dataset(), "context": CONTEXT}
        space["arguments"] = arguments(folder, **options)
        length, *ways = blocks("Hugging Face Trainer")
        exec(length + ways[index].replace("trainer.train()", "pass"), space)
        space["trainer"].train(resume_from_checkpoint=resume)
        optimizer = getattr(space["trainer"].optimizer, "optimizer", space["trainer"].optimizer)
        assert isinstance(optimizer, sf.SteepestDescent)
        assert optimizer.param_groups[0]["initial_lr"] == RATE
        return weights(model), space["trainer"].state.log_history

    whole, history = run(tmp_path / "whole")
    rates = [row["learning_rate"] for row in history if "loss" in row]
    assert rates == pytest.approx([RATE * sf.Run(STEPS, 1).factor(step) for step in range(STEPS)])
    steps = [
        row["step"] for row in history if 0 < row.get("stability/of_bound", 0) < 1 < row["stability/forward_lower"]
    ]
    assert steps == [*range(1, STEPS + 1)] * index  # which the second block asks for
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    again, _ = run(tmp_path / "again", resume=checkpoint)
    assert_equal(whole, again)
    with pytest.raises(ValueError, match=r"has Run\(steps=6, tokens=16\), the optimizer Run\(steps=6, tokens=32\)"):
        run(tmp_path / "other", resume=checkpoint, gradient_accumulation_steps=2)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    pytest.importorskip("accelerate")
    model = build()
    optimizer = sf.SteepestDescent(model, sf.Plan.of(model), lr=0.01)
    transformers.Trainer(model, arguments(tmp_path), train_dataset=dataset(), optimizers=(optimizer, None)).train()
    model = build()
    optimizer = sf.SteepestDescent(model, sf.Plan.of(model, sf.recipes.scion()), lr=0.01)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=dataset(), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="another plan"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), build()
    loader = torch.utils.data.DataLoader(dataset(), batch_size=2)
    space = {"sf": sf, "accelerator": accelerator, "model": model, "loader": loader}
    space |= {"steps": STEPS, "batch_size": 2, "context": CONTEXT}
    before = weights(model)
    (code,) = blocks("accelerate")
    exec(code, space)
    assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)
    assert space["optimizer"].optimizer.param_groups[0]["initial_lr"] == RATE
    assert space["optimizer"].optimizer.stability()["lm_head.weight"]["forward_lower"] > 0
    accelerator.save_state(str(tmp_path / "state"))
    saved = weights(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert_equal(saved, weights(model))


def test_lightning_and_its_resume(tmp_path):
    lightning = pytest.importorskip("lightning")
    space = {"sf": sf, "lightning": lightning, "build": build, "batch_size": 2, "context": CONTEXT}
    exec(blocks("Lightning")[0], space)

    def fit(folder, steps, resume=None):
        module = space["Module"]()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=lightning.pytorch.loggers.CSVLogger(folder, version=""),
            log_every_n_steps=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            callbacks=[
                lightning.pytorch.callbacks.ModelCheckpoint(dirpath=str(folder), every_n_train_steps=3, save_top_k=-1),
                log,
            ],
        )
        trainer.fit(module, torch.utils.data.DataLoader(dataset(6), batch_size=2), ckpt_path=resume)  # whole epochs
        return weights(module), trainer.optimizers[0].param_groups[0]["initial_lr"]

    log = import_module("surefoot.integrations.lightning").StabilityLog()
    log.on_before_optimizer_step(None, None, torch.optim.Adam([torch.zeros(1)]))  # a second optimizer is passed over
    whole, lr = fit(tmp_path / "whole", STEPS)
    assert lr == RATE
    logged = list(csv.DictReader((tmp_path / "whole" / "lightning_logs" / "metrics.csv").open()))
    assert [int(row["step"]) for row in logged if 0 < float(row["stability/of_bound"]) < 1] == [0, 2, 4]
    (checkpoint,) = (tmp_path / "whole").glob("*step=3.ckpt")
    again, lr_again = fit(tmp_path / "again", STEPS, resume=str(checkpoint))
    assert_equal(whole, again)
    assert lr == lr_again
    with pytest.raises(ValueError, match=r"has Run\(steps=6, tokens=16\), the optimizer Run\(steps=5, tokens=16\)"):
        fit(tmp_path / "other", STEPS - 1, resume=str(checkpoint))


TWO = sf.Run(4, 2 * CONTEXT)
"""The length of a run of two processes, of a sequence each a step."""


def assert_trained_as_one(folder):
    """The weights that two processes have saved are those of one process on the same batches."""
    model = build()
    optimizer = sf.SteepestDescent(model, run=TWO)
    schedule = TWO.schedule(optimizer)
    for batch in batches():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for rank in (0, 1):
        found = torch.load(folder / f"{rank}.pt")
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-5, msg=name)


SHARDED = """
import sys
import torch, lightning
import surefoot as sf
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[1])
from test_trainers import CONTEXT, batches, blocks, build

if __name__ == "__main__":
    batch_size, context = 1, CONTEXT
    for code in blocks("Lightning"):
        exec(code)
    module, strategy = Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    options = dict.fromkeys(off, False)  # without a sampler both processes see the same batches
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=4, **options)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    whole = {name: p.full_tensor().detach() for name, p in module.model.named_parameters()}
    torch.save(whole, f"{sys.argv[2]}/{module.global_rank}.pt")
"""


def test_lightning_under_fsdp2(tmp_path):
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert_trained_as_one(tmp_path)


def under_fsdp2(rank, ranks, folder):
    """The page's loop of accelerate under FSDP2, which accelerate itself starts on accelerators only."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": (Path(folder) / "port").read_text(), "GLOO_SOCKET_IFNAME": "lo"}
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerator.state._shared_state["fsdp_plugin"] = plugin
    model = build()
    space = {"sf": sf, "model": model, "accelerator": accelerator, "loader": batches()}
    space |= {"steps": TWO.steps, "batch_size": 1, "context": CONTEXT}
    (code,) = blocks("accelerate")
    exec(code, space)
    whole = {name: p.full_tensor().detach() for name, p in space["model"].named_parameters()}
    torch.save(whole, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def batches():
    rows = dataset(4)
    return [{"input_ids": row["input_ids"][None], "labels": row["labels"][None]} for row in rows]


def test_accelerate_under_fsdp2_puts_other_parameters_into_the_optimizer(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    torch.multiprocessing.spawn(under_fsdp2, (2, str(tmp_path)), nprocs=2)
    assert_trained_as_one(tmp_path)


def test_parameters_put_into_a_group_later_are_refused():
    model = build()
    optimizer = sf.SteepestDescent(model, lr=2**-6)
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(32, 16))
    optimizer.step()  # before its first step it is known by its name
    next(model.parameters()).grad = None
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(32, 16))
    with pytest.raises(ValueError, match="wrap the model before the first step"):
        optimizer.step()
