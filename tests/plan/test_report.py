"""The HTML report: its structure, what hostile names do to it, its size, and how a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardrules as sr
from shardrules._base.text import printable, printable_lines
from shardrules._plan.answers import Section
from tests.support import corpus
from tests.support.browser import chromium, metrics_of
from tests.support.command_line import invoke
from tests.support.folders import ROOT
from tests.support.slow import slow, some

MESH = {"fsdp": 64, "sp": 1, "tp": 8}
HOSTILE = [
    "<script>window.hacked=1</script>", "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>", '<a href="javascript:window.hacked=1">click</a>',
    "<b>bold</b>&lt;i&gt;&amp;", "\"double\" 'single' `back` ${window.hacked=1} %{label} $1",
    "line\nbreak\r\ttab\u2028line\u2029paragraph", "<!--<script>", "]]>", "ünïcode-层-🎉-\u202eright to left",
    "__proto__", "constructor", "nul\0byte", "lone\ud800surrogate", "{0..2}",
]  # fmt: skip


def finding(**changes):
    fields = {
        "level": "warning", "kind": "catch-all", "message": "rule 11 replicates", "rule": 11,
        "paths": ("model/layers/{0..60}/self_attn/q_b_proj/kernel",), "leaves": 61,
        "bytes": 4_605_345_792, "fix": "name them",
    }  # fmt: skip
    return sr.types.Finding(**{**fields, **changes})


FINDINGS = sr.types.Findings([finding(), finding(level="error", kind="unmatched", rule=None)])


@pytest.fixture(scope="module")
def deepseek():
    rules = corpus.rules("easydel__deepseek_v2-DeepseekV2Config-v0.0.80")
    return sr.plan(corpus.manifest(corpus.DEEPSEEK).nested(corpus.abstract), rules, MESH)


@pytest.fixture(scope="module")
def hostile():
    leaf = jax.ShapeDtypeStruct((1024, 1024), "float32")
    tree = {name: {name: leaf, "w": leaf} for name in HOSTILE}
    evil = "<img src=x onerror=window.hacked=1>"
    mesh = {"</script><script>window.hacked=1</script>": 2, "tp": 4}
    plan = sr.plan(tree, [(re.escape(evil), (evil,)), ("__proto__", "tp"), (".*", None)], mesh)
    shown = finding(kind=evil, message=evil, paths=tuple(HOSTILE), fix=evil, level="error")
    texts = SimpleNamespace(_section=lambda _: Section("Suggested rules", ("\n".join(HOSTILE),)))
    sections = [sr.types.Findings([shown]), plan.sweep([mesh]), texts]
    return plan, {"sections": sections, "title": evil, "hbm": 10**11}


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.is_inside = [], [], [""], False
        self.feed(page)
        (self.title,), self.scripts, self.headings = map(self.of_tag, ("title", "script", "h2"))
        self.data = json.loads(self.scripts[0])
        # (pattern, kind, number of leaves) of each folded row
        self.rows = [(pattern, self.data["kinds"][kind], leaves) for pattern, kind, leaves in self.data["rows"]]

    def of_tag(self, tag):
        return [text for each, text in zip(self.tags, self.texts[1:], strict=True) if each == tag]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts.append("")
        self.attributes += [(tag, *attribute) for attribute in attrs]
        self.is_inside = True

    def handle_endtag(self, tag):
        self.is_inside = False

    def handle_data(self, data):
        self.texts[-1] += data * self.is_inside


def test_content(deepseek):
    text = deepseek.to_html(sections=[FINDINGS, deepseek.sweep()], title="DeepSeek-V3")
    page = Page(text)
    assert page.title == "DeepSeek-V3"
    assert len(text) < 100_000
    assert page.headings == ["Findings", "Bytes per device, by module", "Leaves", "Rules", "Meshes"]
    assert f"<p>{deepseek.bytes_per_device()}</p>" in text
    assert text.index("<b>error</b>[unmatched]") < text.index("<b>warning</b>[catch-all]")
    assert deepseek.fingerprint() in text
    won = re.findall(r"<tr><td>\d+</td><td>.*?</td><td>.*?</td><td>([\d,]+)</td>", text)
    assert [int(n.replace(",", "")) for n in won] == [
        1, 0, 61, *[14909] * 3, 58, 61, 61, 1, 1, 424,
    ]  # fmt: skip
    assert sum(leaves for _, _, leaves in page.rows) == 45_395
    assert sum(n * kind["held"] for _, kind, n in page.rows) == deepseek.bytes_per_device().max
    large = {pattern for pattern, kind, _ in page.rows if kind["large"]}
    assert large == {
        f"model/layers/{{0..60}}/self_attn/{name}/kernel" for name in ("q_a_proj", "q_b_proj", "kv_b_proj")
    }


ADAM = {"gradients": "bfloat16", "optimizer": ("float32", "float32")}


# A train state whose moments are partly in the tree, partly in the host's memory.
STATE = {"params": [["layers/0/w", [64, 64], "BF16"], ["layers/1/w", [64, 64], "BF16"], ["n", [64], "F32"],
                    ["opt_state/mu/w", [64, 64], "F32"], ["opt_state/nu/w", [64, 64], "F32"]]}  # fmt: skip
STATE_RULES = """rules = [
    {pattern = "nu/w", spec = ["fsdp", "tp"], memory_kind = "pinned_host"}, ["w", ["fsdp", "tp"]], ["n", []]
]"""


@pytest.mark.parametrize("gradients", [[], ["--gradients", "float32"]])
def test_the_page_says_what_the_command_line_says(tmp_path, gradients):
    """Its bytes and whether they fit, to the byte, as text, JSON and page."""

    (tmp_path / "m.json").write_text(json.dumps(STATE))
    (tmp_path / "r.toml").write_text(STATE_RULES)
    html = tmp_path / "plan.html"
    plan = ["plan", tmp_path / "m.json", "-r", tmp_path / "r.toml", "-m", "fsdp=4,tp=2,sp=1", *gradients]

    def run(*more):
        result = invoke(*plan, *more)
        assert result.exit_code == 0, result.output
        return result.stdout

    held = json.loads(run("--format", "json"))["device_bytes"]
    most = held["total"]
    assert (held["gradients"] > 0) is bool(gradients)
    for missing in (0, 1):
        fits = not missing
        room = ("--hbm", f"{most - missing}B")
        text = run(*room, "--html", html)
        assert ("\nfits into" in text, "\nDOES NOT FIT into" in text) == (fits, not fits)
        assert json.loads(run(*room, "--format", "json"))["fits"] is fits
        header = html.read_text(encoding="utf-8").partition("</header>")[0]
        told = [unescape(line) for line in re.findall("<p>(.*?)</p>", header)[1:]]
        assert told == text.splitlines()[-len(told) :]


@pytest.mark.parametrize(("name", "written"), [("own", "to_python"), ("eformer", "to_toml")])
def test_the_page_ends_with_suggested_rules(name, written):
    """As a file, or as code where no file can say them; with the reason of each."""
    tree = {"up": jax.ShapeDtypeStruct((64, 256), "float32")}
    suggestion = sr.suggest(tree, {"tp": 2}, dialect=replace(sr.dialects.EFORMER, name=name))
    last = suggestion.plan.to_html(sections=[suggestion]).rpartition("<h2>")[2]
    assert last.startswith("Suggested rules</h2>")
    assert escape(getattr(suggestion, written)()) in last
    assert str(suggestion.reasons[0]) in last


def test_sections_of_something_else_are_refused(deepseek, program):
    text = deepseek.to_html(sections=[FINDINGS, deepseek.sweep(**ADAM)], **ADAM)
    assert f"<p>{deepseek.bytes_per_device(**ADAM)}</p>" in text
    with pytest.raises(ValueError, match="give both the same gradients= and optimizer="):
        deepseek.to_html(sections=[FINDINGS, deepseek.sweep()], **ADAM)
    other = sr.suggest({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, {"tp": 2})
    with pytest.raises(ValueError, match="suggestion: it is for 1 leaf of 256 bytes, the plan for 45,395"):
        deepseek.to_html(sections=[FINDINGS, other])
    with pytest.raises(TypeError, match="sections"):
        deepseek.to_html(sections=[deepseek])
    with pytest.raises(ValueError, match="program: it is for tp=2, the plan for fsdp="):
        deepseek.to_html(sections=[program[1]])
    last = program[0].to_html(sections=[program[1]]).rpartition("<h2>")[2]
    assert last.startswith("Compiled program</h2>")
    assert "f32[512,512]" in last


def test_leaves_without_a_rule():
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    tree = {"a": leaf, "scale": jax.ShapeDtypeStruct((), "float32"), "none": 3, "b": leaf}
    text = sr.plan(tree, [("a", "tp")], {"tp": 2}).to_html()
    rules = re.findall(r"<tr><td>(0|-)</td><td>(.*?)</td><td>.*?</td><td>(\d)</td>", text)
    assert rules == [("0", "a", "1"), ("-", "no rule is needed", "2"), ("-", "no rule decides", "1")]
    assert sr.plan({}, [], {"tp": 2}).to_html().endswith("</html>\n")


def test_the_page_fetches_nothing(deepseek):
    """The policy forbids it, each script is named by its hash, and no element asks for anything."""
    page = Page(deepseek.to_html(sections=[sr.types.Findings(())]))
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action")]
    assert not [a for a in page.attributes if a[1].startswith("on")]
    policy = next(v for t, _, v in page.attributes if t == "meta" and "default-src" in (v or ""))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    for script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_hostile_names_are_data(hostile):
    plan, shown = hostile
    text = plan.to_html(**shown)
    page = Page(text)
    harmless = Page(sr.plan({}, [], {"tp": 2}).to_html())
    assert set(page.tags) - set(harmless.tags) <= {"details", "summary", "b", "td"}
    assert page.scripts[1:] == harmless.scripts[1:]
    assert not [a for a in page.attributes if a[1] in ("src", "href", "style") or a[1][:2] == "on"]
    start = text.index('id="data">') + len('id="data">')
    raw = text[start : text.index("</script>", start)]
    assert raw.isascii()
    assert not set("<>&") & set(raw)
    assert page.title == shown["title"]
    patterns = {pattern for pattern, _, _ in page.rows}
    assert patterns >= {printable_lines(f"{name}/w".split("\n")) for name in HOSTILE}
    text.encode()


def test_no_name_turns_the_text_of_the_page_around():
    """Marks of direction and controls are escaped as on a terminal, also in the title."""
    odd = "\u202eright to left\u2066 \x1b[31m \x9b"
    plan = sr.plan({odd: jax.ShapeDtypeStruct((8,), "float32")}, [(odd[:3], odd)], {odd: 2})
    text = plan.to_html(title=odd)
    page = Page(text)
    assert page.title == page.rows[0][0] == printable(odd)
    # As JSON without escapes, in which texts are as the page shows them.
    texts = [json.dumps(page.data, ensure_ascii=False), *text.split("\n")]
    assert not [line for line in texts if not line.isprintable()]


def test_a_notebook_gets_a_small_table(deepseek, hostile):
    table = deepseek._repr_html_()
    assert table.count("<tr>") == 24
    assert "more" not in table
    assert set(re.findall(r"<(\w+)", hostile[0]._repr_html_())) == {"pre", "table", "thead", "tbody", "tr", "th", "td"}
    many = sr.plan({chr(i): np.ones(()) for i in range(300, 370)}, [], {"tp": 2})._repr_html_()
    assert many.count("<tr>") == 61
    assert "and 10 more rows" in many
    unlike = deepseek.with_rules([(path, ()) for path in deepseek.paths[:1000]])
    for value in (deepseek, deepseek.check(), unlike, unlike.check(), deepseek.diff(unlike)):
        assert len(value._repr_html_()) <= 200_000
        assert "<script" not in value._repr_html_()


# In a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        if started is None:
            pytest.skip("chromium or playwright is not installed")
        yield started


@pytest.fixture
def opened(browser, tmp_path):
    """opened(plan, **shown): its report in a browser, which must log nothing and fetch nothing."""
    troubles, pages = [], []

    def requested(request):
        if not request.url.startswith("file://"):
            troubles.append(request.url)

    def call(plan, **shown):
        file = tmp_path / "plan.html"
        plan.to_html(file, **{"sections": [FINDINGS], **shown})
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", requested)
        page.metrics = metrics_of(page)
        page.goto(file.as_uri())
        page.wait_for_selector("#treemap .slice")
        pages.append(page)
        return page

    yield call
    for page in pages:
        page.close()
    assert troubles == []


def leaf_rows(page):
    return page.locator("#leaf-table td:first-child").all_inner_texts()


def search(page, text):
    """Types into the search box, and waits until the table has answered."""
    page.evaluate("document.getElementById('count').textContent = ''")
    page.fill("#search", text)
    page.wait_for_selector("#count:not(:empty)")


def test_browser_shows_all_parts(opened, deepseek):
    page = opened(deepseek, title="DeepSeek-V3", sections=[FINDINGS, sr.suggest(deepseek)], hbm=10**9)
    assert page.title() == page.inner_text("h1") == "DeepSeek-V3"
    assert "DOES NOT FIT into 1.00 GB" in page.inner_text("header")
    assert page.locator("summary b").all_inner_texts() == ["error", "warning"]
    assert page.locator("#legend button").count() == 5
    assert "q_b_proj/kernel" in page.inner_text("#treemap")
    assert page.locator("#leaf-table tr.large").count() == 3
    assert "[[rules]]" in page.inner_text("main > section:last-child")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(background) == light
    assert not page.is_visible("#search")


@pytest.fixture(scope="module")
def program():
    """A plan, and a step under it that sums gradients and returns what is too large."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    plan = sr.plan({"w": jax.ShapeDtypeStruct((256, 512), "float32")}, [("w", (None, "tp"))], mesh)
    x = jax.ShapeDtypeStruct((512, 256), "float32")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(lambda params, x: jnp.tanh(x @ params["w"]), out_shardings=whole)
    return plan, sr.inspect(step.lower(plan.abstract(), x).compile(), (plan, None))


