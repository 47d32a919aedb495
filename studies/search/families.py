"""The families of recipes that are searched: their settings, where the search starts, and a method for each point."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.training.methods import AdamW, Method, MupAdamW, Steepest
from surefoot.recipes.recipe import build
from surefoot.stabilise import Stabiliser

sys.path.append(str(Path(__file__).parents[1]))
from baselines import Factored, Started, gpt2_

Point = Mapping[str, Any]
Range = tuple[float, float]  # searched on a log scale
Choice = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One family: what is searched, in which ranges, from where, and what a point means.

    A rate is log2; all other numbers are searched on a log scale. `short` is 1 minus the kept fraction of a momentum
    and `ahead` of its look-ahead; `mean` is `1 - b1` of Adam and `history` its `(1 - b2) / (1 - b1^2)`, below 1.
    """

    method: Callable[[Point], Method]
    rate: tuple[float, float]
    ranges: Mapping[str, Range | Choice]
    starts: tuple[Point, ...]


def _adam(point: Point) -> tuple[float, float]:
    beta1 = 1 - point["mean"]
    return beta1, 1 - point["history"] * (1 - beta1**2)


def _pair(point: Point) -> sf.Momentum:
    return sf.Momentum(1 - point["short"], 1 - point["ahead"])


@dataclass(frozen=True)
class Sides(sf.Scale):
    """A factor on matrices that widen; another scale on the others."""

    other: sf.Scale
    widening: float

    def __call__(self, shape: tuple[int, ...]) -> float:
        return self.widening if shape[-2] > shape[-1] else self.other(shape)


def steady(point: Point) -> Method:
    """The default's family: spectral steps on hidden matrices; tables by their history, of rows or of entries."""
    table, rows = recipes.beyond_mup().table, point["by"] == "rows"
    smoothing = sf.RowAdam(*_adam(point)) if rows else sf.Adam(*_adam(point), eps=1e-12)
    norms = (sf.RowRMS(), sf.HeadRMS()) if rows else (sf.RowMean(float("inf")), sf.MeanOperator(1, float("inf")))
    vector = {"lr_scale": sf.Constant(point["gain"])}

    def decayed(scale: sf.Scale) -> dict[str, Any]:
        return {"lr_scale": scale, "stabiliser": sf.DecoupledWeightDecay(point["decay"], scale)}

    def ends(norm: sf.Geometry, kind: str) -> dict[str, Any]:
        weight = {"weight_norm": table[kind].weight_geometry}
        return decayed(sf.Constant(point[kind])) | weight | {"geometry": sf.RMSScaled(norm), "momentum": smoothing}

    ratio = sf.FanRatio() if point["down"] == "longer" else sf.Constant(1.0)
    changes = {
        "linear": decayed(Sides(ratio, point["up"]) if "up" in point else ratio) | {"momentum": _pair(point)},
        "embedding": ends(norms[0], "embedding"),
        "head": ends(norms[1], "head"),
        **dict.fromkeys(("gain", "bias", "scalar"), vector | {"momentum": _pair(point)}),
    }
    found = {kind: replace(table[kind], **change) for kind, change in changes.items()}
    if "queries" in point:
        found["heads"] = replace(found["linear"], **decayed(sf.Constant(point["queries"])))
    return Steepest(recipes.Recipe("steady", found))


def moonlight(point: Point) -> Method:
    """Muon under Moonlight's scale; AdamW on all the rest."""
    scale, adam = sf.Moonlight(), sf.Adam(*_adam(point))

    def rest(kind: str, decays: bool) -> dict[str, Any]:
        factor = sf.Constant(point[kind])
        stabiliser = sf.DecoupledWeightDecay(point["decay"], factor) if decays else sf.Free()
        return {"geometry": sf.Identity(), "momentum": adam, "lr_scale": factor, "stabiliser": stabiliser}

    hidden = {"lr_scale": scale, "stabiliser": sf.DecoupledWeightDecay(point["decay"], scale)}
    tables = {kind: rest(kind, True) for kind in ("embedding", "head")}
    vectors = dict.fromkeys(("gain", "bias", "scalar"), rest("gain", False))
    return Steepest(build("moonlight", _pair(point), linear=hidden, **tables, **vectors))


def scion(point: Point) -> Method:
    """Scion, each kind of layer with a radius of its own."""

    def ball(radius: float) -> dict[str, Any]:
        return {"lr_scale": sf.Constant(radius), "stabiliser": sf.WeightDecay(1 / radius), "momentum": _pair(point)}

    table = recipes.scion().table
    radii = {"linear": "radius", "embedding": "embedding", "head": "head"}
    return Steepest(
        recipes.Recipe(
            "scion", {kind: replace(role, **ball(point[radii.get(kind, "gain")])) for kind, role in table.items()}
        )
    )


