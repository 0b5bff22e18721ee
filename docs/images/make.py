"""Writes report.png, the demo's report in a browser: python docs/images/make.py.

Needs playwright and chromium, as the tests of the report do.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import shardrules as sr
from examples import demo

HERE = Path(__file__).parent
ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--font-render-hinting=none"]


def main(file: Path = HERE / "report.png") -> None:
    """EasyDeL's rules for DeepSeek-V3, as they are: 1.3 TB too many."""
    rules = sr.read_rules(demo.RULES).rules
    plan = sr.plan(sr.read_model(demo.MODEL), rules, demo.MESH)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        report = Path(folder) / "report.html"
        worst = plan.check().at_least("error")
        memory = sr.Hardware.named("v5p").memory_bytes
        title = "DeepSeek-V3, EasyDeL's rules"
        plan.to_html(report, sections=[worst], title=title, hbm=memory)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(report.as_uri())
        page.wait_for_selector("#treemap .slice")
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
