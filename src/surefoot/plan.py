"""`Plan`: every trainable parameter, its role, and why. Pure data: printable, hashable, comparable."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.discovery.find import describe_unplaced, find_kinds
from surefoot.discovery.kinds import UNSPLIT
from surefoot.discovery.overrides import Override, decide, match
from surefoot.identity import by_plain_name, digest, label, plain_name
from surefoot.initialise import AsBuilt
from surefoot.linalg.device import is_dtensor, whole_of
from surefoot.recipes import Recipe, steady
from surefoot.roles import Placement, Role
from surefoot.scaling import LAWS, Constant, Run
from surefoot.stabilise.base import Stabiliser, require_positive
from surefoot.views.fused import apart

__all__ = ["Placement", "Plan"]

UNPRINTED = ("layout", "fan in", "fan out")
"""Columns of `Plan.rows` that `print(plan)` leaves out: the shape and the reason say nearly as much."""

warn_once: Callable[[str], None] = cache(logging.getLogger("surefoot").warning)


@dataclass(frozen=True)
class Plan:
    """The placements of a model's parameters, in its order; a frozen parameter is included if a rule places it.

    Build one with `Plan.of`, read it with `print`, hand it to `SteepestDescent`.

    Args:
        recipe: the recipe's name.
        placements: parameter name -> placement.
        run: the length of the run that it was made for, if given.
        rate: the peak learning rate for that run, if the recipe has a rate law.

    >>> print(Plan.of(nn.Linear(4, 2, bias=False))["weight"].why)
    weight of Linear(4, 2)
    """

    recipe: str
    placements: dict[str, Placement] = field(hash=False)
    run: Run | None = field(default=None, compare=False)
    rate: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.unsplit:
            warn_once(self.unsplit)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        recipe: Recipe | None = None,
        *,
        run: Run | None = None,
        stabiliser: Stabiliser | None = None,
        overrides: Sequence[Override] = (),
        head: str | Sequence[str] | None = None,
        tied: Literal["head", "embedding", "error"] | None = None,
        inputs: Any = None,
    ) -> Plan:
        """Find every parameter's role: by module type, by the model's wiring, then by overrides.

        `surefoot.discovery.find` says how the LM head is found, and why `tied` has these choices. A frozen parameter
        gets the role, if any, that it has when all parameters are trained; its reason says so.

        Args:
            model: any module, on any device, the meta device included.
            recipe: the role table; default `recipes.steady()`.
            run: length of the run; sets the decay, and the learning rate if the recipe has a rate law (`Recipe.rate`).
            stabiliser: of every role but an override's Role, before functions; radius in the role's unit (head: log V).
            overrides: `(where, change)` pairs, see `Override`.
            head: name of the LM head's module, or names; `()` for none.
            tied: rule for a table that is embedding and head, and for what is added to its rows: "head"; "embedding",
                the default with an `output_multiplier` (1/d); "error": refuse.
            inputs: the model's arguments, a tuple or a dictionary by name: a forward pass on shapes then finds heads.

        Returns:
            The plan, in the model's order.

        Raises:
            ValueError: a parameter that no rule or two place, an override without a match, a view that does not fit.

        >>> [each.role.name for each in Plan.of(nn.Sequential(nn.Linear(4, 8), nn.ReLU())).placements.values()]
        ['linear', 'bias']
        """
        _require(recipe, stabiliser, run)
        recipe, found = recipe or steady(), dict[str, Placement]()
        recipe = recipe.over(run) if run else recipe
        kinds = find_kinds(model, head, match(model, overrides), tied, inputs)
        for name, p in model.named_parameters():
            with suppress(*() if p.requires_grad else (ValueError,)):  # frozen, and of a shape that no role takes
                if kind := kinds.get(name):
                    found[name] = decide(name, p, kind, recipe, stabiliser)
        if unplaced := [name for name, p in model.named_parameters() if p.requires_grad and kinds[name] is None]:
            raise ValueError(describe_unplaced(model, unplaced, inputs is not None))
        rate = recipe.rate(run) if run and recipe.name in LAWS else None
        return cls(recipe.name, found, run, rate)

    def __getitem__(self, name: str) -> Placement:
        """The placement of a parameter, whatever wrappers add to its name."""
        if (found := by_plain_name(self.placements, name)) is None:
            raise ValueError(f"the plan has no parameter {name!r}; make it with Plan.of(model)")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.placements)

    def __len__(self) -> int:
        return len(self.placements)

    @property
    def hash(self) -> str:
        """A digest of all roles and shapes in order, whatever the names."""
        return digest([placement.digest for placement in self.placements.values()])

    @property
    def unsplit(self) -> str:
        """The attention matrices that have one norm for all heads, because these are unknown, and the remedy."""
        names = [re.sub(r"\b\d+\b", "*", name) for name, place in self.placements.items() if UNSPLIT in place.why]
        remedy = "find heads by a forward pass, Plan.of(model, inputs=...), or override with sf.per_head(rows)"
        return f"attention with {UNSPLIT}, {', '.join(dict.fromkeys(names))}: {remedy}" if names else ""

    @property
    def lr_reason(self) -> str:
        """Where the learning rate comes from."""
        rate, run = self.rate, self.run
        law = f"lr {rate:.4g}, 2^{math.log2(rate):.2f}, by the law of {self.recipe}" if rate else "no law"
        return f"{law}, for {run.steps:,} steps of {run.tokens:,} tokens" if run else "lr as given"

    def smoothness(self) -> dict[str, float]:
        """Norm of steps -> power of the width with which the loss's smoothness grows, if known; see `MeanOperator`."""
        norms = [placement.role.geometry for placement in self.placements.values()]
        return {label(norm): norm.smoothness_exponent for norm in norms if hasattr(norm, "smoothness_exponent")}

    def rows(self) -> list[dict[str, str]]:
        """The plan as a table or JSON: a dictionary per parameter, or per fused part where the parts' roles differ."""
        return [row for name, placement in self.placements.items() for row in placement.rows(name)]

    def __str__(self) -> str:
        if not (rows := _merged(self.rows())):
            return f"plan {self.recipe}: no parameters that a rule places"
        table = [dict(zip(rows[0], rows[0], strict=True)), *rows]
        width = {column: max(len(row[column]) for row in table) for column in rows[0] if column not in UNPRINTED}
        lines = ["  ".join(row[column].ljust(width[column]) for column in width).rstrip() for row in table]
        rule = "-" * max(map(len, lines))
        entries = sum(math.prod(placement.shape) for placement in self.placements.values())
        total = f"{len(self)} parameters, {entries:,} entries, recipe {self.recipe}, plan {self.hash}"
        total += f"\n{self.lr_reason}" if self.run else ""
        growth = ((name, f"grows as width**{a:g}" if a else "does not grow") for name, a in self.smoothness().items())
        facts = [f"{name}: layers compose at every width, smoothness {grows}" for name, grows in growth]
        facts += filter(None, [self.unsplit])
        return "\n".join([lines[0], rule, *lines[1:], rule, *facts, total])

    @torch.no_grad()
    def relative_to(self, model: nn.Module) -> Plan:
        """The same plan with every radius in units of the parameter's present norm: for pretrained weights.

        `PostClip(1.2)` then lets no weight grow by more than a fifth; `WeightDecay`'s rate is divided by that norm.
        Each fused projection has its own unit, heads and experts share the largest; zeros (a bias, LoRA's B) keep the
        natural unit. Do not initialise under such a plan. Its hash includes the norms, to four digits: to resume,
        make it from the same weights.

        Args:
            model: with the pretrained weights, not on the meta device.

        Returns:
            A new plan; this one stays as it is.

        Raises:
            ValueError: a parameter that the model lacks, of another shape, without values, or of a norm above 1e15.

        >>> from surefoot.stabilise import PostClip
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([4.0, 1.0])))
        >>> print(Plan.of(layer, stabiliser=PostClip(1.5)).relative_to(layer)["weight"].promise)
        norm <= 6 at every step, certified
        """
        placements = {}
        for (name, parameter), placement in zip(self._of(model).items(), self.placements.values(), strict=True):
            if parameter.is_meta:
                raise ValueError(f"{name} is on the meta device and has no norm: load the weights first")
            weight = whole_of(parameter).detach().double()
            if not bool(weight.isfinite().all()):
                raise ValueError(f"{name} is not finite: it has no norm to be relative to")
            view, own, roles = apart(placement.role.view, placement.shape), placement.roles, list[Role]()
            blocks = view.split(weight)
            own = own if len(own) == len(blocks) else (*own[:1] * (len(blocks) - 1), own[-1])
            for role, block in zip(own, blocks, strict=True):
                norm = float(role.weight_geometry.norm(block).amax()) if block.numel() else 0.0
                require_positive(f"{name}'s norm", norm or 1.0, 1)
                unit = Constant(float(f"{norm:.4g}")) if norm else role.radius_unit
                roles.append(replace(role, view=view, radius_unit=unit))
            placements[name] = replace(placement, role=roles[0], by_block=tuple(roles) if len({*roles}) > 1 else ())
        return replace(self, recipe=f"{self.recipe}, relative", placements=placements)

    def _of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The plan's parameters in a model."""
        named, found = dict(model.named_parameters()), dict[str, nn.Parameter]()
        parameters = {plain_name(name): parameter for name, parameter in named.items()} | named
        for name, placement in self.placements.items():
            parameter = by_plain_name(parameters, name)
            if parameter is None or tuple(parameter.shape) != placement.shape:
                problem = "is missing" if parameter is None else f"has shape {tuple(parameter.shape)}"
                raise ValueError(f"{name} {problem} in the model, {placement.shape} in the plan")
            found[name] = parameter
        return found

    @torch.no_grad()
    def initialise_(self, model: nn.Module, seed: int = 0) -> None:
        """Write initial values: deterministic in (name without wrappers, seed), the same on every device and mesh.

        Args:
            model: the model the plan was made of; frozen parameters and those on the meta device are left alone.
            seed: any integer.

        Raises:
            ValueError: a parameter that the model or the plan lacks (frozen ones aside), or whose shape differs.
        """
        own, split = self._of(model), dict[Tensor, Callable[[Tensor], None]]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and by_plain_name(self.placements, name) is None:
                raise ValueError(f"{name} is not in the plan: make a plan of this model, Plan.of(model)")
        for name, parameter in own.items():
            fill_ = partial(self[name].fill_, name=name, seed=seed)
            left = parameter.is_meta or not parameter.requires_grad
            if not (left or is_dtensor(parameter)):
                fill_(parameter)
            elif not left and not all(isinstance(role.initial, AsBuilt) for role in self[name].roles):
                split[parameter] = fill_
        if split:
            from surefoot.mesh.groups import scatter_  # imports torch.distributed

            scatter_(split)


