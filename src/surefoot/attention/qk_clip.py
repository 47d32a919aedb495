"""Control of attention logits while a model trains: each head's rows of W_q and W_k, scaled back together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from surefoot.attention.logits import largest_logits
from surefoot.attention.qk_pairs import QueryKey, find_pairs
from surefoot.optim.optimizer import SteepestDescent


class LogitControl:
    """Measures every head's largest attention logit, and scales heads back whose logits exceed a threshold.

    After a step, a head whose largest logit `S` of the batches since the last step, on all processes, was above the
    threshold has its rows of W_q and W_k scaled so that its logits are multiplied by `threshold / S`. Momentum stays.

    Args:
        model: its attention must call `torch.nn.functional.scaled_dot_product_attention` (transformers:
            `attn_implementation="sdpa"`), uncompiled, for logits to be measured.
        threshold: what logits are scaled back to; 100 in the published form.
        pairs: the layers, by name in the model; default: `find_pairs(model)`.
        group: the processes that hold replicas of these layers; default: all.

    Raises:
        ValueError: no such layers, or a threshold that is no positive number.

    Cost: measuring takes one of the two products of attention, forward only; after a step one number a layer is read
    on the host (and one vector reduced over processes), and W_q and W_k are written where it exceeds the threshold.

    Source: "QK-Clip" of Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1; there a shared key is left alone.

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
    ) -> None:
        if not 0 < threshold < math.inf:
            raise ValueError(f"the threshold of attention logits must be positive and finite, not {threshold}")
        if pairs is not None and not pairs:
            raise ValueError("no pairs, nothing to control: leave them out, and they are found")
        self.threshold, self._group = threshold, group
        self.pairs = dict(find_pairs(model) if pairs is None else pairs)
        self._layers = {name: model.get_submodule(name) for name in self.pairs}
        self.largest: dict[str, Tensor] = {}
        """Each layer's largest logits by head, `(heads,)`, over the batches of training since the last step."""

    def bounds(self, input_rms: float = 1.0) -> dict[str, Tensor]:
        """What no logit of a head exceeds, by the norms of W_q and W_k, for inputs of at most this RMS."""
        return {name: pair.bound(input_rms) for name, pair in self.pairs.items()}

    @torch.no_grad()
    def factors(self, largest: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """What `SteepestDescent.scale_` takes to bring these largest logits back to the threshold.

        Of `self.bounds()` it makes a guarantee: no input of that RMS gives a larger logit.
        """
        found: dict[Tensor, Tensor] = {}
        for name, logits in largest.items():
            if bool((logits > self.threshold).any()):
                for p, factor in self.pairs[name].factors(logits, self.threshold).items():
                    found[p] = torch.minimum(found[p], factor) if p in found else factor  # layers may share weights
        return found

    def hold(self, optimizer: SteepestDescent) -> list[RemovableHandle]:
        """Measure from now on, and scale back after each of the optimizer's steps; the handles undo it.

        Raises:
            ValueError: W_q or W_k of a layer is not the optimizer's (frozen, for example).
            RuntimeError: in training, where a layer's attention is not seen.
        """
        held = {p for group in optimizer.param_groups for p in group["params"]}
        for name, pair in self.pairs.items():
            if not {p for side in (pair.query, pair.key) for p in side.layer.parameters(recurse=False)} <= held:
                raise ValueError(f"W_q or W_k of {name} is not the optimizer's: train both, or leave the layer out")
        handles = [optimizer.register_step_post_hook(lambda *_: self._after(optimizer))]
        for name, layer in self._layers.items():
            watch = _Watch(name, self._see)
            handles.append(layer.register_forward_pre_hook(watch.enter))
            handles.append(layer.register_forward_hook(watch.leave, always_call=True))
        return handles

    def _see(self, name: str, largest: Tensor) -> None:
        before = self.largest.get(name, largest)
        self.largest[name] = torch.fmax(before, largest)  # a batch that is not finite says nothing

    def _after(self, optimizer: SteepestDescent) -> None:
        optimizer.scale_(self.factors(self._everywhere()))
        self.largest = {}

    def _everywhere(self) -> dict[str, Tensor]:
        """The largest logits over all processes: replicas must scale alike, whatever batches they had."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.largest
        unseen = {name: pair.bound().zero_() for name, pair in self.pairs.items() if name not in self.largest}
        parts = [(unseen | self.largest)[name].float() for name in self.pairs]
        together = torch.cat(parts)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group)
        return dict(zip(self.pairs, torch.split(together, [len(part) for part in parts]), strict=True))


class _Watch(TorchFunctionMode):
    """Entered while a layer's forward runs; sees the queries and keys of its attention."""

    def __init__(self, name: str, tell: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.name, self.tell, self.calls, self.trains = name, tell, 0, False

    def enter(self, layer: nn.Module, inputs: Any) -> None:
        """Before the forward."""
        self.calls, self.trains = 0, layer.training and torch.is_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """After it, or after its failure (output None)."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if layer.training and output is not None and not self.calls:
            raise RuntimeError(
                f"the attention logits of {self.name} are not seen: it does not call scaled_dot_product_attention. Use "
                "that implementation (transformers: attn_implementation='sdpa'), or measure them yourself and call "
                "optimizer.scale_(control.factors({name: largest}))"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            if self.trains:
                self._see(*args, **kwargs)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _see(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """The arguments of `scaled_dot_product_attention`."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.tell(self.name, largest_logits(query, key, scale, attn_mask, is_causal))
