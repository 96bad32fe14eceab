"""The HTML page: one file, offline, harmless whatever a run is called, and alive in a real browser."""

import re
import shutil

import pytest

from batchtune.report.html import to_html

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<b>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def hostile(tuned):
    trials = [trial.model_copy(update={"message": HOSTILE}) for trial in tuned.trials]
    target = tuned.target.model_copy(update={"metric": HOSTILE, "reason": HOSTILE}) if tuned.target else None
    found = tuned.recommendation.model_copy(update={"reason": HOSTILE})
    task = tuned.task.model_copy(update={"path": HOSTILE})
    changes = {"name": HOSTILE, "task": task, "warnings": [HOSTILE], "trials": trials, "target": target}
    return tuned.model_copy(update=changes | {"recommendation": found})


def test_the_page_is_one_file_that_fetches_nothing(tuned):
    page = to_html(tuned)
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page) == []


def test_the_recommendation_and_its_reason_come_before_the_evidence(tuned):
    page = to_html(tuned)
    assert page.index(tuned.recommendation.reason[:20]) < page.index("<table")


def test_a_probe_draws_its_certificate(probed):
    assert f"{probed.probe.max_batch_size:,}" in to_html(probed)


def test_hostile_text_appears_as_text_only(hostile):
    page = to_html(hostile)
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install the distribution's package 'chromium'")
@pytest.mark.parametrize("width", [1280, 360])
def test_a_real_browser_shows_it_without_errors(hostile, tmp_path, width):
    sync_api = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "report.html"
    file.write_text(to_html(hostile), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": width, "height": 900})
        problems, dialogs, requests = [], [], []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector(".js-plotly-plot", timeout=60_000)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        tabs = page.locator("[role=tab]")
        shown = []
        for index in range(tabs.count()):
            tabs.nth(index).click()
            shown.append(page.locator("[role=tabpanel]:visible").inner_text())
        page.screenshot(path=str(tmp_path / "report.png"), full_page=True)
        browser.close()
    assert problems == []
    assert dialogs == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
    assert overflow <= 0
    assert len(set(shown)) == len(shown)
    assert (tmp_path / "report.png").stat().st_size > 10_000
