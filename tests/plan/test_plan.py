"""Plans: their specs are those of named_shardings; their columns, plain sums over JAX's own answers."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import LibraryCorrection
from tests.support import corpus, references
from tests.support.entered import entered
from tests.support.trees import WITHOUT_ARRAYS, array, kinds_of_trees, trees_of_libraries

DROPPING = LibraryCorrection(absent="drop")


def check_equal_to_named_shardings(plan, tree, rules, mesh):
    expected = sr.named_shardings(tree, rules, mesh)
    found = plan.shardings()
    assert tree_util.tree_structure(found) == tree_util.tree_structure(expected)
    wanted = tree_util.tree_leaves(expected)
    specs = tree_util.tree_leaves(plan.specs(), is_leaf=lambda x: isinstance(x, P))
    rows = zip(tree_util.tree_leaves(found), specs, wanted, strict=True)
    # Objects are shared: of 10^5 leaves a few dozen triples are left to compare.
    for sharding, spec, other in {tuple(map(id, row)): row for row in rows}.values():
        assert isinstance(spec, P)
        assert (sharding, spec) == (other, other.spec)


def all_trees():
    leaf = array(4, 8)
    return {
        **kinds_of_trees(),
        **trees_of_libraries(),
        "deep": {"a": [({"b": OrderedDict(c=leaf)},)] * 3},
        "int4": {"w": array(4, 8, dtype="int4"), "b": array(3, dtype="int4")},
        "keys": {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 4)},
        "nothing": {},
    }


@pytest.mark.parametrize("name", sorted(WITHOUT_ARRAYS))
def test_trees_without_arrays_are_refused(name):
    with pytest.raises(TypeError, match="no (leaf|array)"):
        sr.plan(all_trees()[name], [("", "tp")], {"tp": 2})


@dataclass
class Info:
    shape: tuple
    names: tuple


def test_a_tree_in_which_jax_sees_no_leaf_is_refused():
    """jax-llm-examples keeps its abstract arrays in dataclasses that are registered without data."""
    tree_util.register_dataclass(Info, data_fields=(), meta_fields=("shape", "names"))
    tree, logical = {"w": Info((8, 8), ("x", "y"))}, sr.LogicalRules([("x", "tp")])
    for door, rules in ((sr.plan, [("w", "tp")]), (sr.plan, logical), (sr.named_shardings, logical)):
        with pytest.raises(TypeError, match=r"1 node such as .*Info.* is registered without data"):
            door(tree, rules, {"tp": 2})
    for empty in ({}, {"a": ()}, [{}, ()]):
        assert len(sr.plan(empty, [("w", "tp")], {"tp": 2})) == 0


@pytest.mark.parametrize("name", sorted(all_trees().keys() - WITHOUT_ARRAYS))
def test_trees_of_all_kinds(name, mesh):
    tree = all_trees()[name]
    rules = [("kernel|w|a", ("fsdp", "tp")), ("", "tp")]
    plan = sr.plan(tree, rules, mesh)
    check_equal_to_named_shardings(plan, tree, rules, mesh)
    paths = [path for path, _ in tree_util.tree_flatten_with_path(tree)[0]]
    # Dicts are walked in their own order, not sorted; so by the numbered tree.
    numbered = tree_util.tree_leaves(plan._leaves.tree)
    assert sorted(plan.paths) == sorted(map(references.SLASHED, paths))
    assert [plan.paths[row] for row in numbered] == list(map(references.SLASHED, paths))
    assert len(plan) == len(paths)


def test_rule_specs_and_corrections():
    prefix = sr.Correction(indivisible="prefix")
    rules = [
        ("wq", sr.RuleSpec((None, ("tp", "fsdp")), prefix, units=(None, 4))),
        ("wk", sr.RuleSpec(P("tp", "zz"), LibraryCorrection(absent="drop_axis", pad=False))),
        ("", (("fsdp", "tp"),)),
    ]
    tree = {"wq": array(8, 24), "wk": array(8, 8), "x": array(12), "y": array(16)}
    mesh = {"fsdp": 4, "tp": 2}
    plan = sr.plan(tree, rules, mesh)
    check_equal_to_named_shardings(plan, tree, rules, mesh)
    # 24 are six heads of 4: cut by tp=2, but not by 8.
    assert plan.specs() == {"wq": P(None, "tp"), "wk": P("tp", None), "x": P(), "y": P(("fsdp", "tp"))}
    for correction in (prefix, sr.Correction(indivisible="keep"), sr.Correction(pad=False)):
        given = sr.Rules(rules, correction=correction)
        check_equal_to_named_shardings(sr.plan(tree, given, mesh), tree, given, mesh)


@pytest.mark.parametrize("min_size", [0, 8, 9, 10**6])
@pytest.mark.parametrize("dialect", ["EFORMER", "SPECTRAX"])
def test_min_size(min_size, dialect):
    tree = {"a": array(8), "b": array(2, 4), "c": array(16)}
    dialect, mesh = getattr(sr.dialects, dialect), {"tp": 2}
    rules = sr.Rules([("", "tp")], dialect, min_size=min_size)
    plan = sr.plan(tree, rules, mesh)
    check_equal_to_named_shardings(plan, tree, rules, mesh)
    # The tree is not walked again, and what is small is so all the same.
    again = sr.plan(tree, sr.Rules([("", "tp")], dialect, min_size=9), mesh).with_rules(rules)
    assert again.rule.tolist() == plan.rule.tolist()
    assert rules.match(tree) == sr.match_partition_rules(sr.Rules([("", "tp")], dialect), tree, min_size)
    assert (plan.rule == -1).tolist() == [prod(x.shape) < min_size for x in tree.values()]


class TestMeshes:
    TREE, RULES, SIZES = {"w": array(8, 8)}, (("w", ("fsdp", "tp")),), {"dp": 1, "fsdp": 4, "tp": 2}

    def check(self, plan, mesh):
        assert list(plan.axis_sizes.items()) == list(self.SIZES.items())
        assert plan.devices == 8
        assert plan.shardings() == {"w": NamedSharding(mesh, P("fsdp", "tp"))}

    def test_a_mesh_its_abstract_self_a_dict_and_the_context(self, mesh):
        sizes = {**self.SIZES}
        for given, there in ((mesh, mesh), (mesh.abstract_mesh,) * 2, (sizes, sr.resolve_mesh(sizes))):
            self.check(sr.plan(self.TREE, self.RULES, given), there)
            self.check(sr.plan(self.TREE, self.RULES, {"tp": 2}).on_mesh(given), there)
        plan = sr.plan(self.TREE, self.RULES, sizes)
        sizes["tp"] = 9
        assert plan.axis_sizes == self.SIZES
        with jax.set_mesh(mesh):
            plan = sr.plan(self.TREE, self.RULES)
        # The plan is for that mesh, whatever is in force later.
        with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("tp",))):
            self.check(plan, mesh)


LETTERS = str.maketrans("0123456789", "abcdefghij")


@pytest.mark.parametrize("form", ["layers/{0}/w", "layers/{0}/1/w", "{0}/0/1/w"])
def test_what_does_not_fold_costs_little_more(form):
    """Of each row its kind was worded anew, in each check: now a row costs some 8 calls of ours in all."""

    def ask(names):
        plan = sr.plan(dict.fromkeys(names, array(8, 8)), [("w", ("fsdp", "tp")), (".*", ())], {"fsdp": 8, "tp": 4})
        assert all((str(plan), str(plan.check()), plan.lock(), plan._repr_html_()))

    names = [form.format(str(i).translate(LETTERS)) for i in range(3_000)]
    ask(names[:1])  # the first time imports
    with entered() as calls:
        ask(names)
    assert len(calls) < 10 * len(names)


class TestOptimizer:
    def test_a_real_train_state(self):
        tree = corpus.manifest("easylm-llama-3.1-405b-trainstate").nested(corpus.with_dtype)
        rules = sr.Rules(corpus.rules("EasyLM__llama"), sr.dialects.EASYLM)
        whole, params, state = (
            sr.plan(part, rules, {"dp": 1, "fsdp": 32, "mp": 8}) for part in (tree, tree["params"], tree["opt_state"])
        )
        held = whole.bytes_per_device()
        # Adam's mu and nu are as the parameters; its count is an int32, as is the step.
        assert held.optimizer - 4 == 2 * (held.params - 4)
        assert params.bytes_per_device().params + 4 == held.params
        assert params.bytes_per_device(optimizer=state).max + 4 == held.max
        with pytest.raises(ValueError, match="optimizer: the tree has the state of one already, opt_"):
            whole.bytes_per_device(optimizer=["float32"])

    STATE = (
        "opt_state", "opt_state/0/mu", "a/opt_state/b", "a.opt_state.b", "['opt_state'][0]",
        ".opt_state[0].mu", "opt_states", "opt/state", "optimizer/0/mu/w", "['opt'].mu", ".ema.w",
        "state/ema_params/w", "state/param_states/w/mu",
    )  # fmt: skip
    OTHERS = ("my_opt_state/x", "opt_state_2/x", "model/opt/w", "optional/w", "vq/ema/w", "schema/w")

    @pytest.mark.parametrize("path", STATE + OTHERS)
    def test_its_paths(self, path):
        held = sr.plan({path: array(8)}, [("", ())], {"tp": 2}).bytes_per_device(gradients=True)
        assert held[:3] == ((0, 0, 32) if path in self.STATE else (32, 32, 0))

    def test_of_another_mesh(self):
        plan = sr.plan({"w": array(8)}, [("w", "tp")], {"dp": 2, "tp": 2})
        for mesh in ({"dp": 2, "tp": 4}, {"tp": 2, "dp": 2}):
            with pytest.raises(ValueError, match="the optimizer's plan is for the mesh"):
                plan.bytes_per_device(optimizer=plan.on_mesh(mesh))


TOLD_RULES = (("a/w", ("fsdp", "tp")), ("w", "tp"), ("b", (("fsdp", "sp"),)), ("never", None))
TOLD_TREE = {"a": {"w": array(8, 6)}, "w": array(8), "b": array(16), "s": array(), "small": array(2), "name": "x"}
TOLD_MESH = {"fsdp": 4, "tp": 4}


class TestExplain:
    def plan(self, rules=TOLD_RULES, **policy):
        return sr.plan(TOLD_TREE, sr.Rules(rules, **policy), TOLD_MESH)

    def outcomes(self, path, **options):
        return [one.outcome for one in self.plan(**options).explain(path).tried]

    def test_outcomes(self):
        assert self.outcomes("a/w") == ["wins", "too late", "no match", "no match"]
        assert self.outcomes("w") == ["no match", "wins", "no match", "no match"]
        assert self.outcomes("s") == ["no match"] * 4
        assert self.outcomes("w", min_size=100)[1] == "not needed"
        keras = sr.plan(TOLD_TREE, sr.Rules([("w", None), ("w|v", None), (".", None)], sr.dialects.KERAS), TOLD_MESH)
        # What is equal to the path is tried first, and alone.
        assert [one.outcome for one in keras.explain("w").tried] == ["wins", *["too late"] * 2]
        keras = sr.plan(TOLD_TREE, sr.Rules([("[w]", None), ("w|v", None), ("x", None)], sr.dialects.KERAS), TOLD_MESH)
        assert [one.outcome for one in keras.explain("w").tried] == ["ambiguous", "ambiguous", "no match"]
        assert keras.explain("w").kind.status == "ambiguous"

    def test_in_words(self):
        assert str(self.plan().explain("a/w")).splitlines() == [
            "a/w  shape (8, 6)  float32  192 B",
            "  rule 0: 'a/w' wins",
            "  rule 1: 'w' matches, but comes after rule 0",
            "  2 other rules do not match",
            "  the rule says  P('fsdp', 'tp')",
            "  on fsdp=4,tp=4  P('fsdp', None), 48 B on each device",
            "  lost           dim 1 of size 6 is not divisible by tp=4 (costs 36 B on each device)",
        ]
        assert "the mesh has no axis 'sp', so 'fsdp' beside it is dropped too (costs 48 B on each device)" in str(
            self.plan(correction=DROPPING).explain("b"))  # fmt: skip
        assert "  PROBLEM        the mesh has no axis 'sp'\n" in str(self.plan().explain("b"))
        assert str(self.plan().explain("s")).splitlines()[1:] == [
            "  no rule matches, of 4; the leaf needs none",
            "  on fsdp=4,tp=4  P(), 4 B on each device",
        ]
        assert str(self.plan().explain("small")).splitlines()[-2:] == [
            "  PROBLEM        no rule matches",
            "  fix            add a rule that matches",
        ]
        assert str(self.plan(TOLD_RULES[:2]).explain("w")).splitlines()[2] == "  1 other rule does not match"


def test_no_jax_is_imported():
    code = """
