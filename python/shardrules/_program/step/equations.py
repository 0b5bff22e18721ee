"""Reads the jaxpr of a step as operations on numbered arrays, with its loops and branches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import entries_of, entry_axes
from shardrules._program.jax_names import user_line
from shardrules._program.step.factors import (
    Dimensions,
    Dims,
    Factors,
    Rule,
    Shape,
    rule_of,
    same_rule,
    shape_of,
)
from shardrules._program.work import kernel_flops

Site = tuple[int, ...]
"""Places of equations, the outermost first; after that of a loop or branch the body's number."""


class TracedArray(NamedTuple):
    """Array of a step."""

    shape: Shape
    dtype: Any
    dims: Dims

    @property
    def bits(self) -> int:
        """Return the bits of the whole array; 0 of what has no dtype."""
        return 0 if self.dtype is None else prod(self.shape) * bits_of(self.dtype)


@dataclass(slots=True)
class TracedOperation:
    """Equation of a jaxpr; one with bodies is a loop, a branch, or code by device."""

    eqn: Any
    rule: Rule | None
    """None if it has bodies, or is not modelled."""
    inputs: list[int | None]
    """Numbers of the arrays that it reads; None for a constant of the program."""
    outputs: list[int]
    scope: str = ""
    """JAX's names around it, such as "transpose(jvp(loss))"."""
    devices: int = 1
    """On how many devices it runs, each with its part: of code by device."""
    site: Site = ()
    """Where its equation is in the jaxpr; () of what is none of the program's."""
    bodies: list[Body] = field(default_factory=list)
    trips: int = 1
    """How often a body runs; 1 if that is not known."""
    first: int = 0
    """Place of the first carried array among the inputs of the body."""
    carries: int = 0
    """How many arrays the body carries; what follows is sliced, and among the results stacked."""
    taken: int | None = None
    """Of branches, the place of that for any platform, or of that which computes most."""

    def arguments(self, body: Body) -> list[tuple[int | None, int, bool]]:
        """List (input of the operation, input of a body that it is, whether as slices of it)."""
        stop = self.first + self.carries if self.name == "scan" else len(body.inputs)
        rows = enumerate(zip(self.inputs[-len(body.inputs) :], body.inputs, strict=True))
        return [(outer, inner, place >= stop) for place, (outer, inner) in rows]

    def results(self, body: Body) -> list[tuple[int, int | None, bool]]:
        """List (result of the operation, result of a body, whether these are stacked in it)."""
        stop = self.carries if self.name == "scan" else len(body.outputs)
        rows = enumerate(zip(self.outputs, body.outputs, strict=True))
        return [(outer, inner, place >= stop) for place, (outer, inner) in rows]

    @property
    def flops(self) -> int:
        """Operations of one run, of products; of a kernel those that it estimates, or 0."""
        if self.rule is not None:
            return self.rule.flops
        return kernel_flops(self.eqn) if self.name == "pallas_call" else 0

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name  # type: ignore[no-any-return]

    @property
    def path(self) -> str:
        """JAX's names around it and the primitive's."""
        return f"{self.scope}/{self.name}".lstrip("/")

    @property
    def line(self) -> str:
        """File and line of the program; without one the name of the primitive."""
        return str(user_line(self.eqn) or self.name)

    def operands(self) -> Iterator[tuple[int, tuple[Factors, ...]]]:
        """Yield (number, factors of each dimension) of the arrays that it reads by its rule."""
        if self.rule is not None:
            for number, dims in zip(self.inputs, self.rule.operands, strict=True):
                if number is not None:
                    yield number, dims


class Body(NamedTuple):
    """Operations that run together: a step, or what is in a loop or a branch."""

    inputs: list[int]
    outputs: list[int | None]
    operations: list[TracedOperation]


