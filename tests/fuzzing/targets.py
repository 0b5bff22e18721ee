"""Each target takes bytes and asserts what must hold for any: `FileError` or a sound result.

Any other exception is a finding.
"""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import shardrules as sr
from shardrules import FileError
from shardrules._cli.project import read_jobs
from shardrules._plan import lock as locks
from shardrules._plan.files.models import read_arrays
from shardrules._plan.files.rules import read_rule_source
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.lock import program_lock_text, read_program_lock

try:
    import safetensors as library
except ImportError:
    library = None

CORPUS = Path(__file__).parent / "corpus"
_DIRECTORY = Path(tempfile.mkdtemp(prefix="fuzz"))
Pair = namedtuple("Pair", ["first", "second"])


class Bytes:
    """Choices made of bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._rest = iter(data)

    def below(self, end: int) -> int:
        return next(self._rest, 0) % end


def _file(name: str, data: bytes) -> str:
    path = _DIRECTORY / name
    path.write_bytes(data)
    return str(path)


def manifest(data: bytes) -> None:
    """A JSON manifest, plain or gzipped: `FileError`, or names with shapes and dtypes."""
    for name, content in (("m.json", data), ("m.json.gz", gzip.compress(data, 1))):
        try:
            arrays = read_arrays(_file(name, content))
        except FileError:
            continue
        _check_arrays(arrays.leaves)


def raw_manifest(data: bytes) -> None:
    """The same for bytes that say themselves whether they are gzipped."""
    with suppress(FileError):
        _check_arrays(read_arrays(_file("raw.json.gz", data)).leaves)


def safetensors(data: bytes) -> None:
    """A safetensors file as it is, and a header with the right length in front: the library agrees."""
    for content in (data, struct.pack("<Q", len(data)) + data):
        try:
            arrays = read_arrays(_file("m.safetensors", content))
        except FileError:
            continue
        _check_arrays(arrays.leaves)
        is_lax = b"-0" in content or content[8:11] == b"\xef\xbb\xbf"  # which the library refuses
        if library is not None and not is_lax:
            theirs = {name: tuple(one["shape"]) for name, one in library.deserialize(content)}
            assert theirs == {name: leaf.shape for name, leaf in arrays.leaves.items()}


_SHARD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def index(data: bytes) -> None:
    """The index of one safetensors file: `FileError`, or arrays of that file."""
    header = json.dumps(_SHARD).encode()
    _file("m.safetensors", struct.pack("<Q", len(header)) + header + bytes(8))
    with suppress(FileError):
        arrays = read_arrays(_file("m.safetensors.index.json", data))
        # Of a manifest, which the bytes may be as well, there is nothing to say here.
        if b"params" not in data:
            assert arrays.leaves.keys() <= _SHARD.keys()


def _check_arrays(leaves: dict[str, Any]) -> None:
    for name, leaf in leaves.items():
        assert type(name) is str
        assert all(type(size) is int and size >= 0 for size in leaf.shape)
        assert type(leaf.dtype) is str
    try:
        sr.plan(leaves, [(".*", None)], {"tp": 2}).check()
    except ValueError as error:
        assert "has more bytes than can be counted" in str(error)


def rules(data: bytes) -> None:
    """A rule file in JSON: `FileError`, or rules that match as `re` does."""
    _check_rules(_file("r.json", data))


def toml(data: bytes) -> None:
    """The same in TOML."""
    _check_rules(_file("r.toml", data))


def yaml(data: bytes) -> None:
    """MaxText's rules in YAML: `FileError`, or names with mesh axes."""
    with suppress(FileError):
        read = read_rule_source(_file("r.yml", data)).rules
        assert isinstance(read, sr.LogicalRules)
        assert all(type(name) is str for name, _ in read)


