"""Helpers that depend on device, dtype and settings: branching on values, whole tensors, constants, full precision."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

_BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.Lock()
_users: list[torch.device] = []
_replaced: dict[Any, str] = {}
"""The devices of all threads' open contexts, and the settings to restore when the last one is left, by backend."""


def on_cpu(x: Tensor) -> bool:
    """True if `x` is on the CPU, so that branching on its values needs no device synchronisation.

    >>> on_cpu(torch.zeros(2)), on_cpu(torch.zeros(2, device="meta"))
    (True, False)
    """
    return x.device.type == "cpu"


def may_branch(x: Tensor) -> bool:
    """True if a shortcut may depend on `x`'s values: it is on the CPU, not fake, and nothing is compiled."""
    return on_cpu(x) and not torch.compiler.is_compiling() and not hasattr(x, "fake_mode")


def is_mapped() -> bool:
    """True under a transform of `torch.func`."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(x: Tensor) -> bool:
    """True if an operation without rules of torch may be called on `x`: it is on the CPU, and nothing is traced, mapped
    or differentiated forwards.

    >>> is_plain(torch.zeros(2)), torch.func.vmap(is_plain, out_dims=None)(torch.zeros(1, 2))
    (True, False)
    """
    traced = not may_branch(x) or is_mapped()
    return not traced and forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]


def widened(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision or less, else itself.

    >>> widened(torch.ones(2, dtype=torch.bfloat16)).dtype, widened(torch.ones(2, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32) if x.dtype.itemsize > 1 else torch.float32)


def is_dtensor(p: Tensor) -> bool:
    """Whether a parameter is a `DTensor`, without importing torch.distributed."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def whole_of(x: Tensor) -> Tensor:
    """A tensor itself, or a whole `DTensor`, gathered by a collective."""
    if not is_dtensor(x):
        return x
    from surefoot.mesh.groups import gather

    return gather(x)


def scalar_like(value: float | Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.as_tensor(value)` on the device of `like`, without a copy from the host, which would synchronise.

    Args:
        value: a number, or a tensor, which is converted.
        like: any tensor on the device wanted.
        dtype: of the result; default: torch's default dtype for a number, its own for a tensor.

    Returns:
        A tensor of shape `()` for a number, of its own shape for a tensor; a number too large for dtype becomes inf.

    >>> scalar_like(0.5, torch.zeros(2), torch.float64)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, Tensor) or on_cpu(like):
        return torch.as_tensor(value, dtype=dtype, device=like.device)
    wide = torch.full((), value, dtype=torch.float64, device=like.device)  # directly in dtype it would raise
    return wide.to(dtype or torch.get_default_dtype())


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Context in which float32 products are float32 products: no autocast, no TF32, no bfloat16 passes of oneDNN.

    Contexts may be nested and entered from several threads: the process's settings are restored when the last one is
    left. Until then float32 products of every other thread are computed in full precision too. If a setting is changed
    to something other than `ieee` inside, the change survives: the next context entered replaces it, and the last one
    left restores it. A setting that was inherited from `torch.backends.fp32_precision` is restored as an explicit one.
    Within a graph of `torch.compile` it does nothing: `surefoot.compiled` sets the flags around the graph. On the meta
    device it does nothing, either.

    Args:
        device: the device whose autocast is switched off, for this thread.

    Yields:
        Nothing.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    if torch.compiler.is_compiling() or device.type == "meta":  # a graph cannot set flags
        yield
        return
    with _lock:
        _users.append(device)
        for backend in _BACKENDS:
            if backend.fp32_precision != "ieee":
                _replaced[backend] = backend.fp32_precision
                backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _users.remove(device)
            while _replaced and not _users:
                backend, precision = _replaced.popitem()
                if backend.fp32_precision == "ieee":  # otherwise it was changed meanwhile, and stays so
                    backend.fp32_precision = precision


def unguarded(method: F) -> F:
    """A torch method without its compiler guard, whose first call would import the compiler, which takes a second."""
    return cast(F, getattr(method, "__wrapped__", method))


def uncompiled(method: F) -> F:
    """Have `torch.compile` run a method, and all that it calls, eagerly; does not import the compiler."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        return (compiler.disable(method) if compiler else method)(*args, **kwargs)

    return cast(F, run)
