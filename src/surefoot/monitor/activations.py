"""Stability numbers measured on real activations, with forward hooks.

For a module f with weights w, its inputs x on a batch, and its weights w_0 from before some steps, the largest of:

- forward: `rms(f(x; w))`, over vectors (along the last dimension; over whole images).
- dependency: `rms(f(x1) - f(x2)) / rms(x1 - x2)`, over all pairs: of vectors for layers that act on each one alone,
  else of samples, entries of the first dimension; for discrete inputs `rms(f(x1) - f(x2))`. At most `maxima.PAIRED` of
  them are compared, evenly spaced. Possible rounding is subtracted, so that nearly equal inputs do not measure it
  (`maxima.largest_ratio`): that of the coarsest dtype among the inputs, outputs, parameters and autocast of the module
  and of the modules inside. Where inputs are far apart, this takes about 1e-5 of the number in float32, 1 to 6 % in
  bfloat16. Not known, and not subtracted, are rounding that builds up over several layers in half precision, and casts
  inside a module: measure such blocks in float32.
- update: `rms(f(x; w) - f(x; w_0))`, over vectors, both at the present x, so that only the module's own steps count.

Each should be Theta(1) in the width. For a linear layer, forward is at most its norm times `input`, the largest
`rms(x)`, dependency at most its norm, update at most the norm of the increment times `input`. The smallest `rms(x)` is
`input_smallest`: behind a norm both are 1, and their gap shows how constant `rms(x)` is over vectors.

Upper bounds from the weights, for inputs of RMS at most 1:

- forward_bound, dependency_bound, update_bound: of linear layers, sequences, MLPs, gated MLPs and attention known to
  `surefoot.monitor.block_bounds`.
- loss_forward_bound `log V + 2 s`, loss_dependency_bound `4 s` and loss_update_bound `2 s'`: of the cross entropy over
  V classes behind an LM head without bias; s is the spread of the head's rows, at most its norm, and s' that of its
  increment, both times the model's `output_multiplier` if it has one.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from surefoot.discovery.kinds import own_parameters
from surefoot.monitor.block_bounds import block_bounds
from surefoot.monitor.layer_bounds import spread
from surefoot.monitor.maxima import coarsest, larger, largest_ratio, largest_rms, over_vectors, vector_rms
from surefoot.plan import Plan

_BY_VECTOR = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
"""Layers that act on each vector alone, as far as `over_vectors`."""

Numbers = dict[str, dict[str, float]]
"""Module name -> quantity -> value."""

Observer = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with a module's name, the module, copies of its positional and keyword arguments, and its output."""


@torch.no_grad()
def measure(
    model: nn.Module,
    batch: Any,
    *,
    before: nn.Module | None = None,
    plan: Plan | None = None,
    names: Iterable[str] = (),
) -> Numbers:
    """Measure forward, dependency and update of a model's modules; `surefoot.monitor.activations` defines them.

    The model runs once, in eval mode without gradients. Training flags, gradients and random states are restored, even
    after an exception.

    Args:
        model: any module, unless tensor parallel, where layers see parts of their inputs.
        batch: its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        before: `copy.deepcopy(model)` from before the steps; adds "update".
        plan: the model's plan; adds the bounds.
        names: modules to measure besides those that own parameters; `""` is the model itself.

    Returns:
        Module name -> "input" and "input_smallest" (of floating-point inputs), "forward", "dependency" (if the batch
        has two different samples), "update" and bounds, as floats. Each is the largest over a module's calls
        ("input_smallest" the smallest), for its first input tensor and its first floating-point output. Modules that
        are not called, or have no such output, are absent.

    Raises:
        ValueError: an unknown module name, or a `before` that lacks a module or shares parameters with the model.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> numbers = measure(layer, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    >>> {name: round(value, 4) for name, value in numbers[""].items()}
    {'input': 1.0, 'input_smallest': 1.0, 'forward': 2.0, 'dependency': 2.0}
    """
    selected = list(dict.fromkeys([*owners(model), *names]))
    modules = _modules(model, selected, "the model")
    old_modules = {} if before is None else _modules(before, selected, "before")
    if before is not None and {id(p) for p in model.parameters()} & {id(p) for p in before.parameters()}:
        raise ValueError("before shares parameters with the model: take copy.deepcopy(model) before the step")
    observe = _Measurement(old_modules, plan is not None)
    numbers, args = observe.numbers, batch if isinstance(batch, tuple | list) else (batch,)
    with forward_hooks(model if before is None else before, (), observe), forward_hooks(model, selected, observe):
        model(**batch) if isinstance(batch, Mapping) else model(*args)
    if plan is not None:
        multiplier = getattr(model, "output_multiplier", None) or 1.0
        for name in numbers.keys() & lm_heads(model, plan):
            numbers[name] |= _loss_bounds(modules[name], old_modules.get(name), multiplier)
    return {name: numbers[name] for name in selected if name in numbers}


def owners(model: nn.Module) -> list[str]:
    """Names of the modules that own parameters, a head that shares its weight with an embedding included.

    Args:
        model: any module.

    Returns:
        The names, in the order of `model.named_modules()`.
    """
    return [name for name, module in model.named_modules() if own_parameters(module)]