import sys
from types import SimpleNamespace as Leaf
import shardrules as sr
tree = {"layers": [{"w": Leaf(shape=(8, 6), dtype="bfloat16")} for _ in range(3)], "b": Leaf(shape=(4,), dtype="float32")}
rules = [("w", (("fsdp", "sp"), "tp")), (".*", None)]
plan = sr.plan(tree, sr.Rules(rules, optional_axes=["sp"]), {"fsdp": 2, "tp": 4}, companions=[sr.stacked("h")])
assert plan.for_optimizer({"mu": tree}, zero1="tp").kinds[0].spec == (("fsdp", "tp"), None)
text = plan.lock()
other = sr.Plan.from_lock(text)
str(plan), str(plan.check()), plan.check().to_json(), plan.bytes_per_device(gradients="float32"), str(plan.sweep())
str(plan.explain("b")), str(plan.diff(other)), plan.fingerprint(), plan.rule, plan.total_bytes
str(plan.transfer(plan.on_mesh({"fsdp": 4, "tp": 2})))
found = sr.suggest(tree, {"fsdp": 2})
found.to_toml(), found.to_python(), str(found)
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def leaf(shape, dtype="float32"):
    return SimpleNamespace(shape=shape, dtype=dtype)


BAD_LEAVES = (
    (leaf((2, -1)), ValueError, r"a dimension of the shape \(2, -1\) is negative"),
    (leaf((2, 1.5)), TypeError, r"a dimension of the shape \(2, 1.5\) is 1.5 \(a float\), not an integer"),
    (leaf((None, 2)), TypeError, r"is None \(a NoneType\), not an integer"),
    (leaf((7, True)), TypeError, r"is True \(a bool\), not an integer"),
    (leaf((2,), "float7"), ValueError, "float7"),
    (leaf((2,), np.float32), ValueError, "float32"),
    (leaf((0, 2**70)), ValueError, "has more bytes than can be counted"),
)


