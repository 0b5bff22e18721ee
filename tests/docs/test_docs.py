"""Every example in the README, in docs/, in docstrings and in examples/ runs; what pages say of files and of the code is so."""

import ast
import contextlib
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import shardrules
import shardrules as sr
from benchmarks.tables import front_table, with_text
from tests.support import api, corpus, docs_lists, docs_pages
from tests.support.docs_pages import DOCS, ROOT, blocks, commands, demo_folder, pages
from tests.support.slow import slow

MODULES = ["shardrules", *(m.name for m in pkgutil.walk_packages(shardrules.__path__, "shardrules."))]
# Values that are read, not made; and what needs arrays on several devices to be worth showing.
# Modules of names alone.
CONSTANTS = ("shardrules.compat.eformer_common_types",)
WITHOUT_EXAMPLES = {
    "AxisMetadata", "Change", "Comparison", "Coverage", "CutReason", "DeviceBytes", "Dialect",
    "Explanation", "FileError", "Finding", "Kind", "LogicalDialect", "Loss", "PlanDiff", "Reason", "RuleFile", "RulesFallback", "Sweep",
    "SweepRow", "Tried", "make_shard_and_gather_fns", "with_sharding_constraint",
}  # fmt: skip
# What takes more than three seconds.
SLOW_PAGES = [
    "docs/guides/equinox.md",
    "docs/guides/dialects.md",
    "docs/guides/linen.md",
    "docs/guides/lora.md",
    "docs/guides/maxtext.md",
    "docs/guides/moe.md",
    "docs/guides/nnx.md",
    "docs/memory.md",
    "docs/pod.md",
    "docs/guides/rl.md",
    "docs/guides/kv-heads.md",
    "docs/same.md",
    "docs/solve.md",
    "docs/verify.md",
]
# The other pages are about today's JAX.
NOT_RUN = {
    "docs/pod.md": [
        "the time differs; tests/tpu runs the example",
        "it needs the compiler for CUDA; tests/cuda proves such a step",
    ],
    "docs/meshes.md": ["needs several processes; tests/support/process_worker.py is the one that runs"],
}
# Names of files that pages tell users to have.
USERS_FILES = {
    "base.yml", "model.safetensors.index.json", "plan.lock", "rules.toml", "shardrules.toml",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


# What pages say of the code's constants, which have no test of their own.
FIGURES = {
    "security": [
        ("512 MiB, unpacked", "_base.io", "DEFAULT_MEMORY", 512 << 20),
        ("1 MiB of TOML", "_plan.files.rules", "BYTES_OF_TOML", 512),
        ("100,000 characters", "_plan.codec", "_MOST_CHARACTERS", 100_000),
        ("TOML | 8 |", "_plan.files.rules", "_MOST_LEVELS", 8),
        ("100,000,000 bytes", "_plan.files.safetensors", "_MOST_HEADER_BYTES", 100_000_000),
        ("model | 1,000 |", "_plan.files.models", "_MOST_LEVELS", 1000),
        ("loaded | 1,000,000 |", "_checkpoint.targets", "_MOST_PARTS", 1_000_000),
        ("name | 9;", "_checkpoint.names", "_MOST_DIGITS", 9),
        ("32 MiB, or", "_rules.rules", "DEFAULT_MEMORY_BUDGET", 32 << 20),
        ("HLO | 131,072 |", "_program.hlo", "_MOST_DEVICES", 131_072),
        ("| entries of the cache | 100 |", "_program.compiler", "_CACHE_ENTRIES", 100),
        ("1,200 s", "_program.compiler", "LIMIT", 1200),
    ],
    "findings": [
        ("Default: 16 MiB", "_plan.kinds", "DEFAULT_LARGE", 16 << 20),
        ("2 % of the fullest device's bytes", "_plan.check_context", "_MUCH", 0.02),
        ("more than a fifth of their work", "_program.verify.unexpected", "_ALIKE", 0.2),
        ("half of the memory beside the arguments", "_program.verify.unexpected", "_KEPT", 0.5),
        ("a twentieth of the peak", "_program.verify.unexpected", "_KEPT_OF_PEAK", 0.05),
        ("or 5 % of all", "_program.verify.unexpected", "_SHARE", 0.05),
        ("more than eight times what one rounding", "_program.rehearse", "_ROUNDINGS", 8),
    ],
    "loading": [
        ("default 2 GiB", "_checkpoint.units", "DEFAULT_IN_FLIGHT", 2 << 30),
        ("less than 256 KiB apart", "_checkpoint.units", "_REMOTE_GAP", 256 << 10),
        ("of at most 32 MiB", "_checkpoint.units", "_READ", 16 << 20),
    ],
    "meshes": [
        ("after 10 s the others log", "_place.processes", "_QUIET_SECONDS", 10),
        ("after 600 s all get", "_place.processes", "_LIMIT_SECONDS", 600),
    ],
    "pod": [
        ("0.87 of the cycles", "_program.work", "LEAST_CYCLES", 0.87),
        ("the newest 100", "_program.compiler", "_CACHE_ENTRIES", 100),
        ("two compilers at once", "_program.verify.prove", "_AT_ONCE", 2),
    ],
    "rules": [
        ("more than 100 nested levels", "_rules.patterns", "_MAX_DEPTH", 100),
        ("4,000,000 nodes", "_rules.patterns", "_MAX_NODES_OF_RULES", 4_000_000),
        ("Default: 32 MiB", "_rules.rules", "DEFAULT_MEMORY_BUDGET", 32 << 20),
    ],
    "same": [("Eight times what that changes", "_program.rehearse", "_ROUNDINGS", 8)],
    "solve": [
        ("the ten best", "_program.solve.candidates", "MOST", 10),
        ("at most 12 rules", "_plan.suggest.draft", "MOST_RULES", 12),
        ("half of that counts as hidden", "_program.solve.spread", "_HIDDEN", 0.5),
        ("more than 50,000 rows", "_program.solve.search", "_MOST_ROWS", 50_000),
    ],
    "suggest": [
        ("up to 0.8 % more bytes", "_plan.suggest.draft", "SLACK", 0.008),
        ("taken for 128", "_plan.roles", "_HEAD", 128),
        ("narrower than 2,048", "_plan.roles", "_SMALL", 2048),
        ("more than 64 names", "_plan.suggest.draft", "_MOST_NAMES", 64),
        ("more than 4,000 paths", "_plan.suggest.patterns", "_MOST_PATHS", 4000),
        ("below 5 % are ties", "_plan.sweep", "_TIE", 0.05),
    ],
    "verify": [
        ("less than 64 KiB", "_program.reasons", "_SMALL", 64 << 10),
        ("(default: 16 MiB)", "_plan.kinds", "DEFAULT_LARGE", 16 << 20),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("page", "text", "module", "name", "value"), [(p, *r) for p in FIGURES for r in FIGURES[p]])
def test_figures_are_those_of_the_code(page, text, module, name, value):
    assert getattr(importlib.import_module(f"shardrules.{module}"), name) == value
    assert text in " ".join((DOCS / f"{page}.md").read_text(encoding="utf-8").split())


def test_no_pattern_of_a_real_rule_list_goes_to_re():
    rules = [sr.Rules(corpus.rules(name)) for name in corpus.regex_rule_sets()]
    assert not any(each.fallbacks for each in rules)
    assert f"None of the {sum(map(len, rules)):,} patterns" in (DOCS / "rules.md").read_text()


def test_versions_are_those_that_are_installed_and_tested():
    """The README's, and those that the comparison was tested with."""
    readme, comparison = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/comparison.md"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest, middle, oldest = (
        dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / ".ci/constraints" / f"{stage}.txt").read_text(), re.M))
        for stage in ("py3.12", "py3.11", "py3.11-oldest-jax")
    )
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert f"Python {pythons[0]} to {pythons[-1]}, JAX {oldest['jax']} and newer" in readme
    assert project["requires-python"] == f">={pythons[0]}"
    assert f"jax>={oldest['jax']}" in project["dependencies"]
    jaxes = (oldest["jax"], *(re.match(r"\d+\.\d+", each["jax"])[0] for each in (middle, newest)))
    assert "CI tests 3.11 with JAX {} and {}, and 3.12 with {}.".format(*jaxes) in readme
    for name in ("eformer", "flax", "keras", "haliax", "orbax-checkpoint", "jax"):
        said = re.search(rf"{name.removesuffix('-checkpoint')} ([\d.]+(?:dev\d+)?)\b", comparison, re.I)
        assert said[1] == newest[name], name


