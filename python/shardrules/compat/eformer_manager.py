"""`eformer.escale.partition.manager` of eformer 0.0.101 to 0.1.0: names of dimensions to mesh axes.

Semantics of eformer's classes and functions of the same names, without eformer, except that

- constraints work in all mesh contexts of today's JAX, also under `jax.set_mesh`;
- `PartitionAxis` and `PartitionManager` are immutable, and pytrees without leaves; `register` knows
  what was registered here; they have no `to_json` or `to_state_dict`, nor the managers `to_dict`;
- lists of mesh axes become tuples; docs/guides/eformer.md has the inputs on which eformer fails.

Example:
    >>> from shardrules.compat.eformer_common_types import BATCH, HEAD, MODE_TRAIN, ColumnWise, TP
    >>> manager = PartitionManager(PartitionAxis(batch_axis="dp"))
    >>> tuple(manager.resolve([BATCH, None, HEAD, [TP]], MODE_TRAIN))
    ('dp', None, 'tp', 'tp')
    >>> mesh, x = jax.sharding.Mesh(jax.devices()[:1], ("tp",)), jax.numpy.ones((2, 4))
    >>> with mesh, manager:
    ...     tuple(apply_logical_sharding(x, dynamic_axes=ColumnWise).sharding.spec)
    (None, 'tp')
"""

# ruff: noqa: RUF009
from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import jax
from jax.sharding import PartitionSpec

from shardrules._base.specs import entry_of
from shardrules._base.text import brief
from shardrules.compat import eformer_common_types as names
from shardrules.compat.eformer import get_corrected_named_sharding, with_sharding_constraint
from shardrules.compat.eformer_common_types import NOT_GIVEN

__all__ = [
    "PartitionAxis", "PartitionManager", "apply_logical_sharding", "get_current_partition_manager",
    "get_partition_manager",
]  # fmt: skip


