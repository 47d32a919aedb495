"""Variants of the recipes and baselines, one setting at a time: the entries of the studies in `run.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gains import BASE
from torch import Tensor, nn

from surefoot import recipes
from surefoot.experiment.models.decoder import Decoder, GPTConfig, Size
from surefoot.experiment.training.initial_values import torch_
from surefoot.experiment.training.methods import AdamW, Method, Steepest
from surefoot.geometry import Identity
from surefoot.momentum import Adam, Momentum
from surefoot.scaling import Constant, Moonlight

sys.path.append(str(Path(__file__).parents[1]))
from baselines import Factored, Started, gpt2_

OWN = {"model": f"{Path(__file__).stem}:biased"}


@dataclass(frozen=True)
class Variant:
    """A method, and the fields of `TrainConfig` that differ from the defaults."""

    method: Method
    training: Mapping[str, Any] = field(default_factory=dict)


Variants = dict[str, Variant]


class Restless(Momentum):
    """Momentum that also steps rows absent from the batch, in the direction of their old gradients."""

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor:
        """Return 1 for every finite gradient, zero or not."""
        return finite.to(g.dtype)


def biased(width: int) -> nn.Module:
    """Return the study's model with biases in every linear layer and LayerNorm."""
    return Decoder(GPTConfig(Size(width, depth=2, head_dim=16, vocab=256), biases="all"))


def _schedules(method: Method) -> Variants:
    return {
        "warm-up 2 %": Variant(method, {"warmup": 0.02}),
        "warm-up 25 %": Variant(method, {"warmup": 0.25}),
        "decay over the last 30 %": Variant(method, {"decay": 0.3}),
    }


def _varied(recipe: recipes.Recipe, kinds: tuple[str, ...] = (), **changes: Any) -> Steepest:
    """Return the recipe with changed fields in the roles of these names, or in all roles."""
    table = {k: replace(role, **changes) if not kinds or k in kinds else role for k, role in recipe.table.items()}
    return Steepest(recipes.Recipe("variant", table))


def beyond_mup_base() -> recipes.Recipe:
    """Return the start of the search: factor 16 on the head's rate, 1 on the others, whatever the recipe is now."""
    scales = dict.fromkeys(recipes.beyond_mup().table, 1.0) | {"head": 16.0}
    table = {
        kind: replace(role, momentum=Momentum(0.9, 0.8), lr_scale=Constant(scales[kind]))
        for kind, role in recipes.beyond_mup().table.items()
    }
    return recipes.Recipe("base", table)


def beyond_mup() -> Variants:
    """Return variants of `beyond_mup`."""
    base = beyond_mup_base()

    def scaled(kind: str, scale: float) -> Method:
        return _varied(base, (kind,), lr_scale=Constant(scale))

    pairs = ((0.95, 0.9), (0.9, 0.9), (0.9, 0.7), (0.9, 0.6), (0.85, 0.7), (0.8, 0.6))
    scales = {"head": (4, 8, 32), "embedding": (0.5, 2), "gain": (0.0625, 0.125, 0.25, 0.5, 2)}
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(_varied(base, momentum=Momentum(*pair))) for pair in pairs},
        **{f"{kind} {s}": Variant(scaled(kind, float(s))) for kind, values in scales.items() for s in values},
        "absent rows move on": Variant(_varied(base, momentum=Restless(0.9, 0.8))),
        **_schedules(Steepest(base)),
        **{f"with biases, bias {s}": Variant(scaled("bias", s), OWN) for s in (0.25, 1.0, 4.0)},
    }


def beyond_mup_2() -> Variants:
    """Return variants of the first round's best, gains at a quarter of the rate."""
    first = beyond_mup()["gain 0.25"].method
    assert isinstance(first, Steepest)

    def scaled(kind: str, scale: float) -> Method:
        return _varied(first.recipe, (kind,), lr_scale=Constant(scale))

    return {
        BASE: Variant(first),
        **{
            f"momentum {pair}": Variant(_varied(first.recipe, momentum=Momentum(*pair)))
            for pair in ((0.9, 0.7), (0.85, 0.7))
        },
        **{f"head {scale}": Variant(scaled("head", float(scale))) for scale in (8, 24)},
        **{f"with biases, bias {s}": Variant(scaled("bias", s), OWN) for s in (0.25, 1.0)},
    }