def test_public_docstrings_have_examples():
    for name in shardrules.__all__:
        thing = getattr(shardrules, name)
        if callable(thing) and name not in WITHOUT_EXAMPLES:
            assert ">>>" in (thing.__doc__ or ""), name


@pytest.mark.parametrize("name", [m for m in MODULES if re.match(r"shardrules\.compat\.[^_]", m)])
def test_each_drop_in_has_an_example(name):
    """One for the module: the reader knows the original."""
    if name not in CONSTANTS:
        assert ">>>" in Path(importlib.import_module(name).__file__).read_text()


def test_no_drop_in_needs_its_library():
    names = [name for name in MODULES if re.match(r"shardrules\.compat\.[^_]", name)]
    absent = dict.fromkeys(["eformer", "flax", "keras", "MaxText", "maxtext"])
    code = f"import sys; sys.modules.update({absent}); import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pages show the legacy mesh, too
@pytest.mark.parametrize("page", [slow(p) if p in SLOW_PAGES else p for p in pages()])
def test_page(page):
    with demo_folder() as folder:
        missing, shown = docs_pages.run(page, folder)
    text = (ROOT / page).read_text()
    for (start, end), printed in shown:
        assert text[start:end] == printed, "python -m tests.support.docs_pages writes it anew"
    if missing:
        pytest.skip(f"some of its blocks need {', '.join(sorted(set(missing)))}")


