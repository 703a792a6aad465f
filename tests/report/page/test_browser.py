"""The report in headless Chromium: contents, controls, keyboard, both themes, and widths of phones and desktops."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from flowrl.checkpoints.run_folder import folder_lock
from flowrl.health.monitor import FILE, format_findings
from flowrl.report.page.write_report import write_report
from tests.report.page.chromium import missing_browser, open_browser, open_page
from tests.report.page.generated_run import HOSTILE, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REASON = missing_browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SECTIONS = [
    "summary",
    "curves",
    "rewards",
    "staleness",
    "timeline",
    "placement",
    "completions",
    "settings",
    "environment",
]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return write_report([write_run(folder / "one" / "grpo", num_steps=60)])


@pytest.fixture(scope="module")
def two(folder: Path, one: Path) -> Path:
    other = write_run(folder / "other" / "grpo", num_steps=40, seed=1, is_async=False)
    return write_report([one.parent, other], folder / "two.html")


@pytest.fixture
def page(browser: "Browser", one: Path) -> Iterator["Page"]:
    with open_page(browser, one) as opened:
        yield opened


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_report_fits_the_width_without_errors(
    name: str, width: int, theme: Literal["light", "dark"], browser: "Browser", request: pytest.FixtureRequest
) -> None:
    with open_page(browser, request.getfixturevalue(name), width=width, theme=theme) as page:
        assert page.eval_on_selector_all("main > section", "nodes => nodes.map((node) => node.id)") == SECTIONS
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.get_attribute("html", "data-theme") == theme
        # Every plot has drawn something. Plots draw when they are in view.
        page.set_viewport_size({"width": width, "height": page.evaluate("document.body.scrollHeight")})
        await_drawing(page)
        drawn = """nodes => nodes.map((node) =>
            node.getContext('2d').getImageData(0, 0, node.width, node.height).data.some((value) => value))"""
        assert all(page.eval_on_selector_all("canvas", drawn))


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", [390, 1200, 1440])
def test_all_tabs_can_be_reached(name: str, width: int, browser: "Browser", request: pytest.FixtureRequest) -> None:
    with open_page(browser, request.getfixturevalue(name), width=width) as page:
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        if width == 390:  # the tabs scroll, also with a mouse that has no horizontal wheel
            assert page.eval_on_selector("nav", "nav => getComputedStyle(nav).scrollbarWidth") == "thin"
            assert page.eval_on_selector("nav", "nav => nav.scrollWidth > nav.clientWidth")
        for link in page.locator("nav a").all():
            if width == 390:
                link.scroll_into_view_if_needed()
            box = link.bounding_box()
            assert box is not None and box["x"] > -1 and box["x"] + box["width"] < width + 1
            assert link.evaluate(
                """link => {
                    const box = link.getBoundingClientRect();
                    return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === link;
                }"""
            )


def test_a_tab_scrolls_to_its_section_below_the_header(browser: "Browser", two: Path) -> None:
    with open_page(browser, two, width=800) as page:
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        page.click("nav a:has-text('Timeline')")
        await_drawing(page)
        top = page.eval_on_selector("#timeline", "section => section.getBoundingClientRect().top")
        bottom = page.eval_on_selector(".top", "header => header.getBoundingClientRect().bottom")
        assert bottom <= top <= bottom + 60
        assert page.inner_text("nav a[aria-current]") == "Timeline"


def test_the_card_of_a_run_links_to_its_findings(browser: "Browser", one: Path, folder: Path) -> None:
    quiet = write_run(folder / "quiet", num_steps=8)
    (quiet / FILE).write_text(format_findings([]))
    unchecked = write_run(folder / "unchecked", num_steps=8)
    (unchecked / FILE).unlink()
    path = write_report([one.parent, quiet, unchecked], folder / "findings.html")
    with open_page(browser, path) as page:
        links = page.locator("#summary .facts a")
        assert links.all_inner_texts() == ["1 finding", "no findings", "not run"]
        links.first.click()
        target = page.locator(links.first.get_attribute("href") or "")
        assert "gradient spike" in target.inner_text()
        assert page.url.endswith("#findings-0")
        await_drawing(page)
        assert target.evaluate("node => node.getBoundingClientRect().top") < 900


def test_the_theme_can_be_chosen(page: "Page") -> None:
    colors = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
    for theme in ("light", "dark"):
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == theme
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors[0] == colors[1] != colors[2]


def test_generated_text_is_shown_and_not_executed(page: "Page") -> None:
    page.fill("input[type=search][placeholder^=Search]", "onerror")
    count_of(page)
    assert HOSTILE.split("\u2028")[0] in page.locator("#completions .text").nth(1).inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0


def test_the_policy_blocks_injected_code(browser: "Browser", one: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(one.as_uri())
    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.hacked = 1';
            document.body.append(script);
            document.body.insertAdjacentHTML('beforeend', '<img src="x" onerror="window.hacked = 2">');
        }"""
    )
    await_drawing(page)
    assert page.evaluate("window.hacked") is None
    context.close()