AXE = os.environ.get("AXE", ROOT / "node_modules/axe-core/axe.min.js")


@pytest.mark.parametrize(("width", "scheme"), some([*product((390, 1280), ("light", "dark"))], every=3))
def test_browser_fits_scrolls_and_is_accessible(browser, tmp_path, deepseek, width, scheme):
    """No page is wider than the window; keys scroll what is; axe finds nothing, if it is there.

    `npm install axe-core`, or its file in AXE.
    """
    options = {"viewport": {"width": width, "height": 900}, "bypass_csp": True}
    seconds = sr.types.ProgramTime(0.1, 0.1, (), 0.0, ())
    sections = [deepseek.sweep(hbm=16 * 10**9), sr.suggest(deepseek), seconds]
    deepseek.to_html(tmp_path / "plan.html", sections=sections, hbm=16 * 10**9)
    with browser.new_context(color_scheme=scheme, **options) as context:
        page = context.new_page()
        page.goto((tmp_path / "plan.html").as_uri())
        page.wait_for_selector("#treemap .slice")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        wide = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 "
        wide += "&& getComputedStyle(e).overflowX === 'auto' && e.tabIndex < 0).map(e => e.outerHTML)"
        assert page.evaluate(wide) == []  # else no key scrolls it
        if Path(AXE).exists():
            page.evaluate(Path(AXE).read_text(encoding="utf-8"))
            violations = page.evaluate("axe.run()")["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in violations] == []


def test_browser_shows_corrections_and_problems(opened):
    tree = {name: jax.ShapeDtypeStruct(shape, "float32")
            for name, shape in {"odd": (1001, 2**13), "odder": (64, 30), "lost": (512, 512)}.items()}  # fmt: skip
    page = opened(sr.plan(tree, [("odd", ("tp", None))], {"tp": 2}))
    assert "1001" in page.inner_text("tr.large td:nth-child(7)")
    assert page.inner_text("tr.broken td:nth-child(5)") == "unmatched"
    assert page.locator("#legend code").all_inner_texts() == ["replicated", "no spec", "P('tp', None)"]


def test_browser_search_and_sorting(opened, deepseek):
    page = opened(deepseek)
    assert page.inner_text("#count") == "45,395 leaves in 23 folded rows"
    for text, leaves, rows in (
        ("kv_b", 61, 1),
        ("layers/7/self_attn", 427, 7),  # sets that contain 7
        ("layers/61/", 0, 0),
        ("layers/2/mlp/gate_proj", 3, 1),
        ("EXPERTS/255/up", 14_848, 1),
        ("replicated", 547, 10),
        ("p('tp', ('sp', 'fsdp'))", 62, 2),
        ("rule 6", 58, 1),
        ("no such thing", 0, 0),
    ):
        search(page, text)
        shown = "row" if rows == 1 else "rows"
        assert page.inner_text("#count") == f"{leaves:,} leaves in {rows} folded {shown}"
        assert len(leaf_rows(page)) == rows
    search(page, "")
    page.click("#legend button >> nth=0")
    assert page.input_value("#search") == "replicated"
    assert len(leaf_rows(page)) == 10
    search(page, "")

    def sorted_by(column, place):
        page.click(f"#leaf-table th button:text-is('{column}')")
        return page.locator(f"#leaf-table td:nth-child({place})").all_inner_texts()

    assert "q_b_proj" in leaf_rows(page)[0]
    leaves = [int(text.replace(",", "")) for text in sorted_by("Leaves", 2)]
    assert (leaves, len(leaves)) == (sorted(leaves, reverse=True), 23)
    assert [int(text.replace(",", "")) for text in sorted_by("Leaves", 2)] == leaves[::-1]
    assert page.get_attribute("#leaf-table th:nth-child(2)", "aria-sort") == "ascending"
    assert sorted_by("Path", 1)[0] == "lm_head/kernel"


def test_browser_numbers_beyond_2_to_the_53(opened):
    """A browser's own numbers end there."""
    leaf = jax.ShapeDtypeStruct((2**53 + 1, 4), "int8")
    numbers = [2**53 + 1 + i for i in range(4)] + [10**18 - 2, 10**18 - 1]
    page = opened(sr.plan({f"l/{i}/w": leaf for i in numbers}, [("", (None, "tp"))], {"tp": 4}))
    assert f"({2**53 + 1}, 4)" in page.inner_text("#leaf-table")
    for number, found in ((numbers[1], 6), (10**18 - 1, 6), (2**53, 0), (10**30, 0)):
        search(page, f"l/{number}/")
        assert page.inner_text("#count").startswith(f"{found} leaves")


def test_browser_a_name_of_thousands_of_components(opened):
    """The page stayed empty: a module for each component was more than the stack holds."""
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    names = ["/".join(["a"] * 4000), "/".join(["b"] * 4000), "/".join(["a"] * 3999), "c" * 100_000]
    names += [f"{'/'.join(f'x{chr(97 + j % 26)}' for j in range(i))}/w" for i in range(1, 300, 7)]
    page = opened(sr.plan(dict.fromkeys(names, leaf), [("", "tp")], {"tp": 4}))
    assert page.inner_text("#count").startswith(f"{len(names)} leaves")
    assert set(names) == set(leaf_rows(page))
    assert page.locator("#treemap .leaf").count() > 30


@pytest.mark.parametrize(
    ("dialect", "tree", "expected"),
    [
        slow(sr.dialects.EFORMER, {"m.layers.0.up.w": 0, "m.layers.1.up.w": 0, "m.layers.1.norm": 0, "head": 0},
             ["m.layers", "{0,1}.up.w", "1.norm", "head"]),
        (sr.dialects.KEYSTR, {"m": [{"up": {"w.v": 0}, "norm": 0}] * 2, "head": 0},
         ["['m'][{0,1}]", "['norm']", "['up']['w.v']", "['head']"]),
    ],
)  # fmt: skip
def test_browser_modules_of_other_paths(opened, dialect, tree, expected):
    """Dotted names and keystr paths come apart into modules, too."""
    tree = jax.tree.map(lambda _: jax.ShapeDtypeStruct((8, 8), "float32"), tree)
    page = opened(sr.plan(tree, sr.Rules([(".*", "tp")], dialect), {"tp": 4}))
    labels = page.locator("#treemap .slice > span:first-child").all_inner_texts()
    assert sorted(label.split("  ")[0] for label in labels) == sorted(["all", *expected])


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 2])
def test_browser_opens_a_million_leaves(opened, levels):
    """A million leaves, of which none fold, in a thousand modules or in none."""
    names = ["".join(letters) for letters in product("abcdefghij", repeat=3)]
    leaf = jax.ShapeDtypeStruct((8, 8), "float32")
    tree = dict.fromkeys(names, dict.fromkeys(names, leaf))
    if levels == 1:
        tree = {f"{a}{b}": leaf for a, b in product(names, repeat=2)}
    page = opened(sr.plan(tree, [("", "tp")], {"tp": 4}))
    # Of the thread alone, so that a busy machine does not count.
    spent = page.metrics()["TaskDuration"]
    print(f"{spent:.2f} s")
    assert spent < 6
    assert page.inner_text("#count") == "1,000,000 leaves in 1,000,000 folded rows, of which 500 are shown"
    assert page.locator("#treemap .slice").count() < 3000
    search(page, "jja")
    assert 0 < len(leaf_rows(page)) <= 500


