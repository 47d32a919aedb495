"""The diffs of examples/ against training scripts that people copy: what they add runs, and so do the scripts."""

import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_models import CONTEXT, TOKENS, VOCAB, Decoder, NanoChat, NanoGPT

import surefoot as sf

EXAMPLES = Path(__file__).parents[3] / "examples"
DIFFS = sorted(EXAMPLES.glob("*.diff"))
MOST = 10
STEPS, TOKENS_A_STEP = 8, TOKENS.numel()

NEW_FILES = {
    "wandb.py": "",
    "scripts/base_eval.py": "evaluate_core = None\n",
    "nanochat/engine.py": "Engine = None\n",
    "nanochat/loss_eval.py": "evaluate_bpb = None\n",
    "nanochat/tokenizer.py": """
import torch

class Tokenizer:
    def get_vocab_size(self):
        return 64

get_tokenizer = Tokenizer

def get_token_bytes(device):
    return torch.ones(64, device=device)
""",
    "nanochat/dataloader.py": """
import torch

def tokenizing_distributed_data_loader_bos_bestfit(tokenizer, B, T, split, device):
    raise AssertionError

def tokenizing_distributed_data_loader_with_state_bos_bestfit(tokenizer, B, T, split, device, resume_state_dict=None):
    while True:
        rows = (torch.arange(T + 1) + torch.randint(64, (B, 1))) % 64
        state = dict.fromkeys(("epoch", "pq_idx", "rg_idx"), 0)
        yield rows[:, :-1].contiguous().to(device), rows[:, 1:].contiguous().to(device), state
""",
}
"""In place of nanochat's data and evaluation, whose packages are not among ours: rows that count."""


def changed(path, signs="+-"):
    """The added or removed lines of a diff."""
    return re.findall(rf"^[{signs}](?![{signs}]{{2}} )(.*)$", path.read_text("utf-8"), re.MULTILINE)


def added(name):
    """What a diff adds: before the loop, and in it."""
    lines = changed(EXAMPLES / name, "+")
    return [[line.strip() for line in lines if line.startswith("    ") == inside] for inside in (False, True)]


def losses(model, space, steps, before_step):
    """Of steps on the same rows."""
    for step in range(steps):
        loss = model(TOKENS, TOKENS.roll(-1, 1))
        loss.backward()
        before_step(step)
        space["optimizer"].step()
        model.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("path", DIFFS, ids=lambda path: path.stem)
def test_a_diff_is_short(path):
    assert 0 < len(changed(path)) <= MOST
    assert {line for line in changed(path) if "surefoot" in line} == {"import surefoot as sf"}


def test_what_the_diff_of_nanogpt_adds_trains_a_model_of_its_wiring():
    model = Decoder(NanoGPT)
    space = {"model": model, "max_iters": STEPS, "tokens_per_iter": TOKENS_A_STEP, "init_from": "scratch"}
    setup, loop = added("nanogpt.diff")
    exec("\n".join(setup), space)
    expected = Decoder(NanoGPT)
    plan = sf.Plan.of(expected, run=sf.Run(STEPS, TOKENS_A_STEP))
    plan.initialise_(expected, seed=1337)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=False) if p.ndim > 1)

    def before_step(step):
        space["iter_num"] = step
        exec("\n".join(loop), space)
        assert space["lr"] == pytest.approx(plan.rate * plan.run.factor(step))
        for group in space["optimizer"].param_groups:
            group["lr"] = space["lr"]

    first, *_, last = losses(model, space, STEPS, before_step)
    assert last < first - 0.5


@pytest.mark.parametrize(("given", "flops", "steps"), [(STEPS, -1.0, STEPS), (-1, 3e6, 30), (-1, -1.0, 20)])
def test_what_the_diff_of_nanochat_adds_trains_a_model_of_its_wiring(given, flops, steps):
    torch.manual_seed(0)
    model, reduced = Decoder(NanoChat), []
    space = {"args": Namespace(num_iterations=given, target_flops=flops), "num_flops_per_token": 1e5 / TOKENS_A_STEP}
    space |= {"total_batch_size": TOKENS_A_STEP, "target_tokens": 20 * TOKENS_A_STEP, "orig_model": model}
    space |= {"dist": Namespace(all_reduce=lambda x, op: reduced.append(op), ReduceOp=Namespace(AVG="mean"))}
    setup, loop = added("nanochat.diff")
    exec("\n".join(setup), space)
    run = sf.Run(steps, TOKENS_A_STEP)
    assert space["run"] == run

    def before_step(step):
        space["step"], space["is_ddp_initialized"] = step, lambda: step == 3
        *statements, branch = loop
        exec("\n".join(statements), space)
        for group in space["optimizer"].param_groups:
            group["lr"] = group["initial_lr"] * space["lrm"]
            exec(f"{branch} raise AssertionError", space | {"group": group})
            assert group["lr"] == pytest.approx(sf.recipes.steady().rate(run) * run.factor(step))

    first, *_, last = losses(model, space, steps, before_step)
    assert last < first - 0.5
    assert reduced == ["mean"] * len([*model.parameters()])


def patched(variable, name, folder):
    """A copy of the checkout that an environment variable names, with a diff applied."""
    if not (checkout := os.environ.get(variable)):
        pytest.skip(f"{variable} names no checkout of {name}")
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    subprocess.run(["git", "apply", str(EXAMPLES / f"{name}.diff")], cwd=folder, check=True)


def train(folder, *arguments):
    """The losses that a training script prints."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "NANOCHAT_BASE_DIR": str(folder / "base")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(x) for x in re.findall(r"loss:? (\d+\.\d+)", done.stdout)]
    assert all(map(math.isfinite, found))
    return found


@pytest.mark.integration
def test_nanogpt_itself_trains_and_resumes(tmp_path):
    folder = tmp_path / "nanoGPT"
    patched("SUREFOOT_NANOGPT", "nanogpt", folder)
    for part in ("train", "val"):
        (folder / "data" / "count").mkdir(exist_ok=True, parents=True)
        (np.arange(4096) % VOCAB).astype(np.uint16).tofile(folder / "data" / "count" / f"{part}.bin")
    shared = ["train.py", "--dataset=count", "--device=cpu", "--dtype=float32", "--compile=False", "--log_interval=1"]
    shared += [
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=32",
        f"--block_size={CONTEXT}",
        "--batch_size=4",
        "--max_iters=30",
    ]
    shared += [
        "--gradient_accumulation_steps=2",
        "--eval_iters=1",
        "--eval_interval=15",
        "--always_save_checkpoint=True",
    ]
    found = train(folder, *shared)
    assert found[-1] < found[0] - 0.5
    assert train(folder, *shared, "--init_from=resume")[-1] < found[0] - 0.5


@pytest.mark.integration
def test_nanochat_itself_trains(tmp_path):
    folder = tmp_path / "nanochat"
    patched("SUREFOOT_NANOCHAT", "nanochat", folder)
    for name, text in NEW_FILES.items():
        (folder / name).write_text(text)
    shared = ["-m", "scripts.base_train", "--depth=2", "--head-dim=16", "--aspect-ratio=16", "--max-seq-len=16"]
    shared += ["--device-batch-size=4", "--total-batch-size=64", "--num-iterations=30", "--device-type=cpu"]
    shared += ["--window-pattern=L", *(f"--{each}-every=-1" for each in ("eval", "core-metric", "sample", "save"))]
    found = train(folder, *shared)
    assert found[-1] < found[0] - 0.5
