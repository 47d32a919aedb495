"""Factors in models: constants on table rows, branches, logits or attention, and weight norm's lengths of parts.

Where a model of `transformers` multiplies by `c`, units are divided by it: `c W x` are the outputs of `c W`, so W's
initial values, steps and bounds are those of `c W` divided by c, and the model trains as without the constant. A
table that is embedding and head has the units of logits; rows added to its rows are as large as these are once they
are multiplied. Attention that multiplies products of heads of size d by c above `1/sqrt(d)`, as by 1, counts as one
that multiplies queries and keys by `sqrt(c sqrt(d))` each. Below, as at muP's `1/d`, the scale was chosen.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from surefoot.discovery.heads import head_dim_of, normed, parts, scale_of
from surefoot.discovery.kinds import Kind, Kinds, Search, blocks_of, class_names, is_linear, times
from surefoot.initialise import NormalInitial
from surefoot.roles import by_name

_CONSTANTS = (
    ("head", "logit_scale lm_head_multiplier logits_scaling", 1, "Cohere FalconH1 HyperCLOVAX"),
    ("head", "logits_scaling", -1, "Granite MiniCPM"),
    ("head", "d_model", -0.5, "UMT5 SwitchTransformers Udop"),
    ("head", "d_model", -0.5, "T5 LongT5 Pop2Piano", "scale_decoder_outputs"),
    ("embedding", "hidden_size", 0.5, "T5GemmaEncoder T5GemmaDecoder RecurrentGemma"),
    ("embedding", "hidden_size", 0.5, "Afmoe", "mup_enabled"),
    ("embedding", "scalar_embed_scale embed_scale embedding_multiplier", 1, ""),
    ("branch", "residual_multiplier residual_scale", 1, ""),
    ("layer", "k_proj:key_multiplier gate_proj:gate_multiplier down_proj:down_multiplier", 1, ""),
    ("layer", "mamba.out_proj:ssm_out_multiplier self_attn.o_proj:attn_out_multiplier", 1, ""),
)
"""Columns: what is multiplied; the names of the numbers, each behind its layer; their power; prefixes of the classes
whose configuration has the number, or none for an attribute of any class; flags that the configuration must also set.
An attribute about rows is the table's own, or of the module that has the table as `embed_tokens`."""

_OF_LINEAR = ("weight", "bias", "parametrizations.")
"""How the names of a linear layer's own parameters begin, those of weight norm included."""

_WHAT = {"head": "logits are", "embedding": "rows are", "branch": "what it adds is", "layer": "outputs are"}


def multiplied(search: Search, kinds: Kinds) -> Kinds:
    """Add to the kinds the units of what the model multiplies, and of rows that are added to its head's."""
    constants = constants_of(search.model)
    tables = [("embedding", search.parameters[name]) for name, kind in kinds.items() if kind and kind.name == "head"]
    rows = [(1 / constant, why) for constant, why in (constants[key] for key in tables if key in constants)]
    found = dict(kinds)
    for name, kind in kinds.items():
        added = kind is not None and kind.name == "tied_positions"
        uses = ("head" if added else kind.name, "branch" if kind.branches else "", "layer", "heads") if kind else ()
        said = [constants[key] for use in uses if (key := (use, search.parameters[name])) in constants]
        if kind and (said := said + rows[:added]):
            factor, why = 1 / math.prod(constant for constant, _ in said), "; ".join([kind.why, *(x for _, x in said)])
            found[name] = replace(kind, units=(*kind.units, partial(times, factor=factor)), why=why)
    return found


def constants_of(model: nn.Module) -> dict[tuple[str, nn.Parameter], tuple[float, str]]:
    """What a model multiplies by constants: (use, parameter) -> (constant, reason)."""
    return {key: said for module in model.modules() for key, said in _constants(module)}


def lengths(search: Search, kinds: Kinds) -> Kinds:
    """Add the kinds of the lengths that weight norm gives a weight's parts, where the weight's kind is known.

    In `g v / |v|` the lengths g are a gain on these parts, whose unit is the average length of the parts under the
    usual initial values. So g starts there and moves by that unit: with one length for each output, or for each tap of
    a kernel, the outputs change as much at any width. Of v, only the direction counts.
    """
    found = dict(kinds)
    for own in search.own.values():
        for attribute, (name, v) in own.items():
            gain, g = own.get(f"{attribute}_g", ("", None))
            if g is None or not (kind := kinds[name]):
                continue
            role = replace(kind, initial=None).adapt(by_name(kind.name))
            if isinstance(role.initial, NormalInitial):
                squares = (math.prod(block) * role.initial.std(block) ** 2 for block in blocks_of(role.view, v))
                unit = partial(times, factor=math.sqrt(sum(squares) / g.numel()))
                why = f"lengths in {kind.why}: a gain on parts that start as long as those of a layer without them"
                found[gain] = Kind("gain", why, units=(unit,))
    return found


def _constants(module: nn.Module) -> Iterator[tuple[tuple[str, nn.Parameter], tuple[float, str]]]:
    """What a module multiplies by a constant: (use, parameter), (constant, reason)."""
    config, names = getattr(module, "config", None), class_names(module)
    config, table = getattr(config, "text_config", config), "" if isinstance(module, nn.Embedding) else "embed_tokens"
    for use, attributes, power, classes, *conditions in _CONSTANTS:
        listed = any(name.startswith((*classes.split(" "),)) for name in names)
        said = listed and all(getattr(config, condition, False) for condition in conditions)
        for path, _, attribute in (each.rpartition(":") for each in attributes.split() if said):
            number = getattr(config if classes else module, attribute, None)
            constant = number**power if isinstance(number, float | int) and number > 0 else 1
            if constant != 1 and (inner := dict(module.named_modules()).get(table if use == "embedding" else path)):
                by = f"{'the configuration' if classes else type(module).__name__}'s {attribute}"
                why = f"{_WHAT[use]} multiplied by {constant:g}, by {by}"
                yield from (((use, p), (constant, why)) for p in inner.parameters())
    yield from _heads(module)


def _heads(module: nn.Module) -> Iterator[tuple[tuple[str, nn.Parameter], tuple[float, str]]]:
    """What an attention layer's large scale of products makes of queries and of keys, if no norm makes them anew.

    Both must have linear layers of their own, without the values: half a correction would be none.
    """
    known = parts(module)
    if not {"query", "key"} <= known.keys() or normed(module):
        return
    layers = {known[what].layer: None for what in ("query", "key")}
    own = {p: None for layer in layers for name, p in layer.named_parameters() if name.startswith(_OF_LINEAR)}
    values = {*known["value"].layer.parameters()} if "value" in known else set()
    if values & own.keys() or not all(map(is_linear, layers)):
        return
    size, scale = head_dim_of(module), scale_of(module)
    if not size or not scale or (root := scale * size**0.5) < 1 + 1e-6:
        return
    why = f"products of heads of {size} are multiplied by {scale:g}, not {size**-0.5:.3g}: {root**0.5:.3g} for each"
    yield from ((("heads", p), (root**0.5, why)) for p in own)