class Equations:
    """Operations of a step, its arrays, and the classes of their dimensions."""

    def __init__(self, closed: Any) -> None:
        self.dims = Dimensions()
        self.values: list[TracedArray] = []
        self.manual: dict[int, Cuts] = {}
        """Inputs of the code in `shard_map` and results of it, with the axes of each dimension."""
        self.constants: list[int] = []
        """Arrays that the step closes over: XLA has them whole on each device."""
        self.local: list[tuple[int, int]] = []
        """Pairs of a dimension, and what a device has of it in that code."""
        self._iotas = Iotas()
        self._scope, self._devices = "", 1
        self.body = self._body(closed, list(map(self._new, closed.jaxpr.invars)), ())

    def _new(self, var: Any, dims: Dims | None = None) -> int:
        shape = shape_of(var)
        dtype = getattr(var.aval, "dtype", None)
        self.values.append(
            TracedArray(shape, dtype, self.dims.shape(shape) if dims is None else dims)
        )
        return len(self.values) - 1

    def _body(self, closed: Any, inputs: Sequence[int | None], around: Site) -> Body:
        """Read a jaxpr, or one with its constants, whose inputs are these arrays."""
        jaxpr = open_jaxpr(closed)
        number_of: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = {var: self._new(var) for var in jaxpr.constvars}
        self.constants += constants.values()
        number_of |= constants
        operations: list[TracedOperation] = []

        def number(atom: Any) -> int | None:
            return None if hasattr(atom, "val") else number_of[atom]

        for place, eqn in enumerate(jaxpr.eqns):
            read, site = [number(atom) for atom in eqn.invars], (*around, place)
            outer, name = self._scope, str(eqn.source_info.name_stack)
            self._scope = "/".join(filter(None, (outer, name)))
            inner = inner_jaxpr(eqn)
            if inner is not None:
                arguments = self._numbered(eqn, read)
                if is_barred(eqn):  # XLA does not take what is recomputed for the first
                    shapes = [self.values[i].shape for i in arguments]
                    rule = same_rule(Rule({}, shapes, shapes))
                    passed = self._like(eqn.invars, arguments)
                    operations.append(TracedOperation(eqn, rule, [*arguments], passed, self._scope))
                    arguments = passed
                call = self._body(inner, arguments, site)
                operations += call.operations
                results = call.outputs
            else:
                operation = self._operation(eqn, read, site)
                operation.scope, operation.devices = self._scope, self._devices
                operation.site = site
                operations.append(operation)
                results = list(operation.outputs)
            self._scope = outer
            number_of |= zip(eqn.outvars, results, strict=True)
        outputs = list(map(number, jaxpr.outvars))
        return Body([i for i in inputs if i is not None], outputs, operations)

    def _operation(self, eqn: Any, read: list[int | None], site: Site) -> TracedOperation:
        if read_bodies := _WITH_BODIES.get(eqn.primitive.name):
            return read_bodies(self, eqn, self._numbered(eqn, read), site)
        is_indexed = eqn.primitive.name.startswith(("gather", "scatter"))
        rule = rule_of(eqn, self._iotas.columns(read[1]) if is_indexed else {})
        if rule is None:
            return TracedOperation(eqn, None, read, [self._new(var) for var in eqn.outvars])
        operands = [
            self.dims.shape(shape_of(atom)) if i is None else self.values[i].dims
            for i, atom in zip(read, eqn.invars, strict=True)
        ]
        results = self.dims.apply(rule, operands)
        outputs = [self._new(var, dims) for var, dims in zip(eqn.outvars, results, strict=True)]
        if len(outputs) == 1:
            self._iotas.see(eqn, read, outputs[0])
        return TracedOperation(eqn, rule, read, outputs)

    def _numbered(self, eqn: Any, read: list[int | None]) -> list[int]:
        """Give arguments that are written in the program a number as well."""
        pairs = zip(read, eqn.invars, strict=True)
        return [self._new(atom) if i is None else i for i, atom in pairs]

    def _like(self, variables: Iterable[Any], numbers: Iterable[int]) -> list[int]:
        """Return new arrays with the dimensions of others."""
        pairs = zip(variables, numbers, strict=True)
        return [self._new(var, self.values[i].dims) for var, i in pairs]

    def _unite(self, number: int, result: int | None) -> None:
        if result is not None:
            self.dims.unite_all(self.values[number].dims, self.values[result].dims)

    def _loop(self, eqn: Any, numbers: list[int], site: Site) -> TracedOperation:
        """Read a loop: what it carries, and what a scan slices and stacks along a dimension."""
        params, is_scan = eqn.params, eqn.primitive.name == "scan"
        if is_scan:
            closed, read, (consts, carries) = params["jaxpr"], numbers, scan_counts(params)
        else:
            closed, read = params["body_jaxpr"], numbers[params["cond_nconsts"] :]
            consts, carries = params["body_nconsts"], len(eqn.outvars)
        invars, stacked = open_jaxpr(closed).invars, consts + carries
        carried = self._like(invars[consts:stacked], read[consts:stacked])
        inside, trips = read[:consts] + carried, params["length"] if is_scan else 1
        length = self.dims.new(trips)
        for var, i in zip(invars[stacked:], read[stacked:], strict=True):
            dims = self.values[i].dims
            self.dims.unite(dims[0], length)
            inside.append(self._new(var, dims[1:]))
        body = self._body(closed, inside, (*site, 0))
        outputs = []
        for place, (var, result) in enumerate(zip(eqn.outvars, body.outputs, strict=True)):
            if place < carries:
                dims = self.values[carried[place]].dims
                self._unite(carried[place], result)
            else:
                inner = self.dims.shape(shape_of(var)[1:])
                dims = (length, *(inner if result is None else self.values[result].dims))
            outputs.append(self._new(var, dims))
        loop = TracedOperation(eqn, None, [*numbers], outputs, bodies=[body], carries=carries)
        loop.trips, loop.first = trips, consts
        return loop

    def _cond(self, eqn: Any, numbers: list[int], site: Site) -> TracedOperation:
        branches = enumerate(eqn.params["branches"])
        bodies = [self._body(branch, numbers[1:], (*site, n)) for n, branch in branches]
        outputs = [self._new(var) for var in eqn.outvars]
        for body in bodies:
            for i, result in zip(outputs, body.outputs, strict=True):
                self._unite(i, result)
        choice = TracedOperation(eqn, None, [*numbers], outputs, bodies=bodies)
        choice.carries = len(outputs)
        platforms = eqn.params.get("branches_platforms") or ()
        # Of branches without products that which does most: the other one may be to do nothing.
        work = [(self.flops(body), len([*self.everything(body)])) for body in bodies]
        choice.taken = platforms.index(None) if None in platforms else work.index(max(work))
        return choice

    def _shard_map(self, eqn: Any, numbers: list[int], site: Site) -> TracedOperation:
        """Read the code of one device, whose specs are facts."""
        params = eqn.params
        inside = list(map(self._new, open_jaxpr(params["jaxpr"]).invars))
        self.manual |= zip(inside, cuts_of_specs(params, "in"), strict=True)
        for outer, local in zip(numbers, inside, strict=True):
            self._relate(outer, local, self.manual[local])
        sizes, outer_devices = dict(params["mesh"].shape), self._devices
        self._devices *= prod(sizes[axis] for axis in params.get("manual_axes", sizes))
        body = self._body(params["jaxpr"], inside, (*site, 0))
        self._devices = outer_devices
        outputs = list(map(self._new, eqn.outvars))
        self.manual |= zip(outputs, cuts_of_specs(params, "out"), strict=True)
        for outer, result in zip(outputs, body.outputs, strict=True):
            if result is not None:
                self._relate(outer, result, self.manual[outer])
        return TracedOperation(eqn, None, [*numbers], outputs, bodies=[body])

    def _relate(self, outside: int, inside: int, cuts: Cuts) -> None:
        pairs = zip(self.values[outside].dims, self.values[inside].dims, strict=True)
        for place, (outer, local) in enumerate(pairs):
            if any(cuts[place : place + 1]):
                self.dims.parts.append((outer, local))
                self.local.append((outer, local))
            else:
                self.dims.unite(outer, local)

    @cached_property
    def looped(self) -> set[int]:
        """Return the classes over which loops go."""
        return {
            name
            for operation, _ in self.everything()
            for body in operation.bodies
            for outer, _, is_slice in operation.arguments(body)
            if is_slice and outer is not None
            for name in self.dims.classes(self.values[outer].dims[0])
        }

    @cached_property
    def users(self) -> dict[int, list[TracedOperation | None]]:
        """Operations that read each array; None is that of a step's results, or a loop's."""
        users: defaultdict[int, list[TracedOperation | None]] = defaultdict(list)
        rows = [operation for operation, _ in self.everything()]
        bodies = [self.body, *(inner for operation in rows for inner in operation.bodies)]
        pairs: list[Any] = [(number, row) for row in rows for number in row.inputs]
        pairs += [(number, None) for body in bodies for number in body.outputs]
        for number, user in pairs:
            if number is not None:
                users[number].append(user)
        return dict(users)

    def everything(
        self, body: Body | None = None, trips: int = 1
    ) -> Iterator[tuple[TracedOperation, int]]:
        """Yield each operation, loops before what is in them, and how often a device runs it.

        Of branches that which computes most runs.
        """
        for operation in (self.body if body is None else body).operations:
            yield operation, trips
            for place, inner in enumerate(operation.bodies):
                turns = operation.trips if operation.taken in (None, place) else 0
                yield from self.everything(inner, trips * turns)

    def flops(self, body: Body | None = None) -> int:
        """Return the operations of a step, or of a part of it, on all devices."""
        return sum(row.flops * row.devices * trips for row, trips in self.everything(body))