def test_every_block_runs_or_says_why_not():
    not_run = {}
    for page in pages():
        for block in blocks(page):
            assert block.language in (*docs_pages.LANGUAGES, "markdown"), (page, block)
            if block.language in ("toml", "yaml", "json"):
                assert block.title, f"{page}: a file that nothing reads: {block.code}"
            if block.language == "text":
                assert not re.match(r"\$ |>>> |pip |shardrules ", block.code), (page, block.code)
            if block.language == "console":
                words = {command.split()[0] for command, _ in commands(block)}
                assert words <= {"shardrules", *docs_pages.OTHER_COMMANDS}, (page, words)
            if "not run" in block.markers:
                if block.language == "python":
                    ast.parse(block.code)
                not_run.setdefault(page, []).append(block.markers["not run"])
        fences = re.findall(r"^```\w", (ROOT / page).read_text(), re.M)
        assert len(fences) == sum(block.language != "markdown" for block in blocks(page)), page
    assert not_run == NOT_RUN


def prose(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)


OWNERS = {
    "sr": sr,
    "plan": sr.Plan,
    "proof": sr.types.Proof,
    "program": sr.types.Program,
    "solution": sr.types.Solution,
}


@pytest.mark.parametrize("page", pages())
def test_calls_in_sentences_have_functions_and_keywords_that_exist(page):
    for code in re.findall(r"`([^`\n]*\([^`\n]*)`", prose(ROOT / page)):
        with contextlib.suppress(SyntaxError):  # a pattern, or a part of a call
            for call in ast.walk(ast.parse(code.replace("...", "None").replace("\\|", "|"))):
                match call:
                    case ast.Call(ast.Attribute(ast.Name(owner), name)) if owner in OWNERS:
                        parameters = inspect.signature(getattr(OWNERS[owner], name)).parameters.values()
                        known = {each.name for each in parameters}
                        is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
                        assert is_open or {each.arg for each in call.keywords} <= known, code


def headings(path):
    """The anchors of a page, as mkdocs and GitHub make them."""
    texts = re.findall(r"^#+ (.*)$", prose(path), re.M)
    words = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", text)).lower() for text in texts)
    return {re.sub(r"[-\s]+", "-", text.strip()) for text in words}


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_lead_to_pages_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(ROOT / page)):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_a_page_that_is_wrong_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_pages, "ROOT", tmp_path)
    for text in (
        "```python\n1 + 1  # 3\n```\n",
        "```python\nraise ValueError\n```\n",
        "```console\n$ shardrules check nothing.json -r nothing.toml -m tp=2\n```\n",
    ):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises((AssertionError, ValueError)):
            docs_pages.run("page.md", tmp_path)


