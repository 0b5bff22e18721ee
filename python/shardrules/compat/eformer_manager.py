"""`eformer.escale.partition.manager` of eformer 0.0.101 to 0.1.0: names of dimensions to mesh axes.

`PartitionAxis` says which mesh axes each name of `eformer_common_types` stands for, in training and
in decoding. `PartitionManager` and `apply_logical_sharding` constrain arrays by it, in all mesh
contexts of today's JAX. The differences are in docs/guides/eformer.md. eformer is not needed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardrules._base.specs import entry_of
from shardrules._base.text import brief
from shardrules.compat import eformer_common_types as names
from shardrules.compat.eformer import get_corrected_named_sharding, with_sharding_constraint
from shardrules.compat.eformer_common_types import NOT_GIVEN

__all__ = [
    "PartitionAxis",
    "PartitionManager",
    "apply_logical_sharding",
    "get_current_partition_manager",
    "get_partition_manager",
]

_FIELD_OF: Final = {
    names.BATCH: "batch_axis",
    names.LENGTH: "sequence_axis",
    names.QUERY_LENGTH: "query_sequence_axis",
    names.KV_LENGTH: "key_sequence_axis",
    names.EMBED: "hidden_state_axis",
    names.HEAD: "head_axis",
    names.KV_HEAD: "kv_head_axis",
    names.MLP_INTERMEDIATE: "mlp_intermediate_axis",
    names.VOCAB: "vocab_axis",
    names.EXPERT: "expert_axis",
    names.EXPERT_GATE: "expert_gate_axis",
    names.HEAD_DIM: "attention_dim_axis",
    names.KV_HEAD_DIM: "attention_kv_dim_axis",
    names.BIAS_HEAD_SEQ: "bias_head_sequence_axis",
    names.BIAS_KV_SEQ: "bias_key_sequence_axis",
    names.DP: "data_parallel_axis",
    names.FSDP: "fully_sharded_data_parallel_axis",
    names.TP: "tensor_parallel_axis",
    names.SP: "sequence_parallel_axis",
    names.EP: "expert_parallel_axis",
}
"""The field of `PartitionAxis` for each name."""
_IN_GENERATION: Final = {
    "batch_axis": "decode_batch_axis",
    "query_sequence_axis": "decode_query_sequence_axis",
    "key_sequence_axis": "decode_key_sequence_axis",
    "head_axis": "decode_head_axis",
    "kv_head_axis": "decode_kv_head_axis",
    "attention_dim_axis": "decode_attention_dim_axis",
    "attention_kv_dim_axis": "decode_attention_kv_dim_axis",
}
"""The field that takes the place of another in the generation modes, unless it is None."""
_DEFAULTS: Final = {
    "batch_axis": ("fully_sharded_data_parallel_axis", "data_parallel_axis"),
    "sequence_axis": "sequence_parallel_axis",
    "query_sequence_axis": "sequence_parallel_axis",
    "head_axis": "tensor_parallel_axis",
    "kv_head_axis": "tensor_parallel_axis",
    "key_sequence_axis": "sequence_parallel_axis",
    "hidden_state_axis": "tensor_parallel_axis",
    "mlp_intermediate_axis": "tensor_parallel_axis",
    "vocab_axis": "tensor_parallel_axis",
    "expert_axis": "expert_parallel_axis",
    "decode_batch_axis": "batch_axis",
    "decode_head_axis": "head_axis",
    "decode_kv_head_axis": "kv_head_axis",
    "decode_key_sequence_axis": "key_sequence_axis",
}
"""The fields whose values a field takes that is not given; those before it are set by then."""


class _Registered(NamedTuple):
    """What `PartitionAxis.register` was given for a name."""

    axis_rule: Any
    generation_axis_rule: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """The mesh axes that the names of dimensions stand for.

    A value: immutable, hashable, and a pytree without leaves. Lists of mesh axes become tuples.

    Args:
        data_parallel_axis: The mesh axis of each kind of parallelism; so the next four.
        batch_axis: The mesh axis or axes of a dimension, or None for a dimension that is not
            sharded; so all others. Default: the axes of the parallelism that is usual for it.
        decode_batch_axis: The same in the modes of `GENERATION_MODES`; so all `decode_` fields.
            Where one is None, the field without `decode_` counts.

    Raises:
        ValueError: A field without a default is NOT_GIVEN.

    Example:
        >>> from shardrules.compat.eformer_common_types import BATCH, HEAD, MODE_TRAIN, TP
        >>> axes = PartitionAxis(batch_axis="dp")
        >>> tuple(axes.resolve_spec([BATCH, None, HEAD, [TP]], MODE_TRAIN))
        ('dp', None, 'tp', 'tp')
    """

    data_parallel_axis: str = "dp"
    fully_sharded_data_parallel_axis: str = "fsdp"
    tensor_parallel_axis: str = "tp"
    sequence_parallel_axis: str = "sp"
    expert_parallel_axis: str = "ep"

    batch_axis: Any = NOT_GIVEN
    sequence_axis: Any = NOT_GIVEN
    query_sequence_axis: Any = NOT_GIVEN
    head_axis: Any = NOT_GIVEN
    kv_head_axis: Any = NOT_GIVEN
    key_sequence_axis: Any = NOT_GIVEN
    hidden_state_axis: Any = NOT_GIVEN
    mlp_intermediate_axis: Any = NOT_GIVEN
    vocab_axis: Any = NOT_GIVEN
    expert_axis: Any = NOT_GIVEN
    expert_gate_axis: Any = None

    attention_dim_axis: Any = None
    attention_kv_dim_axis: Any = None
    bias_head_sequence_axis: Any = None
    bias_key_sequence_axis: Any = None

    decode_batch_axis: Any = NOT_GIVEN
    decode_query_sequence_axis: Any = None
    decode_head_axis: Any = NOT_GIVEN
    decode_kv_head_axis: Any = NOT_GIVEN
    decode_key_sequence_axis: Any = NOT_GIVEN
    decode_attention_dim_axis: Any = None
    decode_attention_kv_dim_axis: Any = None

    _registered: ClassVar[dict[str, _Registered]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is NOT_GIVEN:
                if field.name not in _DEFAULTS:
                    raise ValueError(f"{field.name} is NOT_GIVEN; give mesh axes, or None")
                source = _DEFAULTS[field.name]
                value = (
                    getattr(self, source)
                    if isinstance(source, str)
                    else tuple(getattr(self, axis_field) for axis_field in source)
                )
            value = tuple(value) if isinstance(value, list) else value
            object.__setattr__(self, field.name, value)

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

        Args:
            semantic_axis: The name.
            axis_rule: What it stands for: a field of `PartitionAxis`, another name, a mesh axis, a
                sequence of these, or None.
            generation_axis_rule: The same in the generation modes. Default: that of the field, if
                `axis_rule` is one that has another for them.
            override: Whether to replace a name that exists.

        Raises:
            ValueError: The name is empty, or it exists.

        Example:
            >>> PartitionAxis.register("__PAGES__", ["batch_axis", "sp"])
            >>> PartitionAxis().resolve_axis(["__PAGES__"], "__prefill__")
            [['fsdp', 'dp', 'sp']]
            >>> PartitionAxis.unregister("__PAGES__")
        """
        name = _checked_name(semantic_axis)
        if generation_axis_rule is NOT_GIVEN and isinstance(axis_rule, str):
            generation_axis_rule = _IN_GENERATION.get(axis_rule, NOT_GIVEN)
        with cls._lock:
            if not override and name in (names.EMPTY, *_FIELD_OF, *cls._registered):
                raise ValueError(
                    f"the name {name!r} exists; replace it with override=True, or take another"
                )
            cls._registered[name] = _Registered(axis_rule, generation_axis_rule)

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Remove a name that was registered.

        Raises:
            ValueError: The name is empty.
            KeyError: It is not there, and `missing_ok` is False.
        """
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
            return {name: registered._asdict() for name, registered in cls._registered.items()}

    def resolve_axis(self, axes: Sequence[Any], mode: str) -> list[Any]:
        """Return the mesh axes of each dimension.

        Args:
            axes: For each dimension a name, None, or a list of names and mesh axes.
            mode: In a mode of `GENERATION_MODES`, the decode fields count.

        Raises:
            ValueError: A name is unknown, or registered names stand for each other.
        """
        return [self._of_dimension(axis, mode) for axis in axes]

    def resolve_spec(self, axes: Sequence[Any], mode: str) -> PartitionSpec:
        """Return the PartitionSpec of an array with these dimensions; as `resolve_axis`."""
        entries = self.resolve_axis(axes, mode)
        # A list has lost what is not sharded in it, and may have lost all.
        return PartitionSpec(
            *(entry_of(tuple(entry)) if isinstance(entry, list) else entry for entry in entries)
        )

    def rules(self, mode: str) -> list[tuple[str, Any]]:
        """Return the names and their mesh axes in a mode, as rules for `shardrules.LogicalRules`.

        Example:
            >>> from shardrules.compat.eformer_common_types import BATCH, MODE_TRAIN
            >>> dict(PartitionAxis().rules(MODE_TRAIN))[BATCH]
            ('fsdp', 'dp')
        """
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
        own = _Registered(_FIELD_OF.get(name, unknown), NOT_GIVEN)
        rule, in_generation = self._registered.get(name) or own
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
            raise ValueError(
                f"Cyclic semantic axis registration detected at {rule!r}; unregister it"
            )
        further = self._rule(rule, names.MODE_TRAIN, NOT_GIVEN)
        return rule if further is NOT_GIVEN else self._resolved(further, seen | {rule})


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(PartitionAxis))


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionManager:
    """A `PartitionAxis`, and a context in which `apply_logical_sharding` finds it.

    A value: immutable, hashable, and a pytree without leaves.

    Raises:
        TypeError: `paxis` is not a PartitionAxis.

    Example:
        >>> from shardrules.compat.eformer_common_types import ColumnWise, HiddenStateSharding
        >>> manager = PartitionManager(PartitionAxis())
        >>> tuple(manager.resolve(ColumnWise))
        (('fsdp', 'sp'), 'tp')
        >>> tuple(manager.resolve(HiddenStateSharding, shape=(8, 1, 512)))  # decodes: one token
        (('fsdp', 'dp'), 'sp', 'tp')
    """

    paxis: PartitionAxis

    def __post_init__(self) -> None:
        if not isinstance(self.paxis, PartitionAxis):
            raise TypeError(f"Expected PartitionAxis, got {type(self.paxis)}")
        _remember(self)

    def __enter__(self) -> PartitionManager:
        _managers.set((*_managers.get(), self))
        _remember(self)
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
        """Return the PartitionSpec of an array whose dimensions have these names.

        Args:
            axes: For each dimension a name, None, or a list of names and mesh axes; or a composite
                such as `ColumnWise`, which has a mode of its own.
            mode: A mode; or the number of a dimension, for MODE_DECODE if its size is 1, else
                MODE_TRAIN.
            dynamic_axes: A composite, in the place of axes and mode.
            shape: The array's shape, for a mode that is a number.

        Raises:
            ValueError: As `PartitionAxis.resolve_axis`; or an argument is missing.
            IndexError: The shape does not have the dimension that the mode names.
        """
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
        """Constrain an array to the spec of its names, corrected to its shape and the mesh.

        Args:
            x: The array.
            axes: As in `resolve`.
            mode: As in `resolve`.
            dynamic_axes: As in `resolve`.
            auto_correct: Whether a missing mesh is an error. Otherwise the array is returned
                unchanged without one.

        Raises:
            AssertionError: There is no mesh, and `auto_correct` is True.
            ValueError, IndexError: As `resolve`.
        """
        spec = self.resolve(axes=axes, mode=mode, dynamic_axes=dynamic_axes, shape=x.shape)
        if auto_correct:
            spec = get_corrected_named_sharding(x.shape, spec).spec
        return with_sharding_constraint(x, spec)  # type: ignore[no-any-return]


_managers: Final[ContextVar[tuple[PartitionManager, ...]]] = ContextVar("managers", default=())
_last: list[PartitionManager] = []
"""The last one that was made or entered, in whatever thread."""


def get_current_partition_manager() -> PartitionManager | None:
    """Return the manager of the innermost `with`, or None.

    Example:
        >>> with PartitionManager(PartitionAxis()) as manager:
        ...     get_current_partition_manager() is manager
        True
    """
    return next(reversed(_managers.get()), None)


def get_partition_manager() -> PartitionManager | None:
    """Return the manager that was made or entered last in this process, or None.

    Example:
        >>> manager = PartitionManager(PartitionAxis())
        >>> get_partition_manager() is manager
        True
    """
    return next(iter(_last), None)


def apply_logical_sharding(  # noqa: PLR0917 eformer's signature
    x: jax.Array,
    partition_manager: Any = NOT_GIVEN,
    axes: Any = NOT_GIVEN,
    mode: Any = NOT_GIVEN,
    dynamic_axes: Any = NOT_GIVEN,
    auto_correct: bool = True,
) -> jax.Array:
    """`PartitionManager.shard` with the given manager, the context's, or the last one made.

    Args:
        x: The array.
        partition_manager: A manager. Default: that of the innermost `with`, or else the one that
            was made or entered last.
        axes: As in `PartitionManager.resolve`.
        mode: As in `PartitionManager.resolve`.
        dynamic_axes: As in `PartitionManager.resolve`.
        auto_correct: As in `PartitionManager.shard`.

    Raises:
        ValueError: There is no manager; or as `PartitionManager.shard`.
        AssertionError, IndexError: As `PartitionManager.shard`.

    Example:
        >>> from shardrules.compat.eformer_common_types import HiddenStateSharding
        >>> mesh, x = jax.sharding.Mesh(jax.devices()[:1], ("tp",)), jax.numpy.ones((2, 4, 8))
        >>> with mesh, PartitionManager(PartitionAxis()):
        ...     x = apply_logical_sharding(x, dynamic_axes=HiddenStateSharding)
        >>> tuple(x.sharding.spec)
        (None, None, 'tp')
    """
    manager = None if partition_manager is NOT_GIVEN else partition_manager
    manager = manager or get_current_partition_manager() or get_partition_manager()
    if manager is None:
        raise ValueError(
            "No PartitionManager is available. Provide `partition_manager` or use "
            "`with PartitionManager(...)`."
        )
    return manager.shard(x, axes, mode, dynamic_axes, auto_correct)


def _remember(manager: PartitionManager) -> None:
    _last[:] = [manager]


def _checked_name(name: object) -> str:
    checked = str(name).strip()
    if not checked:
        raise ValueError("`semantic_axis` must be a non-empty string.")
    return checked


def _each_axis(axes: Any) -> tuple[Any, ...]:
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, list | tuple) else (axes,)


def _is_composite(value: Any) -> bool:
    """Return whether it is a DynamicShardingAxes, its class, or one of eformer's own."""
    type_ = value if isinstance(value, type) else type(value)
    return issubclass(type_, tuple) and hasattr(type_, "_fields")
