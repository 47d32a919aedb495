"""Every public name says what it takes, what it returns, what it raises, and shows it."""

import dataclasses
import importlib
import inspect
import re

import pytest

import surefoot
import surefoot._api as api

MODULES = (api, api.contrib, api.geometry, api.layers, api.views, api.recipes)
LISTED = 75
RAISES = re.compile(r"\braise \w|\brequire_\w+\(")


def public(module):
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    return {name: x for name, x in found.items() if callable(x) and x.__module__.startswith("surefoot")}


NAMES = {f"{x.__module__}.{name}": x for module in MODULES for name, x in public(module).items()}
NAMES |= {f"{home}.{n}": getattr(importlib.import_module(home), n) for home, ns in api.ELSEWHERE.items() for n in ns}


def parameters(thing):
    """Names of a function's or a constructor's own arguments."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    if inspect.isclass(thing) and "__init__" not in vars(thing):
        return []
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def sources(thing):
    """The source in which a constructor or a function may raise."""
    if not inspect.isclass(thing):
        return inspect.getsource(thing)
    constructor = "__post_init__" if dataclasses.is_dataclass(thing) else "__init__"  # a dataclass's has no source
    own = (vars(cls).get(constructor) for cls in thing.__mro__ if cls.__module__.startswith("surefoot"))
    return "".join(inspect.getsource(method) for method in own if inspect.isfunction(method))


def lacks(thing):
    """What a docstring lacks."""
    doc = inspect.getdoc(thing) or ""
    wanted = {">>>": True, "Args:": bool(parameters(thing)), "Raises:": bool(RAISES.search(sources(thing)))}
    if inspect.isfunction(thing):
        wanted["Returns:"] = "\n\n" in doc.split(">>>")[0].strip() and bool(parameters(thing))
    missing = [section for section, needed in wanted.items() if needed and section not in doc]
    return [*missing, *(f"{name}:" for name in parameters(thing) if not re.search(rf"^ *\*{{0,2}}{name}: ", doc, re.M))]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_arguments_results_errors_and_an_example(name):
    assert lacks(NAMES[name]) == []


def test_what_a_role_of_ones_own_needs_is_public():
    needed = (
        "Role Geometry Momentum Adam Smoothing Identity Initial Fill Scale Constant Stabiliser LinearNormal AsBuilt"
    )
    assert set(needed.split()) <= set(surefoot.__dir__())


def test_few_names_are_listed_and_all_others_are_found_in_their_modules():
    assert len(api.__all__) == len({*api.__all__}) <= LISTED
    for home, names in api.ELSEWHERE.items():
        assert not {*names} & {*api.__all__}
        if home != "surefoot.contrib":  # those warn: tests/laws/adaptive/test_contrib.py
            assert all(getattr(surefoot, name) is getattr(importlib.import_module(home), name) for name in names)


@pytest.mark.parametrize("drop", [">>>", "Args:", "Raises:", "momentum:"])
def test_what_is_missing_is_noticed(drop, monkeypatch):
    doc = surefoot.Precision.__doc__
    monkeypatch.setattr(surefoot.Precision, "__doc__", doc.replace(drop, ""))
    assert [section for section in lacks(surefoot.Precision) if section == drop]
