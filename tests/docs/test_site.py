"""The built site in Chromium, opened from a disk: its search finds, and nothing is clipped."""

import os
import subprocess

import pytest

from tests.support.browser import chromium
from tests.support.folders import ROOT

# The site's environment, which `make docs` makes; MKDOCS names another.
MKDOCS = os.environ.get("MKDOCS") or next((str(file) for file in ROOT.glob(".venv/*-docs/bin/mkdocs")), None)
CLIPPED = """() => [...document.querySelectorAll(".md-content :is(pre, pre > code, table, img)")]
    .filter(e => e.scrollWidth > e.clientWidth + 1
        || e.getBoundingClientRect().right > document.documentElement.clientWidth)
    .map(e => e.textContent.slice(0, 80))"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MKDOCS is None, reason="`make docs` has not made its environment")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [MKDOCS, "build", "--strict", "-d", folder], cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True
    )
    return folder


@pytest.fixture(scope="module")
def page():
    with chromium() as browser:
        if browser is None:
            pytest.skip("no Chromium and playwright")
        with browser.new_page(viewport={"width": 1280, "height": 800}) as page:
            yield page


@pytest.mark.parametrize("opened", ["index.html", "api/functions.html"])
def test_the_search_finds_a_kind_of_finding(site, page, opened):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / opened).as_uri())
    page.locator("input[name=query]").press_sequentially("unpinned")
    page.wait_for_selector(".md-search-result__item a", state="attached")
    links = page.eval_on_selector_all(".md-search-result__item a", "all => all.map(a => a.href)")
    assert any(link.startswith((site / "findings.html").as_uri()) for link in links), links
    assert all(url.startswith(("file:", "about:", "data:")) for url in asked), asked


def test_nothing_is_clipped_at_1280_pixels(site, page):
    clipped = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        if found := page.evaluate(CLIPPED):
            clipped[str(file.relative_to(site))] = found
    assert clipped == {}
