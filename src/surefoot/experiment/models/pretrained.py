"""Loading the weights of transformers' GPT-2 and LLaMA into the reference models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.experiment.models.decoder import GPT, Decoder, Llama

Split = Callable[[Tensor], tuple[Tensor, ...]]


class Source(NamedTuple):
    """One tensor of transformers' state dictionary, and the parameters that it is written to.

    Args:
        name: its name in transformers.
        targets: names of our parameters, several for a fused tensor.
        split: from the tensor to the values of the targets.
    """

    name: str
    targets: tuple[str, ...]
    split: Split


def _as_is(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def _conv1d(x: Tensor) -> tuple[Tensor, ...]:
    return (x.t(),)  # transformers' Conv1D holds (in, out), and biases (out,), which t() leaves alone


def _fused_conv1d(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.t() for part in x.chunk(3, dim=-1))


_QKV = ("attention.query", "attention.key", "attention.value")
_GPT2_BLOCK: tuple[tuple[str, tuple[str, ...], Split], ...] = (
    ("ln_1", ("attention_norm",), _as_is),
    ("attn.c_attn", _QKV, _fused_conv1d),
    ("attn.c_proj", ("attention.output",), _conv1d),
    ("ln_2", ("mlp_norm",), _as_is),
    ("mlp.c_fc", ("mlp.up",), _conv1d),
    ("mlp.c_proj", ("mlp.down",), _conv1d),
)
_LLAMA_BLOCK = (
    ("input_layernorm", "attention_norm"),
    ("self_attn.q_proj", "attention.query"),
    ("self_attn.k_proj", "attention.key"),
    ("self_attn.v_proj", "attention.value"),
    ("self_attn.o_proj", "attention.output"),
    ("post_attention_layernorm", "mlp_norm"),
    ("mlp.gate_proj", "mlp.gate"),
    ("mlp.up_proj", "mlp.up"),
    ("mlp.down_proj", "mlp.down"),
)
# Constants that older checkpoints store beside the weights: causal masks and rotary frequencies.
_CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def load_gpt2_(model: GPT, state: Mapping[str, Tensor]) -> None:
    """Write the weights of transformers' `GPT2LMHeadModel` (its `state_dict()`) into `model`.

    Fused query-key-value matrices are cut in three and `Conv1D` matrices `(in, out)` transposed.

    Args:
        model: written to; its configuration has the checkpoint's sizes.
        state: names and tensors.

    Raises:
        ValueError: a missing or left-over tensor, a wrong shape, or a head that differs from the embedding of a
            tied model; all are named, and `model` is then untouched.
    """
    _load_(model, state, list(_gpt2_sources(model)))


def load_llama_(model: Llama, state: Mapping[str, Tensor]) -> None:
    """Write the weights of transformers' `LlamaForCausalLM` (its `state_dict()`) into `model`.

    Args:
        model: written to; its configuration has the checkpoint's sizes.
        state: names and tensors.

    Raises:
        ValueError: as in `load_gpt2_`.
    """
    _load_(model, state, list(_llama_sources(model)))


def _gpt2_sources(model: GPT) -> Iterator[Source]:
    own = model.state_dict().keys()
    yield Source("transformer.wte.weight", ("embedding.weight",), _as_is)
    if "position_embedding.weight" in own:
        yield Source("transformer.wpe.weight", ("position_embedding.weight",), _as_is)
    modules = [
        (f"transformer.h.{i}.{theirs}", tuple(f"blocks.{i}.{name}" for name in ours), split)
        for i in range(model.config.size.depth)
        for theirs, ours, split in _GPT2_BLOCK
    ]
    for theirs, ours, split in [*modules, ("transformer.ln_f", ("final_norm",), _as_is)]:
        for kind in ("weight", "bias"):
            targets = tuple(f"{name}.{kind}" for name in ours)
            if targets[0] in own:
                yield Source(f"{theirs}.{kind}", targets, split)
    yield Source("lm_head.weight", ("head.weight",), _as_is)


def _llama_sources(model: Llama) -> Iterator[Source]:
    own = model.state_dict().keys()
    yield Source("model.embed_tokens.weight", ("embedding.weight",), _as_is)
    modules = [
        (f"model.layers.{i}.{theirs}.weight", f"blocks.{i}.{ours}.weight")
        for i in range(model.config.size.depth)
        for theirs, ours in _LLAMA_BLOCK
    ]
    for theirs, ours in [*modules, ("model.norm.weight", "final_norm.weight")]:
        if ours in own:
            yield Source(theirs, (ours,), _as_is)
    yield Source("lm_head.weight", ("head.weight",), _as_is)


def _load_(model: Decoder, state: Mapping[str, Tensor], sources: list[Source]) -> None:
    given = {name: x for name, x in state.items() if not name.endswith(_CONSTANTS)}
    head, embedding = sources[-1].name, sources[0].name
    if model.config.head != "untied" and embedding in given:
        given.setdefault(head, given[embedding])  # safetensors files store a shared tensor once
        if not torch.equal(given[head], given[embedding]):
            raise ValueError(f"{head} differs from {embedding}, and the model ties them; build it untied")
    wanted = [source.name for source in sources]
    missing, extra = sorted(set(wanted) - given.keys()), sorted(given.keys() - set(wanted))
    if missing or extra:
        raise ValueError(f"the weights do not fit the model; missing: {missing}; left over: {extra}")
    own = model.state_dict()
    loaded: dict[str, Tensor] = {}
    for source in sources:
        parts = source.split(given[source.name])
        if [part.shape for part in parts] != [own[name].shape for name in source.targets]:
            wants = [tuple(own[name].shape) for name in source.targets]
            raise ValueError(f"{source.name} of shape {tuple(given[source.name].shape)} does not give {wants}")
        loaded.update(zip(source.targets, parts, strict=True))
    model.load_state_dict(loaded)