@pytest.mark.parametrize(("bad", "error", "message"), BAD_LEAVES)
def test_bad_leaves_are_named(bad, error, message):
    tree = {"fine": array(2), "layers": [{"w": array(2)}, {"w": bad}]}
    with pytest.raises(error, match=f"^layers/1/w: .*{message}"):
        sr.plan(tree, [("", "tp")], {"tp": 2})
    fine = {
        "numpy": leaf((np.int64(4), np.int32(2))),
        "list": leaf([4, 2]),
        "empty": leaf((0, 4)),
        "vast": leaf((2**57,), "int8"),
        "text": leaf((4,), np.dtype("S3")),
    }
    plan = sr.plan(fine, [("", "tp")], {"tp": 2})
    assert [plan.explain(path).kind.shape for path in fine] == [(4, 2), (4, 2), (0, 4), (2**57,), (4,)]
    assert [plan.explain(path).kind.device_bytes for path in fine] == [16, 16, 0, 2**56, 6]


def test_errors_of_leaves_name_the_path():
    with pytest.raises(TypeError, match="unhashable") as caught:
        sr.plan({"a": array(4), "b": [array(4), leaf((2,), [])]}, [("", "tp")], {"tp": 2})
    assert "shardrules: at 'b/1' in the tree" in caught.value.__notes__


