"""The three stability numbers as a model has them, on real activations, by forward hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.geometry import HeadRMS, Spectral
from surefoot.plan import Plan

LIPSCHITZ: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0,
    nn.GELU: 1.129,
    nn.SiLU: 1.100,
    nn.Identity: 1.0,
    nn.Dropout: 1.0,  # in eval mode
}
"""Largest slope of an activation; a block's bound is the product of these and its layers' norms."""

See = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


@torch.no_grad()
def measure(
    model: nn.Module,
    batch: Any,
    *,
    before: nn.Module | None = None,
    plan: Plan | None = None,
    names: Iterable[str] = (),
) -> dict[str, dict[str, float]]:
    """Measure `f`'s three stability numbers on the inputs x and outputs f(x) that a batch gives it.

    forward: `rms(f(x))`. dependency: `rms(f(x1) - f(x2)) / rms(x1 - x2)`, x1 and x2 being neighbours in the batch; the
    plain difference for discrete inputs. update: `rms(f(x; w) - f(x; w_before))`, both at the present x, so that only
    the layer's own step counts. Each should be Theta(1) in width. A linear layer's forward is at most its norm times
    `input = rms(x)`, its dependency at most its norm, its update at most the increment's norm times `input`.

    The model runs in eval mode without gradients. Training flags, gradients and random states are as before
    afterwards, and the hooks are gone, also when the forward pass raises.

    Args:
        model: any module.
        batch: its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        before: `copy.deepcopy(model)` from before the step or steps; adds update.
        plan: the model's plan; adds bounds that hold for inputs of RMS at most 1. dependency_bound: the norm of an
            `nn.Linear`; for an `nn.Sequential` of such and of `LIPSCHITZ` the product, which without biases bounds
            forward too. forward_bound: `sqrt(heads) |W_v| |W_o|` of an `nn.MultiheadAttention` without biases. Of the
            cross entropy behind an LM head of norm r, without bias, over V classes: loss_forward_bound `log V + 2 r`,
            loss_dependency_bound `4 r`; with `before`, loss_update_bound `2 r'`, r' being the increment's norm.
        names: modules to measure besides those that own parameters; `""` is the model itself.

    Returns:
        Module name -> `input` (not for discrete ones), `forward`, `dependency` (if the batch holds two different
        inputs), `update` and bounds: plain numbers. Of a module that is called several times, the largest; one that
        is never called is absent. Of several inputs or outputs the first tensor counts.

    Raises:
        ValueError: a name that is no module's, a `before` that lacks a module or shares parameters with the model.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> measure(layer, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    {'': {'input': 1.0, 'forward': 2.0, 'dependency': 2.0}}
    """
    watched = list(dict.fromkeys([*owners(model), *names]))
    modules, old = _modules(model, watched, "the model"), {}
    if before is not None:
        old = _modules(before, watched, "before")
        if {id(p) for p in model.parameters()} & {id(p) for p in before.parameters()}:
            raise ValueError("before shares parameters with the model: take copy.deepcopy(model) before the step")
    found: dict[str, dict[str, float]] = {}

    def see(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = first_tensor((args, kwargs)), first_tensor(output)
        if y is None:
            return
        numbers = {**_of_input(x), "forward": rms(y), **_dependency(x, y)}
        if name in old:
            then = first_tensor(old[name](*args, **kwargs))
            assert then is not None
            numbers["update"] = rms(y - then)
        known = found.setdefault(name, {})
        known.update({key: max(value, known.get(key, 0.0)) for key, value in numbers.items()})

    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(watching(before, (), see))
        stack.enter_context(watching(model, watched, see))
        call(model, batch)
    if plan is not None:
        multiplier = getattr(model, "output_multiplier", None) or 1.0
        for name in found:
            found[name] |= _bounds(modules[name])
        for name in found.keys() & heads(model, plan):
            found[name] |= _loss_bounds(modules[name], old.get(name), multiplier)
    return {name: found[name] for name in watched if name in found}


def owners(model: nn.Module) -> list[str]:
    """Names of the modules with parameters of their own; a head that shares the embedding's is one."""
    return [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]