def test_browser_hostile_names(opened, hostile):
    plan, shown = hostile
    page = opened(plan, **shown)
    page.hover("#treemap .slice >> nth=-1")
    page.wait_for_selector("#tip:not([hidden])")
    assert len(page.locator("#tip div").all_inner_texts()) >= 3
    drawn = page.text_content("#treemap")
    assert "<b>bold</b>&lt;i&gt;&amp;" in drawn
    assert '<a href="javascript:window.hacked=1">click</a>' in drawn
    page.locator("#treemap .slice").nth(1).click(position={"x": 5, "y": 5})
    search(page, "<")
    page.wait_for_timeout(1000)  # an onerror would have come by now
    assert page.evaluate("window.hacked") is None
    assert "<!--<script>" in page.inner_text("main > section:last-child")
    assert page.locator("body :is(img, a, iframe)").count() == 0
    assert page.locator("body b").all_inner_texts() == ["error"]
    assert page.inner_text("h1") == shown["title"]
    assert "<img src=x onerror=window.hacked=1>" in page.inner_text("#leaf-table")
    assert "</script><script>window.hacked=1</script>=2,tp=4" in page.text_content("header")


def test_browser_treemap(opened, deepseek):
    """Areas are bytes; a module is looked into and left again; what is pointed at is told."""
    page = opened(deepseek)

    def area(name):
        box = page.locator(f"#treemap .leaf:has(> span:text-is('{name}'))").first.bounding_box()
        return box["width"] * box["height"]

    held = {kind: n * one["held"] for kind, one, n in Page(deepseek.to_html()).rows}
    names = ("q_b_proj/kernel", "q_a_proj/kernel")
    whole = [held[f"model/layers/{{0..60}}/self_attn/{name}"] for name in names]
    assert area(names[0]) / area(names[1]) == pytest.approx(whole[0] / whole[1], rel=0.06)
    page.hover(f"#treemap .leaf:has(> span:text-is('{names[0]}'))")
    told = page.locator("#tip div").all_inner_texts()
    assert told[:3] == [
        "model/layers/{0..60}/self_attn/q_b_proj/kernel",
        "4.61 GB per device, 4.61 GB in all",
        "61 leaves",
    ]
    assert "P(), rule 11" in told
    module = "#treemap .module:has(> span:text-matches('^self_attn'))"
    page.locator(module).last.click(position={"x": 5, "y": 5})
    assert not page.is_visible("#tip")
    assert page.locator("#treemap .leaf").count() == 5
    assert page.locator("#treemap :text('experts')").count() == 0
    page.locator("#treemap > .slice").click(position={"x": 5, "y": 5})
    assert page.locator("#treemap :text('experts')").count() > 0
    before = page.locator("#treemap > .slice").bounding_box()["width"]
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_timeout(1000)
    assert page.locator("#treemap > .slice").bounding_box()["width"] < before - 300
