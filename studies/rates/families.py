"""Is the rate of the run's length right for other families? Causal models of `transformers`, at it, half and twice it.

    python studies/rates/families.py             # what is missing; 20 minutes of one core
    python studies/rates/families.py bloom opt   # only these families

From `AutoConfig.for_model(family)` with width 64, two layers, four heads and no dropout; a mixture has four experts,
two of them active. All else is the family's: norms, positions, biases, whether the table is tied, constants. 150 steps
of 16 sequences of 64 bytes, one seed, validation loss: differences of about .01 are noise.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.reports.style import markdown

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from rates.run import batches, validate  # noqa: E402
from rates.settings import Setting  # noqa: E402

RECORDS, SEED, SHIFTS = HERE / "families.jsonl", 0, (0, -1, 1)
SETTING = Setting(lambda vocab: nn.Identity())
WIDTH, DEPTH, HEADS, VOCAB = 64, 2, 4, 256
FAMILIES = [
    "apertus", "arcee", "bart", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "ctrl", "deepseek_v2",
    "deepseek_v3", "diffllama", "doge", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "lfm2", "llama", "mbart", "minimax", "mistral", "mixtral", "mpt",
    "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm",
]  # fmt: skip
SIZES = (
    (WIDTH, "hidden_size n_embd d_model word_embed_proj_dim"),
    (DEPTH, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_experts_per_tok"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads num_key_value_heads num_kv_heads"),
    (HEADS, "decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts"),
    (4 * WIDTH, "intermediate_size ffn_dim n_inner ffn_hidden_size inner_dim dff decoder_ffn_dim encoder_ffn_dim"),
    (2 * WIDTH, "moe_intermediate_size shared_expert_intermediate_size"),
    (WIDTH // HEADS, "head_dim rotary_dim query_pre_attn_scalar qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (WIDTH // 2, "q_lora_rank kv_lora_rank"),
    (SETTING.context, "max_position_embeddings n_positions max_seq_len n_ctx sliding_window"),
    (1, "n_group topk_group partial_rotary_factor"),
    (0, "first_k_dense_replace"),
    (VOCAB, "vocab_size"),
    (None, "pad_token_id bos_token_id eos_token_id"),
)
"""Attributes of configurations and what they are set to, where a family has them."""


def build(family: str) -> nn.Module:
    """A small model of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family)
    values = {name: size for size, names in SIZES for name in names.split()}
    values |= dict.fromkeys((name for name in vars(config) if "drop" in name), 0.0)
    values |= {"layer_types": ["full_attention"] * DEPTH, "attention_types": [[["global"], DEPTH]], "use_cache": False}
    for name, value in values.items():
        if hasattr(config, name) and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, value)
    torch.manual_seed(SEED)
    return Logits(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float())


class Logits(nn.Module):
    """A causal model from its tokens to its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(B, T)` -> `(B, T, V)`."""
        return self.model(input_ids=tokens).logits


def measure(family: str, shift: int) -> dict[str, Any]:
    """Train one model at `2^shift` times the given rate."""
    start, recipe = time.perf_counter(), sf.recipes.steady()
    model = build(family)
    plan = sf.Plan.of(model.model, recipe, run=SETTING.run)
    plan.initialise_(model.model, SEED)
    optimizer = sf.SteepestDescent(model.model, plan, lr=2.0**shift * recipe.rate(SETTING.run))
    schedule = SETTING.run.schedule(optimizer)
    for _, (x, y) in zip(range(SETTING.steps), batches(None, SETTING, SEED), strict=False):
        loss = F.cross_entropy(model(x).flatten(0, -2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found = validate(model.eval(), SETTING)
    seconds = round(time.perf_counter() - start, 1)
    loss = found if math.isfinite(found) else None
    return {"family": family, "shift": shift, "val_loss": loss, "seconds": seconds}


def table() -> str:
    """Where the lowest of the three losses is, and what it is below that at the given rate."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for record in read_lines(RECORDS):
        curves[record["family"]][record["shift"]] = math.inf if record["val_loss"] is None else record["val_loss"]
    rows, curves = [], {family: own for family, own in curves.items() if own.keys() == {*SHIFTS}}
    for shift, where in zip(SHIFTS, ("the given rate", "half of it", "twice it"), strict=True):
        lost = {f: own[0] - own[shift] for f, own in curves.items() if min(own, key=own.__getitem__) == shift}
        ordered = sorted(lost.items(), key=lambda pair: (-pair[1], pair[0]))
        named = ", ".join(f"{family} {x:.3f}" if shift else family for family, x in ordered)
        rows.append([where, str(len(lost)), named])
    return markdown(["lowest loss at", "families", "which, and how much lower"], rows)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    torch.set_num_threads(1)
    for family in parser.parse_args().families:
        for shift in SHIFTS:
            done = read_lines(RECORDS) if RECORDS.exists() else []
            if not any((record["family"], record["shift"]) == (family, shift) for record in done):
                record = measure(family, shift)
                with Log(RECORDS) as log:
                    log.append(record)
                print(record, flush=True)


if __name__ == "__main__":
    main()