def lm_heads(model: nn.Module, plan: Plan) -> set[str]:
    """Names of the LM heads, a head that shares its weight with an embedding included.

    Args:
        model: any module.
        plan: the model's plan.

    Returns:
        Names of the modules whose weight has the role head or is an embedding's, embeddings excluded.

    Raises:
        ValueError: a trainable parameter that the plan lacks.
    """
    weights = {name: own_parameters(module).get("weight") for name, module in model.named_modules()}
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    heads = {id(p) for name, p in model.named_parameters() if p.requires_grad and plan[name].role.name == "head"}
    heads |= {id(weights[name]) for name in tables}
    return {name for name, weight in weights.items() if weight is not None and id(weight) in heads} - tables


@contextmanager
def forward_hooks(model: nn.Module, names: Iterable[str], observe: Observer) -> Iterator[None]:
    """Context in which the model is in eval mode without gradients, and named modules are observed.

    On exit the hooks are removed, and training flags and random states are restored.

    Args:
        model: any module.
        names: modules to observe, by name in the model.
        observe: called after every forward pass of a named module, with its inputs as they were before.

    Yields:
        Nothing.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices)), evaluating(model), ExitStack() as stack:
        for name in names:
            module, (before, after) = model.get_submodule(name), _hooks(name, observe)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which all modules of a model are in eval mode; on exit each has its mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _hooks(name: str, observe: Observer) -> tuple[Callable[..., None], Callable[..., None]]:
    """A hook that copies the inputs of a call under way, which may write to them, and one that hands them on."""
    calls: list[Any] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        with suppress(TypeError, RuntimeError):  # a generator, or tensors with a graph inside an object: as they are
            calls[-1] = copy.deepcopy((args, kwargs), {id(x): x.detach().clone() for x in _tensors((args, kwargs))})

    def after(module: nn.Module, *call: Any) -> None:
        args, kwargs = calls.pop()
        observe(name, module, args, kwargs, call[-1])

    return before, after


def first_output(value: Any) -> Tensor | None:
    """First floating-point tensor in nested tuples, lists and mappings, depth first; None if there is none.

    The indices and masks of a router are no activations.

    >>> first_output((torch.tensor([3]), torch.ones(1)))
    tensor([1.])
    """
    return next((tensor for tensor in _tensors(value) if tensor.is_floating_point()), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, depth first."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield from _tensors(part)


def _modules(model: nn.Module, names: list[str], source: str) -> dict[str, nn.Module]:
    try:
        return {name: model.get_submodule(name) for name in names}
    except AttributeError as error:
        raise ValueError(f"{source} has no such module: {error}; is it a model?") from None


@dataclass(frozen=True)
class _Measurement:
    """An `Observer`: the numbers of modules, the maxima over their calls, and the dtypes they were computed in."""

    old_modules: dict[str, nn.Module]
    bounded: bool
    numbers: Numbers = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def __call__(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        x, y = next(_tensors((args, kwargs)), None), first_output(output)
        if y is None:
            return
        largest = self.numbers.setdefault(name, {})
        values = {}
        if x is not None and x.is_floating_point():
            values["input"] = largest_rms(x)
            smallest = float(vector_rms(x).min()) if x.numel() else 0.0
            values["input_smallest"] = -larger(-smallest, -largest.pop("input_smallest", math.inf))
        values["forward"] = largest_rms(y)
        by_vector = isinstance(module, _BY_VECTOR) and over_vectors(module)
        self.dtypes[name] = self._coarsest(name, module, y.device.type)
        if x is not None and (ratio := largest_ratio(x, y, by_vector, self.dtypes[name])) is not None:
            values["dependency"] = ratio
        if name in self.old_modules:  # last, as it may write to the inputs
            old = first_output(self.old_modules[name](*args, **kwargs))
            assert old is not None
            values["update"] = largest_rms(y - old)
        largest.update({key: larger(value, largest.get(key, 0.0)) for key, value in values.items()})
        if self.bounded and "forward_bound" not in largest:
            largest |= block_bounds(module, self.old_modules.get(name))

    def _coarsest(self, name: str, module: nn.Module, device: str) -> torch.dtype:
        """The coarsest dtype of a module's parameters, of autocast around it, and of the modules called inside."""
        prefix = f"{name}." if name else ""
        found = {dtype for n, dtype in self.dtypes.items() if n.startswith(prefix)}
        around = {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
        return coarsest({p.dtype for p in module.parameters()} | found | around)


def _loss_bounds(module: nn.Module, old: nn.Module | None, multiplier: float) -> dict[str, float]:
    if getattr(module, "bias", None) is not None:
        return {}
    weight = cast(Tensor, module.weight)
    s = abs(multiplier) * float(spread(weight))
    bounds = {"loss_forward_bound": math.log(len(weight)) + 2 * s, "loss_dependency_bound": 4 * s}
    if old is not None:
        change = weight.double() - cast(Tensor, old.weight).double()
        bounds["loss_update_bound"] = 2 * abs(multiplier) * float(spread(change))
    return bounds