def beyond_mup_3() -> Variants:
    """Return variants of momentum by role, as in tuned Muon, and Adam on embedding and head, to separate its gain."""
    base = recipes.beyond_mup()
    short, long, ends = Momentum(0.8, 0.6), Momentum(0.95, 0.9), ("embedding", "head")

    def hidden(recipe: Steepest, pair: Momentum = short) -> Steepest:
        return _varied(recipe.recipe, ("linear",), momentum=pair)

    def adam(kind: str, scale: float) -> Steepest:
        return _varied(base, (kind,), geometry=Identity(), momentum=Adam(0.6, 0.8), lr_scale=Constant(scale))

    return {
        BASE: Variant(Steepest(base)),
        **{f"hidden {pair}": Variant(hidden(Steepest(base), Momentum(*pair))) for pair in ((0.8, 0.6), (0.7, 0.5))},
        "embedding and head (0.95, 0.9)": Variant(_varied(base, ends, momentum=long)),
        "hidden (0.8, 0.6), the ends (0.95, 0.9)": Variant(hidden(_varied(base, ends, momentum=long))),
        "hidden (0.8, 0.6), head (0.95, 0.9)": Variant(hidden(_varied(base, ("head",), momentum=long))),
        "hidden (0.8, 0.6), embedding 2": Variant(hidden(_varied(base, ("embedding",), lr_scale=Constant(2.0)))),
        "hidden (0.8, 0.6), head 8": Variant(hidden(_varied(base, ("head",), lr_scale=Constant(8.0)))),
        "head by Adam": Variant(adam("head", 1.0)),
        "embedding by Adam, 4": Variant(adam("embedding", 4.0)),
        "hidden (0.8, 0.6), head by Adam": Variant(hidden(adam("head", 1.0))),
    }


def adamw() -> Variants:
    """Return variants of AdamW."""
    base = AdamW((0.6, 0.8), 0.1, 1.0)
    rates = {"embedding": (0.25, 4, 16), "head": (0.25, 0.5, 2, 4), "gain": (0.25, 4)}
    betas = ((0.5, 0.8), (0.6, 0.9), (0.7, 0.8), (0.7, 0.9), (0.9, 0.95))
    return {
        BASE: Variant(base),
        **{f"betas {pair}": Variant(replace(base, betas=pair)) for pair in betas},
        **{f"decay {decay}": Variant(replace(base, weight_decay=decay)) for decay in (0.0, 0.3)},
        "no clipping": Variant(replace(base, clip=None)),
        "GPT-2's initial values": Variant(Started(base, gpt2_)),
        **{f"{k} {s}": Variant(Factored(base, {k: float(s)})) for k, values in rates.items() for s in values},
        **_schedules(base),
    }


def moonlight() -> Variants:
    """Return variants of Muon under Moonlight's scale."""
    base = recipes.muon(Moonlight())
    others = ("embedding", "head", "gain", "bias", "scalar")

    def scaled(kind: str, scale: float) -> Method:
        return _varied(base, (kind,), lr_scale=Constant(scale))

    pairs = ((0.95, 0.9), (0.9, 0.8), (0.9, 0.7), (0.8, 0.6))
    scales = {"embedding": (0.25, 4, 16), "head": (0.25, 0.5, 4), "gain": (0.25, 4)}
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(_varied(base, ("linear",), momentum=Momentum(*pair))) for pair in pairs},
        **{
            f"betas {b}": Variant(_varied(base, others, momentum=Adam(*b)))
            for b in ((0.6, 0.8), (0.7, 0.9), (0.8, 0.9))
        },
        **{f"{kind} {s}": Variant(scaled(kind, float(s))) for kind, values in scales.items() for s in values},
        "clipping at 1": Variant(Steepest(base, clip=1.0)),
        "torch's initial values": Variant(Started(Steepest(base), torch_)),
    }


def moonlight_tuned(pair: tuple[float, float] = (0.8, 0.6), embedding: float = 4.0) -> recipes.Recipe:
    """Return the best settings of the first round together: shorter momentum, a faster embedding."""
    table = dict(recipes.muon(Moonlight()).table)
    table["linear"] = replace(table["linear"], momentum=Momentum(*pair))
    table["embedding"] = replace(table["embedding"], lr_scale=Constant(embedding))
    return recipes.Recipe("moonlight tuned", table)


def moonlight_2() -> Variants:
    """Return variants of the first round's best Muon."""
    base = moonlight_tuned()
    others = ("embedding", "head", "gain", "bias", "scalar")
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(Steepest(moonlight_tuned(pair))) for pair in ((0.9, 0.7), (0.7, 0.5))},
        **{f"embedding {scale}": Variant(Steepest(moonlight_tuned(embedding=scale))) for scale in (1.0, 2.0, 8.0)},
        **{f"betas {b}": Variant(_varied(base, others, momentum=Adam(*b))) for b in ((0.7, 0.9), (0.8, 0.9))},
    }


def adamw_grid() -> Variants:
    """Return a coarse grid of AdamW's settings."""
    betas = ((0.9, 0.999), (0.9, 0.95), (0.8, 0.9))
    grid = [*itertools.product((torch_, gpt2_), betas, (0.0, 0.1), (None, 1.0))]
    grid += itertools.product((torch_,), ((0.8, 0.95), (0.7, 0.9), (0.7, 0.8), (0.6, 0.8)), (0.1,), (None, 1.0))
    return {
        f"{start.__name__.rstrip('_')} init, betas {betas}, decay {decay}, clip {clip}": Variant(
            Started(AdamW(betas, decay, clip), start)
        )
        for start, betas, decay, clip in grid
    }


def adamw_finalists() -> Variants:
    """Return the grid's best, to be compared at a larger width."""
    grid = adamw_grid().items()
    return {name: v for name, v in grid if "torch init" in name and "(0.9" not in name and "decay 0.1" in name}
