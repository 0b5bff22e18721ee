"""Bad input gets a clear error naming the place and the way out; never a crash or half a result."""

import copyreg
import gc
import re
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import _core
from shardrules._rules.rules import matcher_of

CATCH_ALL = [(".*", P())]


def test_an_invalid_regex_names_the_rule_and_the_place():
    with pytest.raises(re.error) as info:
        sr.match_partition_rules([("fine", P()), ("layers/(wq|wk", P())], {})
    assert str(info.value) == (
        "rule 1: missing ), unterminated subpattern at position 7\n    layers/(wq|wk\n           ^"
    )
    assert info.value.pattern == "layers/(wq|wk"
    assert info.value.pos == 7


REJECTED = ["*", "[a", "(?P<a>x)(?P<a>y)", r"\1", "a**", "(?<=a+)b", "\\"]
BAD_RULES = [
    *(((pattern, P()), re.error, "^rule 0: ") for pattern in REJECTED),
    (("*/kernel", None), re.error, r"(?s)rule 0.*regular expressions, not globs: write '\.\*/kernel'"),
    (("**/kernel", None), re.error, r"(?s)rule 0.*not globs: write '\.\*/kernel'"),
    (("(?x) a\n  b (?P<n", P()), re.error, r"rule 0(?s:.*)\n      b \(\?P<n\n            \^$"),
    (("a{99999999999999999999}", P()), OverflowError, "rule 0"),
    (("(?a)(?u)x", P()), ValueError, "rule 0: ASCII and UNICODE flags are incompatible"),
    (("(" * 20_000 + "a" + ")" * 20_000, P()), RecursionError, "rule 0"),
    *(
        (rule, TypeError, "rule 0 is not a .pattern, spec. pair")
        for rule in ("ab", ("a",), ("a", P(), 1), None, 3, {"a": P()})
    ),
    *(
        ((pattern, P()), TypeError, "rule 0: the pattern must be a string")
        for pattern in (b"bytes", 3, None, re.compile(b"bytes"))
    ),
    (("w", ("tp", 3)), TypeError, "rule 0: entry 1 of the spec is 3 .an int."),
    (("w", ["tp", {"dp"}]), TypeError, "rule 0: entry 1"),
    (("w", [["tp", None]]), TypeError, "rule 0: entry 0"),
    (("w", {"tp": 1}), TypeError, "rule 0: the spec .* cannot be hashed"),
    (("w", bytearray(b"tp")), TypeError, "cannot be hashed"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "error", "message"), BAD_RULES, ids=lambda case: str(case)[:40])
def test_a_bad_rule_is_told_by_its_number(rule, error, message):
    with pytest.raises(error, match=message):
        sr.Rules([rule])
    with pytest.raises(error, match=message.replace("rule 0", "rule 1")):
        sr.Rules([("x", P()), rule])
    if error is re.error:
        with pytest.raises(re.error):
            re.compile(rule[0])


def test_all_unmatched_leaves_are_named():
    tree = {"layers": [{"kernel": np.zeros((2, 3))} for _ in range(12)], "ok": np.zeros(1)}
    with pytest.raises(ValueError, match="Partition rule not found for param") as info:
        sr.match_partition_rules([("ok", P()), ("nope", P())], tree)
    lines = str(info.value).splitlines()
    assert lines[0] == "Partition rule not found for param: layers/0/kernel"
    assert lines[1] == "  12 leaves match none of the 2 rules:"
    assert lines[2:12] == [f"    layers/{i}/kernel  shape (2, 3)" for i in range(10)]
    assert lines[12] == "    ... and 2 more leaves"
    assert "('.*', PartitionSpec())" in lines[13]


def nested(depth, wrap):
    tree = np.zeros(2)
    for _ in range(depth):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize("wrap", [lambda t: {"a": t}, lambda t: [t], lambda t: (t,)])
def test_a_tree_nested_very_deeply(wrap):
    limit = sys.getrecursionlimit()
    try:
        for own in (limit, 1_000_000):  # none is too high
            sys.setrecursionlimit(own)
            with pytest.raises(RecursionError, match="levels deep|nested more than") as info:
                sr.match_partition_rules(CATCH_ALL, nested(100_000, wrap))
            assert info.value.__notes__[0].endswith("keys deep)' in the tree")
    finally:
        sys.setrecursionlimit(limit)
    assert sr.match_partition_rules(CATCH_ALL, nested(400, wrap)) is not None


def leaf_that(act):
    return type("Leaf", (), {"shape": property(lambda self: (act(), (2,))[1])})()


def fail(error):
    raise error


def changing_dict():
    tree = {"x": {}}
    tree["x"]["leaf"] = leaf_that(lambda: tree["x"].update(new=np.zeros(2)))
    return tree


def changing_list():
    items = [None, np.zeros(2), np.zeros(2)]
    items[0] = leaf_that(items.clear)
    return {"x": items}


