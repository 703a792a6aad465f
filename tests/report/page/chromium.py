"""Opens reports in the headless Chromium of this machine, for tests and benchmarks."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
READY = "html[data-ready]"


def missing_browser() -> str | None:
    """Returns why no page can be opened, or None."""
    if find_spec("playwright") is None:
        return "playwright is missing: pip install 'flowrl[dev]'"
    if not any(map(shutil.which, PROGRAMS)):
        return f"no Chromium is installed (one of {', '.join(PROGRAMS)}): apt-get install chromium"
    return None


@contextmanager
def open_browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (an optional package)

    program = next(path for path in map(shutil.which, PROGRAMS) if path)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: "Browser", path: Path, *, width: int = 1440, theme: Literal["light", "dark"] = "light"
) -> Iterator["Page"]:
    """Yields the page of a file when it is complete. Fails if it logs an error or requests another file."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_selector(READY, timeout=60_000)
    yield page
    context.close()
    assert problems == []
