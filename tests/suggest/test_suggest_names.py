"""`suggest` for arrays with logical axis names: a table of names, beside MaxText's own."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from tests.support import corpus, suggested
from tests.support.models import array
from tests.support.plans import leaf_bytes, shard_bytes
from tests.support.slow import some

MESH = {"fsdp": 4, "tp": 2}
NAMES = {
    "embed/table": ("vocab", "embed"),
    "mlp/up": ("embed", "mlp"),
    "mlp/down": ("mlp", "embed"),
    "norm": ("norm",),
}
TREE = {
    "embed/table": array(1024, 64),
    "mlp/up": array(64, 256),
    "mlp/down": array(256, 64),
    "norm": array(64),
}
TABLE = {"vocab": "tp", "mlp": "tp", "embed": "fsdp", "norm": None}
# Of the version that has the names of the manifests, and of a later one.
MAXTEXT = ("maxtext-0.2.5__base", "maxtext__base")
MODELS = [model for model in corpus.manifest_names() if model.startswith("maxtext")]
CASES = [(model, mesh) for model in MODELS for mesh in suggested.meshes_for(model)]
LOGICAL_DIALECTS = [
    sr.dialects.LINEN,
    sr.dialects.MAXTEXT,
    sr.dialects.FLAX_CORE,
    sr.dialects.HALIAX,
]


def table(suggestion):
    return dict(suggestion.rules)


def axes(value):
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


class TestMaxText:
    @pytest.mark.parametrize("dialect", LOGICAL_DIALECTS, ids=lambda one: one.name)
    @pytest.mark.parametrize(("model", "mesh"), some(CASES, 6))
    def test_beside_the_table_that_experts_wrote(self, model, mesh, dialect):
        names = corpus.logical_axes(model)
        found = sr.suggest(
            suggested.leaves(model), suggested.MESHES[mesh], names=names, dialect=dialect
        )
        assert found.rules.dialect == dialect
        assert {name for name, _ in found.rules} == {n for of in names.values() for n in of} - {
            None
        }
        findings = found.plan.check(**found.declared)
        assert not findings.at_least("warning"), findings
        assert not found.plan.coverage.dead
        held = found.plan.bytes_per_device().max
        for hand in MAXTEXT:
            assert held <= 1.01 * suggested.on(model, hand, mesh)
        assert held <= 1.01 * suggested.least(model, mesh, spares=True)

    @pytest.mark.parametrize("model", MODELS)
    def test_experts_and_tensor_axes_cut_what_they_are_for(self, model):
        names = corpus.logical_axes(model)
        found = table(sr.suggest(suggested.leaves(model), {"fsdp": 64, "tp": 8}, names=names))
        residual = {name for name in found if name.startswith("embed")}
        assert {axes(found[name]) for name in residual} == {"fsdp"}
        heads = {name for name in found if name.endswith("heads")}
        assert {axes(found[name]) for name in heads | {"vocab"}} == {"tp"}
        assert found["norm"] is None


class TestRules:
    @pytest.mark.parametrize("dialect", [None, *LOGICAL_DIALECTS])
    def test_names_beside_a_tree(self, dialect):
        found = sr.suggest(TREE, MESH, names=NAMES, dialect=dialect)
        assert {name: axes(value) for name, value in found.rules} == TABLE
        assert found.rules.dialect == (dialect or sr.dialects.LINEN)
        assert not found.plan.check(**found.declared)
        own = sr.plan(TREE, found.rules, MESH, names=NAMES)
        assert found.plan.fingerprint() == own.fingerprint()

    def test_names_in_boxes(self):
        linen = pytest.importorskip("flax.linen")
        boxes = {path: linen.LogicallyPartitioned(TREE[path], NAMES[path]) for path in TREE}
        found = sr.suggest(boxes, MESH)
        assert {name: axes(value) for name, value in found.rules} == TABLE
        given = linen.logical_to_mesh_axes(("vocab", "embed"), list(found.rules))
        assert tuple(map(axes, given)) == ("tp", "fsdp")
        for_paths = sr.suggest(boxes, MESH, dialect=sr.dialects.EFORMER)
        assert isinstance(for_paths.rules, sr.Rules)

    def test_names_of_variables(self):
        nnx = pytest.importorskip("flax.nnx")
        if not hasattr(nnx, "use_eager_sharding"):
            pytest.skip("an older flax, whose Variables are made otherwise")
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
            layers = [nnx.Linear(64, 256, rngs=nnx.Rngs(0), **more)
                      for more in ({"kernel_init": init}, {})]  # fmt: skip
        named, bare = (sr.suggest(nnx.state(layer), MESH) for layer in layers)
        assert tuple(named.rules) == (("mlp", "tp"), ("embed", "fsdp"))
        assert isinstance(bare.rules, sr.Rules)

    def test_names_of_haliax_arrays(self):
        haliax = pytest.importorskip("haliax")
        vocab, embed, mlp = (
            haliax.Axis(*one) for one in (("v", 1024), ("embed", 64), ("mlp", 256))
        )
        tree = {"up": haliax.zeros((embed, mlp)), "down": haliax.zeros((mlp, embed)),
                "table": haliax.zeros((vocab, embed))}  # fmt: skip
        found = sr.suggest(tree, MESH, dialect=sr.dialects.HALIAX)
        assert table(found)["mlp"] == "tp"
        assert table(found)["embed"] == "fsdp"
        assert not found.plan.check(**found.declared).at_least("warning")

    def test_a_mesh_of_many_axes(self):
        """Combinations of five axes for two names at a time are tried."""
        model = "maxtext-deepseek3-671b-scanned"
        mesh = {"data": 2, "fsdp": 8, "fsdp_transpose": 2, "tensor": 4, "expert": 8}
        found = sr.suggest(suggested.leaves(model), mesh, names=corpus.logical_axes(model))
        assert not found.plan.check(**found.declared).at_least("warning")
        # Projections to the latent space are whole over the tensor axis.
        assert found.plan.bytes_per_device().max * 512 <= 1.012 * found.plan.total_bytes
        assert table(found)["exp"] == "expert"

    def test_the_names_of_a_plan(self):
        planned = sr.plan(
            TREE, sr.LogicalRules([("embed", None)], sr.dialects.MAXTEXT), MESH, names=NAMES
        )
        found = sr.suggest(planned)
        assert found.rules.dialect == sr.dialects.MAXTEXT
        assert {name: axes(value) for name, value in found.rules} == TABLE

    def test_a_mesh_is_chosen(self):
        found = sr.suggest(TREE, devices=8, names=NAMES)
        assert found.plan.devices == 8
        assert found.plan.bytes_per_device().max < found.plan.total_bytes / 7

    def test_an_axis_that_experts_take_cuts_embed_elsewhere(self):
        """The rule for embed without that axis counts where experts have it."""
        names = {"moe/experts": ("exp", "embed", "mlp"), "up": ("embed", "mlp")}
        tree = {"moe/experts": array(8, 512, 1024), "up": array(512, 1024)}
        found = sr.suggest(tree, {"fsdp": 4, "ep": 8}, names=names)
        pairs = [(name, axes(value)) for name, value in found.rules]
        assert pairs == [
            ("exp", "ep"), ("mlp", None), ("embed", ("fsdp", "ep")), ("embed", "fsdp")]  # fmt: skip
        assert shard_bytes(found.plan) == [size // 32 for size in leaf_bytes(found.plan)]
        assert not found.plan.check(**found.declared).at_least("warning")
        last = sr.suggest(tree, {"fsdp": 4, "ep": 8}, names=names, dialect=sr.dialects.FLAX_CORE)
        assert len({name for name, _ in last.rules}) == len(last.rules)
        assert not last.plan.check(**last.declared).at_least("warning")

    def test_what_no_axis_divides_stays_whole(self):
        found = sr.suggest({"w": array(7, 64)}, {"fsdp": 4, "tp": 2}, names={"w": ("a", "b")})
        assert axes(table(found)["a"]) is None
        assert found.plan.kind("w").spec == (None, ("fsdp", "tp"))

    def test_reasons(self):
        found = sr.suggest(TREE, MESH, names=NAMES)
        said = {reason.pattern: reason for reason in found.reasons}
        assert said["embed"].leaves == 3
        assert [(one.size, one.role, one.axes) for one in said["embed"].dims] == [
            (64, "residual", ("fsdp",))
        ]
        assert said["vocab"].dims[0].role == "vocabulary"
        assert found.unknown == ()
        assert "rule 1 mlp: 2 leaves" in str(found)

    def test_as_a_file_and_as_code(self, tmp_path):
        found = sr.suggest(TREE, {**MESH, "dp": 2}, names=NAMES, dialect=sr.dialects.MAXTEXT)
        path = tmp_path / "rules.toml"
        path.write_text(found.to_toml(), encoding="utf-8")
        read = sr.read_rules(path)
        assert read.rules == found.rules
        assert read.declared == found.declared
        scope: dict = {}
        exec(found.to_python(), scope)
        assert sr.LogicalRules(scope["rules"], sr.dialects.MAXTEXT) == found.rules

    def test_beside_another_table(self):
        found = sr.suggest(TREE, MESH, names=NAMES)
        other = sr.LogicalRules([("embed", "fsdp"), ("vocab", None), ("mlp", None), ("norm", None)])
        assert "3 leaves changed" in str(found.plan.with_rules(other).diff(found.plan))


class TestWrongUse:
    @pytest.mark.parametrize(
        ("model", "more", "error", "told"),
        [
            (TREE, {"names": NAMES, "dialect": sr.dialects.EFORMER}, TypeError, "eformer is for rules of paths"),
            (TREE, {"dialect": sr.dialects.LINEN}, TypeError, "nothing in the tree has logical axis names"),
            (TREE, {"names": NAMES, "like": [("up", "tp")]}, TypeError, "rules of paths are mended"),
            (TREE, {"names": {"w": ("a",)}}, ValueError, "'w'"),
            (sr.plan(TREE, [], MESH), {"dialect": sr.dialects.LINEN}, TypeError, "give the tree itself"),
            (sr.plan(TREE, [], MESH), {"names": NAMES}, TypeError, "leave names out"),
            (sr.plan(TREE, sr.LogicalRules([]), MESH, names=NAMES), {"dialect": sr.dialects.EFORMER}, TypeError,
             "give the tree itself"),
        ],
    )  # fmt: skip
    def test_what_is_for_paths_and_what_for_names_is_not_mixed(self, model, more, error, told):
        with pytest.raises(error, match=told):
            sr.suggest(model, MESH, **more)

    @pytest.mark.parametrize("names", [None, ("embed",)])
    def test_large_arrays_without_names_are_refused(self, names):
        large = jax.ShapeDtypeStruct((8192, 8192), "float32")
        given = NAMES if names is None else NAMES | {"large": names}
        with pytest.raises(ValueError, match=r"names: 1 leaf .*; or give a dialect for paths"):
            sr.suggest(TREE | {"large": large}, MESH, names=given)

    def test_a_name_that_an_array_has_twice_is_refused(self):
        with pytest.raises(ValueError, match="more than once"):
            sr.suggest({"w": array(8, 8)}, MESH, names={"w": ("x", "x")})

    def test_too_many_names_are_refused(self):
        tree = {f"w{number}/{'x' * number}": array(8) for number in range(301)}
        names = {path: (f"name {number}",) for number, path in enumerate(tree)}
        with pytest.raises(ValueError, match="301 logical axis names, such as 'name 0'"):
            sr.suggest(tree, MESH, names=names)

    def test_no_names_at_all_are_an_empty_file(self, tmp_path):
        path = tmp_path / "rules.toml"
        found = sr.suggest({"w": array(8)}, MESH, names={"w": (None,)})
        path.write_text(found.to_toml(), encoding="utf-8")
        assert sr.read_rules(path).rules == found.rules

    def test_a_dialect_of_ones_own_is_in_no_file(self):
        own = sr.dialects.LogicalDialect("own", last_wins=True, keeps_unknown=False)
        found = sr.suggest(TREE, MESH, names=NAMES, dialect=own)
        with pytest.raises(ValueError, match="one of your own"):
            found.to_toml()