def await_drawing(page: "Page") -> None:
    """Waits until the page has applied filters, which it does shortly after the last key, and has drawn."""
    timer = (
        "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 250))"
    )
    page.evaluate(timer)


def count_of(page: "Page") -> str:
    await_drawing(page)
    return page.inner_text("#completions .controls .note")


def test_rows_can_be_filtered_searched_and_sorted(page: "Page") -> None:
    assert count_of(page) == "184 of 184 rows"
    page.select_option("[aria-label='Kind of rows']", "evaluation")
    assert count_of(page) == "80 of 184 rows"
    page.select_option("[aria-label='Step']", "60")
    assert count_of(page) == "40 of 184 rows"
    page.select_option("[aria-label='Kind of rows']", "training")
    page.fill("[aria-label='Smallest score']", "1")
    shown = int(count_of(page).split()[0])
    assert 0 <= shown <= 8
    page.fill("[aria-label='Smallest score']", "")
    page.select_option("[aria-label='Step']", "")
    page.select_option("[aria-label='Finish reason']", "length")
    assert count_of(page) == "13 of 184 rows"
    page.select_option("[aria-label='Finish reason']", "")
    page.click(".row-head button:has-text('Score')")
    await_drawing(page)
    scores = [float(text) for text in page.locator(".row .score").all_inner_texts()]
    assert len(scores) > 5 and scores == sorted(scores, reverse=True)
    page.fill("[placeholder^=Search]", "no such text")
    assert count_of(page) == "0 of 184 rows"
    assert "No row matches" in page.inner_text(".rows")


def test_the_list_is_used_with_the_keyboard(page: "Page") -> None:
    page.focus(".rows")
    title = page.inner_text(".detail-head h3")
    page.keyboard.press("ArrowDown")
    await_drawing(page)
    assert page.inner_text(".detail-head h3") != title
    page.keyboard.press("End")
    await_drawing(page)
    selected = page.locator(".row[aria-selected=true]")
    assert selected.count() == 1 and selected.is_visible()
    assert "training row 7" in page.inner_text(".detail-head h3")


def test_tokens_are_colored_by_the_chosen_metric(page: "Page") -> None:
    page.check("label:has-text('with token values') input")
    assert count_of(page) == "26 of 184 rows"
    page.wait_for_selector(".token")
    colors = {}
    for metric in ("advantage", "gap", ""):
        page.select_option("[aria-label='Color of the tokens']", metric)
        colors[metric] = page.eval_on_selector_all(".token", "nodes => nodes.map((node) => node.style.background)")
    assert len(set(colors["gap"])) > 5 and colors["gap"] != colors["advantage"]
    assert set(colors[""]) == {""}
    page.focus("[aria-label^='Response tokens']")
    page.keyboard.press("ArrowRight")
    assert "token 0: advantage" in page.inner_text("#completions")


def test_the_same_prompt_is_compared_across_steps(page: "Page") -> None:
    page.select_option("[aria-label='Kind of rows']", "training")
    count_of(page)
    steps = page.locator(".same td:first-child button").all_inner_texts()
    assert len(steps) > 1 and [int(step) for step in steps] == sorted(map(int, steps))
    page.locator(".same td:first-child button").last.click()
    assert f"Step {steps[-1]} " in page.inner_text(".detail-head h3")


