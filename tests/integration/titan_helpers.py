"""torchtitan's imports, its debug model cut to one layer, and its loop; skipped where it is not installed."""

import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of these imports
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton", reason="torchtitan's models import triton, which CPU builds of torch come without")
    from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
    from torchtitan.config import ConfigManager
    from torchtitan.models import deepseek_v3, gpt_oss, llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from surefoot.integrations.torchtitan import SteepestDescentContainer, plan_of

__all__ = [
    "TOKENS",
    "WQKV",
    "WRAPPED",
    "ConfigManager",
    "LRSchedulersContainer",
    "ParamGroupConfig",
    "SteepestDescentContainer",
    "assert_equal",
    "build",
    "container",
    "deepseek_v3",
    "gpt_oss",
    "plan_of",
    "train",
    "weights",
]

TOKENS = torch.randint(2048, (4, 9), generator=torch.Generator().manual_seed(1))
WRAPPED = "_checkpoint_wrapped_module"
WQKV = "layers.0.attention.qkv_linear.wqkv.weight"


def build(heads=2):
    """Its debug model, cut to one layer whose four queries share `heads` keys; attention that runs on any machine."""
    config = llama3._debugmodel("flex")
    (layer,) = config.layers = llama3._build_llama3_layers(
        n_layers=1,
        dim=256,
        n_heads=4,
        n_kv_heads=heads,
        hidden_dim=48,
        rope=llama3.ComplexRoPE.Config(dim=64, max_seq_len=64),
        attn_backend="flex",
    )
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights()
    return model


def container(model, lr=2**-4, **options):
    return SteepestDescentContainer.Config(lr=lr, **options).build(model_parts=[model])


def train(model, optimizers, schedule=(), tokens=TOKENS, steps=3):
    """`steps` of torchtitan's loop, and their losses."""
    losses = []
    for _ in range(steps):
        optimizers.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        for scheduler in schedule:
            scheduler.step()
        losses.append(float(loss))
    return losses


def weights(model):
    plain = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name.replace(f"{WRAPPED}.", ""): p.detach().clone() for name, p in plain.items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