def vanishing(key, wrap):
    """A leaf that takes its own key out of the tree and fails; the key's text is made for the walk."""
    tree = {}
    tree[key] = wrap(leaf_that(lambda: (tree.clear(), fail(RuntimeError("gone")))))
    return tree


FAILING = {
    "a shape that raises": (lambda: {"a": [np.zeros(2), leaf_that(lambda: fail(RuntimeError("deleted")))]}, "deleted", "'a/1'"),
    "a shape that is no tuple": (lambda: {"a": type("Leaf", (), {"shape": 3})()}, "leaf of type Leaf is 3, not a tuple", "'a'"),
    "a dict that changes": (changing_dict, "dict changed size while it was walked", "'x'"),
    "a list that changes": (changing_list, "list changed size while it was walked", "'x'"),
    "a key that only the walk knew": (lambda: vanishing("".join(["k", "ey"]), lambda leaf: leaf), "gone", "'key'"),
    "one in keystr": (lambda: vanishing(1000, lambda leaf: [leaf]), "gone", "'[1000][0]'"),
    "a key without text": (lambda: {"x": {type("BadKey", (), {"__str__": lambda self: fail(ValueError("no text"))})(): np.zeros(2)}}, "no text", ""),  # nor has the place
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_what_fails_in_a_walk_is_told_with_its_place(case):
    make, message, place = FAILING[case]
    rules = sr.Rules(CATCH_ALL, sr.dialects.KEYSTR if "keystr" in case else sr.dialects.EFORMER)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message) as info:
        rules.match(make())
    assert getattr(info.value, "__notes__", []) == ([f"shardrules: at {place} in the tree"] if place else [])


def test_what_fails_without_harm():
    # As hasattr has it, and so eformer:
    assert sr.match_partition_rules(CATCH_ALL, [leaf_that(lambda: fail(AttributeError()))]) == [P()]
    # Replaced values and dropped references.
    tree = {"a": {"b": None, "c": [np.zeros(2)]}}
    tree["a"]["b"] = leaf_that(lambda: (tree.update(a=None), gc.collect()))
    assert sr.match_partition_rules(CATCH_ALL, tree) == {"a": {"b": P(), "c": [P()]}}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_it_was(is_enabled):
    try:
        (gc.enable if is_enabled else gc.disable)()
        sr.match_partition_rules(CATCH_ALL, {"a": np.zeros(2)})
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


# All but that of Python, which is an enum.
CLASSES = [value for value in vars(_core).values() if isinstance(value, type) and value is not _core.RecordLayout]
assert _core.RuleSet in CLASSES


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_there_are_no_uninitialised_objects(cls):
    """RuleSet.__new__(RuleSet).counters() crashed."""
    for make in (cls.__new__, object.__new__, lambda cls: copyreg.__newobj__(cls)):
        with pytest.raises(TypeError):
            make(cls)
    # Its __init__ could show others what is not made yet.
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Own", (cls,), {})


def test_init_again_changes_no_object_of_the_core():
    corrector = _core.Corrector([([3], 1)], "drop", "drop")
    for dims in ([([2], 1)], [([-3], 1)]):
        corrector.__init__(dims, "drop", "drop")
    assert corrector.kept((9,)) == 1


def test_what_the_core_refuses_is_not_printed():
    """Of strict="no" the message had the whole tree."""
    tree = {f"kernel {i}": np.zeros(2) for i in range(1000)}
    matcher = matcher_of(sr.Rules(CATCH_ALL))
    rules, answers = matcher.rule_set, matcher.rule_indices()
    calls = [
        lambda: rules.match(tree, answers, "no", 0, 0, 0, 0, False),
        lambda: rules.count_matches(tree, []),
        lambda: rules.count_paths(tree),
        lambda: rules.count_paths(["kernel", b"bias"]),
        lambda: rules.first_match(list(tree)),
        lambda: rules.all_matches(list(tree)),
        lambda: _core.Corrector([(list(tree), 1)], "drop", "drop"),
        lambda: _core.Corrector([([2**63], 1)] * 1000, "drop", "drop"),
        lambda: _core.Corrector([], "drop", "drop").kept(list(tree)),
        lambda: _core.LogicalRuleSet([], list(tree), False, "drop"),
        lambda: _core.LogicalRuleSet([], [], False, "drop").resolve(list(tree)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="the core does not take") as info:
            call()
        assert len(str(info.value)) < 200


def test_what_only_the_core_is_given():
    """Not to be reached by way of Python's side; no crash all the same."""
    with pytest.raises(ValueError, match="a rule has no such spec"):
        _core.ShardingTable([None], [1], print, print)
    names, shapes = ["a", "b"], [(1,), (2,)]

    def make(*_):
        names.clear()
        shapes.clear()

    with pytest.raises(IndexError):
        _core.resolve_all(names, shapes, {}, make)
