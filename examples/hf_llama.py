"""A LLaMA of `transformers`, trained from its configuration, then fine-tuned with a limit on every weight's growth.

You should see: each of the 4 heads of queries and 2 of keys has its own norm; class and wiring give each role. Then
the same text in capitals: with the limit no norm grows by more than a tenth, without it one does by half. The losses
are close.
"""

import copy
from pathlib import Path

import torch
from picture import Picture
from transformers import LlamaConfig, LlamaForCausalLM

import surefoot as sf

picture = Picture(__doc__)
text = (Path(__file__).parents[1] / "LICENSE").read_bytes()
sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 128}


def train(model: torch.nn.Module, plan: sf.Plan, data: bytes, steps: int) -> tuple[list[float], float]:
    """Return the losses, and by how much the norm grew that grew most."""
    torch.manual_seed(0)
    tokens = torch.tensor(list(data))
    optimizer = sf.SteepestDescent(model, plan, lr=2**-4)
    before, losses = optimizer.stability(), []
    for _ in range(steps):
        rows = tokens[torch.randint(len(tokens) - 64, (16, 1)) + torch.arange(64)]
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = optimizer.stability()
    return losses, max(after[name]["forward_lower"] / before[name]["forward_lower"] for name in plan)


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
plan = sf.Plan.of(model)
plan.initialise_(model, seed=0)
for name in [*list(plan)[:5], "lm_head.weight"]:
    print(f"{name}: {plan[name].role.name}, {plan[name].blocks}, {plan[name].why}")
losses, _ = train(model, plan, text, steps=80)
print(f"from scratch: loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
curves = {}
for name, stabiliser in {"free": sf.Free(), "growth of a tenth at most": sf.PostClip(1.1)}.items():
    tuned = copy.deepcopy(model)  # pretrained: its weights are not initialised, and radii are in units of their norms
    plan = sf.Plan.of(tuned, stabiliser=stabiliser).relative_to(tuned)
    losses, growth = train(tuned, plan, text.upper(), steps=60)
    print(
        f"in capitals, {name}: loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}, largest growth {growth:.2f} times"
    )
    curves[name] = [losses]
picture.draw("step", "loss on the text in capitals", curves)
