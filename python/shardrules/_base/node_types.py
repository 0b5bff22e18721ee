"""Which registered pytree types are plain records, and how their nodes are read and rebuilt.

A record's children are attributes with fixed names, so the core reads and rebuilds it without the
registry's Python functions. Three kinds are known: JAX's own dataclasses, equinox modules and flax
nnx Variables. Each is recognised by the very functions that it was registered with, and checked on
the first node met; whatever looks different goes through the registry. Asked once per type and
walk; imports neither flax nor equinox.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from shardrules._base.jax_names import node_flattener, registered_unflatten
from shardrules._core import RecordLayout


class Record(NamedTuple):
    """The way in which the core reads and rebuilds nodes of one type."""

    layout: RecordLayout
    children: tuple[str, ...]
    """Attributes that hold the children."""
    keys: tuple[str, ...]
    """The children's texts in paths."""
    rest: tuple[str, ...]
    """Attributes that are carried over."""


# JAX 0.12 gave the function its underscore.
_JAX_DATACLASS: Final = {
    ("jax._src.tree_util", f"{prefix}register_dataclass.<locals>.unflatten_func")
    for prefix in ("", "_")
}

# What a function does; the rest of its code says where it was written.
_CODE: Final = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars")

_known: WeakKeyDictionary[type, Record] = WeakKeyDictionary()


def registration(
    node_type: type, example: object
) -> tuple[Callable[..., Any] | None, Record | None]:
    """Return the unflatten function that a type is registered with, and the layout of a record.

    Either is None if it is not known; then the core asks the registry itself, node by node.
    """
    unflatten = registered_unflatten(node_type)
    if unflatten is None:
        return None, None
    record = _known.get(node_type)
    if record is None:
        record = _record_of(node_type, unflatten)
        if record is None or not _is_record(record, example, unflatten):
            return unflatten, None
        _known[node_type] = record
    if record.layout is RecordLayout.CALL and _constructor_sets_fields(node_type, record):
        record = record._replace(layout=RecordLayout.FIELDS)
    return unflatten, record


def _record_of(node_type: type, unflatten: Callable[..., Any]) -> Record | None:
    if _full_name(unflatten) in _JAX_DATACLASS:
        fields = inspect.getclosurevars(unflatten).nonlocals
        children, rest = tuple(fields["data_fields"]), tuple(fields["meta_fields"])
        is_its_own = fields["nodetype"] is node_type
        return Record(RecordLayout.CALL, children, children, rest) if is_its_own else None
    if isinstance(unflatten, functools.partial) and unflatten.args == (node_type,):
        if _is_of_equinox(unflatten.func, node_type):
            return _equinox_module(node_type)
        if _full_name(unflatten.func) == ("flax.nnx.variablelib", "_variable_unflatten"):
            return _nnx_variable(node_type)
    return None


def _constructor_sets_fields(node_type: Any, record: Record) -> bool:
    """Return whether type(**everything) does nothing but set each attribute, in the record's order.

    That is so if its `__init__` is what `dataclasses` makes of plain fields of these names.
    """
    plain_type: Any = object
    init = vars(node_type).get("__init__")
    names = (*record.children, *record.rest)
    if type(node_type) is not type or node_type.__new__ is not plain_type.__new__:
        return False
    if not isinstance(init, FunctionType) or init.__code__.co_varnames[1:] != names:
        return False
    cells = init.__closure__ or ()  # a frozen one holds `object`, to ask it for __setattr__
    plain = _plain_init(names, bool(cells))
    if any(getattr(init.__code__, part) != getattr(plain, part) for part in _CODE):
        return False
    if cells:
        return all(cell.cell_contents is object for cell in cells)
    return node_type.__setattr__ is plain_type.__setattr__


@functools.lru_cache(256)
def _plain_init(names: tuple[str, ...], frozen: bool) -> CodeType:
    fields = [(name, object) for name in names]
    plain: Any = dataclasses.make_dataclass("Plain", fields, frozen=frozen)
    code: CodeType = plain.__init__.__code__
    return code


def _is_of_equinox(function: Callable[..., Any], node_type: type) -> bool:
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    return file == f"<generated_unflatten_{node_type.__qualname__}>"


def _equinox_module(node_type: Any) -> Record:
    static = {f.name: f.metadata.get("static", False) for f in dataclasses.fields(node_type)}
    children = tuple(name for name, is_static in static.items() if not is_static)
    rest = tuple(name for name, is_static in static.items() if is_static)
    return Record(RecordLayout.ATTRIBUTES, children, children, rest)


def _nnx_variable(node_type: type) -> Record | None:
    make = getattr(getattr(node_type, "_new", None), "__func__", None)
    if _full_name(make) != ("flax.nnx.variablelib", "Variable._new"):
        return None
    return Record(RecordLayout.VARIABLE, ("_raw_value",), ("value",), ("_var_metadata",))


def _full_name(function: object) -> tuple[Any, Any]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _is_record(record: Record, node: object, unflatten: Callable[..., Any]) -> bool:
    """Tell if the registry takes this node apart, and puts it together, as the record has it."""
    from jax.tree_util import GetAttrKey

    flat = node_flattener()(node)
    if flat is None:
        return False
    pairs, auxiliary = list(flat[0]), flat[1]
    if [key for key, _ in pairs] != [GetAttrKey(key) for key in record.keys]:
        return False
    children = tuple(child for _, child in pairs)
    if record.layout is RecordLayout.CALL:
        return True  # JAX's own code; the constructor is the user's, so not tried
    again = unflatten(auxiliary, children)
    if record.layout is RecordLayout.ATTRIBUTES:
        before = getattr(node, "__dict__", {})
        names = (*record.children, *record.rest)
        expected = {name: before[name] for name in names if name in before}
        return len(expected) == len(names) and _same_items(again.__dict__, expected)
    slots = [name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())]
    if sorted(slots) != ["_raw_value", "_trace_state", "_var_metadata"]:
        return False
    metadata = getattr(node, "_var_metadata", {})
    return (
        again._raw_value is getattr(node, "_raw_value", None)
        and _same_items(again._var_metadata, dict(sorted(metadata.items())))
        # The nodes of one walk share theirs.
        and again._trace_state == unflatten(auxiliary, children)._trace_state
    )


def _same_items(items: dict[str, object], expected: dict[str, object]) -> bool:
    return list(items) == list(expected) and all(items[k] is expected[k] for k in expected)