def test_arrays_are_let_go():
    class Leaf(np.ndarray):
        pass

    tree = {"a": [np.ones((4, 2)).view(Leaf) for _ in range(3)], "b": np.ones(8).view(Leaf)}
    alive = [weakref.ref(x) for x in tree_util.tree_leaves(tree)]
    device_array = jax.numpy.ones((4, 4))
    alive.append(weakref.ref(device_array))
    plan = sr.plan({**tree, "c": device_array}, [("", "tp")], {"tp": 2})
    uses = (plan.check, plan.specs, plan.shardings, plan.abstract, plan.lock, plan.sweep, plan.coverage.dead.__len__)
    for use in uses:
        use()
    assert len(plan) == 5
    del tree, device_array
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    assert str(plan.explain("a/0")).startswith("a/0  shape (4, 2)  float64")


def test_the_table():
    lines = str(sr.plan({"layers": [{"w": array(8, 8)}] * 12, "s": 3}, [("w", "tp")], {"tp": 2})).splitlines()
    assert lines[0] == "13 leaves, 3.07 kB on tp=2 (2 devices): 1.54 kB on the fullest device: params 1.54 kB"
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "path leaves shape dtype rule spec bytes per device",
        "layers/{0..11}/w 12 [8, 8] float32 0 P('tp', None) 3.07 kB 1.54 kB",
        "s 1 - - - P() 0 B 0 B",
    ]
    assert len(set(map(len, lines[1:]))) == 1
    many = sr.plan({f"{c}{d}": array(2) for c in "abcdefghij" for d in "klmnopqrst"}, [("", ())], {"tp": 2})
    assert str(many).splitlines()[-1] == "... and 40 more rows"
    huge = str(sr.plan({"x" * 10**6: array(2), "w": array(2)}, [("", ())], {"tp": 2})).splitlines()
    assert [len(line) > 300 for line in huge[1:]] == [False, True, False]


