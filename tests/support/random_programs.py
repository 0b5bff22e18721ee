"""Random small steps of products, reshapes, sums and loops, to compare what they send with XLA."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SIZES = (4, 8, 12)
"""Of dimensions; devices that cut one are 4."""
_MOST_RANK = 4
Shape = tuple[int, ...]
Op = Callable[[list[Any]], Any]


class RandomStep:
    """A function of 2 to 4 arrays, made of a few operations on what is there."""

    def __init__(self, seed: int, operations: int = 5) -> None:
        self._rng = random.Random(seed)
        rng = self._rng
        self.args: list[Shape] = [
            tuple(rng.choice(SIZES) for _ in range(rng.choice((2, 2, 3)))) for _ in range(rng.randint(2, 3))
        ]
        self._shapes = list(self.args)
        self._ops: list[tuple[str, Op]] = []
        while len(self._ops) < operations:
            name = rng.choice(list(_MAKERS))
            made = _MAKERS[name](self)
            if made is not None:
                op, shape = made
                self._ops.append((name, op))
                self._shapes.append(shape)

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        for _, op in self._ops:
            values.append(op(values))
        return values[-1]

    def __str__(self) -> str:
        names = [f"{name}{shape}" for (name, _), shape in zip(self._ops, self._shapes[len(self.args) :], strict=True)]
        return f"{self.args}: {', '.join(names)}"

    # What is made: a function of all values so far, and the shape of what it gives.

    def _pick(self, fits: Callable[[Shape], bool] = lambda _: True) -> int | None:
        """Choose an array, a late one rather."""
        places = [i for i, shape in enumerate(self._shapes) if shape and fits(shape)]
        late = [i for i in places if i >= len(self._shapes) - 2]
        return self._rng.choice(late or places) if places else None

    def _dot(self) -> tuple[Op, Shape] | None:
        left = self._pick()
        right = self._rng.randrange(len(self._shapes))
        if left is None or right == left:
            return None
        a, b = self._shapes[left], self._shapes[right]
        pairs = [(i, j) for i, n in enumerate(a) for j, m in enumerate(b) if n == m]
        if not pairs or len(a) + len(b) - 2 > _MOST_RANK:
            return None
        i, j = self._rng.choice(pairs)
        free = [(p, q) for p, q in pairs if p != i and q != j]
        batch = [self._rng.choice(free)] if free and self._rng.random() < 0.4 else []
        numbers = (((i,), (j,)), (tuple(p for p, _ in batch), tuple(q for _, q in batch)))
        shape = jax.eval_shape(
            lambda x, y: lax.dot_general(x, y, numbers),
            jax.ShapeDtypeStruct(a, "float32"),
            jax.ShapeDtypeStruct(b, "float32"),
        ).shape
        return lambda values: lax.dot_general(values[left], values[right], numbers), shape

    def _add(self) -> tuple[Op, Shape] | None:
        left = self._pick()
        if left is None:
            return None
        shape = self._shapes[left]
        same = [i for i, other in enumerate(self._shapes) if other == shape and i != left]
        if not same:
            return None
        right = self._rng.choice(same)
        return lambda values: values[left] * values[right] + values[left], shape

    def _transpose(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: len(shape) > 1)
        if place is None:
            return None
        order = list(range(len(self._shapes[place])))
        self._rng.shuffle(order)
        shape = tuple(self._shapes[place][i] for i in order)
        return lambda values: jnp.transpose(values[place], order), shape

    def _merge(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: len(shape) > 1)
        if place is None:
            return None
        shape = self._shapes[place]
        dim = self._rng.randrange(len(shape) - 1)
        made = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        return lambda values: jnp.reshape(values[place], made), made

    def _split(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: max(shape) > 12 and len(shape) < _MOST_RANK)
        if place is None:
            return None
        shape = self._shapes[place]
        dim = shape.index(max(shape))
        parts = [n for n in SIZES if shape[dim] % n == 0 and shape[dim] // n > 1]
        first = self._rng.choice(parts)
        made = (*shape[:dim], first, shape[dim] // first, *shape[dim + 1 :])
        return lambda values: jnp.reshape(values[place], made), made

    def _along(self, function: Callable[..., Any], keeps: bool) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: len(shape) > 1)
        if place is None:
            return None
        shape = self._shapes[place]
        dim = self._rng.randrange(len(shape))
        made = shape if keeps else (*shape[:dim], *shape[dim + 1 :])
        return lambda values: function(values[place], dim), made

    def _scan(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: len(shape) > 1)
        if place is None:
            return None
        shape = self._shapes[place]

        def turn(carry: Any, x: Any) -> Any:
            return jnp.tanh(carry + x), carry * x

        def op(values: list[Any]) -> Any:
            return lax.scan(turn, jnp.zeros(shape[1:]), values[place])[1]

        return op, shape

    def _look_up(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: len(shape) > 1)
        if place is None:
            return None
        shape = self._shapes[place]
        count = self._rng.choice(SIZES)

        def op(values: list[Any]) -> Any:
            return values[place][jnp.arange(count) * 7 % shape[0]]

        return op, (count, *shape[1:])

    def _concatenate(self) -> tuple[Op, Shape] | None:
        place = self._pick()
        if place is None:
            return None
        shape = self._shapes[place]
        dim = self._rng.randrange(len(shape))
        made = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        return lambda values: jnp.concatenate([values[place], -values[place]], dim), made

    def _slice(self) -> tuple[Op, Shape] | None:
        place = self._pick(lambda shape: max(shape) >= 8)
        if place is None:
            return None
        shape = self._shapes[place]
        dim = shape.index(max(shape))
        made = (*shape[:dim], shape[dim] - 4, *shape[dim + 1 :])
        return lambda values: lax.slice_in_dim(values[place], 0, shape[dim] - 4, axis=dim), made


_MAKERS: dict[str, Callable[[RandomStep], tuple[Op, Shape] | None]] = {
    "dot": RandomStep._dot,
    "add": RandomStep._add,
    "transpose": RandomStep._transpose,
    "merge": RandomStep._merge,
    "split": RandomStep._split,
    "sum": lambda step: step._along(jnp.sum, keeps=False),
    "max": lambda step: step._along(jnp.max, keeps=False),
    "softmax": lambda step: step._along(jax.nn.softmax, keeps=True),
    "cumsum": lambda step: step._along(jnp.cumsum, keeps=True),
    "scan": RandomStep._scan,
    "look up": RandomStep._look_up,
    "concatenate": RandomStep._concatenate,
    "slice": RandomStep._slice,
}
