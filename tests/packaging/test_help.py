"""What `help` shows of every public function and class."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from contextlib import suppress
from typing import Any, get_type_hints

import shardrules as sr
from tests.support import api

# What no page of `help` shows: how typing keeps a name, where an object is, a record's every field.
UNREADABLE = re.compile(r"ForwardRef|<object object| at 0x|= \w*Dialect\(|= Correction\(absent")


def public_callables() -> dict[str, Any]:
    found = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in api.modules()
        for name in api.public_names(module)
    }
    return {
        name: one
        for name, one in found.items()
        if callable(one) and getattr(one, "__module__", "").startswith("shardrules")
    }


def test_help_is_readable():
    pages = {name: pydoc.plain(pydoc.render_doc(one)) for name, one in public_callables().items()}
    assert len(pages) > 145
    # What a class inherits from Python is not ours to word.
    ours = {name: re.split("inherited from collections", page)[0] for name, page in pages.items()}
    wrong = {name: set(UNREADABLE.findall(page)) for name, page in ours.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_defaults_are_short():
    """Of every public function, class and method."""
    count = 0
    for name, one in public_callables().items():
        members = vars(one).items() if inspect.isclass(one) else ()
        methods = [it for own, it in members if inspect.isfunction(it) and own[0] != "_"]
        for thing in (one, *methods):
            with suppress(ValueError, TypeError):  # of an enum, or one made in C
                for parameter in inspect.signature(thing).parameters.values():
                    assert len(repr(parameter.default)) <= 60, (name, thing, parameter)
                    count += 1
    assert count > 500


def test_annotations_still_have_types():
    assert get_type_hints(sr.types.CutReason)["axes"] == tuple[str, ...]
