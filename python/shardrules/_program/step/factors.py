"""Factors of operations: which dimensions of operands and results are the same one.

Each primitive of a jaxpr has a rule, which names the factors of an operation and says of which each
dimension consists, the major one first, as Shardy's op sharding rules do. `dot_general` of [8, 64]
and [64, 32] has three factors: 8 and 32 are kept, and 64 is summed. Reshaping 4096 to 32 x 128 has
two, of which the dimension of 4096 consists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import gcd, prod
from typing import Any, Final

from shardrules._program.work import window_pairs

Factors = tuple[int, ...]
"""Numbers of the factors of one dimension, the major one first; () for a dimension of size 1."""
_Dims = Iterable[Factors]
"""Factors of each dimension of an array."""
Shape = tuple[int, ...]
IotaColumns = Mapping[int, int]
"""By column of indices that is an iota along a dimension, that dimension."""


@dataclass(eq=False)
class Rule:
    """Factors of an operation, which the function of its primitive names one after the other."""

    params: Any
    """Of the equation."""
    shapes: list[Shape]
    """Of the operands."""
    result_shapes: list[Shape]
    """Of the results."""
    iota_columns: IotaColumns = field(default_factory=dict)
    """Of the indices of a gather or scatter."""
    sizes: list[int] = field(default_factory=list)
    """Per factor."""
    operands: tuple[tuple[Factors, ...], ...] = ()
    """Per operand and dimension."""
    results: tuple[tuple[Factors, ...], ...] = ()
    summed: set[int] = field(default_factory=set)
    """Factors that results lack, over which terms are added or one term is chosen: a device that
    has a part of them has a term of the results."""
    whole: set[int] = field(default_factory=set)
    """Factors that a device needs whole: along them results are not computed element by element."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of factors of which one is a part of the other: of slices, pads, concatenations."""
    flops: int = 0
    """Floating-point operations of products."""
    looked_up: set[int] = field(default_factory=set)
    """Factors of which an index chooses the rows: those of a table."""
    is_identity: bool = False
    """True if each result is one of the operands, in their order."""

    @cached_property
    def minor(self) -> frozenset[int]:
        """Factors of which a dimension consists together with others that are before them.

        Devices have contiguous parts of a dimension, and so parts of its major factor.
        """
        arrays = (*self.operands, *self.results)
        return frozenset(f for array in arrays for dims in array for f in dims[1:])

    def dimension(self, size: int) -> Factors:
        """Return a new factor for a dimension; none for one of size 1."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def dimensions(self, shape: Iterable[int]) -> list[Factors]:
        return [self.dimension(size) for size in shape]

    def apart(self, before: int, after: int) -> tuple[Factors, Factors]:
        """Return the factors of two dimensions, of which one is a part of the other if unequal."""
        first = self.dimension(before)
        if before == after:
            return first, first
        second = self.dimension(after)
        self.parts += [(first[0], second[0])] if first and second else []
        self.keep_whole((first, second))
        return first, second

    def keep_whole(self, dimensions: Iterable[Factors]) -> None:
        self.whole.update(factor for factors in dimensions for factor in factors)

    def of(self, operands: Iterable[_Dims], results: Iterable[_Dims]) -> Rule:
        """Return itself with these; operands that are left out have no factors, as scalars."""
        self.operands, self.results = (tuple(map(tuple, arrays)) for arrays in (operands, results))
        self.operands += ((),) * (len(self.shapes) - len(self.operands))
        return self


def rule_of(eqn: Any, iota_columns: IotaColumns | None = None) -> Rule | None:
    """Return the rule of an equation without a jaxpr in it; None if it is not modelled.

    Of a gather or scatter, `iota_columns` of the indices choose rows that stay where they are.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> (eqn,) = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 64)), jnp.ones((64, 32))).eqns
        >>> rule = rule_of(eqn)
        >>> rule.sizes, rule.operands, rule.results, rule.summed, rule.flops
        ([8, 64, 32], (((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), {1}, 32768)
    """
    shapes, results = ([shape_of(var) for var in vars_] for vars_ in (eqn.invars, eqn.outvars))
    make = _RULES.get(eqn.primitive.name)
    return make and make(Rule(eqn.params, shapes, results, iota_columns or {}))


def shape_of(var: Any) -> Shape:
    """Return the shape of a variable; () for a token or another value without one."""
    return tuple(getattr(var.aval, "shape", ()))


@lru_cache(maxsize=4096)
def _elementwise(shapes: tuple[Shape, ...], results: tuple[Shape, ...]) -> Rule:
    """Return the rule of most operations of a step, which have the shapes of few."""
    return _alike(Rule({}, [*shapes], [*results]), results[0])


def _alike(op: Rule, shape: Shape, whole: Iterable[int] = ()) -> Rule:
    """Return the rule of arrays that have the dimensions of one shape.

    Scalars, and dimensions that are broadcast, have no factors.
    """
    factors = op.dimensions(shape)
    op.keep_whole(factors[dim] for dim in whole)
    return op.of(
        *([_of_shape(factors, s) for s in arrays] for arrays in (op.shapes, op.result_shapes))
    )


def _of_shape(factors: list[Factors], shape: Shape) -> list[Factors]:
    pairs = zip(factors, shape, strict=bool(shape))
    return [() if size == 1 else factor for factor, size in pairs]


def _broadcast(op: Rule) -> Rule:
    factors = op.dimensions(op.result_shapes[0])
    pairs = zip(op.shapes[0], op.params["broadcast_dimensions"], strict=True)
    operand = [factors[dim] if size == op.result_shapes[0][dim] else () for size, dim in pairs]
    return op.of([operand], [factors])


def _transpose(op: Rule) -> Rule:
    factors = op.dimensions(op.shapes[0])
    return op.of([factors], [[factors[dim] for dim in op.params["permutation"]]])


def _reshape(op: Rule) -> Rule:
    """Split both shapes into their greatest common factors, from the major end."""
    before, after = op.shapes[0], op.result_shapes[0]
    if 0 in before:
        return op.of(map(op.dimensions, op.shapes), map(op.dimensions, op.result_shapes))
    operand: list[Factors] = [() for _ in before]
    result: list[Factors] = [() for _ in after]
    i = j = 0
    rest = other_rest = 1
    while True:
        while rest == 1 and i < len(before):
            rest, i = before[i], i + 1
        while other_rest == 1 and j < len(after):
            other_rest, j = after[j], j + 1
        if rest == other_rest == 1:
            break
        common = gcd(rest, other_rest)
        # Sizes that share no factor: what is left of both has one of its own.
        first, second = op.apart(rest, other_rest) if common == 1 else op.apart(common, common)
        operand[i - 1] += first
        result[j - 1] += second
        rest, other_rest = rest // common, other_rest // common
        if common == 1:
            i, j = _aligned(before, after, i, j)
            rest = other_rest = 1
    return op.of([operand], [result])


def _aligned(before: Shape, after: Shape, i: int, j: int) -> tuple[int, int]:
    """Return the next places before which both shapes have as many elements."""
    while (count := prod(before[:i])) != (goal := prod(after[:j])):
        i, j = (i + 1, j) if count < goal else (i, j + 1)
    return i, j


def _reduce(op: Rule) -> Rule:
    """Return the rule of what leaves dimensions out: those of size 1 have no factors to sum."""
    axes = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    shape = next(filter(None, op.shapes), ())
    factors = op.dimensions(shape)
    op.summed.update(f for dim in axes for f in factors[dim])
    rest = [f for dim, f in enumerate(factors) if dim not in axes]
    return op.of([_of_shape(factors, s) for s in op.shapes], [rest for _ in op.result_shapes])


def _dot(op: Rule) -> Rule:
    (left_summed, right_summed), (left_batch, right_batch) = op.params["dimension_numbers"]
    lhs, rhs = _multiplied(op, (*left_batch, *left_summed), (*right_batch, *right_summed))
    op.summed.update(f for dim in left_summed for f in lhs[dim])
    result = [lhs[dim] for dim in left_batch]
    result += [f for i, f in enumerate(lhs) if i not in (*left_batch, *left_summed)]
    result += [f for j, f in enumerate(rhs) if j not in (*right_batch, *right_summed)]
    op.flops = 2 * prod(op.result_shapes[0]) * prod(op.shapes[0][dim] for dim in left_summed)
    return op.of([lhs, rhs], [result])


def _multiplied(
    op: Rule, left_dims: Iterable[int], right_dims: Iterable[int]
) -> tuple[list[Factors], list[Factors]]:
    """Return the factors of two arrays which have these dimensions in common."""
    lhs, shape = op.dimensions(op.shapes[0]), op.shapes[1]
    shared = {j: lhs[i] for i, j in zip(left_dims, right_dims, strict=True)}
    return lhs, [shared[j] if j in shared else op.dimension(n) for j, n in enumerate(shape)]


def _ragged_dot(op: Rule) -> Rule:
    """Return the rule of rows sorted by expert, each multiplied by the kernel of its expert.

    Or, if the rows are summed over as for the kernels' gradients, of a product for each expert.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    dots, ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    group = numbers.rhs_group_dimensions
    (left_summed, right_summed), (left_batch, right_batch) = dots
    left_both, right_both = (*left_summed, *left_batch), (*right_summed, *right_batch)
    lhs, rhs = _multiplied(op, left_both, right_both)
    count = op.shapes[2][-1]
    experts = rhs[group[0]] if group else op.dimension(count)
    op.summed.update(f for i in left_summed for f in lhs[i])
    op.summed.update(experts if group else ())
    has_experts = not group and ragged[0] in left_summed
    rest = [f for i, f in enumerate(lhs) if i not in left_both]
    rest += [f for j, f in enumerate(rhs) if j not in (*right_both, *group)]
    result = [*[experts][:has_experts], *[lhs[i] for i in left_batch], *rest]
    flops = 2 * prod(op.result_shapes[0]) * prod(op.shapes[0][i] for i in left_summed)
    op.flops = flops // (count if has_experts else 1)
    return op.of([lhs, rhs, [*[()] * (len(op.shapes[2]) - 1), experts]], [result])


def _convolution(op: Rule) -> Rule:
    params, (shape, kernel), (out_shape,) = op.params, op.shapes, op.result_shapes
    lhs, rhs, out = params["dimension_numbers"]
    groups = params["feature_group_count"]
    left, right, result = map(op.dimensions, (shape, kernel, out_shape))
    if params["batch_group_count"] == 1:
        result[out[0]] = left[lhs[0]]
    if groups == 1:
        right[rhs[1]] = left[lhs[1]]
        result[out[1]] = right[rhs[0]]
        op.summed.update(left[lhs[1]])
    elif shape[lhs[1]] == groups == kernel[rhs[0]]:  # of one channel each
        right[rhs[0]] = result[out[1]] = left[lhs[1]]
    else:  # of several channels, for which XLA gathers all
        op.keep_whole((*left, *right, *result))
    multiplied = out_shape[out[0]] * out_shape[out[1]] * kernel[rhs[1]]
    for place, (i, j, k) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        op.keep_whole((left[i], right[j], result[k]))
        rows = (out_shape[k], params["window_strides"][place])
        window = (kernel[j], params["rhs_dilation"][place])
        first, dilation = params["padding"][place][0], params["lhs_dilation"][place]
        multiplied *= window_pairs(rows, window, first, shape[i], dilation)
    op.flops = 2 * multiplied
    return op.of([left, right], [result])


def _indexed(
    op: Rule, batching: str, dropped: str, columns: str, window: str
) -> tuple[list[Factors], list[Factors], dict[int, int], list[int]]:
    """Read a gather or scatter by the names that it has for its dimension numbers.

    Return the factors of the operand and of the indices, the dimensions of the operand by those of
    the windows, and those of which indices choose the rows.
    """
    numbers = op.params["dimension_numbers"]
    operand, indices = op.dimensions(op.shapes[0]), op.dimensions(op.shapes[1])
    gone = getattr(numbers, dropped)
    batch = list(getattr(numbers, "operand_batching_dims", ()))
    for dim, index_dim in zip(batch, getattr(numbers, batching, ()), strict=True):
        indices[index_dim] = operand[dim]
    for column, index_dim in op.iota_columns.items():
        dim = getattr(numbers, columns)[column]
        if dim in gone and op.shapes[1][index_dim] == op.shapes[0][dim]:
            indices[index_dim] = operand[dim]
            batch.append(dim)
    kept = [dim for dim in range(len(operand)) if dim not in {*gone, *batch}]
    places = dict(zip(getattr(numbers, window), kept, strict=True))
    return operand, indices, places, [dim for dim in gone if dim not in batch]


_OF_GATHER: Final = (
    "start_indices_batching_dims", "collapsed_slice_dims", "start_index_map", "offset_dims",
)  # fmt: skip
_OF_SCATTER: Final = (
    "scatter_indices_batching_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
    "update_window_dims",
)  # fmt: skip


def _gather(op: Rule) -> Rule:
    operand, indices, window, looked_up = _indexed(op, *_OF_GATHER)
    rows = iter(indices[:-1])
    result: list[Factors] = []
    for place, size in enumerate(op.result_shapes[0]):
        if place not in window:
            result.append(next(rows))
            continue
        dim = window[place]
        factors = operand[dim]
        if size != op.shapes[0][dim]:
            operand[dim], factors = op.apart(op.shapes[0][dim], size)
        result.append(factors)
    for dim in looked_up:
        op.summed.update(operand[dim])
        op.looked_up.update(operand[dim])
    return op.of([operand, indices], [result])


def _scatter(op: Rule) -> Rule:
    operand, indices, window, looked_up = _indexed(op, *_OF_SCATTER)
    rows = iter(indices[:-1])
    updates: list[Factors] = []
    for place, size in enumerate(op.shapes[2]):
        if place not in window:
            updates.append(next(rows))
        elif size == op.shapes[0][window[place]]:
            updates.append(operand[window[place]])
        else:
            updates.append(op.dimension(size))
            op.whole.update(updates[-1])
    kept = {f for factors in operand for f in factors}
    op.summed.update(f for factors in updates for f in factors if f not in kept)
    op.looked_up.update(f for dim in looked_up for f in operand[dim])
    return op.of([operand, indices, updates], [operand])


def _cut(op: Rule) -> Rule:
    """Return the rule of slices and pads: a dimension of another size is another one."""
    pairs = [op.apart(*sizes) for sizes in zip(op.shapes[0], op.result_shapes[0], strict=True)]
    return op.of([[first for first, _ in pairs]], [[second for _, second in pairs]])


def _update(op: Rule) -> Rule:
    operand = op.dimensions(op.shapes[0])
    update: list[Factors] = []
    for factors, before, after in zip(operand, op.shapes[0], op.shapes[1], strict=True):
        update.append(factors if before == after else op.dimension(after))
        if before != after:
            op.whole.update(update[-1])
            op.parts += [(f, u) for f in factors for u in update[-1]]
    return op.of([operand, update], [operand])


def _concatenate(op: Rule) -> Rule:
    dim = op.params["dimension"] if "dimension" in op.params else op.params["axis"]
    result = op.dimensions(op.result_shapes[0])
    op.whole.update(result[dim])
    operands = []
    for shape in op.shapes:
        part = op.dimension(shape[dim])
        op.whole.update(part)
        op.parts += [(p, f) for p in part for f in result[dim]]
        operands.append([*result[:dim], part, *result[dim + 1 :]])
    return op.of(operands, [result])


def _unstack(op: Rule) -> Rule:
    factors = op.dimensions(op.shapes[0])
    axis = op.params["axis"] % len(factors)
    op.whole.update(factors[axis])
    rest = [f for dim, f in enumerate(factors) if dim != axis]
    return op.of([factors], [rest for _ in op.result_shapes])


def _reversed(make: Callable[[Rule], Rule], op: Rule) -> Rule:
    """Return the rule of an operation that undoes another."""
    rule = make(Rule(op.params, op.result_shapes, op.shapes))
    rule.operands, rule.results = rule.results, rule.operands
    return rule


def _scatter_of_windows(op: Rule) -> Rule:
    """Return the rule of the gradient of a maximum over windows."""
    _cut(op)
    op.operands = (op.operands[0], op.results[0], *op.operands[2:])
    return op


def _along(name: str, op: Rule) -> Rule:
    """Return the rule of what goes along one dimension, or several, and keeps the shape."""
    dims = op.params[name]
    return _alike(op, op.shapes[0], (dims,) if isinstance(dims, int) else dims)


def _last(count: int, op: Rule) -> Rule:
    """Return the rule of what computes with the last dimensions as a whole."""
    lead = op.dimensions(max(op.shapes, key=len)[:-count])

    def dimensions(shape: Shape) -> list[Factors]:
        rest = op.dimensions(shape[len(lead) :])
        op.keep_whole(rest)
        return [*lead[: len(shape)], *rest]

    return op.of(map(dimensions, op.shapes), map(dimensions, op.result_shapes))


def _new(op: Rule) -> Rule:
    """Return the rule of what is made from nothing, or from a key."""
    operands = list(map(op.dimensions, op.shapes))
    for dims in operands:
        op.keep_whole(dims)
    return op.of(operands, map(op.dimensions, op.result_shapes))


def _across(op: Rule) -> Rule:
    """Return the rule of what goes between devices, in the code of one of them."""
    is_alike = list(map(len, op.shapes)) == list(map(len, op.result_shapes)) and len(op.shapes) == 1
    return (_cut if is_alike else _new)(op)


def same_rule(op: Rule) -> Rule:
    """Return the rule of what gives back each of its operands, changed in no dimension."""
    operands, op.is_identity = list(map(op.dimensions, op.shapes)), True
    return op.of(operands, operands[: len(op.result_shapes)])


_BY_NAME: Final[dict[str, Callable[[Rule], Rule]]] = {
    """exp exp2 expm1 log log1p log2 logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh
    acosh atanh sqrt rsqrt cbrt pow erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e
    copy stop_gradient name bitcast_convert_type pvary reduce_precision select_n
    add add_any sub mul div rem max min neg sign abs floor ceil round is_finite not and or xor
    eq ne lt le gt ge lt_to le_to eq_to shift_left shift_right_logical shift_right_arithmetic
    clamp convert_element_type integer_pow square one_minus_square nextafter real imag
    complex conj population_count clz threefry2x32 mulhi regularized_incomplete_beta igamma igammac
    igamma_grad_a random_gamma polygamma zeta to_edtype from_edtype tie
    reciprocal""": lambda op: _elementwise(tuple(op.shapes), tuple(op.result_shapes)),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax
    argmin squeeze""": _reduce,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    """scatter scatter-add scatter_add scatter-mul scatter_mul scatter-max scatter_max scatter-min
    scatter_min scatter-sub scatter_sub""": _scatter,
    """slice dynamic_slice pad tile reduce_window reduce_window_sum reduce_window_max
    reduce_window_min""": _cut,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "split": partial(_reversed, _concatenate),
    "unstack": _unstack,
    "stack": partial(_reversed, _unstack),
    "select_and_scatter_add": _scatter_of_windows,
    "rev": partial(_along, "dimensions"),
    "sort": partial(_along, "dimension"),
    "cumsum cumprod cummax cummin cumlogsumexp": partial(_along, "axis"),
    "top_k approx_top_k": partial(_last, 1),
    "fft": lambda op: _last(len(op.params["fft_lengths"]), op),
    """cholesky triangular_solve eigh qr lu svd householder_product schur
    tridiagonal_solve""": partial(_last, 2),
    """iota rng_bit_generator rng_uniform random_bits random_seed random_wrap random_unwrap
    random_fold_in random_split random_clone axis_index empty empty2 create_token
    platform_index lu_pivots_to_permutation""": _new,
    """sharding_constraint reshard optimization_barrier device_put layout_constraint
    vary_unreduced_cast pbroadcast ppermute psum psum_invariant pmax
    pmin with_memory_space_constraint xla_metadata_value pin unpin reduced_vary_cast""": same_rule,
    "all_gather all_gather_invariant reduce_scatter all_to_all": _across,
}
_RULES: Final = {name: rule for names, rule in _BY_NAME.items() for name in names.split()}


Dims = tuple[int, ...]
"""Numbers of the dimensions of an array."""


class Dimensions:
    """Dimensions of the arrays of a step, united where an operation makes them the same one.

    A dimension may consist of others, as 4096 of 32 heads x 128 after a reshape: what they are
    united with is split alike. Classes are dimensions that consist of no others.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._same: list[int] = []
        self._consists_of: dict[int, Dims] = {}
        self.parts: list[tuple[int, int]] = []
        """Pairs of dimensions of which one is a part of the other."""

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def shape(self, sizes: Iterable[int]) -> Dims:
        """Return new dimensions of these sizes."""
        return tuple(map(self.new, sizes))

    def first(self, dim: int) -> int:
        """Return the first of the dimensions that are united with one."""
        same = self._same
        while same[dim] != dim:
            same[dim] = same[same[dim]]
            dim = same[dim]
        return dim

    def classes(self, dim: int) -> Dims:
        """Return the classes that a dimension consists of, the major one first."""
        dim = self.first(dim)
        if dim not in self._consists_of:
            return (dim,) if self.sizes[dim] > 1 else ()
        return tuple(c for part in self._consists_of[dim] for c in self.classes(part))

    def unite(self, dim: int, other: int) -> None:
        """Make two dimensions of one size the same."""
        dim, other = self.first(dim), self.first(other)
        if dim == other or self.sizes[dim] != self.sizes[other]:
            return
        if other in self._consists_of and dim in self._consists_of:
            self._unite_parts(self.classes(dim), self.classes(other))
        # The parts may have been united with the whole meanwhile.
        dim, other = self.first(dim), self.first(other)
        if dim == other:
            return
        if dim not in self._consists_of:
            dim, other = other, dim
        self._same[other] = dim

    def unite_all(self, dims: Iterable[int], others: Iterable[int]) -> None:
        """Make the dimensions of two arrays the same."""
        for dim, other in zip(dims, others, strict=True):
            self.unite(dim, other)

    def divided(self, dim: int, sizes: Iterable[int]) -> Dims:
        """Return the dimensions of these sizes that a dimension consists of."""
        parts = self.shape(sizes)
        self.unite(dim, self.product(parts))
        return parts

    def product(self, parts: Dims) -> int:
        """Return the dimension that consists of these, the major one first."""
        whole = self.new(prod(self.sizes[part] for part in parts))
        self._consists_of[whole] = parts
        return whole

    def _unite_parts(self, left: Dims, right: Dims) -> None:
        """Unite what two dimensions consist of, which is split where it does not align."""
        lefts, rights = list(reversed(left)), list(reversed(right))
        while lefts and rights:
            a, b = self.first(lefts.pop()), self.first(rights.pop())
            if a == b:
                continue
            small, large = sorted((a, b), key=self.sizes.__getitem__)
            size, rest = divmod(self.sizes[large], self.sizes[small])
            if rest:  # such as 2 x 3 and 3 x 2, which no sharding of both cuts alike
                return
            if size == 1:
                self.unite(a, b)
                continue
            if large in self._consists_of:
                return
            major, minor = self.shape((self.sizes[small], size))
            self._consists_of[large] = (major, minor)
            self.unite(small, major)
            (lefts if large == a else rights).append(minor)

    def apply(self, rule: Rule, operands: list[Dims]) -> list[Dims]:
        """Unite the dimensions of operands by a rule, and return those of the results."""
        dims: list[int] = [-1] * len(rule.sizes)
        for operand, of_dims in zip(operands, rule.operands, strict=True):
            for dim, factors in zip(operand, of_dims, strict=True):
                if not factors:
                    continue
                sizes = [rule.sizes[factor] for factor in factors]
                if prod(sizes) != self.sizes[dim]:
                    continue
                parts = (dim,) if len(factors) == 1 else self.divided(dim, sizes)
                for factor, part in zip(factors, parts, strict=True):
                    if dims[factor] < 0:
                        dims[factor] = part
                    elif dims[factor] != part:
                        self.unite(dims[factor], part)
        for factor, size in enumerate(rule.sizes):
            if dims[factor] < 0:
                dims[factor] = self.new(size)
        self.parts += [(dims[a], dims[b]) for a, b in rule.parts]
        return [tuple([self._of(factors, dims) for factors in result]) for result in rule.results]

    def _of(self, factors: Factors, dims: list[int]) -> int:
        if len(factors) == 1:
            return dims[factors[0]]
        return self.product(tuple(dims[factor] for factor in factors)) if factors else self.new(1)
