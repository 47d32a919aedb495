"""QK-clip: attention logits are measured while a model trains, and heads above a threshold are rescaled."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from surefoot.attention.logits import largest_logits, multihead_logits
from surefoot.attention.qk_pairs import UNKNOWN_SCALE, QueryKey, find_pairs
from surefoot.discovery.heads import Projection
from surefoot.discovery.kinds import NO_VIEW
from surefoot.linalg.device import is_dtensor
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Placement
from surefoot.views import Matrix, PerHead
from surefoot.views.fused import apart

_ARGUMENTS = {
    F.multi_head_attention_forward: tuple(inspect.signature(F.multi_head_attention_forward).parameters),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
"""The functions that compute attention, which are measured when a layer calls them, and their positional arguments."""


class LogitControl:
    """Measure the largest attention logit of every head and rescale the heads that exceed a threshold.

    Let `S` be a head's largest logit over the training batches since the last step, on all processes. If S exceeds the
    threshold, the head's rows of W_q and W_k are rescaled after the step so that its logits are multiplied by
    `threshold / S`. Momentum is unchanged.

    Measuring costs one of the two matrix products of attention, in the forward pass only. After a step one number per
    layer is read on the host, one vector is reduced over the processes, and W_q and W_k of the layers above the
    threshold are written.

    Args:
        model: its attention must call `torch.nn.functional.scaled_dot_product_attention` (transformers:
            `attn_implementation="sdpa"`) or be `nn.MultiheadAttention`, uncompiled, for logits to be measured.
        threshold: upper limit of the logits after rescaling; the published value is 100.
        pairs: attention layer's name -> W_q and W_k; default: `find_pairs(model, scale)`.
        group: processes with replicas, or parts, of these layers; default: all.
        scale: factor on the products of queries and keys, for `bounds` of layers without an attribute `scaling`;
            measured logits need none.

    Attributes:
        threshold: the argument of this name.
        pairs: attention layer -> W_q and W_k.
        largest: attention layer -> largest logit per head, `(heads,)`, over the training batches since the last step.

    Raises:
        ValueError: the model has no such layers, or the threshold is not positive and finite.

    Source: "QK-Clip" of Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1, which does not rescale shared keys.

    >>> from surefoot.experiment.models.decoder import reference
    >>> model = reference("llama", width=32, depth=1, head_dim=16, vocab=8)
    >>> optimizer = SteepestDescent(model, lr=0.02)
    >>> control = LogitControl(model, threshold=0.001)
    >>> _ = control.hold(optimizer)
    >>> tokens = torch.arange(8)[None]
    >>> model(tokens).square().mean().backward()
    >>> optimizer.step()
    >>> _ = model(tokens)
    >>> bool(control.largest["blocks.0.attention"].max() < 0.01)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        pairs: Mapping[str, QueryKey] | None = None,
        group: dist.ProcessGroup | None = None,
        scale: float | None = None,
    ) -> None:
        if not 0 < threshold < math.inf:
            raise ValueError(f"the threshold of attention logits must be positive and finite, not {threshold}")
        if pairs is not None and not pairs:
            raise ValueError("pairs is empty: omit it to control the layers of find_pairs(model)")
        self.threshold: float = threshold
        self._group, self._by_names = group, pairs is None
        self.pairs: dict[str, QueryKey] = dict(find_pairs(model, scale) if pairs is None else pairs)
        self._layers = {name: model.get_submodule(name) for name in self.pairs}
        self.largest: dict[str, Tensor] = {}
        self._unseen = list(self.pairs)

    def bounds(self, input_rms: float = 1.0) -> dict[str, Tensor]:
        """Upper bounds on the logits from the norms of W_q and W_k.

        Args:
            input_rms: largest RMS of the layers' inputs.

        Returns:
            Attention layer -> bound per head, `(heads,)`.

        Raises:
            ValueError: a layer does not say the scale of its logits.
        """
        if unknown := [name for name, pair in self.pairs.items() if pair.scale is None]:
            raise ValueError(f"{unknown[0]}: {UNKNOWN_SCALE}")
        return {name: pair.bound(input_rms) for name, pair in self.pairs.items()}

    @torch.no_grad()
    def factors(self, largest: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """Factors that reduce logits to the threshold, for `SteepestDescent.scale_`.

        Given `self.bounds(input_rms)` in place of measured logits, the rescaled layers have no larger logit for any
        input of at most that RMS.

        Args:
            largest: attention layer -> largest logit per head, `(heads,)`.

        Returns:
            Parameter -> factors of its shape, in [0, 1], for the layers above the threshold.
        """
        factors: dict[Tensor, Tensor] = {}
        for name, logits in largest.items():
            if bool((logits > self.threshold).any()):
                for p, factor in self.pairs[name].factors(logits, self.threshold).items():
                    factors[p] = torch.minimum(factors[p], factor) if p in factors else factor  # layers may share p
        return factors

    def hold(self, optimizer: SteepestDescent) -> list[RemovableHandle]:
        """Register hooks that measure logits in every forward pass and rescale heads after every step.

        In training, the forward pass raises RuntimeError if a layer does not call `scaled_dot_product_attention`. A
        weight that is frozen later is not rescaled. Two controls of a layer both scale it: to change the threshold,
        remove the handles first.

        Args:
            optimizer: the optimizer of W_q and W_k.

        Returns:
            Handles whose `remove()` unregisters the hooks.

        Raises:
            ValueError: another optimizer; W_q or W_k of a layer is not among its parameters, for example because it is
                frozen; or its plan found their rows elsewhere by a forward pass.
        """
        if not isinstance(optimizer, SteepestDescent):
            raise ValueError(f"hold needs a SteepestDescent, not a {type(optimizer).__name__}")
        optimized = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for name, pair in self.pairs.items():
            of = name or "the model"
            if not {p for side in (pair.query, pair.key) for p in side.parameters.values()} <= optimized:
                raise ValueError(f"the optimizer lacks W_q or W_k of {of}: train both, or leave the layer out")
            for what, part in (("query", pair.query), ("key", pair.key)) if self._by_names else ():
                _, placement = optimizer._known[part.parameters["weight"]]
                if other := _otherwise(placement, part, what, pair):
                    remedy = f"give pairs={{{name!r}: QueryKey(Projection(layer, view, part), ...)}}"
                    raise ValueError(f"the rows of {part.name!r} of {of} are {other} by the plan: {remedy}")
        handles = [optimizer.register_step_post_hook(lambda *_: self._rescale(optimizer))]
        for name, layer in self._layers.items():
            recorder = _LogitRecorder(name, self._record)
            handles.append(layer.register_forward_pre_hook(recorder.start))
            handles.append(layer.register_forward_hook(recorder.stop, always_call=True))
        return handles

    def _record(self, name: str, largest: Tensor) -> None:
        """Update a layer's maxima over the batches since the last step."""
        self.largest[name] = torch.fmax(self.largest.get(name, largest), largest)  # fmax ignores NaN

    def _rescale(self, optimizer: SteepestDescent) -> None:
        """Rescale the heads above the threshold and start new maxima."""
        largest = self._global_largest()
        if unseen := [name for name in self._unseen if name not in largest or bool((largest[name] < 0).all())]:
            warnings.warn(
                f"the attention logits of {', '.join(unseen)} were not measured: its forward method was not called in "
                "training before this step, or was compiled before `hold`; name the enclosing module that is, "
                "pairs={name: QueryKey(...)}",
                stacklevel=2,
            )
        self._unseen = []  # warned once
        optimizer.scale_({p: factor for p, factor in self.factors(largest).items() if p.requires_grad})
        self.largest = {}

    def _global_largest(self) -> dict[str, Tensor]:
        """The largest logits over all processes: replicas must be rescaled alike, whatever their batches."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.largest
        per_layer = []
        for name, pair in self.pairs.items():
            heads, weight = pair.query.count // pair.head_dim, pair.query.parameters["weight"]
            own = self.largest.get(name, torch.full((heads,), -1.0, device=weight.device)).float()
            per_layer.append(own if len(own) == heads else _among_all(own, heads, name, pair))
        reduced = torch.cat(per_layer)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group)
        return dict(zip(self.pairs, torch.split(reduced, [len(x) for x in per_layer]), strict=True))


def _among_all(own: Tensor, heads: int, name: str, pair: QueryKey) -> Tensor:
    """Logits of the heads that tensor parallelism computes here, at their places among those of all; 0 elsewhere."""
    weight, rows = pair.query.parameters["weight"], len(own) * pair.head_dim
    if not is_dtensor(weight) or len(weight) != heads * pair.head_dim or heads % len(own):
        raise ValueError(f"{name} computes {len(own)} of {heads} heads, and its W_q does not show which: leave it out")
    from surefoot.mesh.groups import slab_of

    slab = slab_of(weight)
    first = len(own) * ((slab.start[0] - (not slab.numel)) // rows)  # an empty one begins where its part ends
    placed = own.new_zeros(heads)
    placed[first : first + len(own)] = own
    return placed


def _otherwise(placement: Placement, part: Projection, what: str, pair: QueryKey) -> str:
    """How a plan has the rows of queries or keys where it is not as their name says, else nothing."""
    view, planned = placement.role.view, placement.role.view.whole
    if planned not in (part.view, apart(part.view, placement.shape), Matrix()) or NO_VIEW in placement.why:
        return f"{part.view} by its name, {'another order' if NO_VIEW in placement.why else planned}"
    if isinstance(view, PerHead) and view.head_dim != pair.head_dim:
        return f"heads of {pair.head_dim} by its attributes, of {view.head_dim}"
    own = placement.parts[part.part if len(placement.parts) > 1 else 0] if placement.parts else what
    shared = len(placement.parts) == 1 and pair.query.layer is pair.key.layer
    return "" if shared or own == what else f"{what} number {part.part} by its name, {' and '.join(placement.parts)}"


class _LogitRecorder(TorchFunctionMode):
    """Measures the logits of one attention layer while its forward method runs, if it trains."""

    def __init__(self, name: str, record: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.name, self.record, self.calls, self.measures, self.open = name, record, 0, False, ExitStack()

    def start(self, layer: nn.Module, inputs: Any) -> None:
        """Forward pre-hook: intercept torch functions from here on."""
        self.calls, self.measures = 0, layer.training and torch.is_grad_enabled()
        self.open.enter_context(self)

    def stop(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook, called after an exception, too, with output None: stop intercepting."""
        self.open.close()  # nothing is open where another hook has raised before `start`
        if layer.training and output is not None and not self.calls:
            raise RuntimeError(
                f"the attention logits of {self.name} cannot be measured: it does not call "
                "scaled_dot_product_attention. Use that (transformers: attn_implementation='sdpa'), name the module "
                "that does, pairs={name: QueryKey(...)}, or call optimizer.scale_(control.factors({name: largest}))"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ARGUMENTS:
            self.calls += 1
            if self.measures:
                self.record(self.name, _measured(dict(zip(_ARGUMENTS[func], args, strict=False)) | kwargs))
        return func(*args, **kwargs)


@torch.no_grad()
def _measured(call: dict[str, Any]) -> Tensor:
    """The largest logits of a call of either function of `_ARGUMENTS`, by its arguments."""
    if "num_heads" in call:
        return multihead_logits(**call)
    scale = call.get("scale")
    scale = call["query"].shape[-1] ** -0.5 if scale is None else scale
    return largest_logits(call["query"], call["key"], scale, call.get("attn_mask"), call.get("is_causal", False))