def _named_field(name: str, *like: str, value: Any = None) -> Any:
    """Return a field: the name that stands for it, its default, and the fields that it is like."""
    default = NOT_GIVEN if like else value
    return dataclasses.field(default=default, metadata={"name": name, "like": like})


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """The mesh axes that the names of dimensions stand for.

    Where a `decode_` field is None, the field without `decode_` counts in the generation modes.
    """

    data_parallel_axis: str = _named_field(names.DP, value="dp")
    fully_sharded_data_parallel_axis: str = _named_field(names.FSDP, value="fsdp")
    tensor_parallel_axis: str = _named_field(names.TP, value="tp")
    sequence_parallel_axis: str = _named_field(names.SP, value="sp")
    expert_parallel_axis: str = _named_field(names.EP, value="ep")
    batch_axis: Any = _named_field(
        names.BATCH, "fully_sharded_data_parallel_axis", "data_parallel_axis"
    )
    sequence_axis: Any = _named_field(names.LENGTH, "sequence_parallel_axis")
    query_sequence_axis: Any = _named_field(names.QUERY_LENGTH, "sequence_parallel_axis")
    head_axis: Any = _named_field(names.HEAD, "tensor_parallel_axis")
    kv_head_axis: Any = _named_field(names.KV_HEAD, "tensor_parallel_axis")
    key_sequence_axis: Any = _named_field(names.KV_LENGTH, "sequence_parallel_axis")
    hidden_state_axis: Any = _named_field(names.EMBED, "tensor_parallel_axis")
    mlp_intermediate_axis: Any = _named_field(names.MLP_INTERMEDIATE, "tensor_parallel_axis")
    vocab_axis: Any = _named_field(names.VOCAB, "tensor_parallel_axis")
    expert_axis: Any = _named_field(names.EXPERT, "expert_parallel_axis")
    expert_gate_axis: Any = _named_field(names.EXPERT_GATE)
    attention_dim_axis: Any = _named_field(names.HEAD_DIM)
    attention_kv_dim_axis: Any = _named_field(names.KV_HEAD_DIM)
    bias_head_sequence_axis: Any = _named_field(names.BIAS_HEAD_SEQ)
    bias_key_sequence_axis: Any = _named_field(names.BIAS_KV_SEQ)
    decode_batch_axis: Any = NOT_GIVEN
    decode_query_sequence_axis: Any = None
    decode_head_axis: Any = NOT_GIVEN
    decode_kv_head_axis: Any = NOT_GIVEN
    decode_key_sequence_axis: Any = NOT_GIVEN
    decode_attention_dim_axis: Any = None
    decode_attention_kv_dim_axis: Any = None

    _registered: ClassVar[dict[str, dict[str, Any]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is NOT_GIVEN:
                like = field.metadata.get("like", (field.name.removeprefix("decode_"),))
                if not like or field.name in like:
                    raise ValueError(f"{field.name} is NOT_GIVEN; give mesh axes, or None")
                # These are set by now.
                value, *others = (getattr(self, other) for other in like)
                value = (value, *others) if others else value
            object.__setattr__(self, field.name, tuple(value) if type(value) is list else value)

    @classmethod
    def register(
        cls,
        semantic_axis: str,
        axis_rule: Any,
        *,
        generation_axis_rule: Any = NOT_GIVEN,
        override: bool = False,
    ) -> None:
        """Add a name for every `PartitionAxis` of the process.

        `axis_rule` may be a field of `PartitionAxis`, another name, a mesh axis, a sequence of
        these, or None. ValueError if the name is empty, or exists and not `override`.
        """
        name = _checked_name(semantic_axis)
        if generation_axis_rule is NOT_GIVEN and isinstance(axis_rule, str):
            generation_axis_rule = _IN_GENERATION.get(axis_rule, NOT_GIVEN)
        with cls._lock:
            if not override and name in (names.EMPTY, *_FIELD_OF, *cls._registered):
                raise ValueError(f"the name {name!r} exists; give another, or override=True")
            rules = {"axis_rule": axis_rule, "generation_axis_rule": generation_axis_rule}
            cls._registered[name] = rules

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Remove a registered name; a KeyError if it is not there and not `missing_ok`."""
        name = _checked_name(semantic_axis)
        with cls._lock:
            if cls._registered.pop(name, None) is None and not missing_ok:
                raise KeyError(f"the name {name!r} is not registered")

    @classmethod
    def clear_registered_axes(cls) -> None:
        """Remove all names that were registered."""
        with cls._lock:
            cls._registered.clear()

    @classmethod
    def get_registered_axes(cls) -> dict[str, dict[str, Any]]:
        """{name: {"axis_rule": ..., "generation_axis_rule": ...}}, as of now."""
        with cls._lock:
            return {name: dict(rules) for name, rules in cls._registered.items()}

    def resolve_axis(self, axes: Sequence[Any], mode: str) -> list[Any]:
        """Return the mesh axes of each dimension; ValueError if a name is unknown or a cycle."""
        return [self._of_dimension(axis, mode) for axis in axes]

    def resolve_spec(self, axes: Sequence[Any], mode: str) -> PartitionSpec:
        """Return the PartitionSpec of an array with these dimensions; as `resolve_axis`."""
        entries = self.resolve_axis(axes, mode)
        # A list has lost what is not sharded in it, and may have lost all.
        return PartitionSpec(
            *(entry_of(tuple(entry)) if isinstance(entry, list) else entry for entry in entries)
        )

    def rules(self, mode: str) -> list[tuple[str, Any]]:
        """Return the names and their mesh axes in a mode, as rules for `LogicalRules`."""
        axis_names = list(dict.fromkeys([*_FIELD_OF, *self.get_registered_axes()]))
        return list(zip(axis_names, self.resolve_spec(axis_names, mode), strict=True))

    def replace(self, **updates: Any) -> PartitionAxis:
        """Return a copy with other values for these fields."""
        return dataclasses.replace(self, **updates)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        fields = dataclasses.asdict(self).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionAxis:
        """Return the value that `to_dict` was of; other keys are ignored."""
        return cls(**{name: data[name] for name in _FIELDS if name in data})

    def _of_dimension(self, axis: Any, mode: str) -> Any:
        if isinstance(axis, list | tuple):
            # In a list, what is no name is a mesh axis.
            return self._resolved([self._rule(item, mode, item) for item in axis])
        rule = self._rule(axis, mode, NOT_GIVEN)
        if rule is NOT_GIVEN:
            raise ValueError(
                f"Unknown semantic axis name: {brief(axis)}; register it with "
                "PartitionAxis.register, or put a mesh axis into a list"
            )
        return self._resolved(rule)

    def _rule(self, name: Any, mode: str, unknown: Any) -> Any:
        """Return what a name stands for in a mode: a field, or what was registered for it."""
        if name is None or name == names.EMPTY:
            return None
        if not isinstance(name, str):
            return unknown
        own = {"axis_rule": _FIELD_OF.get(name, unknown), "generation_axis_rule": NOT_GIVEN}
        rule, in_generation = self._registered.get(name, own).values()
        if mode not in names.GENERATION_MODES:
            return rule
        if in_generation is not NOT_GIVEN:
            return in_generation
        field = _IN_GENERATION.get(rule) if isinstance(rule, str) else None
        return rule if field is None or getattr(self, field) is None else field

    def _resolved(self, rule: Any, seen: frozenset[str] = frozenset()) -> Any:
        """Return the mesh axes of a rule."""
        if isinstance(rule, list | tuple):
            axes = [axis for item in rule for axis in _each_axis(self._resolved(item, seen))]
            return tuple(axes) if isinstance(rule, tuple) else axes
        if not isinstance(rule, str):
            return rule
        if rule in _FIELDS:
            return getattr(self, rule)
        if rule in seen:
            raise ValueError(f"Cyclic semantic axis registration at {rule!r}; unregister it")
        further = self._rule(rule, names.MODE_TRAIN, NOT_GIVEN)
        return rule if further is NOT_GIVEN else self._resolved(further, seen | {rule})


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(PartitionAxis))
_IN_GENERATION: Final = {f: f"decode_{f}" for f in _FIELDS if f"decode_{f}" in _FIELDS}
_FIELD_OF: Final = {
    f.metadata["name"]: f.name for f in dataclasses.fields(PartitionAxis) if f.metadata
}


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionManager:
    """A `PartitionAxis`, and a context in which `apply_logical_sharding` finds it."""

    paxis: PartitionAxis

    def __post_init__(self) -> None:
        if not isinstance(self.paxis, PartitionAxis):
            raise TypeError(f"Expected PartitionAxis, got {type(self.paxis)}")
        _last[:] = [self]

    def __enter__(self) -> PartitionManager:
        _managers.set((*_managers.get(), self))
        _last[:] = [self]
        return self

    def __exit__(self, *_: object) -> None:
        _managers.set(_managers.get()[:-1])

    def resolve(
        self,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        shape: Any = NOT_GIVEN,
    ) -> PartitionSpec:
        """Return the PartitionSpec of an array; `axes` may be a composite, as `dynamic_axes`."""
        if dynamic_axes is NOT_GIVEN and _is_composite(axes):
            dynamic_axes, axes = axes, NOT_GIVEN
        if axes is NOT_GIVEN or mode is NOT_GIVEN:
            if not _is_composite(dynamic_axes):
                raise ValueError("if axes or mode is empty you should provide dynamic axes")
            axes, mode = dynamic_axes.axes, dynamic_axes.mode
        if isinstance(mode, int):
            if shape is NOT_GIVEN:
                raise ValueError("when using dynamic mode detection shape should be provided")
            mode = names.MODE_DECODE if shape[mode] == 1 else names.MODE_TRAIN
        return self.paxis.resolve_spec(axes, mode)

    def shard(
        self,
        x: jax.Array,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        auto_correct: bool = True,
    ) -> jax.Array:
        """Constrain an array; AssertionError if there is no mesh and `auto_correct` is True."""
        spec = self.resolve(axes, mode, dynamic_axes, x.shape)
        if auto_correct:
            spec = get_corrected_named_sharding(x.shape, spec).spec
        return with_sharding_constraint(x, spec)  # type: ignore[no-any-return]


_managers: Final[ContextVar[tuple[PartitionManager, ...]]] = ContextVar("managers", default=())
_last: list[PartitionManager] = []


def get_current_partition_manager() -> PartitionManager | None:
    """Return the manager of the innermost `with`, or None."""
    return next(reversed(_managers.get()), None)


def get_partition_manager() -> PartitionManager | None:
    """Return the manager that was made or entered last in this process, or None."""
    return next(iter(_last), None)


def apply_logical_sharding(  # noqa: PLR0917 eformer's signature
    x: jax.Array,
    partition_manager: Any = NOT_GIVEN,
    axes: Any = NOT_GIVEN,
    mode: Any = NOT_GIVEN,
    dynamic_axes: Any = NOT_GIVEN,
    auto_correct: bool = True,
) -> jax.Array:
    """`PartitionManager.shard` of the given manager, the context's, or the last one made."""
    given = None if partition_manager is NOT_GIVEN else partition_manager
    manager = given or get_current_partition_manager() or get_partition_manager()
    if manager is None:
        raise ValueError("No PartitionManager is available: give one, or enter one by `with`")
    return manager.shard(x, axes, mode, dynamic_axes, auto_correct)


def _checked_name(name: object) -> str:
    checked = str(name).strip()
    if not checked:
        raise ValueError("`semantic_axis` must be a non-empty string.")
    return checked


def _each_axis(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else tuple(axes) if isinstance(axes, list | tuple) else (axes,)


def _is_composite(value: Any) -> bool:
    # Also eformer's own, or the class itself.
    type_ = value if isinstance(value, type) else type(value)
    return issubclass(type_, tuple) and hasattr(type_, "_fields")