def _check_rules(path: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = read_rule_source(path)
    except FileError:
        return
    assert isinstance(read.rules, sr.Rules)
    for leaf in ("", "layers/0/kernel", "é"):
        first = read.rules.first_match(leaf)
        assert (first is None) == (read.rules.all_matches(leaf) == [])


@contextmanager
def _lenient_locks(text: str) -> Iterator[None]:
    """Any digest fits, for what is behind that check; and few leaves, which take less time."""
    try:
        content = json.loads(text)
        digest = content["digest"]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        digest = None
    with mock.patch.object(locks, "MOST_TEXT", 2**20), mock.patch.object(locks, "_digest", return_value=digest):
        yield


def lock(data: bytes) -> None:
    """A lock: `FileError`, or a plan that can be locked again, to the same plan."""
    text = "{" + data.decode("utf-8", "replace")
    try:
        with warnings.catch_warnings(), _lenient_locks(text):
            warnings.simplefilter("ignore")
            plan = sr.Plan.from_lock(text)
    except FileError:
        return
    assert sum(len(folded.rows) for folded in plan.folded) == len(plan)
    for answer in (plan, plan.check(), plan.diff(plan), *map(plan.explain, plan.paths[:9])):
        str(answer).encode("utf-8", "surrogatepass")
    again = sr.Plan.from_lock(plan.lock())
    assert again.fingerprint() == plan.fingerprint()
    assert again.lock() == plan.lock()
    assert not plan.diff(again)


_VALUES = (
    None, True, 0, -1, 7, 2**31, 2**63, 10**30, 0.5, float("inf"), "", "a", "tp", "é\ud800", "(", "a*",
    "layers/{0..3}/w", "{0..99999999999999999999}", "{5..1}", "{1,1}", "{", "{{{0}}}", [], ["tp"],
    [["a", "b"], None], [[]], {}, {"a": 1}, [8, 6], "float32", "eformer",
)  # fmt: skip


def _changed(value: Any, choices: Bytes) -> Any:
    """JSON in which some values, deep inside, are others."""
    what = choices.below(12)
    if what == 0:
        return _VALUES[choices.below(len(_VALUES))]
    if isinstance(value, dict) and value:
        key = list(value)[choices.below(len(value))]
        if what == 1:
            return {name: one for name, one in value.items() if name != key}
        return value | {key: _changed(value[key], choices)}
    if isinstance(value, list) and value:
        at = choices.below(len(value))
        again = [value[at]] if what == 1 else []
        return [*value[:at], _changed(value[at], choices), *again, *value[at + 1 :]]
    return _VALUES[choices.below(len(_VALUES))]


def lock_values(data: bytes) -> None:
    """A lock whose JSON is sound, with other values in it."""
    choices, seeds = Bytes(data), sorted((CORPUS / "lock").iterdir())
    content = json.loads("{" + seeds[choices.below(len(seeds))].read_text())
    for _ in range(1 + choices.below(3)):
        content = _changed(content, choices)
    lock(json.dumps(content)[1:].encode("utf-8", "surrogatepass"))


def rule_values(data: bytes) -> None:
    """The same for rules in JSON."""
    choices, seeds = Bytes(data), sorted((CORPUS / "rules").glob("*.json"))
    content = json.loads(seeds[choices.below(len(seeds))].read_text())
    for _ in range(1 + choices.below(3)):
        content = _changed(content, choices)
    rules(json.dumps(content).encode("utf-8", "surrogatepass"))


def program_lock(data: bytes) -> None:
    """The lock of a program: `FileError`, or costs whose lock says the same."""
    with suppress(FileError):
        costs = read_program_lock(data, "step.lock")
        assert read_program_lock(program_lock_text(costs).encode(), "again.lock") == costs


def hlo(data: bytes) -> None:
    """The text of a program: ValueError, or collectives with the groups of its devices."""
    with suppress(ValueError), hlo_errors():
        program = Hlo(data.decode(errors="replace"))
        assert program.alias_count >= 0
        for row in program.exchanges({}):
            program.place(row.instruction)
            assert all(device >= 0 for group in row.groups for device in group)


def project(data: bytes) -> None:
    """A project file: `FileError` without control characters, or jobs."""
    try:
        assert all(type(job) is dict for job in read_jobs(Path(_file("p.toml", data))).values())
    except FileError as error:
        assert str(error).isprintable()


class _Key:
    """A key whose text, hash and order are not of one mind."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number % 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.number == other.number

    def __lt__(self, other: Any) -> bool:
        return self.number % 3 < other.number % 3

    def __str__(self) -> str:
        return f"k/{self.number % 4}"


class _Leaf:
    def __init__(self, shape: Any) -> None:
        self._shape = shape

    @property
    def shape(self) -> Any:
        if callable(self._shape):
            return self._shape()
        return self._shape


_TEXTS = ("a", "kernel", "é", "", "a/b", "\n", "x" * 40, "x" * 39 + "y", "0", "layers")


class _Trees:
    """Trees of every kind of node, some of which change, or fail, while they are walked."""

    def __init__(self, data: bytes) -> None:
        self._bytes = Bytes(data)
        self._open: list[Any] = []

    def tree(self, depth: int = 5) -> Any:
        kind = self._bytes.below(12 if depth else 3)
        if kind < 3:
            return self._leaf()
        size = self._bytes.below(6)
        if kind < 6:
            return self._filled({}, size, depth)
        if kind == 6:
            return self._filled(OrderedDict(), size, depth)
        if kind == 7:
            return self._filled(defaultdict(list), size, depth)
        if kind == 8:
            return Pair(self.tree(depth - 1), self.tree(depth - 1))
        if kind == 9:
            return tuple(self.tree(depth - 1) for _ in range(size))
        made: list[Any] = []
        self._open.append(made)
        made += [self.tree(depth - 1) for _ in range(size)]
        return made

    def _filled(self, made: Any, size: int, depth: int) -> Any:
        self._open.append(made)
        odd = self._bytes.below(8)
        for _ in range(size):
            made[self._key(odd)] = self.tree(depth - 1)
        return made

    def _key(self, odd: int) -> Any:
        number = self._bytes.below(256)
        if odd == 0:
            return _Key(number)
        if odd == 1:
            return (1, 1.5, True, b"x", (1, "a"), number, -number, "é")[number % 8]
        return _TEXTS[number % len(_TEXTS)]

    def _leaf(self) -> Any:
        kind = self._bytes.below(16)
        if kind < 8:
            return _Leaf((2,) * (kind % 4))
        number = self._bytes.below(256)
        odd = (None, 3, "text", [2, 3], (2, "a"), (-1, 4), (2**70,), np.zeros(2), range(2))
        if kind < 12:
            return _Leaf(odd[number % len(odd)])
        if kind < 14:
            return (None, 1, "leaf", object(), np.float32(1))[number % 5]
        return _Leaf(self._mischief(number))

    def _mischief(self, number: int) -> Callable[[], Any]:
        """A shape that changes a container which was begun before its leaf."""
        target = self._open[number % len(self._open)] if self._open else []

        def change() -> Any:
            if number % 5 == 0:
                raise RuntimeError("a shape that fails")
            if number % 5 == 1:
                target.clear()
            elif isinstance(target, list):
                target[:] = [*target[1:], 1] if number % 2 else [*target, 1]
            elif target and number % 2:
                target.pop(next(iter(target)))
            else:
                target[next(iter(target), "new")] = 1
            return (2, 3)

        return change


_RULES = [
    sr.Rules([("kernel|1", "tp"), (r"a(?=/)", None), ("é.*x", ("a", "b")), (".*", None)], dialect)
    for dialect in (sr.dialects.EFORMER, sr.dialects.KEYSTR, sr.dialects.EASYLM, sr.dialects.KERAS)
]


def tree(data: bytes) -> None:
    """Any tree, hostile ones too: a tree of the same leaves, or one of the documented errors."""
    rules = _RULES[Bytes(data).below(len(_RULES))]
    documented = (TypeError, ValueError, RuntimeError, OverflowError)
    calls: list[Callable[[Any], Any]] = [
        lambda t: sr.match_partition_rules(rules, t, Bytes(data[::-1]).below(3)),
        lambda t: rules.coverage(t),
        lambda t: sr.named_shardings(t, rules, {"tp": 2, "a": 3, "b": 5}),
        lambda t: sr.plan(t, rules, {"tp": 2}),
    ]
    for call in calls:
        with suppress(documented):
            call(_Trees(data[1:]).tree())


_FUNCTIONS: tuple[Callable[[bytes], None], ...] = (
    manifest, raw_manifest, safetensors, index, rules, toml, yaml, rule_values, lock, lock_values, program_lock,
    hlo, project, tree,
)  # fmt: skip
TARGETS = {function.__name__: function for function in _FUNCTIONS}