def test_files_that_pages_name_exist():
    files = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if ".venv" not in p.parts]
    ends = {path[at:] for path in files for at in [0, *_after_slashes(path)]}
    named = 0
    for page in [*pages(), "CONTRIBUTING.md"]:
        text = (ROOT / page).read_text()
        for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:cpp|hpp|py|pyi|md|ipynb|gz|toml))`", text):
            assert name in ends or name in USERS_FILES, f"{page} names {name}"
            named += 1
        for name in re.findall(
            r"(?<![\w./-])((?:csrc|docs|tests|benchmarks|examples|python/shardrules)/[\w./-]*\w)", text
        ):
            places = (ROOT, (ROOT / page).parent)  # links go out from the page
            assert any((place / name).exists() for place in places), f"{page} names {name}"
            named += 1
    assert named > 100


def _after_slashes(path):
    return [found.end() for found in re.finditer("/", path)]


def test_the_reference_has_each_public_name_once():
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    lists = re.findall(r"^<!-- api (\S+): (.*?) -->$", pages, re.M | re.S)  # see docs/hooks.py
    names = re.findall(r"^::: (\S+)$", pages, re.M)
    names += [f"{module}.{name}" for module, listed in lists for name in listed.split()]
    compat = [name for name in MODULES if re.match(r"shardrules\.compat\.[^_]", name)]
    offered = [f"{module}.{name}" for module in ("shardrules", *api.BESIDE_ROOT) for name in api.public_names(module)]
    assert sorted(names) == sorted([*compat, *offered])


def test_lists_are_those_of_the_code():
    for file, text in docs_lists.texts().items():
        assert file.read_text(encoding="utf-8") == text, "python -m tests.support.docs_lists writes it anew"


# The tables of the front page


README = (ROOT / "README.md").read_text(encoding="utf-8")
MESH = {"fsdp": 4, "tp": 16}
TREE = {"q": jax.ShapeDtypeStruct((8192, 64, 128), "bfloat16"), "k": jax.ShapeDtypeStruct((8192, 8, 128), "bfloat16")}
RIGHT = [("q", ("fsdp", "tp")), ("k", ("fsdp",))]
WRONG = {
    "catch-all": [("query|key", ("fsdp", "tp")), (".*", ())],
    "unknown-axis": [("q", ("fsdp", "tpp")), ("k", ("fsdp",))],
    "correction": [("q|k", (None, "tp"))],
}


def test_the_readme_shows_the_speed_of_the_report():
    """It showed another run, with other bars missed; `python -m benchmarks --write` writes both."""
    report = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    assert with_text(README, "speed", front_table(report)) == README
    missed = report.replace("identity <= 0.5x: met", "identity <= 0.5x: MISSED")
    assert missed != report
    assert front_table(missed) != front_table(report)


@pytest.mark.parametrize("kind", WRONG)
def test_the_line_finds_a_mistake_and_passes_right_rules(kind):
    (level,) = re.findall(r'`plan\.check\(\)\.raise_for\("(\w+)"\)`', README)
    sr.plan(TREE, RIGHT, MESH).check().raise_for(level)
    findings = sr.plan(TREE, WRONG[kind], MESH).check()
    assert kind in {one.kind for one in findings}
    with pytest.raises(sr.FindingsError):
        findings.raise_for(level)


LOOKERS = {"check": sr.Plan.check, "prove": sr.prove, "verify": sr.verify, "audit": sr.audit, "rehearse": sr.rehearse}


def rows(text):
    """(what one has, how it is looked at) of each row."""
    lines = text.partition("| you have | it looks |")[2].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")[:2]) for line in lines]


def test_each_that_looks_has_a_row():
    assert [call.split(".")[1].split("(")[0] for _, call in rows(README)] == [*LOOKERS]


@pytest.mark.parametrize("name", LOOKERS)
def test_each_docstring_has_the_table(name):
    assert rows(inspect.getdoc(LOOKERS[name])) == rows(README)


# The examples


def test_demo(capsys):
    from examples import demo

    demo.main()
    printed = capsys.readouterr().out
    assert "44,544 leaves of 45,395 (1.31 TB of 1.34 TB) match no rule but the catch-all" in printed
    assert "check: 0 errors" in printed


# For a process of its own, because JAX must know the number of devices before it first uses one.
SCRIPT = """
import math
import jax, numpy as np, optax
from train_transformer import main, train

def parts(tree):
    return {
        jax.tree_util.keystr(path): (array.shape, [shard.data.shape for shard in array.addressable_shards])
        for path, array in jax.tree.leaves_with_path(tree)
    }

state, losses = main(30)
on_one, losses_on_one = train(30, fsdp=1, tp=1)
assert len(losses) == 30 and losses[-1] < 0.25 * losses[0]
for path, (shape, shards) in parts(state.params).items():
    is_whole = len(shape) == 1 or "positions" in path
    # 2 KV heads cannot be cut by tp=4.
    count = 1 if is_whole else 2 if "key" in path or "value" in path else 8
    assert [math.prod(shard) for shard in shards] == [math.prod(shape) // count] * 8, path
for moments in ("mu", "nu"):
    assert parts(optax.tree_utils.tree_get(state.optimizer, moments)) == parts(state.params)
# Sharding does not change the maths.
assert all(shards == [shape] for shape, shards in parts(on_one.params).values())
np.testing.assert_allclose(losses, losses_on_one, rtol=1e-4)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, on_one)
"""


@pytest.mark.slow
def test_train_transformer():
    pytest.importorskip("flax", reason="flax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    command = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    corrected = [line.split()[0] for line in lines if "corrected from" in line]
    assert corrected == ["block_0/key/kernel", "block_0/value/kernel"]
    assert [line for line in lines if line.startswith("Adam's")] == [
        f"Adam's {name} sharded as the parameters: True" for name in ("mu", "nu")
    ]
