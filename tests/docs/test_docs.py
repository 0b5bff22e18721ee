"""Every example in the README, in docs/ and in docstrings runs, and what the pages say of files is so."""

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import shardrules
from tests.support import api, docs_pages
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


BOUNDS = {
    "512 MiB; more with": ("_base.io", "DEFAULT_MEMORY", 512 << 20),
    "100,000 characters": ("_plan.codec", "_MOST_CHARACTERS", 100_000),
    "TOML | 8 |": ("_plan.files.rules", "_MOST_LEVELS", 8),
    "100,000,000 bytes": ("_plan.files.safetensors", "_MOST_HEADER_BYTES", 100_000_000),
    "model | 1,000 |": ("_plan.files.models", "_MOST_LEVELS", 1000),
    "loaded | 1,000,000 |": ("_checkpoint.targets", "_MOST_PARTS", 1_000_000),
    "name | 9;": ("_checkpoint.names", "_MOST_DIGITS", 9),
    "32 MiB, or": ("_rules.rules", "DEFAULT_MEMORY_BUDGET", 32 << 20),
    "HLO | 131,072 |": ("_program.hlo", "_MOST_DEVICES", 131_072),
    "| entries of the cache | 100 |": ("_program.compiler", "_MOST_KEPT", 100),
    "1,200 s": ("_program.compiler", "LIMIT", 1200),
}


@pytest.mark.parametrize("text", BOUNDS)
def test_bounds_are_those_of_the_code(text):
    module, name, value = BOUNDS[text]
    assert getattr(importlib.import_module(f"shardrules.{module}"), name) == value
    assert text in (DOCS / "security.md").read_text(encoding="utf-8")


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
    offered = [f"{module}.{name}" for module in ("shardrules", *api.OFFERED) for name in api.public_names(module)]
    assert sorted(names) == sorted([*compat, *offered])


def test_demo(capsys):
    from examples import demo

    demo.main()
    printed = capsys.readouterr().out
    assert "44,544 leaves of 45,395 (1.31 TB of 1.34 TB) match no rule but the catch-all" in printed
    assert "check: 0 errors" in printed
