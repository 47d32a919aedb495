"""Equality of values by type and fields, and a digest of them that is the same in every process.

Roles are compared, and plans digested, by what a value is, never by how it prints. Tensors are compared by content;
objects that are not dataclasses by their attributes.
"""

import ctypes
import dataclasses
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from functools import cached_property, partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

Name = Callable[[Any], Hashable]
"""Class or function -> a hashable value that stands for it."""

_LEAVES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def key(value: Any) -> Hashable:
    """A hashable stand-in: two keys are equal if types and fields of the values are, tensors by content.

    >>> from surefoot.geometry import Spectral
    >>> key(Spectral()) == key(Spectral()), key(torch.ones(2)) == key(torch.zeros(2))
    (True, False)
    """
    return _tree(value, lambda definition: definition, partial(sorted, key=itemgetter(0)))


def digest(value: Any) -> str:
    """A 16-digit hexadecimal hash of type names, field names and field values; private names do not count.

    >>> from surefoot.geometry import Spectral
    >>> digest(Spectral()) == digest(Spectral("auto")), digest(Spectral()) == digest(Spectral("qdwh"))
    (True, False)
    """
    return hashlib.sha256(repr(_tree(value, _public_name, _public_fields)).encode()).hexdigest()[:16]


def label(value: object) -> str:
    """A value by its class and the fields that differ from their defaults.

    >>> from surefoot.geometry import Spectral
    >>> label(Spectral()), label(Spectral("qdwh"))
    ('Spectral', "Spectral(method='qdwh')")
    """
    if not dataclasses.is_dataclass(value):
        return repr(value) if type(value).__module__ == "builtins" else type(value).__name__
    shown = []
    for field in dataclasses.fields(value):
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if key(own := getattr(value, field.name)) != key(usual):
            shown.append(f"{field.name}={label(own)}")
    return type(value).__name__ + (f"({', '.join(shown)})" if shown else "")


def _tree(value: Any, name: Name, order: Callable[[Any], Any]) -> Hashable:
    """A value as nested tuples of strings, numbers and names; order arranges an object's (field name, tree) pairs."""
    visit = partial(_tree, name=name, order=order)
    if isinstance(value, MethodType):
        return (name(value.__func__), visit(value.__self__))
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return name(value)
    if isinstance(value, Enum):
        return (name(type(value)), visit(value.value))
    if isinstance(value, Tensor):
        return ("Tensor", str(value.dtype), tuple(value.shape), _content(value))
    if value is None or isinstance(value, _LEAVES) or type(value).__module__ == "numpy":
        return _leaf(value)
    if isinstance(value, Mapping):
        return ("Mapping", *sorted(((visit(k), visit(x)) for k, x in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return ("Set", *sorted(map(visit, value), key=repr))
    if isinstance(value, list | tuple):
        return (name(type(value)), *map(visit, value))
    return (name(type(value)), *order((field, visit(x)) for field, x in _fields(value)))


def _leaf(value: Any) -> Hashable:
    """Canonical form of a number, string or constant: numpy's as Python's, and 2.0 as the equal 2."""
    value = value.tolist() if type(value).__module__ == "numpy" else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if value == value // 1 else float(value)
    return value if value is None or isinstance(value, str | bytes) else (type(value).__name__, repr(value))


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    """A dataclass's field names and values; for another object, the arguments and the state that pickle would use."""
    computed = {name for cls in type(value).__mro__ for name, x in vars(cls).items() if isinstance(x, cached_property)}
    if dataclasses.is_dataclass(value):
        declared = {field.name for field in dataclasses.fields(value)}
        extended = "__dataclass_fields__" not in vars(type(value))  # a subclass that is not decorated
        own = [pair for pair in vars(value).items() if pair[0] not in declared | computed] if extended else []
        return own + [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
    try:
        reduced = value.__reduce_ex__(4)
    except TypeError:
        raise ValueError(f"{value!r} cannot be compared by value: make its class a dataclass") from None
    if isinstance(reduced, str):
        return [("name", reduced)]
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    parts = state if isinstance(state, tuple) else (state,)  # attributes, and slots if there are any
    contents = [("arguments", arguments), ("items", list(items or ())), ("pairs", list(pairs or ()))]
    if not all(part is None or isinstance(part, dict) for part in parts):
        return [*contents, ("state", state)]
    return contents + [pair for part in parts for pair in (part or {}).items() if pair[0] not in computed]


def _public_fields(fields: Iterable[Any]) -> list[Any]:
    """Public fields sorted by name, then private ones in their order, without their names."""
    named = (("_" if name.startswith("_") else name, tree) for name, tree in fields)
    return sorted(named, key=lambda field: (field[0] == "_", field[0]))


def _public_name(definition: Any) -> Hashable:
    """A class's or function's name; for private ones, what they derive from, define, close over and consist of."""
    if isinstance(definition, type):
        public = next(cls for cls in definition.__mro__ if not cls.__name__.startswith("_"))
        own = () if public is definition else sorted(name for name in vars(definition) if not name.startswith("_"))
        return (public.__name__, *own)
    closure = [cell.cell_contents for cell in getattr(definition, "__closure__", None) or ()]
    values = (getattr(definition, "__defaults__", None), getattr(definition, "__kwdefaults__", None), closure)
    code = definition.__code__.co_code.hex() if definition.__name__ == "<lambda>" else ""
    constants = [x for x in definition.__code__.co_consts if isinstance(x, int | float | str)] if code else []
    name = "_" if definition.__name__.startswith("_") else definition.__name__
    return (name, code, *constants, _tree(values, _public_name, _public_fields))


def _content(x: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    if x.is_meta:
        raise ValueError("a tensor on the meta device has no content to be compared by")
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())).hexdigest()


_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def plain_name(name: str) -> str:
    """A parameter's name without what DDP, `torch.compile`, activation checkpointing and FSDP add.

    >>> plain_name("module.blocks.0._checkpoint_wrapped_module.up.weight")
    'blocks.0.up.weight'
    """
    return _WRAPPERS.sub("", name)


def by_plain_name(among: Mapping[str, Item], name: str) -> Item | None:
    """The item of this name, or else of one that differs only by what wrappers add; None if there is none.

    >>> by_plain_name({"up.weight": 1}, "module.up.weight")
    1
    """
    plain = plain_name(name)
    known = next((key for key in (name, plain) if key in among), None)
    return among[known] if known else next((x for key, x in among.items() if plain_name(key) == plain), None)