_WITH_BODIES: Final[dict[str, Callable[..., TracedOperation]]] = {
    "scan": Equations._loop,
    "while": Equations._loop,
    "cond": Equations._cond,
    "shard_map": Equations._shard_map,
}


# What holds one jaxpr that runs once, and the names of the parameter that has it.
_CALLS: Final = frozenset((
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat",
    "remat2", "run_state", "eval_jaxpr", "composite", "custom_jvp_call", "custom_vjp_call",
    "custom_vmap_call", "remat_opt", "linear_call",
))  # fmt: skip
_INNER: Final = ("jaxpr", "call_jaxpr", "fwd_jaxpr", "call", "callee")
Cuts = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of an array."""
CONSTRAINTS: Final = frozenset({"sharding_constraint", "reshard"})
# What changes no element of an index.
_UNCHANGED: Final = frozenset({"convert_element_type", "copy"})
BODIES: Final = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
"""The parameter that has the jaxpr of a loop, or those of branches."""


def open_jaxpr(closed: Any) -> Any:
    """Return a jaxpr without its constants."""
    return getattr(closed, "jaxpr", closed)


def without_dead(closed: Any) -> Any:
    """Leave out the equations whose results nothing reads, as XLA does; all inputs stay."""
    from jax.interpreters.partial_eval import dce_jaxpr

    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


def inner_jaxpr(eqn: Any) -> Any:
    """Return the jaxpr that an equation runs once; None if it is no such call."""
    if eqn.primitive.name not in _CALLS:
        return None
    return next((eqn.params[name] for name in _INNER if name in eqn.params), None)


def only_call(closed: Any) -> Any:
    """Return the equation of the jitted function that a jaxpr consists of; None without one."""
    eqns = closed.jaxpr.eqns
    is_call = len(eqns) == 1 and eqns[0].primitive.name in ("jit", "pjit")
    return eqns[0] if is_call and list(eqns[0].invars) == list(closed.jaxpr.invars) else None


def is_barred(eqn: Any) -> bool:
    """Say whether an equation is what `jax.checkpoint` recomputes, behind a barrier."""
    barred = eqn.params.get("prevent_cse", False)
    is_any = any(barred) if isinstance(barred, tuple) else bool(barred)
    return is_any and bool(eqn.params.get("differentiated", False))


def constrains(eqn: Any) -> bool:
    """Say whether an equation fixes a sharding: a `reshard` onto Auto axes changes a type alone."""
    if eqn.primitive.name == "reshard":
        mesh = getattr(eqn.params.get("dst_sharding"), "mesh", None)
        return any("Auto" not in str(kind) for kind in getattr(mesh, "axis_types", ("",)))
    return bool(eqn.primitive.name == "sharding_constraint")


def cuts_of_specs(params: Any, side: str) -> Iterable[Cuts]:
    """Yield the cuts of each array of a shard_map's "in" or "out"."""
    return (tuple(map(entry_axes, entries_of(spec))) for spec in params[f"{side}_specs"])


