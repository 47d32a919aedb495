"""`SteepestDescent`: the optimizer. The only place that writes to parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.linalg import device
from surefoot.momentum import is_finite
from surefoot.monitor.norms import divide, stability, unite
from surefoot.optim.batching import chunks, gather, marks, scatter, side_by_side, stacked, unstacked, write_
from surefoot.optim.param_groups import by_role, digest, place, with_names
from surefoot.optim.precision import Precision
from surefoot.optim.running_bound import Looks
from surefoot.plan import Placement, Plan
from surefoot.roles import Role
from surefoot.step import Step, in_pieces
from surefoot.step import step as advance

FORMAT = 1
"""Version of the state dictionary's layout."""

_CHUNK_BYTES = {"cpu": 4 << 20}
"""How much of a bucket of like parameters is stacked at once: a share of the cache; a small part of the memory."""

_PIECE_BYTES = {"cpu": 3 << 19}
"""How much of a table's rows goes through the whole step at once."""

Params = nn.Module | Iterable[Any]


class SteepestDescent(Optimizer):
    """Steepest descent under the norm of each parameter's role.

    For a role with norm `|.|`, gradient `g`, `m` its momentum and `eta = lr * lr_scale`:
    `w <- stabilise(w - eta * argmax_{|d| <= 1} <m, d>)`.

    Args:
        params: a model; or `named_parameters()` with a plan of their model; or parameter groups, each with a role:
            `{"params": [...], "role": "linear"}` (a role's name, with natural scale and no bound, or a `Role`).
        plan: roles of the parameters; default for a model: `Plan.of(model)`.
        lr: learning rate in natural units, one number for every layer and width. Schedulers act on it.
        storage: in what numbers momentum and half-precision weights are kept; default: float32, rounded to nearest.
        step: what takes the step of a chunk of like parameters; `surefoot.compiled()` fuses its passes.
        maximize: climb instead of descending.

    State: 4 bytes per parameter (float32 momentum; 2 if `precision` says bfloat16; twice as much for AdamW parts).
    Parameters in bfloat16 or float16 are stepped in float32, and rounded as it says. A parameter without gradient is
    untouched; one whose gradient is not finite keeps weight and state, and is counted (`skipped()`), without a
    synchronisation.

    Raises:
        ValueError: a group without a role, a shape that its role cannot take, complex parameters, a parameter that
            the plan lacks, a negative lr. List errors are torch's own.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> optimizer = SteepestDescent(model, lr=0.1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.param_groups[0]["role"]
    'linear'
    """

    def __init__(
        self,
        params: Params,
        plan: Plan | None = None,
        *,
        lr: float | Tensor,
        precision: Precision | None = None,
        step: Step = advance,
        maximize: bool = False,
    ) -> None:
        device.keep_freed()
        self._precision = precision or Precision()
        self._step = step
        self._placements: dict[Tensor, Placement] = {}
        self._numbers: dict[Tensor, int] = {}
        self._marks: dict[Tensor, Tensor] = {}  # of each bounded parameter as this optimizer left it
        self._looks = Looks()  # the same for those on an accelerator
        self._seen: dict[Tensor, dict[str, Tensor]] = {}  # vectors that `stability` keeps; no part of the state
        if isinstance(params, nn.Module):
            plan = plan or Plan.of(params)
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        groups = params if plan is None else by_role(params, plan)
        super().__init__(groups, {"lr": lr, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group needs a `"role"`."""
        group = dict(param_group)
        placements = group.pop("placements", None)
        role = group.get("role")
        if self.param_groups and "param_names" in self.param_groups[0]:
            group["params"] = with_names(group["params"], len(self.param_groups))
        group["role"] = role.name if isinstance(role, Role) else role
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            if (
                not (isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu")
                and not 0 <= group["lr"] < math.inf
            ):
                raise ValueError(f"Invalid learning rate: {group['lr']}")
            if any(p.is_complex() for p in group["params"]):
                raise ValueError("complex parameters have no role; give their real and imaginary parts")
            for p in group["params"]:
                self._precision.check(p)
            placements = placements or place(group["params"], role)
        except ValueError:
            self.param_groups.pop()
            raise
        self._placements.update(zip(group["params"], placements, strict=True))
        self._numbers = {p: number for number, p in enumerate(self._placements)}
        group["plan"] = digest(placements)
        group["format"] = FORMAT

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss, as torch's optimizers take it.

        Returns:
            The closure's loss, else None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for chunk in chunks(group["params"], self._placements, budget):
                self._advance(chunk, group)
            self._looks.count(group)
        return loss

    def _advance(self, chunk: list[Tensor], group: dict[str, Any]) -> None:
        """Stack the blocks of like parameters, take the step, write the results back."""
        placement = self._placements[chunk[0]]
        role, view = placement.role, placement.role.view
        dtype = torch.promote_types(chunk[0].dtype, torch.float32)
        unseen = not any(self.state[p] for p in chunk)
        states = [self._state(p, placement, dtype) for p in chunk]
        if unseen and device.on_cpu(chunk[0]):
            side_by_side(states, states[0].keys() & set(role.momentum.averages))
        rounding = self._precision.rounding(chunk[0])
        weights = stacked([rounding.read(p, state, dtype) for p, state in zip(chunk, states, strict=True)], view)
        gradients = stacked([p.grad.to(dtype) for p in chunk if p.grad is not None], view)
        kept = gather(states, placement, dtype)
        if "upper" in kept[0]:
            if device.on_cpu(weights[0]):
                kept = self._trusted(chunk, weights, kept)
            else:
                kept = self._looks.before(chunk, weights, kept, placement, group)
        finite = torch.stack([is_finite(g) for g in gradients]).all(0)
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        for i, (stabiliser, block) in enumerate(zip(placement.stabilisers, placement.blocks, strict=True)):
            g = -gradients[i] if group["maximize"] else gradients[i]
            eta, flag = lr * role.lr_scale(block), finite.reshape(-1, *(1,) * len(block))
            take = in_pieces(self._step, budget(g.device, _PIECE_BYTES))
            weights[i], kept[i] = take(role, stabiliser, weights[i], g, kept[i], eta, flag)
        spoilt = () if device.on_cpu(finite) and bool(finite.all()) else (~finite).unbind()
        moved, news = unstacked(weights, view, placement.shape), scatter(kept, placement, states)
        for p, w, state, new in zip(chunk, moved, states, news, strict=True):
            value, added = rounding.write(w, p.dtype, state)
            write_(p, value)
            for name, x in new.items():
                write_(state[name], self._precision.keep(x, state[name], state))
            for name, x in added.items():
                write_(state[name], x)
            if "rounds" in state:
                state["rounds"] += 1
        for state, missed in zip(states, spoilt, strict=False):
            state["skipped"] += missed
        if "upper" in kept[0] and (chunk[0].dtype == dtype or "master" in states[0]):  # rounding is a write, too
            if device.on_cpu(weights[0]):
                self._marks.update(zip(chunk, marks(weights), strict=True))
            else:
                self._looks.after(chunk)

    def _state(self, p: Tensor, placement: Placement, dtype: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            role = placement.role
            state.update(role.momentum.init_state(torch.zeros_like(p, dtype=dtype)))
            blocks = zip(placement.stabilisers, role.view.split(p.detach().to(dtype)), strict=True)
            state.update(unite([stabiliser.init_state(w, role.weight_geometry) for stabiliser, w in blocks]))
            state["skipped"] = torch.zeros((), dtype=torch.int32, device=p.device)
            self._conform(p)
        return state

    def _conform(self, p: Tensor) -> None:
        """Keep a parameter's state as `precision` says."""
        kept = self._precision.conform(p, self.state[p], self._placements[p].role.momentum.averages, self._numbers[p])
        self.state[p].clear()
        self.state[p].update(kept)

    def _trusted(
        self, chunk: list[Tensor], weights: list[Tensor], kept: list[dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """What is kept of the weights, checked where somebody else has written to them (a load, `p.data`, rounding)."""
        geometry = self._placements[chunk[0]].role.weight_geometry
        if not device.on_cpu(weights[0]):
            return [x | geometry.revalidate(w, {"upper": x["upper"]}) for w, x in zip(weights, kept, strict=True)]
        found = marks(weights)
        unknown = found.new_full(found.shape[1:], math.nan)
        written = (torch.stack([self._marks.get(p, unknown) for p in chunk]) != found).any(1)
        if not bool(written.any()):
            return kept
        checked = [
            geometry.revalidate(w[written], {"upper": x["upper"][written]}) for w, x in zip(weights, kept, strict=True)
        ]
        return [
            x | {"upper": x["upper"].index_put((written,), new["upper"])} for x, new in zip(kept, checked, strict=True)
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and state is kept as `precision` says (torch casts it to the parameter's dtype).

        Raises:
            ValueError: the checkpoint was made under another plan, or by another optimizer.
        """
        saved = state_dict["param_groups"]
        for index, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=False)):
            if theirs.get("format") != FORMAT:
                raise ValueError(f"parameter group {index} of the checkpoint is not SteepestDescent's format {FORMAT}")
            if theirs.get("plan") != ours["plan"]:
                raise ValueError(
                    f"parameter group {index} ({ours['role']}) was saved under another plan: {theirs.get('plan')}, "
                    f"now {ours['plan']}; build the optimizer with the recipe and overrides of the checkpoint"
                )
        super().load_state_dict(state_dict)
        self._marks.clear()  # what was saved of the weights may be of others
        self._looks.clear()
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    self.state[p][name] = value.detach().to(device=p.device, copy=True)
                if self.state.get(p):
                    self._conform(p)

    @torch.no_grad()
    def scale_(self, factors: Mapping[Tensor, Tensor]) -> None:
        """Multiply parameters by factors in [0, 1], `{parameter: factors of its shape}`, between two steps.

        For control that couples parameters, `surefoot.LogitControl` for one; momentum stays as it is. Factors that are
        constant along rows or columns raise no norm, so no bound is lost.

        Raises:
            ValueError: a parameter that this optimizer does not hold.
        """
        if foreign := [p for p in factors if p not in self._placements]:
            raise ValueError(f"a parameter of shape {tuple(foreign[0].shape)} to be scaled is not this optimizer's")
        for p, factor in factors.items():
            p.mul_(factor)

    def skipped(self) -> dict[str, int]:
        """How many steps each parameter sat out because its gradient was not finite; those with none are left out."""
        counts = {name: int(self.state[p]["skipped"]) for name, p, _ in self._named() if p in self.state}
        return {name: count for name, count in counts.items() if count}

    @torch.no_grad()
    def stability(self) -> dict[str, dict[str, float]]:
        """Every parameter's forward, dependency and update numbers in natural units, see `surefoot.monitor`.

        `{name: {"forward_lower": ..., "forward_upper": ..., "dependency_lower": ..., ...}}`, the largest of the
        parameter's blocks; one of several blocks (experts, groups of a convolution) has each as `name[0]`, ... too.
        It reads the weights once and changes nothing that a step reads; four vectors a matrix are kept from
        call to call, the stabiliser's own where it has some.
        """
        report: dict[str, dict[str, float]] = {}
        for name, p, group in self._named():
            numbers, cache = stability(p, self._placements[p], float(group["lr"]), self._known(p))
            self._seen[p] = {key: x for key, x in cache.items() if key != "upper"}
            report[name] = {key: max(block[key] for block in numbers) for key in numbers[0]} if numbers else {}
            report |= {f"{name}[{i}]": block for i, block in enumerate(numbers) if len(numbers) > 1}
        return report

    def _known(self, p: Tensor) -> dict[str, Tensor]:
        """What is known of a parameter's norm: the stabiliser's vectors, or the last report's, and a true upper."""
        state, placement = self.state.get(p, {}), self._placements[p]
        known = {**self._seen.get(p, {}), **{name: state[name] for name in ("vectors", "upper") if name in state}}
        if "upper" in known:
            wide = p.to(torch.promote_types(p.dtype, torch.float32))
            weights = stacked([wide], placement.role.view)
            uppers = [{"upper": part["upper"][None]} for part in divide({"upper": known["upper"]}, placement.blocks)]
            known |= unite([{"upper": x["upper"][0]} for x in self._trusted([p], weights, uppers)])
        return known

    def _named(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"group{number}.{i}" for i in range(len(group["params"]))]
            yield from ((name, p, group) for name, p in zip(names, group["params"], strict=True))

    def __getstate__(self) -> dict[str, Any]:
        kept = {
            "_placements": self._placements,
            "_numbers": self._numbers,
            "_storage": self._precision,
            "_step": self._step,
        }
        return {**super().__getstate__(), **kept, "_marks": {}, "_looks": Looks(), "_seen": {}}


def budget(device: torch.device, of: Mapping[str, int] = _CHUNK_BYTES) -> int:
    """Bytes that are worked on at once: by default, of a bucket of like parameters. On an accelerator 256 MiB."""
    return of.get(device.type, 256 << 20)
