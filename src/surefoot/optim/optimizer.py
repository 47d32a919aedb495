"""`SteepestDescent`: the optimizer. It and its batches are the only things that write to parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.momentum.base import refuse_overflowing
from surefoot.optim import param_groups
from surefoot.optim.batching import STEPS, advance, alike, batches, init_state, own_memories, own_memory
from surefoot.optim.measuring import report
from surefoot.optim.param_groups import FORMAT, grouped
from surefoot.optim.precision import Leaf, Precision, as_precision
from surefoot.plan import Placement, Plan, rate_of
from surefoot.roles import Role
from surefoot.scaling import Run
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import Step
from surefoot.step import step as plain_step

if TYPE_CHECKING:
    from surefoot.optim.sharding import Sharding


class SteepestDescent(Optimizer):
    """Steepest descent under the norm of each parameter's role.

    For momentum m, a role's norm `|.|`, `eta = lr * lr_scale`: `w <- stabilise(w - eta argmax_{|d| <= 1} <m, d>)`.

    State: float32 momentum, 4 bytes per parameter (bfloat16 2, int8 1), 4 per row of a table; AdamW parts twice that.
    Half precision is stepped in float32. A missing gradient moves nothing, nor does one not finite (see `skipped`).

    Args:
        params: a model; or `named_parameters()` with a plan of their model; or parameter groups, each with a role:
            `{"params": [...], "role": "linear"}` (a role's name: natural scale, no bound; or a `Role`).
        plan: roles of the parameters; default for a model: `Plan.of(model, run=run)`.
        lr: learning rate in natural units, at every width; schedulers act on each group's own. Default: `plan.rate`.
        run: length of the run, `Run(steps, tokens)`, for a model without a plan: sets decay and rate.
        precision: how momentum and half-precision weights are stored; default: float32, rounded to nearest.
        step: function that steps a batch of like parameters; `surefoot.compiled()` fuses its passes.
        maximize: climb instead of descending.
        replicas: group of copies (DDP) that divide the matrix signs, an all-gather a bucket; default: each does all.
        **others: none; a TypeError says where other optimizers' settings (`weight_decay`, `betas`) belong.

    Raises:
        ValueError: parameters without a role that fits shape and dtype, or that are partial sums; a negative or no lr.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> optimizer = SteepestDescent(model, run=Run(steps=100, tokens=1024))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.param_groups[0]["role"]
    'linear'
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        plan: Plan | None = None,
        *,
        lr: float | Tensor | None = None,
        run: Run | None = None,
        precision: Precision | None = None,
        step: Step = plain_step,
        maximize: bool = False,
        replicas: torch.distributed.ProcessGroup | None = None,
        **others: Never,
    ) -> None:
        self._precision, self._step, self._replicas = as_precision(precision), step, replicas
        self._known = dict[Tensor, tuple[str, Placement]]()
        self._dtypes: dict[Tensor, torch.dtype] = {}  # of each parameter when its state was last converted
        self._roles: dict[Role, Role] = {}  # equal roles are made one object, which compares at once
        self._bounds, self._vectors = RunningBound(), dict[Tensor, State]()  # those of what was measured: no state
        self._sharding: Sharding | None = None  # of parameters that other processes hold, too, if any is
        self._frozen: list[Tensor] = []  # whose state waits until they are trained
        groups, self._unplaced, plan = grouped(params, plan, run, others)
        self._lr_reason = plan.lr_reason if plan and lr is None else "lr as given"
        defaults = {"lr": rate_of(plan, lr), "maximize": maximize}
        super().__init__(groups, defaults | ({"run": str(plan.run)} if plan and plan.run else {}))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{self._lr_reason}\n)"

    zero_grad: Callable[..., None] = device.unguarded(Optimizer.zero_grad)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of a copy of the group, which needs a `"role"`."""
        group = {"lr": param_groups.own_rate(self.defaults["lr"]), **param_group}
        placements, role = group.pop("placements", None), group.get("role")
        if self.param_groups and "param_names" in self.param_groups[0]:
            group["params"] = param_groups.with_names(group["params"], len(self.param_groups))
        group["role"] = role.name if isinstance(role, Role) else role
        device.unguarded(Optimizer.add_param_group)(self, group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        try:
            names = param_groups.checked_names(group, number, self._known, self._precision)
            placements = placements or param_groups.place(group, role, self._known)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for p, name, placement in zip(group["params"], names, placements, strict=True):
            self._known[p] = name, placement.with_roles(lambda role: self._roles.setdefault(role, role))
        self._prepare()
        group |= {"plan": [placement.digest for placement in placements], "format": FORMAT, STEPS: group.get(STEPS, 0)}

    def _prepare(self) -> None:
        """Make, before the first step, the state that processes exchange; of frozen ones when they are trained."""
        self._optimizer_state_dict_post_hooks.setdefault(-1, own_memories)  # the first, and not saved with others
        self._frozen = [p for p in self._known if not p.requires_grad]
        roles = {p: placement.role for p, (_, placement) in self._known.items() if p.requires_grad}
        signs = {p for p, x in roles.items() if self._replicas and x.geometry.couples == {-2, -1} and not x.owned}
        for p in (p for p in roles if device.is_dtensor(p) or p in signs):  # copies can go on from the signs of others
            if not self._sharding:
                from surefoot.optim.sharding import Sharding

                self._sharding = Sharding(self._precision, self._bounds, self._step is plain_step, self._replicas)
            if (shard := self._sharding.shards.get(p)) is None or self.state[p] is not shard.kept:  # a loop clears it
                self.state[p] = self._sharding.add(p, *self._known[p], self.state[p])
        for p in roles.keys() - self._sharding.shards.keys() if self._sharding else ():
            self._state(p)

    def _adopt(self) -> None:
        """Know by name what a wrapper has put in the place of parameters, and what became of state or was unfrozen."""
        found = param_groups.replaced(self.param_groups, self._known, self.state)
        for p, before in found.items():
            self._known[p] = self._known.pop(before)
        if found or self._sharding or any(p.requires_grad for p in self._frozen):
            self._prepare()

    @torch.no_grad()
    @device.uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `torch.compile` leaves it as it is, `surefoot.compiled()` compiles what pays.

        Args:
            closure: re-evaluates the model and returns the loss, as torch's optimizers take it.

        Returns:
            The closure's loss, else None.

        Raises:
            ValueError: a rate, shape or dtype that no step can take.
            TypeError: a setting of other optimizers in a group; RuntimeError: a sparse gradient.
        """
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self._adopt()
        param_groups.refuse_step(self.param_groups, self._unplaced, self._known, self._precision)
        for p in self._sharding.agree(self.param_groups) if self._sharding else ():  # those that were cast
            self._convert(p)
        for some in batches((leaf for group in self.param_groups for leaf in self._leaves(group)), alike):
            advance(some, self._precision, self._bounds, self._step)
        for group in self.param_groups:
            group[STEPS] = group.get(STEPS, 0) + (not all(device.on_cpu(p) for p in group["params"]))
        if self._sharding:
            self._sharding.step()
        return loss

    def _leaves(self, group: dict[str, Any]) -> Iterator[Leaf]:
        """Those parameters of a group that this process steps by itself."""
        for p in group["params"]:
            if self._sharding and (shard := self._sharding.shards.get(p)):
                if shard.way.name == "here" and p.numel():
                    yield shard.leaf()
            elif p.grad is not None:
                if p.grad.is_sparse:
                    raise RuntimeError("SteepestDescent takes no sparse gradients: use nn.Embedding(sparse=False)")
                state = self._state(p)
                if p.numel():
                    yield Leaf(p, p.grad, self._known[p][1], state, group, name=self._known[p][0])

    def _state(self, p: Tensor) -> State:
        """The parameter's state, initialised at its first step, and that of another dtype converted."""
        if new := not (state := self.state[p]):
            refuse_overflowing(self._known[p][0], p)
            state.update(init_state(self._known[p][1], p))
        if new or self._dtypes.get(p) != p.dtype:
            self._convert(p)
        return self.state[p]  # type: ignore[no-any-return]

    def _convert(self, p: Tensor) -> None:
        """Store a parameter's state as `precision` says."""
        (name, place), self._dtypes[p] = self._known[p], p.dtype
        if self._sharding and p in self._sharding.shards:
            self.state[p] = self._sharding.stored(p, name, self.state[p])
        elif not device.is_dtensor(p):  # of a frozen one when it is trained
            self.state[p] = self._precision.convert(p, place, self.state[p], name, partial(init_state, place, p))

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with live tensors: deepcopy it to go back later. Parts of larger tensors are copied."""
        self._adopt()
        if self._sharding:
            self._sharding.gather_owned()
        for group in self.param_groups:  # whose parameters a loop may have moved to others
            group |= {"plan": [self._known[p][1].digest for p in group["params"]], "format": FORMAT}
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's with its hooks, but state is stored as `precision` says (torch casts it to the parameter's dtype).

        Args:
            state_dict: what `state_dict` returned, for parameters in the same order (`torch.distributed.checkpoint`'s
                `set_optimizer_state_dict` matches names). Missing group entries get their defaults.

        Raises:
            ValueError: the checkpoint is of another plan, optimizer or format version, or an entry is missing or does
                not fit. After this or any other error nothing has changed.
        """
        self._adopt()
        loaded: dict[str, Any] = {}

        def like(p: Tensor) -> State:  # as the parameter's is or will be
            return self.state.get(p) or init_state(self._known[p][1], device.whole_of(p))

        def checked(_: Optimizer, hooked: dict[str, Any]) -> dict[str, Any]:  # what all other hooks have made of it
            param_groups.check_saved(hooked, self.param_groups, self._known, like)
            loaded.update(hooked)
            return {**hooked, "param_groups": [{**self.defaults, **group} for group in hooked["param_groups"]]}

        first = self.register_load_state_dict_post_hook(lambda _: self._restore(loaded), prepend=True)
        shards = self._sharding.shards.values() if self._sharding else ()
        before = [(owner, {**vars(owner)}) for owner in (self, *shards)]  # whose values loading replaces, each whole
        try:
            with first, self.register_load_state_dict_pre_hook(checked):
                super().load_state_dict(state_dict)
        except BaseException:
            for owner, values in before:
                vars(owner).update(values)
            raise

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Take a loaded state as it was saved, before torch has cast it, and store it as `precision` says."""
        self._bounds.clear()  # the state may be of other weights
        self._dtypes, self._lr_reason = {}, "lr as loaded"
        for theirs, ours in zip(loaded["param_groups"], self.param_groups, strict=True):
            ours |= {"lr": param_groups.own_rate(ours["lr"])}
            ours |= {"param_names": [self._known[p][0] for p in ours["params"]]} if "param_names" in ours else {}
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                saved = loaded["state"].get(index, {})
                for key, value in self._precision.in_full(p, self._known[p][1], saved, device.whole_of).items():
                    whole = device.whole_of(value).detach().to(p.device, copy=True) if not self._sharding else None
                    self.state[p][key] = self._sharding.placed(p, key, value) if self._sharding else whole
                if self.state.get(p):
                    self._convert(p)
                elif self._sharding and p in self._sharding.shards:  # unfrozen since
                    self.state[p] = self._sharding.add(p, *self._known[p], {})

    @torch.no_grad()
    def scale_(self, factors: Mapping[Tensor, Tensor]) -> None:
        """Multiply parameters by factors in [0, 1] between two steps; momentum stays as it is.

        For controls that couple parameters. Factors constant along rows or columns raise no norm.

        Args:
            factors: `{parameter: factors of its shape}`.

        Raises:
            ValueError: a parameter that is not this optimizer's, or factors of another shape.
        """
        param_groups.refuse_factors(factors, self._known)
        for p, factor in factors.items():
            (self._sharding.scale_ if self._sharding else Tensor.mul_)(p, factor)

    def skipped(self) -> dict[str, int]:
        """How many steps each parameter skipped because its gradient was not finite; those without any are omitted."""
        return {n: k for p, (n, _) in self._known.items() if (k := int(self.state.get(p, {}).get("skipped", 0)))}

    @torch.no_grad()
    def stability(self, before: Mapping[str, Tensor] | None = None) -> dict[str, dict[str, float]]:
        """Bounds on every parameter's forward, dependency and update numbers in natural units; see `monitor.weights`.

        Args:
            before: name -> weights before the last step; adds "update_measured", the change's norm, not per block.

        Returns:
            `{name: {"forward_lower": ..., "forward_upper": ..., "dependency_lower": ..., ...}}`, the largest of the
            parameter's blocks; several blocks (experts, groups of a convolution) are also listed as `name[0]`, ...
        """
        self._adopt()
        rates = ((*self._known[p], p, float(g["lr"])) for g in self.param_groups for p in g["params"])
        parameters = {name: (p, placement, x, self.state.get(p, {})) for name, placement, p, x in rates}
        return report(parameters, before or {}, self._bounds, self._vectors, self._sharding)

    def __getstate__(self) -> dict[str, Any]:
        pickled = super().__getstate__()
        pickled["state"] = type(self.state)(dict, {p: own_memory(state) for p, state in self.state.items()})
        names = ("_known", "_dtypes", "_roles", "_precision", "_step", "_frozen", "_unplaced", "_lr_reason")
        own = {name: vars(self)[name] for name in names}
        return {**pickled, **own, "_bounds": RunningBound(), "_vectors": {}, "_sharding": None, "_replicas": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_lr_reason": "lr as given", **state})  # which 0.2 did not save
        if self._sharding is None:
            self._prepare()
