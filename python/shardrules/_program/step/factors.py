"""Factors of operations: which dimensions of operands and results are the same one.

Each primitive of a jaxpr has a rule, which names the factors of an operation and says of which each
dimension consists, the major one first, as Shardy's op sharding rules do. `dot_general` of [8, 64]
and [64, 32] has three factors: 8 and 32 are kept, and 64 is summed. Reshaping 4096 to 32 x 128 has
two, of which the dimension of 4096 consists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from math import gcd, prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

Factors = tuple[int, ...]
"""Numbers of the factors of one dimension, the major one first; () for a dimension of size 1."""
Shape = tuple[int, ...]
Counted = Mapping[int, int]
"""By column of indices that counts along a dimension, that dimension."""
_NONE: Final[Counted] = MappingProxyType({})
_OF_BUTTERFLY: Final = 8
"""Operations of a Fourier transform for each element and pass, as XLA counts them."""


class Rule(NamedTuple):
    """Factors of an operation."""

    sizes: tuple[int, ...]
    """Per factor."""
    operands: tuple[tuple[Factors, ...], ...]
    """Per operand and dimension."""
    results: tuple[tuple[Factors, ...], ...]
    summed: frozenset[int] = frozenset()
    """Factors that results lack, over which terms are added or one term is chosen: a device that
    has a part of them has a term of the results."""
    whole: frozenset[int] = frozenset()
    """Factors that a device needs whole: along them results are not computed element by element."""
    parts: tuple[tuple[int, int], ...] = ()
    """Pairs of factors of which one is a part of the other: of slices, pads, concatenations."""
    flops: int = 0
    """Operations as XLA counts them, without transcendental ones."""
    looked_up: frozenset[int] = frozenset()
    """Factors of which an index chooses the rows: those of a table."""
    is_identity: bool = False
    """True if each result is one of the operands, in their order."""

    @property
    def minor(self) -> frozenset[int]:
        """Factors of which a dimension consists together with others that are before them.

        Devices have contiguous parts of a dimension, and so parts of its major factor.
        """
        arrays = (*self.operands, *self.results)
        return frozenset(f for array in arrays for dims in array for f in dims[1:])


class _Builder:
    """Factors of an operation while its rule is made."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.summed: set[int] = set()
        self.whole: set[int] = set()
        self.parts: list[tuple[int, int]] = []
        self.looked_up: set[int] = set()

    def dimension(self, size: int) -> Factors:
        """Return a new factor for a dimension; none for one of size 1."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def dimensions(self, shape: Iterable[int]) -> list[Factors]:
        return [self.dimension(size) for size in shape]

    def apart(self, before: int, after: int) -> tuple[Factors, Factors]:
        """Return the factors of two dimensions of which one is a part of the other."""
        pair = self.dimension(before), self.dimension(after)
        if all(pair):
            self.parts.append((pair[0][0], pair[1][0]))
        self.keep_whole(pair)
        return pair

    def keep_whole(self, dimensions: Iterable[Factors]) -> None:
        self.whole.update(factor for factors in dimensions for factor in factors)

    def rule(
        self,
        operands: Iterable[Iterable[Factors]],
        results: Iterable[Iterable[Factors]],
        flops: int = 0,
    ) -> Rule:
        first, second = (tuple(map(tuple, arrays)) for arrays in (operands, results))
        return Rule(
            tuple(self.sizes),  # behind both: they may make factors
            first,
            second,
            frozenset(self.summed),
            frozenset(self.whole),
            tuple(self.parts),
            flops,
            frozenset(self.looked_up),
        )


def rule_of(eqn: Any, counted: Counted = _NONE) -> Rule | None:
    """Return the rule of an equation without a jaxpr in it; None if it is not modelled.

    Of a gather or scatter, columns of the indices that count along a dimension are `counted`: rows
    of the array along it stay where they are.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> (eqn,) = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 64)), jnp.ones((64, 32))).eqns
        >>> rule = rule_of(eqn)
        >>> rule.sizes, rule.operands, rule.results, rule.summed, rule.flops
        ((64, 8, 32), (((1,), (0,)), ((0,), (2,))), (((1,), (2,)),), frozenset({0}), 32768)
    """
    name = eqn.primitive.name
    shapes = [shape_of(var) for var in eqn.invars]
    results = [shape_of(var) for var in eqn.outvars]
    if name in _ELEMENTWISE:
        return _elementwise(tuple(shapes), tuple(results), 0 if name in _UNCOUNTED else 1)
    make = _RULES.get(name)
    if make is None:
        return None
    if counted and make in (_gather, _scatter):
        return make(eqn.params, shapes, results, counted)
    return make(eqn.params, shapes, results)


def shape_of(var: Any) -> Shape:
    """Return the shape of a variable; () for a token or another value without one."""
    return tuple(getattr(var.aval, "shape", ()))


@lru_cache(maxsize=4096)
def _elementwise(shapes: tuple[Shape, ...], results: tuple[Shape, ...], flops: int) -> Rule:
    builder = _Builder()
    factors = builder.dimensions(results[0])
    count = flops * sum(map(prod, results))
    return builder.rule(_of_shapes(factors, shapes), _of_shapes(factors, results), count)


def _of_shapes(factors: list[Factors], shapes: Iterable[Shape]) -> Iterator[list[Factors]]:
    """Yield the factors for each shape: scalars, and dimensions that are broadcast, have none."""
    for shape in shapes:
        pairs = zip(factors, shape, strict=bool(shape))
        yield [() if size == 1 else factor for factor, size in pairs]


def _broadcast(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    builder = _Builder()
    factors = builder.dimensions(results[0])
    operand = [
        factors[dim] if size == results[0][dim] else ()
        for size, dim in zip(shapes[0], params["broadcast_dimensions"], strict=True)
    ]
    return builder.rule([operand, *[[] for _ in shapes[1:]]], [factors])


def _transpose(params: Any, shapes: list[Shape], _: list[Shape]) -> Rule:
    builder = _Builder()
    factors = builder.dimensions(shapes[0])
    return builder.rule([factors], [[factors[dim] for dim in params["permutation"]]])


def _reshape(_: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Split both shapes into their greatest common factors, from the major end."""
    builder = _Builder()
    before, after = shapes[0], results[0]
    operand: list[Factors] = [() for _ in before]
    result: list[Factors] = [() for _ in after]
    if 0 in before:
        return builder.rule([builder.dimensions(before)], [builder.dimensions(after)])
    i = j = 0
    left = right = 1
    while True:
        while left == 1 and i < len(before):
            left, i = before[i], i + 1
        while right == 1 and j < len(after):
            right, j = after[j], j + 1
        if left == right == 1:
            break
        common = gcd(left, right)
        if common == 1:  # sizes that share no factor: what is left of both has one of its own
            first, second = builder.apart(left, right)
            operand[i - 1] += first
            result[j - 1] += second
            i, j = _aligned(before, after, i, j)
            left = right = 1
            continue
        factor = builder.dimension(common)
        operand[i - 1] += factor
        result[j - 1] += factor
        left, right = left // common, right // common
    return builder.rule([operand, *[[] for _ in shapes[1:]]], [result])