def test_curves_show_values_and_zoom(page: "Page") -> None:
    panel = page.locator("#curves .panel").first
    assert panel.locator("h3").inner_text() == "Mean reward"
    canvas = panel.locator("canvas")
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    await_drawing(page)
    assert "step 59" in (panel.locator(".legend").text_content() or "")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 80, steps=4)
    page.mouse.up()
    reset = page.locator("#curves button:has-text('Reset zoom')")
    assert reset.is_visible()
    reset.click()
    assert not reset.is_visible()
    before = page.evaluate("document.querySelector('#curves canvas').toDataURL()")
    for action in (
        lambda: page.check("#curves label:has-text('Log scale') input"),
        lambda: page.fill("#curves input[type=range]", "0.9"),
        lambda: page.click("#curves button:has-text('Tokens')"),
    ):
        action()
        await_drawing(page)
        after = page.evaluate("document.querySelector('#curves canvas').toDataURL()")
        assert after != before
        before = after


def test_metrics_can_be_added(page: "Page") -> None:
    panels = page.locator("#curves .panel")
    before = panels.count()
    page.click("#curves button:has-text('Add metrics')")
    page.fill("[aria-label='Filter metrics']", "memory")
    page.check("#metrics .list input")
    assert panels.count() == before + 1 and panels.first.locator("h3").inner_text() == "memory_mb"
    page.click("[aria-label='Remove memory_mb']")
    assert panels.count() == before


def test_the_timeline_zooms_and_reads_calls(page: "Page") -> None:
    window = page.locator("#timeline .mono").first
    page.click("#timeline button:has-text('Show all')")
    await_drawing(page)
    everything = window.inner_text()
    page.click("[aria-label='Zoom in']")
    await_drawing(page)
    assert window.inner_text() != everything
    page.focus("#timeline canvas[tabindex]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    status = page.inner_text("#timeline .status")
    assert "on rank" in status and "compute" in status
    assert page.locator("#timeline tbody tr").count() > 5
    assert page.locator("#placement svg rect").count() >= 12


def test_runs_can_be_hidden_and_settings_compared(browser: "Browser", two: Path) -> None:
    with open_page(browser, two) as page:
        assert page.locator("#settings tbody tr").count() < 15
        assert "actor.optimizer.lr" in page.inner_text("#settings")
        page.check("label:has-text('also equal values') input")
        assert "data.train" in page.inner_text("#settings")
        total = count_of(page)
        page.click("#runs button:has-text('other')")
        assert count_of(page) != total
        assert "other" not in page.locator("#curves .legend").first.inner_text()
        page.click("#timeline [aria-label=Run] button:has-text('other')")
        await_drawing(page)
        assert page.locator("#timeline canvas[tabindex]").count() == 1


def test_missing_parts_have_a_reason(browser: "Browser", folder: Path) -> None:
    run = write_run(folder / "running", num_steps=8)
    for name in ("summary.json", "trace.json", "system.json"):
        (run / name).unlink()
    with folder_lock(run):
        path = write_report([run])
    with open_page(browser, path, width=390) as page:
        assert "running" in page.inner_text("#summary .badge")
        assert "trace.json" in page.inner_text("#timeline .note.card")
        assert "system.json" in page.inner_text("#environment .note.card")
        assert "makers" in page.inner_text("#placement")


def test_a_large_report_draws_only_visible_rows(browser: "Browser", folder: Path) -> None:
    run = write_run(folder / "large", num_steps=10_000, num_rows=50, every=25, num_token_rows=1)
    path = write_report([run])
    with open_page(browser, path) as page:
        shown, total = (int(number.replace(",", "")) for number in count_of(page).split()[::2][:2])
        assert shown == total and 19_800 <= total <= 20_000
        assert 10 < page.locator(".row").count() < 60
        page.focus(".rows")
        page.keyboard.press("End")
        await_drawing(page)
        assert page.inner_text(".row[aria-selected=true] span:first-child") == "10000"
        assert 10 < page.locator(".row").count() < 60
