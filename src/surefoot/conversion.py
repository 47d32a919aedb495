"""One matrix's learning rate and weight decay in every published convention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.scaling import Keller, Moonlight, Natural, Scale

MUP_BASE_WIDTH = 64
"""The width at which muP and standard AdamW have the same learning rates: the unit of muP's rate."""

CONVENTIONS = ("natural", "keller", "moonlight", "adamw", "mup")
"""natural: steps of norm lr, decay by `lr rate`. keller, moonlight: Muon's published scales, decay by `lr wd`. adamw:
an AdamW rate, which Moonlight's scale reuses. mup: AdamW's at the base width, `lr base_width / d_in` at this one."""


@dataclass(frozen=True)
class Setting:
    """A learning rate and a weight decay as one convention writes them."""

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"a learning rate must be positive and finite, not {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"a weight decay must be finite and not negative, not {self.weight_decay}")


def convert(
    setting: Setting, source: str, target: str, d_in: int, d_out: int, base_width: int = MUP_BASE_WIDTH
) -> Setting:
    """The same steps and the same decay of a `(d_out, d_in)` matrix, written in another convention.

    A convention writes the step as `lr s(d_in, d_out) sqrt(d_out/d_in) msign(G)` and decays by `lr wd`, so the natural
    rate is `lr s` and the natural decay `wd / s`: what bounds the norm by `1/rate` is `s / wd`.

    Args:
        setting: in the source's convention.
        source, target: of `CONVENTIONS`.
        d_in, d_out: fan-in and fan-out, at least 1.
        base_width: where muP's rates equal AdamW's.

    Raises:
        ValueError: an unknown convention, a size below 1.

    >>> convert(Setting(0.02, 0.1), "keller", "natural", d_in=768, d_out=3072)
    Setting(lr=0.02, weight_decay=0.1)
    >>> convert(Setting(0.02, 0.1), "keller", "natural", d_in=3072, d_out=768)
    Setting(lr=0.04, weight_decay=0.05)
    """
    sizes = {"d_in": d_in, "d_out": d_out, "base_width": base_width}
    if wrong := next((name for name, size in sizes.items() if size < 1), None):
        raise ValueError(f"{wrong} must be at least 1, not {sizes[wrong]}")
    ratio = _factor(source, d_in, d_out, base_width) / _factor(target, d_in, d_out, base_width)
    return Setting(setting.lr * ratio, setting.weight_decay / ratio)


def from_adamw(lr: float, weight_decay: float, d_in: int, d_out: int) -> Setting:
    """Natural rate and decay for a `(d_out, d_in)` matrix that AdamW trains well with these.

    Its steps' entries have RMS 0.2 lr, as AdamW's have in practice: `lr * 0.2 sqrt(max(d_in, d_out) d_in / d_out)`. A
    starting point, not a law: AdamW's best rate falls with width, and this carries its fall along.

    Source: J. Liu et al., "Muon is scalable for LLM training", 2025.

    >>> from_adamw(3e-4, 0.1, d_in=1024, d_out=1024)
    Setting(lr=0.00192, weight_decay=0.015625)
    """
    found = convert(Setting(lr, weight_decay), "adamw", "natural", d_in, d_out)
    return Setting(float(f"{found.lr:.12g}"), float(f"{found.weight_decay:.12g}"))


def table(setting: Setting, source: str, d_in: int, d_out: int, base_width: int = MUP_BASE_WIDTH) -> dict[str, Setting]:
    """The setting in every convention."""
    return {name: convert(setting, source, name, d_in, d_out, base_width) for name in CONVENTIONS}


def _factor(convention: str, d_in: int, d_out: int, base_width: int) -> float:
    """s: natural rate over the convention's."""
    scales: dict[str, Scale] = {
        "natural": Natural(),
        "keller": Keller(),
        "moonlight": Moonlight(),
        "adamw": Moonlight(),
    }
    if convention == "mup":
        return Moonlight()((d_out, d_in)) * base_width / d_in
    if convention not in scales:
        raise ValueError(f"unknown convention {convention!r}; choose one of {', '.join(CONVENTIONS)}")
    return scales[convention]((d_out, d_in))