def scan_counts(params: Any) -> tuple[int, int]:
    """Return how many constants and how many carried arrays a scan begins with."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carries)


def inputs_of(tree: Any, function: Any, values: Iterable[Any] | None = None) -> list[Any]:
    """Return the leaves that are inputs, or these values of leaves: of equinox the arrays alone."""
    from jax import Array, ShapeDtypeStruct, tree_util

    leaves = tree_util.tree_leaves(tree)
    is_filtered = type(function).__module__.startswith("equinox.")
    pairs = zip(leaves, leaves if values is None else values, strict=True)
    kinds = Array | ShapeDtypeStruct
    return [value for leaf, value in pairs if not is_filtered or isinstance(leaf, kinds)]


class Iotas:
    """Arrays of a step whose elements are their own places along a dimension, as an iota's are.

    `x[jnp.arange(n)[:, None], i]` leaves rows in place.
    """

    def __init__(self) -> None:
        self._along: dict[int | None, int] = {}
        """By array, the dimension of which its elements are the places."""
        self._sums: dict[int | None, int | None] = {}
        """By array that is another one plus a number, the other one."""
        self._columns: dict[int | None, dict[int, int]] = {}

    def columns(self, indices: int | None) -> dict[int, int]:
        """Return {column of an array of indices: the dimension along which it is an iota}."""
        if indices in self._along:
            return {0: self._along[indices]}
        return self._columns.get(indices, {})

    def see(self, eqn: Any, read: Sequence[int | None], output: int) -> None:
        """Note whether the result of an equation is an iota."""
        name, along = eqn.primitive.name, [self._along.get(number) for number in read]
        dim = along[0] if along else None
        if name == "iota":
            self._along[output] = eqn.params["dimension"]
        elif name == "concatenate":
            self._columns[output] = _columns_of(eqn, along)
        elif name == "add" and along.count(None) == 1:
            self._sums[output] = next(n for n in read if n in self._along)
        elif name == "select_n" and len(read) == 3:
            # Below 0 an index has the size added to it: none of these is.
            if along[1] is not None and self._sums.get(read[2]) == read[1]:
                self._along[output] = along[1]
        elif dim is not None and name == "broadcast_in_dim":
            self._along[output] = eqn.params["broadcast_dimensions"][dim]
        elif dim is not None and (name in _UNCHANGED or (name == "reshape" and _is_kept(eqn, dim))):
            self._along[output] = dim


def _columns_of(eqn: Any, along: Sequence[int | None]) -> dict[int, int]:
    """Return the columns that are iotas, of arrays side by side in the last dimension."""
    columns: dict[int, int] = {}
    if eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
        place = 0
        for dim, atom in zip(along, eqn.invars, strict=True):
            if dim is not None and atom.aval.shape[-1] == 1:
                columns[place] = dim
            place += atom.aval.shape[-1]
    return columns


def _is_kept(eqn: Any, dim: int) -> bool:
    """Say whether a reshape leaves the dimensions up to one as they are."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return bool(before[: dim + 1] == after[: dim + 1])