def moga(linear: Callable[[Point], recipes.Recipe]) -> Callable[[Point], Method]:
    """MOGA around the recipe of a point: factors of the roles, its pair, and a decay."""

    def method(point: Point) -> Method:
        table: dict[str, sf.Role] = {}
        for kind, role in linear(point).table.items():
            scale = sf.Constant(point.get(kind, 1.0 if kind == "linear" else point["gain"]))
            decays = kind in ("linear", "embedding", "head")
            stabiliser: Stabiliser = sf.DecoupledWeightDecay(point["decay"], scale) if decays else sf.Free()
            table[kind] = replace(role, lr_scale=scale, momentum=_pair(point), stabiliser=stabiliser)
        return Steepest(recipes.Recipe("moga", table))

    return method


def adamw(point: Point) -> Method:
    """AdamW with factors on the rates of embedding, head and gains."""
    factors = {kind: point[kind] for kind in ("embedding", "head", "gain")}
    method = Factored(AdamW(_adam(point), point["decay"], {"1": 1.0, "none": None}[point["clip"]]), factors)
    return {"torch": method, "gpt2": Started(method, gpt2_)}[point["start"]]


def mup_adamw(point: Point) -> Method:
    """AdamW under muP, base width 64, with the same factors as AdamW."""
    factors = {kind: point[kind] for kind in ("embedding", "head", "gain")}
    clip = {"1": 1.0, "none": None}[point["clip"]]
    return Factored(MupAdamW(_adam(point), point["decay"], clip), factors)


PAIR: dict[str, Range | Choice] = {"short": (0.05, 0.5), "ahead": (0.1, 0.7)}
ADAM: dict[str, Range | Choice] = {"mean": (0.03, 0.5), "history": (0.05, 0.8)}
FACTORS: dict[str, Range | Choice] = {"embedding": (0.2, 16.0), "head": (0.1, 8.0), "gain": (0.1, 8.0)}
NATURAL: dict[str, Range | Choice] = {"embedding": (0.3, 8.0), "head": (1.0, 200.0), "gain": (0.05, 1.5)}
DECAY: dict[str, Range | Choice] = {"decay": (0.01, 0.6)}

SHORT = {"short": 0.2, "ahead": 0.4}
LONG = {"mean": 0.1, "history": 0.05 / (1 - 0.9**2)}  # betas (.9, .95)
ADAMW = {"mean": 0.4, "history": 0.2 / (1 - 0.6**2), "decay": 0.1, "clip": "1", "embedding": 1, "head": 1, "gain": 1}
AS_PUBLISHED = {"short": 0.05, "ahead": 0.1, "embedding": 1, "head": 1, "gain": 1, "decay": 0.01}
LIKE_DEFAULT = {"short": 0.1, "ahead": 0.2, "embedding": 1, "head": 16, "gain": 0.25, "decay": 0.01}
ROWS = {"embedding": 2.5, "head": 20, "gain": 0.1, "decay": 0.06}
CANDIDATE = {**SHORT, **LONG, "embedding": 1.75, "head": 56, "gain": 0.25, "decay": 0.1}
ROUNDED = {
    "short": 0.1, "ahead": 0.5, "mean": 0.1, "history": 0.02 / (1 - 0.9**2),
    "embedding": 2, "head": 20, "gain": 0.05, "decay": 0.08,
}  # fmt: skip

