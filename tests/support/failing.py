"""Calls of the core in which one thing fails: each hook's k-th call raises, or the k-th allocation.

`python -m tests.support.failing NAME` fails every allocation of one case in turn; a process of its own, so
that a crash is a test's failure and not the end of the run.
"""

import gc
import itertools
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import shardrules._base.node_types
from shardrules import Rules
from shardrules._base.node_types import Record
from shardrules._core import Corrector, RecordLayout, RuleSet, ShardingTable, SpecTable, templates
from shardrules._rules.matcher import _dialect_options
from shardrules._rules.patterns import EMPTY_TEXT_HAS_NO_NON_BOUNDARY, compile_patterns
from shardrules.dialects import EFORMER, KERAS, KEYSTR, NNX


class Hooks:
    """Counts the calls of all hooks; one of them, by its number, raises."""

    def arm(self, failing: int | None, error: type[BaseException] | None) -> None:
        self.calls, self.failing, self.error, self.failed = 0, failing, error, ""

    def call(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.failing:
            self.failed = name
            raise self.error(name)


HOOKS = Hooks()
HOOKS.arm(None, None)


def counted(function, name):
    def call(*args, **keywords):
        HOOKS.call(name)
        return function(*args, **keywords)

    return call


def hooked(**names):
    """Makes hooks of a class's methods: `lt="lt"` of `__lt__`."""

    def wrap(cls):
        for method, name in names.items():
            setattr(cls, f"__{method}__", counted(getattr(cls, f"__{method}__"), name))
        return cls

    return wrap


Pair = namedtuple("Pair", ["first", "second"])


@hooked(new="namedtuple")
class Own(namedtuple("Own", ["first"])):
    """Its constructor runs."""

    __slots__ = ()


@hooked(hash="hash", eq="eq", lt="lt", str="str", repr="repr")
class Key:
    def __init__(self, text):
        self.text = text

    def __hash__(self):
        return 7  # so that all are compared

    def __eq__(self, other):
        return isinstance(other, Key) and self.text == other.text

    def __lt__(self, other):
        return self.text < other.text

    def __repr__(self):
        return self.text


@hooked(mul="mul", rmul="mul", eq="size eq", hash="size hash")
class Size(int):
    """A size whose products are hooks, too: an int times one is its own product."""


@hooked(len="len", getitem="getitem", iter="iter")
class Shape(list):
    """No tuple: it is read as any sequence."""


@hooked(hash="dtype hash", eq="dtype eq")
class DType:
    def __hash__(self):
        return 3

    def __eq__(self, other):
        return isinstance(other, DType)

    def __repr__(self):
        return "DType"


class Meta(type):
    """Asked for `shape` of the class, too."""

    def __getattribute__(cls, name):
        if name == "shape":
            HOOKS.call("class shape")
        return super().__getattribute__(name)


class Leaf(metaclass=Meta):
    def __init__(self, shape):
        self._shape = shape

    shape = property(counted(lambda self: self._shape, "shape"))
    dtype = property(counted(lambda self: DType(), "dtype"))


class Slotted:
    """Its shape is read without a call, so that siblings of it are known again."""

    __slots__ = ("shape",)

    def __init__(self, *shape):
        self.shape = shape


@hooked(str="entry str")
class Entry:
    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


class Node:
    def __init__(self, *children):
        self.children = children

    def __repr__(self):
        return f"Node{self.children}"


@dataclass
class Block:
    """A record: read and rebuilt without its registered functions."""

    a: Any
    b: Any
    note: str = "kept"


@hooked(init="init")
class Called(Block):
    """A record whose constructor runs."""


def _flattened(node):
    return [(Entry(str(i)), child) for i, child in enumerate(node.children)], None


flatten_with_keys = counted(_flattened, "flatten")
unflatten = counted(lambda _, children: Node(*children), "unflatten")


def registration(node_type: type, _: object) -> tuple[Any, Record | None]:
    """In the place of _node_types.registration."""
    HOOKS.call("registration")
    layout = {Block: RecordLayout.ATTRIBUTES, Called: RecordLayout.CALL}.get(node_type)
    record = None if layout is None else Record(layout, ("a", "b"), ("a", "b"), ("note",))
    return unflatten if node_type is Node else None, record


class Registry:
    """In the place of JAX's, which itself crashes when there is no memory."""

    def flatten_one_level_with_keys(self, node):
        if isinstance(node, Node):
            return flatten_with_keys(node)
        if isinstance(node, Block):
            return [("a", node.a), ("b", node.b)], node.note
        if isinstance(node, tuple):
            return list(zip(map(GetAttrKey, node._fields), node, strict=True)), type(node)
        return None


class PartitionSpec(tuple):
    __slots__ = ()

    def __new__(cls, *entries):
        return super().__new__(cls, entries)


class GetAttrKey:
    def __init__(self, name):
        self.name = name


def use_stand_in() -> None:
    """Makes the core see the registry of this module, and not JAX."""
    tree_util, sharding = ModuleType("jax.tree_util"), ModuleType("jax.sharding")
    tree_util.default_registry = Registry()
    tree_util.GetAttrKey, tree_util.tree_flatten = GetAttrKey, None
    for kind in ("DictKey", "SequenceKey", "FlattenedIndexKey"):
        setattr(tree_util, kind, type(kind, (), {}))
    sharding.PartitionSpec = PartitionSpec
    sys.modules |= {"jax": ModuleType("jax"), "jax.tree_util": tree_util, "jax.sharding": sharding}
    shardrules._base.node_types.registration = registration
    # CPython's os.environ raises a SystemError where there is no memory.
    shardrules._rules.matcher.logs_moves = lambda: False


def hostile_tree(leaf: object) -> Any:
    """Every kind of node that needs no registry."""
    return {
        "a": [leaf, (leaf, None, ()), {7: leaf, 3: {"k": leaf}}],
        "od": OrderedDict([("x", leaf), ("yé", leaf)]),
        "dd": defaultdict(list, {"z": leaf}),
        "nt": Pair(leaf, Own([leaf])),
        "many": {"1": leaf, "2": leaf, "3": leaf, "4": leaf, "5": leaf},
        "t": leaf,
        "keys": {Key("p"): leaf, Key("q"): [leaf]},
    }


def registered_tree(leaf: object) -> Any:
    records = Block(leaf, [leaf]), Called(leaf, leaf, "note")
    return [Node(leaf, {"a": leaf}), hostile_tree(leaf), Node(Node(), leaf), records]


def siblings_tree(leaf: object) -> Any:
    """Blocks that come again, each made of dicts of its own; and, first, one leaf that is none of them."""

    def block(rank):
        return {"x": Slotted(2, 3), "y": {"p": Slotted(*[2] * rank), "q": {"x": Slotted(2, 3)}}}

    return {"t": leaf, "blocks": [block(1 + number % 5 % 2) for number in range(40)]}


PATTERNS = ["^keys.*q", r"t(?=/)", "(?i)É|x$", "p|q", ".*"]
REGULAR = [pattern.replace("(?=/)", "$") for pattern in PATTERNS]


def rule_set(dialect: Any = EFORMER, memory_budget: int = 1 << 20, patterns: list[str] = PATTERNS) -> RuleSet:
    code = compile_patterns(patterns, dialect.match)
    return RuleSet(
        code.patterns,
        code.classes,
        counted(code.oracle, "accepts"),
        code.word_class,
        code.ascii_word_class,
        EMPTY_TEXT_HAS_NO_NON_BOUNDARY,
        [(rule, counted(search, "search")) for rule, search in code.fallbacks],
        memory_budget,
        len(dialect.match),
        _dialect_options(dialect),
    )


class Make:
    """What a table asks for the answer. No function: where memory is out, CPython 3.12 crashes on making one."""

    def __init__(self, spec: object):
        self.spec = spec

    def __call__(self, *_: object) -> object:
        HOOKS.call("make")
        return self.spec


def spec_table(spec: object) -> SpecTable:
    return SpecTable([None] * len(PATTERNS), [2] * len(PATTERNS), Make(spec))


def sharding_table(spec: object, corrector: Corrector | None = None) -> ShardingTable:
    return ShardingTable([corrector], [0] * len(PATTERNS), Make(spec), Make(spec))


def corrected_table(spec: object) -> ShardingTable:
    return sharding_table(spec, Corrector([([2], 1), ([3], 1)], "drop", "drop"))


def match(
    tree: Any, table: Any, dialect: Any = EFORMER, min_size: int = 0, patterns: list[str] = PATTERNS
) -> Callable[[], Any]:
    rules = rule_set(dialect, patterns=patterns)
    return lambda: rules.match(tree, table(SPEC), True, min_size, SPEC, None, None, True)


def through_rules(tree: Any) -> Callable[[], Any]:
    """The way of users."""
    rules = Rules([(pattern, SPEC) for pattern in PATTERNS])
    return lambda: rules.match(tree)


def survey(tree: Any) -> Callable[[], Any]:
    rules, table = rule_set(), spec_table(1)
    return lambda: rules.survey(tree, table, 0, -1, -2, -3)


def count(tree: Any) -> Callable[[], Any]:
    rules = rule_set()
    return lambda: (rules.count_matches(tree, True), rules.count_paths(["a/kernel", "a/é", "b/kernel"]))


def searches() -> Callable[[], Any]:
    """For a character each time of which nothing is known."""
    rules = rule_set(memory_budget=0)
    new = itertools.count(0x4E00)

    def use():
        path = f"layers/{chr(next(new))}é/q"
        return rules.first_match(path), rules.all_matches(path)

    return use


SPEC = ("the spec", "of all rules")
LEAF = Leaf((Size(6), Size(8)))
ODD_LEAF = Leaf(Shape([Size(6), Size(8)]))

_WALKED = "shape hash eq lt str search namedtuple accepts "
# What is called, each with rules and tables of its own; and the least of the hooks that it must call.
CASES: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
    "match": (lambda: match(hostile_tree(LEAF), spec_table), _WALKED + "make"),
    "match odd shapes": (
        lambda: match(hostile_tree(ODD_LEAF), spec_table, min_size=40), _WALKED + "make len iter mul"),
    "match registered": (
        lambda: match(registered_tree(LEAF), spec_table), _WALKED + "make flatten unflatten entry-str init"),
    "Rules.match": (lambda: through_rules(hostile_tree(LEAF)), "shape hash eq lt str namedtuple"),
    "match siblings": (lambda: match(siblings_tree(LEAF), spec_table, patterns=REGULAR), "shape make"),
    "match keystr": (lambda: match(registered_tree(LEAF), spec_table, KEYSTR), "shape repr flatten entry-str"),
    "match hidden": (
        lambda: match([registered_tree(LEAF), {"value": LEAF}], spec_table, NNX), "shape flatten unflatten entry-str"),
    "match unique": (lambda: match(hostile_tree(LEAF), spec_table, KERAS), "shape hash str"),
    "shardings": (lambda: match(hostile_tree(ODD_LEAF), corrected_table), _WALKED + "make getitem"),
    "shardings by shape": (
        lambda: match(hostile_tree(ODD_LEAF), sharding_table), _WALKED + "make dtype dtype-hash dtype-eq size-hash"),
    "survey": (lambda: survey(registered_tree(ODD_LEAF)), _WALKED + "dtype dtype-hash dtype-eq size-hash"),
    "count": (lambda: count(hostile_tree(LEAF)), "shape hash str search accepts"),
    "searches": (searches, "accepts search"),
    "templates": (lambda: lambda: templates(["a/1", "a/2/é", "b\0"] * 3), ""),
}  # fmt: skip


