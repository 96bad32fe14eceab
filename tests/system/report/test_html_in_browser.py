"""The page in a real Chromium: it draws, sorts, turns dark, prints, fits a phone, and nothing hostile in it runs."""

import shutil

import pytest

from batchtune.report.figures.theme import DARK, LIGHT
from batchtune.report.page.html import to_html
from batchtune.report.view.read import view_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install the system's package 'chromium'")


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; install '.[test]'")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


class Opened:
    """A page, and everything it did that it should not."""

    def __init__(self, page):
        self.page, self.problems = page, []
        page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", self._requested)

    def _requested(self, request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.problems.append(f"fetched {request.url}")

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()

    def fill_of_plots(self):
        return self.page.eval_on_selector(".js-plotly-plot .main-svg", "svg => svg.style.background")


@pytest.fixture
def opened(chromium, tmp_path):
    contexts = []

    def open_page(result, *, width=1280, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(to_html(result), encoding="utf-8")
        phone = {"is_mobile": True, "has_touch": True, "device_scale_factor": 2} if width < 640 else {}
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **phone))
        page = contexts[-1].new_page()
        made = Opened(page)
        page.goto(file.as_uri())
        for place in page.locator("[data-figure]").all():  # wait_for_function would need eval, which the page forbids
            place.locator(".main-svg").first.wait_for(state="attached")
        return made

    yield open_page
    for context in contexts:
        context.close()


def test_every_result_is_drawn_without_a_complaint_and_fits_each_screen(opened, any_result, tmp_path):
    made = opened(any_result, width=360)
    for width, scheme in ((360, "light"), (1280, "light"), (1280, "dark")):
        made.page.set_viewport_size({"width": width, "height": 900})
        made.page.emulate_media(color_scheme=scheme)
        made.page.wait_for_timeout(150)  # figures take their new size
        wider = made.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0
        picture = tmp_path / f"report-{width}-{scheme}.png"
        made.page.screenshot(path=str(picture), full_page=True, scale="css")
        assert picture.stat().st_size > 10_000
    assert made.problems == []


def test_no_button_of_a_figure_sends_anything(opened, result_of):
    made = opened(result_of("tune"))
    for place in made.page.locator("[data-figure]").all():
        names = [each.get_attribute("data-title") for each in place.locator(".modebar-btn").all()]
        assert names == ["Download plot", "Reset axes"]


@pytest.mark.parametrize("name", ["hostile", "hostile estimate"])
def test_hostile_text_stays_text_under_the_pointer_too(opened, result_of, name):
    made = opened(result_of(name))
    for place in made.page.locator(".js-plotly-plot .nsewdrag").all():
        place.hover()
        made.page.wait_for_timeout(50)
    assert made.page.locator("img, main a:not([href^='#']), svg a[href*=evil]").count() == 0
    assert made.page.locator("script").count() == 4
    assert made.problems == []


def test_tabs_show_one_snippet_at_a_time_by_pointer_and_by_key(opened, result_of):
    made = opened(result_of("tune"))
    assert made.texts("[role=tab]") == [*view_of(result_of("tune")).settings, "Markdown"]
    assert "batch_size = 128" in made.page.locator("[role=tabpanel]:visible").inner_text()
    made.page.get_by_role("tab", name="JSON").click()
    assert '"micro_batch_size": 128' in made.page.locator("[role=tabpanel]:visible").inner_text()
    made.page.keyboard.press("ArrowRight")
    assert "## batchtune tune" in made.page.locator("[role=tabpanel]:visible").inner_text()
    made.page.keyboard.press("ArrowRight")  # round to the first
    assert "batch_size = 128" in made.page.locator("[role=tabpanel]:visible").inner_text()


def test_a_snippet_is_copied(opened, result_of):
    made = opened(result_of("tune"))
    made.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = made.page.locator("[role=tabpanel]:visible .copy")
    button.click()
    made.page.locator(".copy", has_text="Copied").wait_for()
    assert made.page.evaluate("navigator.clipboard.readText()").startswith("batch_size = 128\n")
    assert made.problems == []