FAMILIES = {
    "steady": Family(
        steady,
        (-5.0, -1.5),
        {"by": ("rows", "entries"), "down": ("longer", "one"), **PAIR, **ADAM, **NATURAL, **DECAY},
        (
            {"lr": -3.25, "by": "entries", "down": "longer", **CANDIDATE},
            {"lr": -3.25, "by": "rows", "down": "longer", **CANDIDATE},
            {"lr": -3.25, "by": "rows", "down": "one", **CANDIDATE},
        ),
    ),
    "steady_rows": Family(
        lambda point: steady({**point, "by": "rows", "down": "longer"}),
        (-5.0, -1.5),
        {**PAIR, **ADAM, **NATURAL, **DECAY},
        (
            {"lr": -3.25, **CANDIDATE},
            {"lr": -3.25, **CANDIDATE, "embedding": 2.5, "head": 20, "gain": 0.1, "decay": 0.06},
        ),
    ),
    "steady_heads": Family(  # a norm for each head of queries and keys
        lambda point: steady({**point, "by": "rows", "down": "longer"}),
        (-5.0, -1.5),
        {**PAIR, **ADAM, **NATURAL, **DECAY, "queries": (0.5, 4), "up": (0.5, 4)},
        ({"lr": -3.0, **ROUNDED, "queries": 1, "up": 1}, {"lr": -3.25, **ROUNDED, "queries": 2, "up": 2}),
    ),
    "moonlight": Family(
        moonlight,
        (-6.5, -2.5),
        {**PAIR, **ADAM, **FACTORS, **DECAY},
        (
            {"lr": -4.2, **SHORT, **LONG, "embedding": 4, "head": 1, "gain": 1, "decay": 0.1},
            {"lr": -4.2, "short": 0.05, "ahead": 0.1, **LONG, "embedding": 1, "head": 1, "gain": 1, "decay": 0.1},
        ),
    ),
    "scion": Family(
        scion,
        (-12.0, -6.5),
        {**PAIR, "radius": (5, 500), "embedding": (5, 500), "head": (300, 30000), "gain": (1, 200)},
        (
            {"lr": -9.0, "short": 0.1, "ahead": 0.1, "radius": 50, "embedding": 50, "head": 3000, "gain": 50},
            {"lr": -9.0, **SHORT, "radius": 50, "embedding": 50, "head": 3000, "gain": 10},
        ),
    ),
    "moga_row": Family(
        moga(lambda point: recipes.moga_row(float(point["p"]))),
        (-5.5, 0.0),
        {"p": ("1.5", "2", "3"), **PAIR, **NATURAL, **DECAY},
        ({"lr": -3.0, "p": "2", **AS_PUBLISHED}, {"lr": -2.5, "p": "2", **LIKE_DEFAULT}),
    ),
    "moga_column": Family(
        moga(lambda point: recipes.moga_column(2.0)),
        (-5.5, 0.0),
        {**PAIR, **NATURAL, **DECAY},
        ({"lr": -3.0, **AS_PUBLISHED}, {"lr": -2.5, **LIKE_DEFAULT}),
    ),
    "adamw": Family(
        adamw,
        (-9.0, -4.5),
        {**ADAM, **FACTORS, **DECAY, "clip": ("1", "none"), "start": ("torch", "gpt2")},
        ({"lr": -6.5, **ADAMW, "start": "torch"}, {"lr": -6.5, **ADAMW, "start": "gpt2"}),
    ),
    "mup_adamw": Family(
        mup_adamw,
        (-9.0, -4.5),
        {**ADAM, **FACTORS, **DECAY, "clip": ("1", "none")},
        ({"lr": -6.5, **ADAMW}, {"lr": -6.0, **ADAMW, **LONG}),
    ),
}


def again(name: str, rate: Range, **ranges: Range) -> Family:
    """A second search of a family, in wider ranges, where its first ended at an edge; it starts from that end."""
    first = FAMILIES[name]
    return replace(first, rate=rate, ranges={**first.ranges, **ranges}, starts=(FOUND[name],))


FOUND: dict[str, Point] = {  # where the first searches ended
    "scion": {
        "lr": -12.0, "short": 0.05, "ahead": 0.453, "radius": 500.0, "embedding": 500.0, "head": 5610.0, "gain": 200.0,
    },
    "moga_row": {
        "lr": -1.43, "p": "3", "short": 0.23, "ahead": 0.376, "embedding": 0.3, "head": 1.84, "gain": 0.05,
        "decay": 0.01,
    },
    "moga_column": {
        "lr": -2.69, "short": 0.169, "ahead": 0.28, "embedding": 0.3, "head": 1.0, "gain": 1.5, "decay": 0.01,
    },
    "adamw": {
        "lr": -6.9, "mean": 0.363, "history": 0.092, "embedding": 16.0, "head": 3.61, "gain": 4.27, "decay": 0.029,
        "clip": "none", "start": "torch",
    },
    "mup_adamw": {
        "lr": -6.62, "mean": 0.267, "history": 0.05, "embedding": 16.0, "head": 4.22, "gain": 1.26, "decay": 0.08,
        "clip": "1",
    },
}  # fmt: skip
WIDE_NATURAL: dict[str, Range] = {"embedding": (0.01, 8.0), "head": (0.03, 200.0), "gain": (0.003, 15.0)}
FAMILIES |= {
    "scion_2": again(
        "scion", (-16.0, -6.5), short=(0.01, 0.5), radius=(5, 10000), embedding=(5, 10000), gain=(1, 5000)
    ),
    "moga_row_2": again("moga_row", (-5.5, 1.0), **WIDE_NATURAL, decay=(0.0003, 0.6)),
    "moga_column_2": again("moga_column", (-5.5, 1.0), **WIDE_NATURAL, decay=(0.0003, 0.6)),
    "adamw_2": again("adamw", (-10.0, -4.5), embedding=(0.2, 200.0), head=(0.1, 50.0), gain=(0.1, 50.0)),
    "mup_adamw_2": again("mup_adamw", (-10.0, -4.5), history=(0.005, 0.8), embedding=(0.2, 200.0), head=(0.1, 50.0)),
}