def heads(model: nn.Module, plan: Plan) -> set[str]:
    """Names of the modules that are LM heads under the plan, those that share an embedding's table included."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = {id(p) for name, p in trained if plan[name].role.name == "head"} | tables
    modules = [(name, model.get_submodule(name)) for name in owners(model)]
    return {
        name
        for name, module in modules
        if id(getattr(module, "weight", None)) in weights and not isinstance(module, nn.Embedding)
    }


@contextmanager
def watching(model: nn.Module, names: Iterable[str], see: See) -> Iterator[None]:
    """Call `see(name, args, kwargs, output)` after each forward pass of the named modules.

    In eval mode and without gradients; training flags and random states come back, the hooks go.
    """
    flags = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(list(devices)))
        for name in names:
            hook = partial(_hook, see, name)
            stack.callback(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True).remove)
        try:
            model.eval()
            yield
        finally:
            for module, flag in flags:
                module.training = flag


def _hook(see: See, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    see(name, args, kwargs, output)


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)


def rms(x: Tensor) -> float:
    """`sqrt(mean(x**2))`, in float32 or better; 0 of no entries.

    >>> rms(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    if x.numel() == 0:
        return 0.0
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return float(torch.linalg.vector_norm(wide)) / math.sqrt(x.numel())


def _modules(model: nn.Module, names: list[str], who: str) -> dict[str, nn.Module]:
    try:
        return {name: model.get_submodule(name) for name in names}
    except AttributeError as error:
        raise ValueError(f"{who} has no such module: {error}") from None


def _of_input(x: Tensor | None) -> dict[str, float]:
    return {"input": rms(x)} if x is not None and x.is_floating_point() else {}


def _dependency(x: Tensor | None, y: Tensor) -> dict[str, float]:
    """Of sample i and sample i + 1, the last one and the first."""
    if x is None or x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or torch.equal(x, x.roll(1, 0)):
        return {}
    change = rms(y - y.roll(1, 0))
    return {"dependency": change / rms(x - x.roll(1, 0)) if x.is_floating_point() else change}


def _norm(weight: Tensor) -> float:
    return float(Spectral().norm(weight.to(torch.promote_types(weight.dtype, torch.float32))))


def _lipschitz(module: nn.Module) -> float | None:
    """A bound on the dependency; None where none is known. Subclasses may do anything."""
    if type(module) is nn.Sequential:
        factors = [factor for part in module if (factor := _lipschitz(part)) is not None]
        return math.prod(factors) if len(factors) == len(module) else None
    return _norm(module.weight) if type(module) is nn.Linear else LIPSCHITZ.get(type(module))


def _bounds(module: nn.Module) -> dict[str, float]:
    own = dict(module.named_parameters())
    if type(module) is nn.MultiheadAttention and not own.keys() & {"in_proj_bias", "bias_v"}:
        value = own["v_proj_weight"] if "v_proj_weight" in own else own["in_proj_weight"].chunk(3)[2]
        return {"forward_bound": math.sqrt(module.num_heads) * _norm(value) * _norm(own["out_proj.weight"])}
    bound = _lipschitz(module)
    return {} if bound is None else {"dependency_bound": bound}


def _loss_bounds(module: nn.Module, old: nn.Module | None, multiplier: float) -> dict[str, float]:
    if getattr(module, "bias", None) is not None:
        return {}
    weight = module.get_parameter("weight")
    r = multiplier * float(HeadRMS().norm(weight))
    bounds = {"loss_forward_bound": math.log(len(weight)) + 2 * r, "loss_dependency_bound": 4 * r}
    if old is not None:
        step = weight - old.get_parameter("weight")
        bounds["loss_update_bound"] = 2 * multiplier * float(HeadRMS().norm(step))
    return bounds
