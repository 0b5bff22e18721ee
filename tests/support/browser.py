"""Chromium, driven by playwright, for reports: nothing in it leaves this machine."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's Chromium; None if it or playwright is not installed."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=_ARGUMENTS)
        yield browser
        browser.close()


def metrics_of(page: Any) -> Callable[[], dict[str, float]]:
    """Asks for the page's metrics, in processor time of its main thread: a busy machine adds none."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    return lambda: {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
