"""Equality of values by type and fields, and a digest of them that is the same in every process.

Roles are compared so, and the digest of a plan is made so: by what a value is, never by how it prints. Tensors are
compared by content; objects that are no dataclass by their attributes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

Name = Callable[[Any], Any]
"""A class or function -> what stands for it."""


def key(value: Any) -> Hashable:
    """A hashable stand-in: two keys are equal if types and fields of the values are, tensors by content.

    >>> from surefoot.geometry import Spectral
    >>> key(Spectral()) == key(Spectral()), key(torch.ones(2)) == key(torch.zeros(2))
    (True, False)
    """
    tree: Hashable = _tree(value, lambda definition: definition)
    return tree


def digest(value: Any) -> str:
    """16 hexadecimal digits of the names of types, and names and values of fields; private names do not count.

    >>> from surefoot.geometry import Spectral
    >>> digest(Spectral()) == digest(Spectral("auto")), digest(Spectral()) == digest(Spectral("qdwh"))
    (True, False)
    """
    return hashlib.sha256(repr(_tree(value, _public_name)).encode()).hexdigest()[:16]


def _tree(value: Any, name: Name) -> Any:
    """Nested tuples of strings, numbers and names."""
    visit = partial(_tree, name=name)
    if isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType):
        return name(value)
    if value is None or isinstance(value, str | bytes | int | complex):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value  # 2.0 and 2 are one number, as for ==
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Tensor):
        return ("Tensor", str(value.dtype), tuple(value.shape), _content(value))
    if isinstance(value, Mapping):
        return ("Mapping", *sorted(((visit(k), visit(x)) for k, x in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return ("Set", *sorted(map(visit, value), key=repr))
    if isinstance(value, list | tuple):
        return (name(type(value)), *map(visit, value))
    fields = (("_" if field.startswith("_") else field, visit(x)) for field, x in _fields(value))
    return (name(type(value)), *fields)


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    """Names and values of a dataclass's fields; of another object the arguments and the state that pickle would use."""
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
    try:
        reduced = value.__reduce_ex__(4)
    except TypeError:
        raise ValueError(f"{value!r} cannot be compared by value: make its class a dataclass") from None
    if isinstance(reduced, str):
        return [("name", reduced)]
    state = reduced[2] if len(reduced) > 2 else None
    parts = state if isinstance(state, tuple) else (state,)  # attributes, and slots if there are any
    if not all(part is None or isinstance(part, dict) for part in parts):
        return [("arguments", reduced[1]), ("state", state)]
    computed = {
        field for cls in type(value).__mro__ for field, x in vars(cls).items() if isinstance(x, cached_property)
    }
    attributes = [pair for part in parts for pair in (part or {}).items() if pair[0] not in computed]
    return [("arguments", reduced[1]), *attributes]


def _public_name(definition: Any) -> Any:
    """The name of a class, or of the nearest public class it derives from; of a function with what it closes over."""
    if isinstance(definition, type):
        return next(cls.__name__ for cls in definition.__mro__ if not cls.__name__.startswith("_"))
    closure = [cell.cell_contents for cell in getattr(definition, "__closure__", None) or ()]
    values = (*(getattr(definition, "__defaults__", None) or ()), *closure)
    return (definition.__qualname__, *(_tree(x, _public_name) for x in values))


def _content(x: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    if x.is_meta:
        raise ValueError("a tensor on the meta device has no content to be compared by")
    x = x.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())).hexdigest()