EMPTY = [((),), ((), "tp"), (("tp",), ()), ((), ()), (None, ()), ("fsdp", (), "tp")]


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("entries", EMPTY, ids=str)
def test_an_empty_entry_is_none(entries, pad):
    """A plan is named_shardings, and a rule is one however its spec is written."""
    tree, mesh = {"w": array(8, 8, 8), "b": array(8)}, {"fsdp": 2, "tp": 2}
    correction = sr.Correction(pad=pad)
    written = [entries, P(*entries), P(*(e or None for e in entries))]
    given = [sr.Rules([("", spec)], correction=correction) for spec in written]
    plans = [sr.plan(tree, rules, mesh) for rules in given]
    for rules, plan in zip(given, plans, strict=True):
        check_equal_to_named_shardings(plan, tree, rules, mesh)
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert len({str(plan) for plan in plans}) == 1


def test_zero1_leaves_averages_alone():
    """They count as the optimizer's bytes, but are no optimizer's state."""
    plan = sr.plan({"w": array(8, 8)}, [("w", "tp")], {"dp": 2, "tp": 2})
    state = {"opt_state": {"w": array(8, 8)}, "ema_params": {"w": array(8, 8)}}
    specs = plan.for_optimizer(state, zero1="dp").specs()
    assert "dp" in str(specs["opt_state"]["w"])
    assert "dp" not in str(specs["ema_params"]["w"])
    assert plan.for_optimizer(state).bytes_per_device().params == 0


def test_a_plan_on_devices_is_not_pickled():
    plan = sr.plan({"w": array(8)}, [("w", "tp")], Mesh(np.array(jax.devices()[:2]), ("tp",)))
    with pytest.raises(TypeError, match=r"plan\.on_mesh\(mesh\.abstract_mesh\)"):
        pickle.dumps(plan)
    assert copy.copy(plan).mesh is copy.deepcopy(plan).mesh is plan.mesh
    sizes = plan.on_mesh(plan.axis_sizes)
    assert pickle.loads(pickle.dumps(sizes)).fingerprint() == plan.fingerprint()


