"""Random small steps of products, reshapes, sums and loops, to compare what they send with XLA."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
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
        rng = self.rng = random.Random(seed)
        self.args: list[Shape] = [
            tuple(rng.choice(SIZES) for _ in range(rng.choice((2, 2, 3)))) for _ in range(rng.randint(2, 3))
        ]
        self.shapes = list(self.args)
        self._ops: list[tuple[str, Op]] = []
        while len(self._ops) < operations:
            name = rng.choice(list(_MAKERS))
            op = _MAKERS[name](self)
            if op is not None:
                values = [jax.ShapeDtypeStruct(shape, "float32") for shape in self.shapes]
                self._ops.append((name, op))
                self.shapes.append(jax.eval_shape(op, values).shape)

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        for _, op in self._ops:
            values.append(op(values))
        return values[-1]

    def __str__(self) -> str:
        names = [f"{name}{shape}" for (name, _), shape in zip(self._ops, self.shapes[len(self.args) :], strict=True)]
        return f"{self.args}: {', '.join(names)}"

    def pick(self, fits: Callable[[Shape], bool] = lambda _: True) -> int | None:
        """Choose an array, a late one rather."""
        places = [i for i, shape in enumerate(self.shapes) if shape and fits(shape)]
        late = [i for i in places if i >= len(self.shapes) - 2]
        return self.rng.choice(late or places) if places else None


Maker = Callable[[RandomStep], Op | None]


def _dot(step: RandomStep) -> Op | None:
    left, right = step.pick(), step.rng.randrange(len(step.shapes))
    if left is None or right == left:
        return None
    a, b = step.shapes[left], step.shapes[right]
    pairs = [(i, j) for i, n in enumerate(a) for j, m in enumerate(b) if n == m]
    if not pairs or len(a) + len(b) - 2 > _MOST_RANK:
        return None
    i, j = step.rng.choice(pairs)
    free = [(p, q) for p, q in pairs if p != i and q != j]
    batch = [step.rng.choice(free)] if free and step.rng.random() < 0.4 else []
    numbers = (((i,), (j,)), (tuple(p for p, _ in batch), tuple(q for _, q in batch)))
    return lambda values: lax.dot_general(values[left], values[right], numbers)


def _add(step: RandomStep) -> Op | None:
    left = step.pick()
    same = [i for i, shape in enumerate(step.shapes) if left is not None and shape == step.shapes[left] and i != left]
    if left is None or not same:
        return None
    right = step.rng.choice(same)
    return lambda values: values[left] * values[right] + values[left]


def _of_one(make: Callable[..., Any], fits: Callable[[Shape], bool] = lambda shape: len(shape) > 1) -> Maker:
    """Return a maker of operations on one array, for what makes a function of (random numbers, its shape)."""

    def maker(step: RandomStep) -> Op | None:
        place = step.pick(fits)
        if place is None:
            return None
        function = make(step.rng, step.shapes[place])
        return lambda values: function(values[place])

    return maker


def _transpose(rng: random.Random, shape: Shape) -> Any:
    order = list(range(len(shape)))
    rng.shuffle(order)
    return lambda x: jnp.transpose(x, order)


def _merge(rng: random.Random, shape: Shape) -> Any:
    dim = rng.randrange(len(shape) - 1)
    return lambda x: jnp.reshape(x, (*shape[:dim], prod(shape[dim : dim + 2]), *shape[dim + 2 :]))


def _split(rng: random.Random, shape: Shape) -> Any:
    dim = shape.index(size := max(shape))
    first = rng.choice([n for n in SIZES if size % n == 0 and size // n > 1])
    return lambda x: jnp.reshape(x, (*shape[:dim], first, size // first, *shape[dim + 1 :]))


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    def make(rng: random.Random, shape: Shape) -> Any:
        dim = rng.randrange(len(shape))
        return lambda x: function(x, dim)

    return make


def _scan(rng: random.Random, shape: Shape) -> Any:
    turn = lambda carry, x: (jnp.tanh(carry + x), carry * x)  # noqa: E731
    return lambda x: lax.scan(turn, jnp.zeros(shape[1:]), x)[1]


def _look_up(rng: random.Random, shape: Shape) -> Any:
    count = rng.choice(SIZES)
    return lambda x: x[jnp.arange(count) * 7 % shape[0]]


def _slice(rng: random.Random, shape: Shape) -> Any:
    dim = shape.index(max(shape))
    return lambda x: lax.slice_in_dim(x, 0, shape[dim] - 4, axis=dim)


_MAKERS: dict[str, Maker] = {
    "dot": _dot,
    "add": _add,
    "transpose": _of_one(_transpose),
    "merge": _of_one(_merge),
    "split": _of_one(_split, lambda shape: max(shape) > 12 and len(shape) < _MOST_RANK),
    "sum": _of_one(_along(jnp.sum)),
    "max": _of_one(_along(jnp.max)),
    "softmax": _of_one(_along(jax.nn.softmax)),
    "cumsum": _of_one(_along(jnp.cumsum)),
    "scan": _of_one(_scan),
    "look up": _of_one(_look_up),
    "concatenate": _of_one(_along(lambda x, dim: jnp.concatenate([x, -x], dim)), bool),
    "slice": _of_one(_slice, lambda shape: max(shape) >= 8),
}