def references() -> list[int]:
    gc.collect()
    return [sys.getrefcount(x) for x in (SPEC, LEAF, ODD_LEAF, Node, Pair, None)][:-1]


def fail_allocations(name: str) -> str:
    """Each allocation of Python's in turn, first with all that follow it, then alone."""
    use = CASES[name][0]()
    expected, before = repr(use()), references()
    for start in itertools.count(1):
        if fails(use, expected, start, 0) is None:
            break
    alone = [fails(use, expected, one, one + 1) for one in range(1, start)]
    assert repr(use()) == expected
    after = references()
    assert after == before, (before, after)
    survived = alone.count(None)
    return f"{name}: {start - 1} allocations, {survived} of which may fail alone unnoticed"


def fails(use: Callable[[], Any], expected: str, start: int, stop: int) -> MemoryError | None:
    """The error when allocations from `start` to `stop` (0: all that follow) fail."""
    import _testcapi

    try:
        _testcapi.set_nomemory(start, stop)
        result = use()
    except MemoryError as error:
        return error.with_traceback(None)
    finally:
        _testcapi.remove_mem_hooks()
    assert repr(result) == expected, (start, stop, repr(result), expected)
    return None


if __name__ == "__main__":
    use_stand_in()
    print(fail_allocations(sys.argv[1]))