def _require(*given: object) -> None:
    """Raise ValueError for what is no recipe, no stabiliser or no run, in this order, and not None."""
    examples = {Recipe: "recipes.muon()", Stabiliser: "PostClip(2.0)", Run: "Run(steps, tokens)"}
    for each, (kind, example) in zip(given, examples.items(), strict=True):
        if not isinstance(each, kind | None):
            raise ValueError(f"give a {kind.__name__} like {example}, not {each!r}")


def rate_of(plan: Plan | None, lr: float | Tensor | None) -> float | Tensor:
    """The learning rate as given, or that of the plan's run; a warning where both are known and far apart."""
    law, warn = plan.rate if plan is not None else None, logging.getLogger("surefoot").warning
    if lr is not None:
        if law and isinstance(lr, int | float) and lr and not law / 16 <= lr <= 16 * law:
            what = f"lr {lr:.3g} is {lr / law:.3g} times the run's {law:.3g}: is it another optimizer's?"
            warn(f"surefoot: {what} Leave lr out for the run's")
        return lr
    if plan is not None and law is not None:
        wiring = {placement.role.name for placement in plan.placements.values()}
        if plan.run and plan.run.steps < 100 and {"tied_positions", "bias"} <= wiring:  # docs/transfer.md, "hf gpt2"
            warn(f"surefoot: a tied table with positions and biases, in under 100 steps: lr={law / 2:.3g} is better")
        return law
    reason = "no run is known: give lr=..., or SteepestDescent(model, run=Run(steps, tokens)), or Plan.of(..., run=run)"
    if plan is not None and plan.run:
        reason = f"recipe {plan.recipe} has no law: give lr=...; a sweep finds it, or take one of {', '.join(LAWS)}"
    raise ValueError(f"the learning rate is missing and {reason}")


def _merged(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Those of repeated blocks in one line: their names differ in numbers alone, of which all combinations occur."""
    groups = defaultdict[tuple[tuple[str, str], ...], list[list[str]]](list)
    for row in rows:
        pieces = re.split(r"\b(\d+)\b", row["name"])
        alike = {**row, "name": "*".join(pieces[::2])}
        groups[tuple(alike.items())].append(pieces)
    found = []
    for columns, names in groups.items():
        places = [list(dict.fromkeys(texts)) for texts in zip(*names, strict=True)]
        whole = math.prod(map(len, places)) == len(names)
        shown = ["".join(map(_range, places))] if whole else map("".join, names)
        found += [{**dict(columns), "name": name} for name in shown]
    return found


def _range(texts: Sequence[str]) -> str:
    """A place of names that may hold these: itself if there is one, else numbers such as `0-11` or `1,4`."""
    if len(texts) == 1:
        return texts[0]
    numbers = sorted(map(int, texts))
    follow = numbers[-1] - numbers[0] + 1 == len(numbers)
    return f"{numbers[0]}-{numbers[-1]}" if follow else ",".join(map(str, numbers))