def _aligned(before: Shape, after: Shape, i: int, j: int) -> tuple[int, int]:
    """Return the next places before which both shapes have as many elements."""
    while (left := prod(before[:i])) != (right := prod(after[:j])):
        if left < right:
            i += 1
        else:
            j += 1
    return i, j


def _squeeze(params: Any, shapes: list[Shape], _: list[Shape]) -> Rule:
    builder = _Builder()
    factors = builder.dimensions(shapes[0])
    rank = len(shapes[0])
    gone = {dim % rank for dim in params["dimensions"]}
    return builder.rule([factors], [[f for dim, f in enumerate(factors) if dim not in gone]])


def _reduce(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    builder = _Builder()
    axes = params["axes"] if "axes" in params else params["dimensions"]
    arrays = [shape for shape in shapes if shape] or shapes[:1]
    factors = builder.dimensions(arrays[0])
    for dim in axes:
        builder.summed.update(factors[dim])
    rest = [f for dim, f in enumerate(factors) if dim not in axes]
    flops = max(0, prod(arrays[0]) - prod(results[0])) * len(results)
    return builder.rule(_of_shapes(factors, shapes), [rest for _ in results], flops)


def _dot(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    (left_summed, right_summed), (left_batch, right_batch) = params["dimension_numbers"]
    builder = _Builder()
    left: list[Factors | None] = [None] * len(shapes[0])
    right: list[Factors | None] = [None] * len(shapes[1])
    result: list[Factors] = []
    for i, j in zip(left_batch, right_batch, strict=True):
        left[i] = right[j] = builder.dimension(shapes[0][i])
        result.append(left[i] or ())
    for i, j in zip(left_summed, right_summed, strict=True):
        left[i] = right[j] = builder.dimension(shapes[0][i])
        builder.summed.update(left[i] or ())
    for dims, shape in ((left, shapes[0]), (right, shapes[1])):
        for dim, size in enumerate(shape):
            if dims[dim] is None:
                dims[dim] = builder.dimension(size)
                result.append(dims[dim] or ())
    flops = 2 * prod(results[0]) * prod(shapes[0][dim] for dim in left_summed)
    operands = [[f or () for f in dims] for dims in (left, right)]
    return builder.rule(operands, [result], flops)


def _ragged_dot(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Return the rule of rows sorted by expert, each multiplied by the kernel of its expert.

    Or, if the rows are summed over as for the kernels' gradients, of a product for each expert.
    """
    numbers = params.get("ragged_dot_dimension_numbers")
    dots: Any = ((1,), (1,)), ((), ())
    ragged, group = (0,), (0,)
    if numbers is not None:
        dots, ragged = numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions)
        group = tuple(numbers.rhs_group_dimensions)
    (left_summed, right_summed), (left_batch, right_batch) = dots
    builder = _Builder()
    left, right = builder.dimensions(shapes[0]), builder.dimensions(shapes[1])
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    experts = right[group[0]] if group else builder.dimension(shapes[2][-1])
    builder.summed.update(f for i in left_summed for f in left[i])
    builder.summed.update(experts if group else ())
    has_experts = not group and ragged[0] in left_summed
    rest = [f for i, f in enumerate(left) if i not in (*left_summed, *left_batch)]
    rest += [f for j, f in enumerate(right) if j not in (*right_summed, *right_batch, *group)]
    result = [*[experts][:has_experts], *[left[i] for i in left_batch], *rest]
    flops = 2 * prod(results[0]) * prod(shapes[0][i] for i in left_summed)
    sizes = [*[()] * (len(shapes[2]) - 1), experts]
    return builder.rule(
        [left, right, sizes, *[[] for _ in shapes[3:]]],
        [result],
        flops // (shapes[2][-1] if has_experts else 1),
    )


def _convolution(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    lhs, rhs, out = params["dimension_numbers"]
    groups = params["feature_group_count"]
    builder = _Builder()
    operands = [builder.dimensions(shape) for shape in shapes]
    result = builder.dimensions(results[0])
    if params["batch_group_count"] == 1:
        result[out[0]] = operands[0][lhs[0]]
    if groups == 1:
        operands[1][rhs[1]] = operands[0][lhs[1]]
        result[out[1]] = operands[1][rhs[0]]
        builder.summed.update(operands[0][lhs[1]])
    elif shapes[0][lhs[1]] == groups == shapes[1][rhs[0]]:  # of one channel each
        operands[1][rhs[0]] = result[out[1]] = operands[0][lhs[1]]
    else:  # of several channels, for which XLA gathers all
        builder.keep_whole((*operands[0], *operands[1], *result))
    multiplied = results[0][out[0]] * results[0][out[1]] * shapes[1][rhs[1]]
    for place, (i, j, k) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        builder.keep_whole((operands[0][i], operands[1][j], result[k]))
        rows = (results[0][k], params["window_strides"][place])
        window = (shapes[1][j], params["rhs_dilation"][place])
        first, dilation = params["padding"][place][0], params["lhs_dilation"][place]
        multiplied *= _met(rows, window, first, shapes[0][i], dilation)
    return builder.rule(operands, [result], 2 * multiplied)


def _met(
    rows: tuple[int, int], window: tuple[int, int], first: int, size: int, dilation: int
) -> int:
    """Count the pairs of a row and a place of its window that meet no padding, along a dimension.

    Rows and places are so many, and so far apart; `first` is the padding before the operand, whose
    elements are a dilation apart.
    """
    few, many = sorted((rows, window))
    places = np.arange(many[0]) * many[1] - first
    count = 0
    for met in (places + i * few[1] for i in range(few[0])):
        inside = (met >= 0) & (met <= (size - 1) * dilation) & (met % dilation == 0)
        count += int(np.count_nonzero(inside))
    return count


def _indexed(
    builder: _Builder,
    shapes: list[Shape],
    numbers: Any,
    form: tuple[str, str, str],
    counted: Counted,
) -> tuple[list[Factors], list[Factors], list[int], list[int]]:
    """Return factors of an array and of indices; its dimensions of a window, and looked up ones.

    `form` has the names of what gather and scatter call by names of their own.
    """
    operand, indices = builder.dimensions(shapes[0]), builder.dimensions(shapes[1])
    batching, dropped, of_columns = (getattr(numbers, name, ()) for name in form)
    batch = list(getattr(numbers, "operand_batching_dims", ()))
    for dim, other in zip(batch, batching, strict=True):
        indices[other] = operand[dim]
    for column, other in counted.items():
        dim = of_columns[column]
        if dim in dropped and shapes[1][other] == shapes[0][dim]:
            indices[other] = operand[dim]
            batch.append(dim)
    window = [dim for dim in range(len(operand)) if dim not in {*dropped, *batch}]
    return operand, indices, window, [dim for dim in dropped if dim not in batch]


_OF_GATHER: Final = ("start_indices_batching_dims", "collapsed_slice_dims", "start_index_map")
_OF_SCATTER: Final = (
    "scatter_indices_batching_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
)  # fmt: skip


def _gather(
    params: Any, shapes: list[Shape], results: list[Shape], counted: Counted = _NONE
) -> Rule:
    numbers = params["dimension_numbers"]
    builder = _Builder()
    operand, indices, window, dropped = _indexed(builder, shapes, numbers, _OF_GATHER, counted)
    offsets = dict(zip(numbers.offset_dims, window, strict=True))
    rows = iter(indices[:-1])
    result: list[Factors] = []
    for place, size in enumerate(results[0]):
        if place not in offsets:
            result.append(next(rows))
        elif size == shapes[0][offsets[place]]:
            result.append(operand[offsets[place]])
        else:
            before, after = builder.apart(shapes[0][offsets[place]], size)
            operand[offsets[place]] = before
            result.append(after)
    for dim in dropped:
        builder.summed.update(operand[dim])
        builder.looked_up.update(operand[dim])
    return builder.rule([operand, indices], [result])


def _scatter(
    params: Any, shapes: list[Shape], results: list[Shape], counted: Counted = _NONE
) -> Rule:
    numbers = params["dimension_numbers"]
    builder = _Builder()
    operand, indices, window, dropped = _indexed(builder, shapes, numbers, _OF_SCATTER, counted)
    offsets = dict(zip(numbers.update_window_dims, window, strict=True))
    rows = iter(indices[:-1])
    updates: list[Factors] = []
    for place, size in enumerate(shapes[2]):
        if place not in offsets:
            updates.append(next(rows))
        elif size == shapes[0][offsets[place]]:
            updates.append(operand[offsets[place]])
        else:
            updates.append(builder.dimension(size))
            builder.whole.update(updates[-1])
    kept = {f for factors in operand for f in factors}
    builder.summed.update(f for factors in updates for f in factors if f not in kept)
    for dim in dropped:
        builder.looked_up.update(operand[dim])
    flops = prod(shapes[2]) if "update_jaxpr" in params and len(results) == 1 else 0
    return builder.rule([operand, indices, updates], [operand], flops)


def _cut(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Return the rule of slices and pads: a dimension of another size is another one."""
    builder = _Builder()
    operand: list[Factors] = []
    result: list[Factors] = []
    for before, after in zip(shapes[0], results[0], strict=True):
        first, second = (
            (builder.dimension(before),) * 2 if before == after else builder.apart(before, after)
        )
        operand.append(first)
        result.append(second)
    return builder.rule([operand, *[[] for _ in shapes[1:]]], [result])


def _update(_: Any, shapes: list[Shape], __: list[Shape]) -> Rule:
    builder = _Builder()
    operand = builder.dimensions(shapes[0])
    update: list[Factors] = []
    for factors, before, after in zip(operand, shapes[0], shapes[1], strict=True):
        update.append(factors if before == after else builder.dimension(after))
        if before != after:
            builder.whole.update(update[-1])
            builder.parts += [(f, u) for f in factors for u in update[-1]]
    return builder.rule([operand, update, *[[] for _ in shapes[2:]]], [operand])


def _concatenate(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    builder = _Builder()
    dim = params["dimension"]
    result = builder.dimensions(results[0])
    builder.whole.update(result[dim])
    operands = []
    for shape in shapes:
        part = builder.dimension(shape[dim])
        builder.whole.update(part)
        builder.parts += [(p, f) for p in part for f in result[dim]]
        operands.append([*result[:dim], part, *result[dim + 1 :]])
    return builder.rule(operands, [result])


def _split(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    rule = _concatenate({"dimension": params["axis"]}, results, shapes)
    return rule._replace(operands=rule.results, results=rule.operands)


def _unstack(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    builder = _Builder()
    factors = builder.dimensions(shapes[0])
    axis = params["axis"] % len(shapes[0])
    builder.whole.update(factors[axis])
    rest = [f for dim, f in enumerate(factors) if dim != axis]
    return builder.rule([factors], [rest for _ in results])


def _stack(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    rule = _unstack(params, results, shapes)
    return rule._replace(operands=rule.results, results=rule.operands)


def _scatter_of_windows(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Return the rule of the gradient of a maximum over windows."""
    rule = _cut(params, shapes[:1], results)
    operands = rule.operands[0], rule.results[0], *[()] * (len(shapes) - 2)
    return rule._replace(operands=operands, flops=prod((*shapes[0], *params["window_dimensions"])))


def _along(name: str, flops: int = 0) -> Callable[[Any, list[Shape], list[Shape]], Rule]:
    """Return the rule of what goes along one dimension, or several, and keeps the shape."""

    def make(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
        builder = _Builder()
        factors = builder.dimensions(shapes[0])
        dims = params[name]
        for dim in (dims,) if isinstance(dims, int) else dims:
            builder.whole.update(factors[dim])
        count = flops * prod(shapes[0])
        return builder.rule(_of_shapes(factors, shapes), _of_shapes(factors, results), count)

    return make


def _last(count: int) -> Callable[[Any, list[Shape], list[Shape]], Rule]:
    """Return the rule of what computes with the last dimensions as a whole."""

    def make(_: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
        builder = _Builder()
        lead = builder.dimensions(max(shapes, key=len)[:-count])

        def dimensions(shape: Shape) -> list[Factors]:
            rest = builder.dimensions(shape[len(lead) :])
            builder.keep_whole(rest)
            return [*lead[: len(shape)], *rest]

        return builder.rule(map(dimensions, shapes), map(dimensions, results))

    return make


def _windows(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    rule = _cut(params, shapes, results)
    return rule._replace(flops=prod(results[0]) * (prod(params["window_dimensions"]) - 1))


def _fourier(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    lengths = params["fft_lengths"]
    rule = _last(len(lengths))(params, shapes, results)
    passes = sum(length.bit_length() - 1 for length in lengths)
    return rule._replace(flops=_OF_BUTTERFLY * passes * prod(shapes[0]))


def _new(_: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Return the rule of what is made from nothing, or from a key."""
    builder = _Builder()
    operands = [builder.dimensions(shape) for shape in shapes]
    for dims in operands:
        builder.keep_whole(dims)
    return builder.rule(operands, map(builder.dimensions, results))


def _across(params: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    """Return the rule of what goes between devices, in the code of one of them."""
    is_alike = len(shapes) == len(results) == 1 and len(shapes[0]) == len(results[0])
    return (_cut if is_alike else _new)(params, shapes, results)


def same_rule(shapes: Iterable[Shape]) -> Rule:
    """Return the rule of what gives back each of its operands, changed in no dimension."""
    builder = _Builder()
    operands = [builder.dimensions(shape) for shape in shapes]
    return builder.rule(operands, operands)._replace(is_identity=True)


def _same(_: Any, shapes: list[Shape], results: list[Shape]) -> Rule:
    rule = same_rule(shapes)
    return rule._replace(results=rule.operands[: len(results)])


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TRANSCENDENTAL: Final = _names(
    """exp exp2 expm1 log log1p log2 logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh
    acosh atanh sqrt rsqrt cbrt pow erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e"""
)
_UNCOUNTED: Final = _TRANSCENDENTAL | _names(
    "copy copy_p stop_gradient name bitcast_convert_type pvary reduce_precision select_n"
)
_ELEMENTWISE: Final = _UNCOUNTED | _names(
    """add add_any sub mul div rem max min neg sign abs floor ceil round is_finite not and or xor
    eq ne lt le gt ge lt_to le_to eq_to shift_left shift_right_logical shift_right_arithmetic
    clamp convert_element_type integer_pow square one_minus_square nextafter real imag
    complex conj population_count clz threefry2x32 mulhi regularized_incomplete_beta igamma igammac
    igamma_grad_a random_gamma_grad random_gamma polygamma zeta to_edtype from_edtype tie
    reciprocal"""
)
_BY_NAME: Final[dict[str, Callable[..., Rule | None]]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax
    argmin""": _reduce,
    "dot_general": _dot,
    "ragged_dot ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    """scatter scatter-add scatter_add scatter-mul scatter_mul scatter-max scatter_max scatter-min
    scatter_min scatter-sub scatter_sub""": _scatter,
    "slice dynamic_slice pad tile": _cut,
    "dynamic_update_slice": _update,
    "concatenate": _concatenate,
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "select_and_scatter_add": _scatter_of_windows,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "cumsum cumprod cummax cummin cumlogsumexp": _along("axis", 1),
    "top_k approx_top_k": _last(1),
    "fft": _fourier,
    """cholesky triangular_solve eigh qr lu svd householder_product schur
    tridiagonal_solve""": _last(2),
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min": _windows,
    """iota rng_bit_generator rng_uniform random_bits random_seed random_wrap random_unwrap
    random_fold_in random_split random_clone axis_index empty empty2 create_token
    platform_index lu_pivots_to_permutation""": _new,
    """sharding_constraint reshard mesh_cast optimization_barrier device_put layout_constraint
    reduce_vma vary_unreduced_cast pbroadcast ppermute psum psum2 psum_invariant pmax
    pmin with_memory_space_constraint xla_metadata_value pin unpin reduced_vary_cast""": _same,
    "all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all": _across,
}
_RULES: Final = {name: rule for names, rule in _BY_NAME.items() for name in names.split()}
