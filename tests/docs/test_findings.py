"""The page of findings has a section for each kind, to which messages can link, and errors by the texts of others."""

import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.folders import ROOT

PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
CHECK, VERIFY = (typing.get_args(part) for part in typing.get_args(typing.get_type_hints(sr.types.Finding)["kind"]))


def sections(*titles):
    """The headings of the third level below headings of the second."""
    parts = [re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.M)[0] for title in titles]
    return tuple(re.findall(r"^### (\S+)$", "".join(parts), re.M))


def test_each_kind_has_a_section():
    assert sorted(sections("Findings of check")) == sorted(CHECK)
    assert sections("Findings of verify", "Findings of audit", "Findings of rehearse") == VERIFY
    assert sorted(re.findall(r"^### (.*)$", PAGE, re.M)) == sorted({*CHECK, *VERIFY})


@pytest.mark.parametrize("kind", [*CHECK, *VERIFY])
def test_a_section_says_the_level(kind):
    text = PAGE.partition(f"\n### {kind}\n")[2].partition("\n#")[0].strip()
    assert re.match(r"\*\*(Error|Warning|Info)\b", text), text


MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
EXPLICIT = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def on(*spec, mesh=MESH, rows=8, kind="device"):
    return jax.device_put(np.ones((rows, 8)), NamedSharding(mesh, P(*spec), memory_kind=kind))


def use_deleted():
    array = on()
    array.delete()
    return array + 1


def contract_cut_dimensions():
    with jax.set_mesh(EXPLICIT):
        return on(None, "tp", mesh=EXPLICIT) @ on("tp", mesh=EXPLICIT)


def named_axes_of_a_dense_general():
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads", "size"))
    with jax.set_mesh(MESH), nn.logical_axis_rules([("embed", "fsdp"), ("heads", "tp"), ("size", None)]):
        jax.eval_shape(nn.DenseGeneral((4, 16), kernel_init=init).init, jax.random.key(0), np.ones((2, 64)))


CAUSES = {
    "implies that array axis 0 is partitioned 4 times, but the dimension size is 6": lambda: on("fsdp", rows=6),
    "Resource axis: tpp of P('tpp',) is not found in mesh": lambda: on("tpp"),
    "Partition rule not found for param: w": lambda: pytest.importorskip("eformer.escale").match_partition_rules(
        [("v", P())], {"w": np.ones(8)}
    ),
    "Sharding passed to jit does not match the sharding on the respective arg": lambda: jax.jit(
        jnp.sin, in_shardings=NamedSharding(MESH, P("fsdp"))
    )(on("tp")),
    "Received incompatible devices for jitted computation": lambda: jnp.add(
        on("tp"), jax.device_put(np.ones((8, 8)), jax.devices()[1])
    ),
    "Array has been deleted": use_deleted,
    "Some donated buffers were not usable": lambda: jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((8, 8))),
    "Contracting dimensions are sharded and it is ambiguous": contract_cut_dimensions,
    "memory_space of all inputs passed to add must be the same": lambda: jnp.add(on(kind="pinned_host"), on()),
    "lowering_platforms": lambda: jax.jit(
        jnp.sin, in_shardings=sr.named_shardings(np.ones((8, 8)), P("tp"), {"fsdp": 4, "tp": 2})
    )(np.ones((8, 8))),
    "only valid for values of rank at least 3": named_axes_of_a_dense_general,
}
PAGES = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="pages have the texts of newer versions")
@pytest.mark.parametrize("text", CAUSES)
def test_an_error_of_others_has_the_text_of_the_pages(text):
    assert text in PAGES
    with pytest.raises(Exception, match=re.escape(text).replace("add", "`?add`?")):
        CAUSES[text]()
