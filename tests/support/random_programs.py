"""Random small steps of products, reshapes, sums and loops, to compare what they send with XLA."""

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


class RandomStep:
    """A function of 2 or 3 arrays, made of a few operations on what is there."""

    def __init__(self, seed: int, operations: int = 5) -> None:
        rng = random.Random(seed)
        self.args: list[Shape] = [
            tuple(rng.choice(SIZES) for _ in range(rng.choice((2, 2, 3)))) for _ in range(rng.randint(2, 3))
        ]
        self._shapes = list(self.args)
        self._ops: list[tuple[str, Callable[..., Any], list[int]]] = []
        while len(self._ops) < operations:
            name = rng.choice([*_OF_TWO, *_OF_ONE])
            op, places = _OF_TWO[name](self._shapes, rng) if name in _OF_TWO else _of_one(name, self._shapes, rng)
            if places:
                given = [jax.ShapeDtypeStruct(self._shapes[place], "float32") for place in places]
                self._ops.append((name, op, places))
                self._shapes.append(jax.eval_shape(op, *given).shape)

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        for _, op, places in self._ops:
            values.append(op(*(values[place] for place in places)))
        return values[-1]

    def __str__(self) -> str:
        made = zip(self._ops, self._shapes[len(self.args) :], strict=True)
        return f"{self.args}: {', '.join(f'{name}{shape}' for (name, *_), shape in made)}"


def _place(shapes, rng, fits=lambda _: True):
    """An array, a late one rather."""
    places = [i for i, shape in enumerate(shapes) if shape and fits(shape)]
    late = [i for i in places if i >= len(shapes) - 2]
    return rng.choice(late or places) if places else None


def _dot(shapes, rng):
    left, right = _place(shapes, rng), rng.randrange(len(shapes))
    if left is None or right == left:
        return None, ()
    a, b = shapes[left], shapes[right]
    pairs = [(i, j) for i, n in enumerate(a) for j, m in enumerate(b) if n == m]
    if not pairs or len(a) + len(b) - 2 > _MOST_RANK:
        return None, ()
    i, j = rng.choice(pairs)
    free = [(p, q) for p, q in pairs if p != i and q != j]
    batch = [rng.choice(free)] if free and rng.random() < 0.4 else []
    numbers = (((i,), (j,)), (tuple(p for p, _ in batch), tuple(q for _, q in batch)))
    return lambda x, y: lax.dot_general(x, y, numbers), [left, right]


def _add(shapes, rng):
    left = _place(shapes, rng)
    same = [i for i, shape in enumerate(shapes) if left is not None and shape == shapes[left] and i != left]
    return (lambda x, y: x * y + x), [left, rng.choice(same)] if same else ()


def _of_one(name, shapes, rng):
    fits, make = _OF_ONE[name]
    place = _place(shapes, rng, fits)
    return (None, ()) if place is None else (make(rng, shapes[place]), [place])


def _transpose(rng, shape):
    order = list(range(len(shape)))
    rng.shuffle(order)
    return lambda x: jnp.transpose(x, order)


def _merge(rng, shape):
    dim = rng.randrange(len(shape) - 1)
    return lambda x: jnp.reshape(x, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))


def _split(rng, shape):
    dim = shape.index(max(shape))
    first = rng.choice([n for n in SIZES if shape[dim] % n == 0 and shape[dim] // n > 1])
    return lambda x: jnp.reshape(x, (*shape[:dim], first, shape[dim] // first, *shape[dim + 1 :]))


def _along(function):
    def make(rng, shape):
        dim = rng.randrange(len(shape))
        return lambda x: function(x, dim)

    return _has_several, make


def _look_up(rng, shape):
    count = rng.choice(SIZES)
    return lambda x: x[jnp.arange(count) * 7 % shape[0]]


def _scan(rng, shape):
    return lambda x: lax.scan(lambda carry, y: (jnp.tanh(carry + y), carry * y), jnp.zeros(shape[1:]), x)[1]


def _slice(rng, shape):
    dim = shape.index(max(shape))
    return lambda x: lax.slice_in_dim(x, 0, shape[dim] - 4, axis=dim)


def _has_several(shape):
    return len(shape) > 1


_OF_TWO: dict[str, Any] = {"dot": _dot, "add": _add}
# The shapes that it takes, and what makes it for one.
_OF_ONE: dict[str, Any] = {
    "transpose": (_has_several, _transpose),
    "merge": (_has_several, _merge),
    "split": (lambda shape: max(shape) > 12 and len(shape) < _MOST_RANK, _split),
    "sum": _along(jnp.sum),
    "max": _along(jnp.max),
    "softmax": _along(jax.nn.softmax),
    "cumsum": _along(jnp.cumsum),
    "scan": (_has_several, _scan),
    "look up": (_has_several, _look_up),
    "concatenate": (lambda _: True, _along(lambda x, dim: jnp.concatenate([x, -x], dim))[1]),
    "slice": (lambda shape: max(shape) >= 8, _slice),
}