def test_a_click_on_a_heading_sorts_a_second_turns_round_and_the_unmeasured_stay_last(opened, result_of):
    made = opened(result_of("tune"))
    made.page.locator("details:has(table.sortable) > summary").first.click()  # the single runs
    runs = made.page.locator("details table.sortable").first
    head = runs.locator("th", has_text="to target")
    column = head.evaluate("head => head.cellIndex")
    rows = "[...document.querySelector('details table.sortable').tBodies[0].rows]"
    read = f"{rows}.map(row => row.cells[{column}].textContent)"
    runs.locator("th", has_text="run").locator("button").click()
    assert made.page.evaluate(read) == ["30 s", "12 s", "9 s", "-", "-", "10 s", "110 s"]
    head.locator("button").click()
    assert made.page.evaluate(read) == ["9 s", "10 s", "12 s", "30 s", "110 s", "-", "-"]
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert made.page.evaluate(read) == ["110 s", "30 s", "12 s", "10 s", "9 s", "-", "-"]
    assert head.get_attribute("aria-sort") == "descending"


def test_figures_follow_the_colours_of_the_screen_and_paper_is_white(opened, result_of):
    def rgb(colour):
        return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"

    made = opened(result_of("tune"), scheme="dark")
    assert made.fill_of_plots() == rgb(DARK["card"])
    made.page.emulate_media(color_scheme="light")
    made.page.wait_for_timeout(100)
    assert made.fill_of_plots() == rgb(LIGHT["card"])
    made.page.emulate_media(color_scheme="dark", media="print")
    made.page.wait_for_timeout(100)
    assert made.fill_of_plots() == rgb(LIGHT["card"])
    assert made.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert [panel.is_visible() for panel in made.page.locator(".panel").all()].count(True) == 1
    widths = made.page.eval_on_selector_all(".main-svg", "all => all.map(svg => svg.getBoundingClientRect().width)")
    assert max(widths) <= 680  # the room on A4 and on letter


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_every_tab_stop_does_something(chromium, result_of, tmp_path, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="install '.[test]'").Axe()
    file = tmp_path / "report.html"
    file.write_text(to_html(result_of("tune")), encoding="utf-8")
    phone = {"is_mobile": True, "has_touch": True} if width < 640 else {}
    view = {"width": width, "height": 900}
    with chromium.new_context(viewport=view, color_scheme=scheme, bypass_csp=True, **phone) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        page.locator(".main-svg").last.wait_for(state="attached")
        found = axe.run(page)
        assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found.response["violations"]] == []
        idle = "all => all.filter(e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight).length"
        assert page.eval_on_selector_all("[tabindex='0']:not(button):not(a):not(svg *)", idle) == 0
        cut = "all => all.filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth).length"
        assert page.eval_on_selector_all("caption span", cut) == 0


def test_a_prediction_says_that_it_is_none_of_the_measurements(opened, result_of):
    made = opened(result_of("tune"))
    place = made.page.locator("[data-figure=landscape]")
    place.scroll_into_view_if_needed()
    assert "predicted time, s (response surface, 7 runs)" in place.locator(".legendtext").all_text_contents()
    assert place.locator(".contourlayer path").count() > 2
    area = place.locator(".nsewdrag").bounding_box()
    made.page.mouse.move(area["x"] + area["width"] * 0.3, area["y"] + area["height"] * 0.3)
    place.locator(".hoverlayer .hovertext").first.wait_for()
    assert "not measured" in " ".join(place.locator(".hoverlayer .hovertext").all_text_contents())
    assert made.problems == []


def test_it_reads_without_scripts(chromium, result_of, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(to_html(result_of("tune")), encoding="utf-8")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".panel").count() == len(view_of(result_of("tune")).settings) + 1
    assert all(panel.is_visible() for panel in page.locator(".panel").all())
    assert page.locator("h1").inner_text() == "digits"
    context.close()
