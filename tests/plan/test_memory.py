"""Memory kinds in plans: what a rule says, where bytes are counted, what locks and diffs hold."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.rule_specs import MEMORY_KINDS
from tests.plan.test_lock import check_round_trip
from tests.support.contexts import not_on_jax_0_7
from tests.support.trees import array

SIZES = {"dp": 2, "fsdp": 4, "tp": 2}


def on_host(spec, kind="pinned_host", **more):
    return sr.RuleSpec(spec, memory_kind=kind, **more)


TREE = {"layers": [{"wq": array(16, 8), "b": array(8)}] * 2, "embed": array(64, 8), "step": array()}
RULES = [("embed", on_host(("fsdp", "tp"))), ("wq", ("fsdp", "tp")), (".*", ())]


def test_companions_are_in_the_memory_of_their_base():
    tree = {"wq": {"kernel": array(16, 8), "lora_a": array(16, 2)}}
    rules = [("wq/kernel", on_host(("fsdp", "tp")))]
    plan = sr.plan(tree, rules, SIZES, companions=sr.LORA)
    assert plan.explain("wq/lora_a").kind.memory_kind == "pinned_host"


@not_on_jax_0_7
def test_shardings_and_abstract_arrays_are_those_of_named_shardings(mesh):
    plan = sr.plan(TREE, RULES, mesh)
    expected = sr.named_shardings(TREE, RULES, mesh)
    assert expected["embed"] == NamedSharding(mesh, P("fsdp", "tp"), memory_kind="pinned_host")
    assert plan.shardings() == expected
    assert jax.tree.map(lambda leaf: leaf.sharding, plan.abstract()) == expected
    placed = jax.jit(lambda: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), TREE),
                     out_shardings=plan.shardings())()  # fmt: skip
    assert placed["embed"].sharding == expected["embed"]


def test_bytes_are_counted_apart():
    plan, all_on_device = sr.plan(TREE, RULES, SIZES), sr.plan(TREE, [(".*", ())], SIZES)
    held = plan.bytes_per_device()
    assert (held.host, held.max) == (64 * 8 * 4 // 8, 2 * (16 * 8 * 4 // 8 + 8 * 4) + 4)
    assert held.max == held.params
    told = sr.plan(TREE, [(".*", on_host((), "device"))], SIZES)
    for plan_of in (told, all_on_device):
        assert plan_of.bytes_per_device()[:4] == (told.total_bytes, 0, 0, 0)
    assert "in the host's memory" not in str(all_on_device.bytes_per_device())
    assert str(held) == "196 B on the fullest device: params 196 B; 256 B in the host's memory"
    assert str(plan).startswith("6 leaves, 3.14 kB on dp=2,fsdp=4,tp=2 (16 devices): 196 B on the")
    assert "256 B in the host's memory" in str(plan)


def test_gradients_are_on_the_device_and_moments_beside_their_parameters():
    plan = sr.plan({"w": array(8, 8), "v": array(8, 8)}, [("w", on_host(())), ("", ())], SIZES)
    held = plan.bytes_per_device(gradients=True, optimizer=("float32", "bfloat16"))
    assert held[:4] == (256, 512, 384, 256 + 384)
    own = plan.bytes_per_device(gradients="bfloat16")
    assert own[:4] == (256, 256, 0, 256)
    for kind, (optimizer, host) in {
        "device": (512, 256),
        "pinned_host": (0, 256 + 512),
        "unpinned_host": (0, 256 + 512),
    }.items():
        state = plan.for_optimizer({"mu": {"w": array(8, 8), "v": array(8, 8)}}, memory_kind=kind)
        assert plan.bytes_per_device(optimizer=state)[:4] == (256, 0, optimizer, host)


STATE = ({"count": array(dtype="int32")}, {"mu": TREE, "nu": TREE})


class TestOptimizer:
    def kinds(self, plan):
        return {path: plan.explain(path).kind.memory_kind for path in plan.paths}

    @pytest.mark.parametrize("kind", [None, *MEMORY_KINDS])
    def test_a_leaf_is_where_its_parameter_is_or_where_it_is_told_to_be(self, kind):
        found = self.kinds(sr.plan(TREE, RULES, SIZES).for_optimizer(STATE, memory_kind=kind))
        assert found == {path: kind or ("pinned_host" if "embed" in path else None) for path in found}

    def test_of_a_train_state_the_optimizer_s_leaves_alone(self):
        state = {"params": TREE, "opt_state": STATE, "step": array(dtype="int32")}
        plan = sr.plan(TREE, RULES, SIZES)
        moved = plan.for_optimizer(state, memory_kind="pinned_host", zero1="dp")
        kinds = self.kinds(moved)
        assert {kind for path, kind in kinds.items() if path.startswith("opt_state")} == {"pinned_host"}
        assert kinds["params/layers/0/wq"] is kinds["step"] is None
        assert kinds["params/embed"] == "pinned_host"
        # Its parameter alone decides whether a leaf is cut.
        assert moved.specs()["opt_state"][0]["count"] == P()
        assert moved.specs()["opt_state"][1]["mu"]["embed"][0] == ("fsdp", "dp")

    def test_a_kind_that_the_devices_do_not_have(self, mesh, monkeypatch):
        monkeypatch.setattr("shardrules._plan.plan.check_memory_kind", lambda *_: None)
        plan = sr.plan(TREE, [("", ())], mesh)
        with pytest.raises(ValueError, match="for_optimizer: memory_kind='of_others' is not on"):
            plan.for_optimizer(STATE, memory_kind="of_others")


class TestLocksAndDiffs:
    def test_a_lock_holds_the_kinds(self):
        plan = sr.plan(TREE, [*RULES[:2], ("", on_host((), "device"))], SIZES)
        back = check_round_trip(plan)
        assert all(back.explain(path).kind.memory_kind == plan.explain(path).kind.memory_kind for path in plan.paths)
        assert [getattr(spec, "memory_kind", None) for _, spec in back.rules] == ["pinned_host", None, "device"]

    def test_what_says_nothing_of_memory_has_the_locks_and_fingerprints_of_before(self):
        plan = sr.plan(TREE, [("", "tp")], SIZES)
        assert "memory_kind" not in plan.lock()
        assert plan.fingerprint().startswith("e01e8ad07d763b64")

    @pytest.mark.parametrize("kind", MEMORY_KINDS)
    def test_a_change_of_memory_is_a_change(self, kind):
        rules = [("embed", on_host(("fsdp", "tp"), kind)), *RULES[1:]]
        before, after = (sr.plan(TREE, [("embed", ("fsdp", "tp")), *RULES[1:]], SIZES), sr.plan(TREE, rules, SIZES))
        assert before.fingerprint() != after.fingerprint()
        found = before.diff(after)
        assert [(one.path, one.leaves) for one in found] == [("embed", 1)]
        assert found.rules == ("- 'embed' -> P('fsdp', 'tp')", f"+ 'embed' -> P('fsdp', 'tp'), memory_kind='{kind}'")
        saved = "-256" if kind != "device" else "+0"
        assert f"~ embed  P('fsdp', 'tp') -> P('fsdp', 'tp') in {kind}  ({saved} B on" in str(found)
        if kind != "device":
            assert found.host_bytes == (0, 256)
            assert str(found).endswith("452 B -> 196 B on the fullest device; 0 B -> 256 B in the host's memory")
        assert bool(after.diff(before))


def test_in_reports():
    plan = sr.plan(TREE, RULES, SIZES)
    moments = {"optimizer": plan.for_optimizer([TREE, TREE], memory_kind="pinned_host")}
    page = plan.to_html(sections=[plan.sweep(hbm=100, **moments)], hbm=100, **moments)
    for told in ("in pinned_host", "1.16 kB in the host&#x27;s memory", "DOES NOT FIT into 100 B"):
        assert told in page
    with pytest.raises(ValueError, match="on the host, the report .* optimizer="):
        plan.to_html(sections=[plan.sweep()], **moments)
    with pytest.raises(ValueError, match="on the host, the report .* optimizer="):
        plan.on_mesh({**SIZES, "pp": 1}).to_html(sections=[plan.sweep(gradients=True)])


@pytest.mark.parametrize(("hbm", "fits"), [(None, None), (196, True), (195, False)])
def test_what_fits_has_room_on_the_device(hbm, fits):
    plan = sr.plan(TREE, RULES, SIZES)
    (row,) = plan.sweep([SIZES], hbm=hbm)
    assert (row.bytes, row.host_bytes, row.fits) == (196, 256, fits)
    assert "196 B + 256 B on the host" in str(plan.sweep([SIZES]))
    assert ("does not fit" in str(plan.sweep([SIZES], hbm=hbm))) is (fits is False)
