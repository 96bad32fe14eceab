"""The page in a real Chromium: it draws, sorts, turns dark, prints, fits a phone, and nothing hostile in it runs."""

import io
import re
import shutil

import pytest

from batchtune.report.formats import to_html
from batchtune.report.theme import DARK, LIGHT
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

    def colour_of_rules(self):
        return self.page.eval_on_selector(".drawing .rule", "line => getComputedStyle(line).stroke")


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
        return made

    yield open_page
    for context in contexts:
        context.close()


def test_every_result_is_drawn_without_a_complaint_and_fits_each_screen(opened, any_result, tmp_path):
    made = opened(any_result, width=360)
    for width, scheme in ((360, "light"), (1280, "light"), (1280, "dark")):
        made.page.set_viewport_size({"width": width, "height": 900})
        made.page.emulate_media(color_scheme=scheme)
        wider = made.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0
        picture = tmp_path / f"report-{width}-{scheme}.png"
        made.page.screenshot(path=str(picture), full_page=True, scale="css")
        assert picture.stat().st_size > 10_000
    assert made.problems == []


def test_no_button_of_the_page_sends_anything(opened, result_of):
    made = opened(result_of("tune"))
    names = {*made.page.locator("button:not(th button)").all_inner_texts()}
    assert names == {"Copy", *view_of(result_of("tune")).settings, "Markdown"}
    assert made.page.locator("form, input, main a:not([href^='#'])").count() == 0


@pytest.mark.parametrize("name", ["hostile", "hostile estimate"])
def test_hostile_text_stays_text_under_the_pointer_too(opened, result_of, name):
    made = opened(result_of(name))
    for place in made.page.locator(".drawing [data-tip]").all():
        place.hover(force=True)
    assert made.page.locator(".tip").inner_text() != ""
    assert made.page.locator("img, main a:not([href^='#']), svg a[href*=evil]").count() == 0
    assert made.page.locator("script").count() == 1
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
    assert made.colour_of_rules() == rgb(DARK["rule"])
    made.page.emulate_media(color_scheme="light")
    assert made.colour_of_rules() == rgb(LIGHT["rule"])
    made.page.emulate_media(color_scheme="dark", media="print")
    assert made.colour_of_rules() == rgb(LIGHT["rule"])
    assert made.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


MARKS = """() => document.querySelectorAll('figure, .answer, .panel').forEach((each, at) => {
  for (const [place, sign] of [['prepend', 'begin'], ['append', 'end']]) {
    const mark = document.createElement('span');
    mark.textContent = `${sign}-${at}-mark`;
    each[place](mark);
  }
})"""


@pytest.mark.parametrize("name", ["tune", "probe", "estimate"])
def test_on_paper_no_figure_is_cut_and_one_snippet_shows(opened, result_of, name):
    pypdf = pytest.importorskip("pypdf", reason="install '.[test]'")
    made = opened(result_of(name))
    assert [panel.is_visible() for panel in made.page.locator(".panel").all()].count(True) == 1
    made.page.evaluate(MARKS)
    pages = pypdf.PdfReader(io.BytesIO(made.page.pdf(format="A4"))).pages
    texts = [page.extract_text() for page in pages]
    places = {mark: at for at, text in enumerate(texts) for mark in re.findall(r"(?:begin|end)-\d+-mark", text)}
    figures = len([mark for mark in places if mark.startswith("begin")])
    assert figures == made.page.locator("figure, .answer, .panel:visible").count() > 3
    assert all(places[f"begin-{mark[4:]}"] == at for mark, at in places.items() if mark.startswith("end-"))
    shown = " ".join(texts)
    assert all(title in shown for title in made.page.locator("section > h2").all_inner_texts())
    assert shown.count("Markdown") == 0 or name == "estimate"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["probe", "tune", "estimate", "tune, running"])
def test_axe_finds_nothing_and_every_tab_stop_does_something(chromium, result_of, tmp_path, name, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="install '.[test]'").Axe()
    file, (name, *running) = tmp_path / "report.html", name.split(", ")
    file.write_text(to_html(result_of(name), refresh_seconds=60 if running else None), encoding="utf-8")
    phone = {"is_mobile": True, "has_touch": True} if width < 640 else {}
    view = {"width": width, "height": 900}
    with chromium.new_context(viewport=view, color_scheme=scheme, bypass_csp=True, **phone) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        found = axe.run(page)
        assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found.response["violations"]] == []
        idle = "all => all.filter(e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight).length"
        assert page.eval_on_selector_all("[tabindex='0']:not(button):not(a):not(svg *)", idle) == 0
        cut = "all => all.filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth).length"
        assert page.eval_on_selector_all("caption span", cut) == 0


def test_the_page_of_a_run_shows_what_is_new_but_not_while_somebody_uses_it(chromium, result_of, tmp_path):
    file, result = tmp_path / "report.html", result_of("tune").model_copy(update={"status": "interrupted"})
    file.write_text(to_html(result, refresh_seconds=1, words="run 1"), encoding="utf-8")
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(file.as_uri())
        page.locator("summary").first.focus()
        file.write_text(to_html(result, refresh_seconds=1, words="run 2"), encoding="utf-8")
        page.wait_for_timeout(2500)
        assert page.get_by_text("run 1").count() == 1
        page.evaluate("document.activeElement.blur()")
        page.get_by_text("run 2").wait_for(timeout=20_000)


def test_what_a_point_says_shows_under_the_pointer_and_goes_with_it(opened, result_of):
    made = opened(result_of("probe"))
    made.page.locator("#figure-memory .open[data-tip]").first.hover()
    assert made.page.locator(".tip").inner_text() == "batch 176\npeak 1.5 GiB\n3 steps"
    made.page.locator("h1").hover()
    assert made.page.locator(".tip").is_hidden()
    assert made.problems == []


@pytest.mark.parametrize("name", ["probe", "tune", "estimate"])
def test_a_phone_s_first_screen_has_the_answer_and_what_to_paste(opened, result_of, name):
    made = opened(result_of(name), width=390)
    made.page.set_viewport_size({"width": 390, "height": 844})
    for each in ("#answer", "#paste .panel:visible pre"):
        box = made.page.locator(each).bounding_box()
        assert box["y"] + min(box["height"], 120) <= 844


def test_figures_take_the_width_of_the_screen_and_their_texts_keep_their_size(opened, result_of):
    made = opened(result_of("tune"), width=390)
    size = "text => text.getBoundingClientRect().height"
    small = made.page.eval_on_selector(".drawing text.middle", size)
    for width in (390, 1280):
        made.page.set_viewport_size({"width": width, "height": 900})
        assert made.page.eval_on_selector(".drawing text.middle", size) == pytest.approx(small, abs=1)
        beyond = """all => all.filter(text => {
          const [each, room] = [text, text.closest('section')].map(one => one.getBoundingClientRect());
          return each.right > room.right || each.left < room.left;
        }).length"""
        assert made.page.eval_on_selector_all(".drawing text", beyond) == 0


def test_it_reads_without_scripts(chromium, result_of, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(to_html(result_of("tune")), encoding="utf-8")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".panel").count() == len(view_of(result_of("tune")).settings) + 1
    assert all(panel.is_visible() for panel in page.locator(".panel").all())
    assert page.locator("h1").inner_text() == "digits"
    assert page.locator("figure .drawing").count() == 5
    assert page.locator("figure .dot title").count() > 10
    context.close()
