"""A step before it is compiled: `trace` reads its jaxpr, and `Step` says what it does."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._base.arguments import check_type
from shardrules._base.io import collector_paused
from shardrules._base.text import (
    and_more,
    answer,
    mesh_shown,
    near_shown,
    printable_lines,
    record,
)
from shardrules._place.mesh import in_force
from shardrules._place.spec_trees import leaf_paths
from shardrules._plan.answers import Column, Table
from shardrules._plan.plan import Plan
from shardrules._program.lowering import (
    check_static,
    check_step,
    meshes_of,
    noted,
    placed_on,
    target_mesh,
)
from shardrules._program.step.equations import Equations, inputs_of, only_call, without_dead
from shardrules._program.topologies.topology import Topology
from shardrules._program.values import reached
from shardrules._program.work import phase_of, primitive_name

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._program.step.equations import TracedOperation
    from shardrules._program.step.factors import Dims

_IN_TEXT: Final = 8
_ARRAYS_SHOWN: Final = 4
_COLUMNS: Final = (Column("role"), Column("size", is_right=True), Column("arrays"))
_WORK: Final = (
    Column("FLOPs", is_right=True),
    Column("share", is_right=True),
    Column("operation"),
    Column("pass"),
    Column("line"),
)


@record
class DimensionClass(NamedTuple):
    """Dimensions of a step that must be sharded alike; a row of `Step.dimensions`."""

    role: ClassRole
    """What the step does with them; "" if nothing tells."""
    size: int
    arrays: tuple[tuple[str, int], ...]
    """(path, dimension) of each argument that has them."""
    contracted: tuple[str, ...]
    """Lines of the products that sum over them."""


@record
class Work(NamedTuple):
    """Arithmetic of the operations of one line; a row of `Step.work`."""

    operation: str
    part: str
    """"forward", "backward", "recomputed" or "other"."""
    line: str
    flops: int
    """Floating-point operations of products, and of kernels those that they estimate."""


@answer
class Step:
    """What a step does, by its jaxpr: dimensions, their roles, and FLOPs; `trace` makes it.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
        >>> plan = sr.plan(tree, [("up", ("fsdp", "tp"))], {"fsdp": 2, "tp": 4})
        >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
        >>> step = sr.trace(lambda params, x: x @ params["up"], plan, x)
        >>> step.flops
        262144
        >>> [(row.role, row.size, row.arrays) for row in step.dimensions][0]
        ('hidden', 64, (('inputs/0/up', 0), ('inputs/1', 1)))
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], paths: list[str], mesh: Any, *, closed: Any,
        out_tree: Any,
    ) -> None:  # fmt: skip
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.mesh = mesh
        """The mesh that constraints are of; None without one."""
        self._args, self._paths = args, paths
        self._function, self._closed, self._out_tree = function, without_dead(closed), out_tree
        self._call = only_call(closed)
        with collector_paused():
            self._equations = Equations(self._closed)
        self._trees = tuple(arg.abstract() if isinstance(arg, Plan) else arg for arg in args)
        inputs, argument_of = self._equations.body.inputs, [int(p.split("/")[1]) for p in paths]
        self._ranges = [
            range(bisect_left(argument_of, i), bisect_right(argument_of, i))
            for i in range(len(args))
        ]
        """The places of each argument's leaves among all."""
        # Weights are what is planned, or the first argument, but for state such as caches.
        plans = [i for i, arg in enumerate(args) if isinstance(arg, Plan)] or [0][: len(args)]
        planned = [inputs[row] for i in plans for row in self._ranges[i]]
        state = written_arrays(self._equations, planned)
        weights = {number for number in planned if number not in state} or {*planned}
        is_weight = [number in weights for number in inputs]
        self._roles = Roles(self._equations, weights, compress(inputs, map(not_, is_weight)))
        self._model_at = argument_of[is_weight.index(True)] if weights else 0
        """The argument of the parameters: the first plan that is no state, or the first one."""

    @property
    def plan(self) -> Plan | None:
        """The Plan of the parameters among the arguments; None without one."""
        arg = self._args[self._model_at] if self._args else None
        return arg if isinstance(arg, Plan) else None

    @cached_property
    def _arrays_of(self) -> dict[int, list[tuple[str, int]]]:
        """By class, (path, dimension) of each argument that has it."""
        equations = self._equations
        arrays_of: dict[int, list[tuple[str, int]]] = {}
        for path, number in zip(self._paths, equations.body.inputs, strict=True):
            for place, dim in enumerate(equations.values[number].dims):
                for name in equations.dims.classes(dim):
                    arrays_of.setdefault(name, []).append((path, place))
        return arrays_of

    @cached_property
    def dimensions(self) -> tuple[DimensionClass, ...]:
        """Classes of dimensions that must be sharded alike, of which arguments have some."""
        roles = self._roles
        rows = [
            DimensionClass(
                roles.of.get(name, ""),
                self._equations.dims.sizes[name],
                tuple(arrays),
                tuple(roles.contracted.get(name, ())),
            )
            for name, arrays in self._arrays_of.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-len(row.arrays), -row.size)))

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """Arithmetic by line, the most first."""
        flops: Counter[tuple[str, str, str]] = Counter()
        for operation, trips in self._equations.everything():
            if count := operation.flops * trips * operation.devices:
                flops[operation.name, phase_of(operation.scope), operation.line] += count
        return tuple(Work(*key, count) for key, count in flops.most_common())

    @property
    def flops(self) -> int:
        """Floating-point operations of a step's products on all devices."""
        return self._equations.flops()

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What is not looked into: kernels, and primitives without a rule."""
        operations = [operation for operation, _ in self._equations.everything()]
        missing = Counter(
            primitive_name(operation.eqn)
            for operation in operations
            if operation.rule is None and not operation.bodies
        )
        rows = [f"{name} ({count:,} times)" for name, count in missing.items()]
        lines = (operation.line for operation in operations if operation.name == "while")
        return (*rows, *(f"{line}: a loop whose length is not known" for line in lines))

    @cached_property
    def _donated(self) -> list[int]:
        """Numbers of the arguments whose memory results take."""
        flags = () if self._call is None else self._call.params.get("donated_invars", ())
        inputs = self._equations.body.inputs
        return list(compress(inputs, flags)) if len(flags) == len(inputs) else []

    def explain(self, path: str) -> str:
        """Say of each dimension of an argument what the step does with it.

        Args:
            path: Of an array, such as "inputs/0/layers/up", or its end, such as "layers/up".

        Raises:
            KeyError: There is no such array; the message lists near paths.
        """
        check_type("path", path, str, "a text, such as 'inputs/0/layers/up'")
        ends = [i for i, name in enumerate(self._paths) if name.endswith(f"/{path}")]
        rows = [i for i, name in enumerate(self._paths) if name == path] or ends
        if len(rows) != 1:
            why = "is in several arguments" if rows else "is no argument's"
            raise KeyError(f"the path {path!r} {why}{near_shown(path, self._paths)}")
        (row,) = rows
        equations = self._equations
        value = equations.values[equations.body.inputs[row]]
        dtype = getattr(value.dtype, "name", value.dtype)
        lines = [f"{self._paths[row]} {dtype}{list(value.shape)}"]
        for place, (size, dim) in enumerate(zip(value.shape, value.dims, strict=True)):
            lines += self._dimension_lines(place, size, equations.dims.classes(dim))
        return printable_lines(lines)

    def _dimension_lines(self, place: int, size: int, classes: Iterable[int]) -> Iterator[str]:
        roles, sizes = self._roles, self._equations.dims.sizes
        names = {c: f"{roles.of.get(c, '') or 'no role'} {sizes[c]:,}" for c in classes}
        yield f"  dimension {place}, {size:,}: {' x '.join(names.values()) or 'one element'}"
        for name, text in names.items():
            lines = [*roles.contracted.get(name, ())]
            part = f"{text} " if len(names) > 1 else ""
            for line in lines[:_ARRAYS_SHOWN]:
                yield f"    {part}summed over at {line}"
            yield from (f"    {text}" for text in and_more(len(lines), _ARRAYS_SHOWN, "line"))

    def __str__(self) -> str:
        rows = self.work
        total = self.flops or 1
        work = [
            (f"{row.flops:.3g}", f"{row.flops / total:.1%}", row.operation, row.part, row.line)
            for row in rows[:_IN_TEXT]
        ]
        lines = [f"{self.name}: {self.flops:.3g} FLOPs on all devices"]
        lines += Table(_WORK, work).lines() if work else []
        lines += and_more(len(rows), _IN_TEXT, "row")
        lines += ["", "dimensions of the arguments, by what must be sharded alike"]
        lines += Table(_COLUMNS, map(_class_cells, self.dimensions)).lines()
        lines += [f"not looked into: {text}" for text in self.unmodelled]
        return printable_lines(lines)


def _class_cells(row: DimensionClass) -> tuple[str, ...]:
    shown_arrays = [f"{path}[{dim}]" for path, dim in row.arrays[:_ARRAYS_SHOWN]]
    rest = len(row.arrays) - _ARRAYS_SHOWN
    text = ", ".join(shown_arrays) + (f" and {rest} more" if rest > 0 else "")
    return row.role, f"{row.size:,}", text


def trace(step: Any, *args: Any, on: Topology | Mesh | None = None) -> Step:
    """Read what a step does from its jaxpr: nothing is compiled, and nothing runs.

    This is what `solve` is made of; `prove` looks at what the compiler makes of the step.

    Args:
        step: A function, or what `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` makes of one;
            give the jitted one for donation and `out_shardings`.
        *args: Its arguments, as `prove` takes them: a Plan stands for the tree that it plans.
        on: The mesh of the constraints in it, as `prove` takes it. Default: that of the plans, or
            without one that of the arguments' shardings.

    Returns:
        A `Step`: classes of dimensions with their roles, and FLOPs by line.

    Raises:
        TypeError: The step is no function.
        ValueError: The arguments have several meshes.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((64, 256), "float32")}
        >>> plan = sr.plan(tree, [("w", ("fsdp", "tp"))], {"fsdp": 2, "tp": 4})
        >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
        >>> print(sr.trace(lambda params, x: x @ params["w"], plan, x).explain("w"))
        inputs/0/w float32[64, 256]
          dimension 0, 64: hidden 64
            summed over at <doctest shardrules._program.step.step.trace[4]>:1
          dimension 1, 256: no role 256
    """
    import jax

    check_step(step, args)
    check_static(step, args)
    mesh = _mesh_of(on, args)
    trees = placed_on(args, mesh)
    make: Any = partial(jax.make_jaxpr, return_shape=True)
    if type(step).__module__.startswith("equinox."):
        import equinox

        make = equinox.filter_make_jaxpr
    run = step
    if any(map(_is_of_nnx, jax.tree_util.tree_leaves(trees, is_leaf=_is_of_nnx))):

        def run(*modules: Any) -> tuple[Any, Any]:
            return step(*modules), modules  # which the step may change

    with in_force(mesh), noted(step, args):
        closed, results, *_ = make(run)(*trees)
    paths = [
        f"inputs/{place}/{path}" if path else f"inputs/{place}"
        for place, tree in enumerate(trees)
        for path in inputs_of(tree, step, leaf_paths(tree))
    ]
    out_tree = jax.tree_util.tree_structure(results)
    return Step(step, args, paths, mesh, closed=closed, out_tree=out_tree)


def _is_of_nnx(node: Any) -> bool:
    return any(base.__module__.startswith("flax.nnx.") for base in type(node).__mro__)


def _mesh_of(on: Any, args: tuple[Any, ...]) -> Any:
    """Return the mesh of constraints; None if nothing says."""
    if on is not None:
        return target_mesh(on, args)
    plans = [arg for arg in args if isinstance(arg, Plan)]
    meshes: dict[str, Any] = {}
    for mesh in meshes_of(plans or args):
        meshes.setdefault(mesh_shown(mesh.shape), mesh)
    if len(meshes) > 1:
        raise ValueError(f"the arguments have several meshes: {'; '.join(meshes)}: give on=")
    return next(iter(meshes.values()), None)


ClassRole = Literal[
    "layers", "experts", "vocabulary", "KV heads", "heads", "query heads of a KV head", "head size",
    "model width", "hidden", "batch", "sequence", "",
]  # fmt: skip
# A gradient is added to zeros, and never written into a weight.
_WRITES: Final = frozenset(["dynamic_update_slice", "scatter"])


def weight_arrays(equations: Equations, weights: Iterable[int]) -> dict[int, int]:
    """Return {array that is a weight, or computed of it alone, as slices and casts are: it}."""
    sources = {number: number for number in weights}
    for operation, _ in equations.everything():
        rows = (row for inner in operation.bodies for row in operation.arguments(inner))
        pairs = [(outer, inner) for outer, inner, _ in rows]
        arrays = [n for n in operation.inputs if n is not None and equations.values[n].shape]
        if operation.rule is not None and operation.rule.is_identity:
            pairs += zip(operation.inputs, operation.outputs, strict=False)
        elif operation.rule is not None and not operation.rule.summed and len(arrays) == 1:
            pairs += zip(arrays, operation.outputs, strict=False)
        for before, after in pairs:
            if before in sources:
                sources[after] = sources[before]
    return sources


def written_arrays(equations: Equations, arrays: Iterable[int]) -> set[int]:
    """Return which of these arrays come back, as caches, with what is written into them: state.

    A row of a table that is set to zero before it is looked up in does not come back.
    """
    sources = weight_arrays(equations, arrays)
    writes = [
        (row.inputs[0], row.outputs)
        for row, _ in equations.everything()
        if row.name in _WRITES and row.inputs[0] in sources
    ]
    returned = returned_arrays(equations) if writes else set()
    return {
        sources[before]
        for before, after in writes
        if before is not None and not returned.isdisjoint(after)
    }


def returned_arrays(equations: Equations) -> set[int | None]:
    """Return the results of a step, and the arrays that these are made of element by element."""
    made_of: defaultdict[int | None, list[int | None]] = defaultdict(list)
    for operation, _ in equations.everything():
        for body in operation.bodies:
            for output, result, _ in operation.results(body):
                made_of[output].append(result)
        for output in operation.outputs if operation.rule and not operation.rule.summed else ():
            made_of[output] += operation.inputs
    return set(reached(equations.body.outputs, made_of.__getitem__))


def _classes_alike(equations: Equations) -> dict[int, int]:
    """Return {class that code by device has a part of, or the part: the first class of these}."""
    first: dict[int, int] = {}
    for pair in equations.local:
        for whole, part in zip(*map(equations.dims.classes, pair), strict=False):
            if whole != part:
                first.setdefault(whole, whole)
                first[whole] = first.setdefault(part, first[whole])
    return first


class Roles:
    """Roles by class of dimensions.

    `weights` are the arguments that are the model's parameters, `data` those that are neither
    these nor state of the optimizer.
    """

    def __init__(self, equations: Equations, weights: Iterable[int], data: Iterable[int]) -> None:
        self._equations = equations
        self._first = _classes_alike(equations)
        weights = tuple(weights)
        self.weights = weight_arrays(equations, weights)
        self.of_weights = Counter(self._classes_of(weights))
        self._of_data = [list(self._dims_of(number)) for number in data]
        self.of: dict[int, ClassRole] = {}
        self.contracted: dict[int, dict[str, None]] = {}
        """The lines of the products that sum over each class."""
        self._name_stacks()
        for operation, _ in equations.everything():
            self._see(operation)
        self._name_data()
        self._name_rest()
        for name, first in self._first.items():
            if first in self.of:
                self.of[name] = self.of[first]
            self.of_weights[name] = self.of_weights[first]

    def is_like_weights(self, number: int) -> bool:
        """Say whether weights have all dimensions of an array, as their gradients do."""
        return self._are_of_weights(list(self._classes_of([number])))

    def _are_of_weights(self, classes: Collection[int]) -> bool:
        return bool(classes) and all(name in self.of_weights for name in classes)

    def _classes_of(self, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            yield from dict.fromkeys(c for dims in self._dims_of(number) for c in dims)

    def _dims_of(self, number: int) -> Iterator[Dims]:
        for dim in self._equations.values[number].dims:
            yield tuple([self._first.get(c, c) for c in self._equations.dims.classes(dim)])

    def _name(self, classes: Iterable[int], role: ClassRole) -> None:
        for name in classes:
            self.of.setdefault(name, role)

    def _name_stacks(self) -> None:
        for operation, _ in self._equations.everything():
            for body in operation.bodies:
                for outer, _, is_slice in operation.arguments(body):
                    if is_slice and outer in self.weights:
                        self._name(next(self._dims_of(outer)), "layers")

    def _see(self, operation: TracedOperation) -> None:
        """Name the classes that one operation tells of."""
        rule = operation.rule
        if rule is None or not operation.inputs:
            return
        if operation.name == "dot_general":
            self._see_dot(operation)
        elif operation.name == "ragged_dot_general":
            sizes = operation.inputs[2]
            if sizes is not None:
                self._name((c for dims in self._dims_of(sizes) for c in dims), "experts")
        elif operation.name == "top_k" and operation.inputs[0] is not None:
            *_, last = self._dims_of(operation.inputs[0])
            self._name(self._of_weights_in(last), "experts")
        if not rule.looked_up:
            return
        for number, dims in operation.operands():
            for classes, factors in zip(self._dims_of(number), dims, strict=True):
                if rule.looked_up.intersection(factors):
                    self._name(self._of_weights_in(classes), "vocabulary")

    def _see_dot(self, operation: TracedOperation) -> None:
        (sum_dims, _), (batch_dims, _) = operation.eqn.params["dimension_numbers"]
        first, second = operation.inputs
        if first is None or second is None:
            return
        rows, others = list(self._dims_of(first)), list(self._dims_of(second))
        summed = [c for dim in sum_dims for c in rows[dim]]
        batch = [c for dim in batch_dims for c in rows[dim]]
        free = [c for row in (*rows, *others) for c in row if c not in (*summed, *batch)]
        for name in summed:
            self.contracted.setdefault(name, {})[operation.line] = None
        if first in self.weights or second in self.weights:
            self._name(self._of_weights_in(batch), "experts")
            return
        # A batch of one row has no class: then attention sums over the size of heads, and has
        # positions that no weight has.
        is_of_one_row = self._are_of_weights(summed) and not self._are_of_weights(summed + free)
        if batch and (not self._are_of_weights(batch) or is_of_one_row):
            self._see_attention(summed, batch, free)

    def _see_attention(self, summed: list[int], batch: list[int], free: list[int]) -> None:
        """Name the classes of a product of two activations, one for each sequence and head."""
        sizes, grouped = self._parts_of_weights(summed), self._of_weights_in(free)
        self._name(sizes, "head size")
        if sizes or not grouped:
            self._name(self._of_weights_in(batch), "KV heads" if grouped else "heads")
        if sizes:
            self._name(grouped, "query heads of a KV head")
            self._name(free, "sequence")
            self._name(batch, "batch")

    def _parts_of_weights(self, classes: Iterable[int]) -> list[int]:
        """Return the classes of weights that these are, or whose parts they are put together of."""
        return self._of_weights_in(self.with_parts(classes))

    def with_parts(self, classes: Iterable[int]) -> list[int]:
        """Return classes, what is cut out of them, and what is put together of such parts.

        Rotary embeddings cut heads in halves, and put them together in a class of their own.
        """
        parts = dict.fromkeys(classes)
        rest = [*parts]
        for name in rest:  # which grows
            added = self._cut_from.get(name, set()) - parts.keys()
            parts |= dict.fromkeys(added)
            rest += added
        return rest

    @cached_property
    def _cut_from(self) -> dict[int, set[int]]:
        """Return {class: those that are a part of it, or that it is a part of}."""
        near: defaultdict[int, set[int]] = defaultdict(set)
        for pair in self._equations.dims.parts:
            first, second = map(self._equations.dims.classes, pair)
            if len(first) == len(second) == 1:
                near[first[0]].add(second[0])
                near[second[0]].add(first[0])
        return near

    def _of_weights_in(self, classes: Iterable[int]) -> list[int]:
        return [name for name in classes if name in self.of_weights]

    def _name_data(self) -> None:
        for array in self._of_data:
            for place, classes in enumerate(array):
                for name in classes:
                    if name not in self.of_weights:
                        self._name([name], "sequence" if place else "batch")

    def _name_rest(self) -> None:
        """Name what is left of the classes that weights have."""
        of_data = Counter(c for array in self._of_data for classes in array for c in classes)
        rest = [c for c in self.of_weights if c not in self.of]
        rest.sort(key=lambda c: (self.of_weights[c], of_data[c]), reverse=True)
        if rest and self.of_weights[rest[0]] > 1 and rest[0] in self.contracted:
            self._name([rest.pop(0)], "model width")
        self._name((c for c in rest if c in self.contracted), "hidden")