def test_totals_beyond_an_int64():
    tree = {f"w{i}": leaf((2**59,), "float8_e5m2") for i in range(40)}
    plan = sr.plan(tree, [(".*", "tp")], {"dp": 1, "tp": 2})
    whole = 40 * 2**59
    assert plan.total_bytes == whole
    assert plan.bytes_per_device().params == whole // 2
    held = plan.bytes_per_device(gradients="float32", optimizer=("float32", "float64"))
    assert held.max == (1 + 4 + 4 + 8) * whole // 2
    assert str(held).startswith("196 EB on the fullest device: params 11.5 EB, gradients 46.1 EB")
    state = plan.for_optimizer({"mu": tree, "nu": tree})
    assert plan.bytes_per_device(optimizer=state).max == 3 * whole // 2
    assert plan.sweep(gradients=True)[0].bytes == whole
    assert "40 leaves, 23.1 EB on" in repr(plan)
    assert sr.Plan.from_lock(plan.lock()).total_bytes == whole
    assert "23.1 EB of 23.1 EB" in plan.check()[0].message


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        ("easylm-llama-3.1-405b-trainstate", "EasyLM__llama"),
        ("easydel-deepseek-v3", "easydel__deepseek_v3-DeepseekV3Config-v0.2.0"),
        ("flax-whisper-large-v3", "easydel__whisper-WhisperConfig-v0.2.0"),
    ],
)
@pytest.mark.parametrize("before", [[], [(".*", P("fsdp"))]])
def test_other_rules_decide_as_in_a_plan_of_their_own(model, rules, before):
    tree = corpus.manifest(model).flat(corpus.with_dtype) | {"count": 3}
    rules = corpus.rules(rules)
    mesh = {"fsdp": 8, "sp": 1, "tp": 4, "dp": 1, "mp": 2}
    own = sr.plan(tree, rules, mesh)
    found = sr.plan(tree, before, mesh).with_rules(rules)
    assert repr(found) == repr(own)
    assert found.fingerprint() == own.fingerprint()
    assert found.coverage == own.coverage
    assert found.rule.tolist() == own.rule.tolist()
    assert found.on_mesh({"fsdp": 2}).fingerprint() == own.on_mesh({"fsdp": 2}).fingerprint()


def test_other_rules_decide_of_the_same_kind_and_keys_alone():
    plan = sr.plan({"w": jax.ShapeDtypeStruct((8,), "int8")}, [], {"tp": 2})
    with pytest.raises(ValueError, match="the dialect JAXSeq has other keys than eformer"):
        plan.with_rules(sr.Rules([("w", "tp")], sr.dialects.KEYSTR))
    logical = sr.LogicalRules([("a", "tp")], sr.dialects.MAXTEXT)
    with pytest.raises(TypeError, match="logical"):
        plan.with_rules(logical)
    tree, names, mesh = {"w": array(8), "v": array(4)}, {"w": ("a",), "v": ("b",)}, {"tp": 2}
    plan = sr.plan(tree, sr.LogicalRules([("b", "tp")]), mesh, names=names)
    own, found = sr.plan(tree, logical, mesh, names=names), plan.with_rules(logical)
    assert (repr(found), found.fingerprint()) == (repr(own), own.fingerprint())
    with pytest.raises(TypeError, match="give LogicalRules"):
        plan.with_rules([("w", "tp")])


def test_a_plan_is_the_same_in_another_process(tmp_path):
    tree, logical = {"w": array(8, 8)}, sr.LogicalRules([("embed", "fsdp"), ("mlp", ("tp",))])
    named = sr.plan(tree, logical, {"fsdp": 2, "tp": 2}, names={"w": ("embed", "mlp")})
    rules = [("w$", sr.RuleSpec(("fsdp", "tp"), units=(2,))), ("never", ())]
    scaled, scale = {**tree, "w_scale": array(8)}, sr.Companion("_scale$", "", dims=(0,))
    plan = sr.plan(scaled, rules, {"fsdp": 2, "tp": 2}, companions=[scale])
    state = plan.for_optimizer({"mu": tree, "count": array(dtype="int32")}, zero1="fsdp")
    given = [plan, state, named, sr.Plan.from_lock(plan.lock())]
    there = tmp_path / "plans.pickle"
    there.write_bytes(pickle.dumps(given))
    program = (
        "import pickle, sys; plans = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(*(one.fingerprint() for one in plans), plans[0].on_mesh({'fsdp': 4}).fingerprint())"
    )
    command = [sys.executable, "-c", program, there]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = [*given, plan.on_mesh({"fsdp": 4})]
    assert found.stdout.split() == [one.fingerprint() for one in wanted]
