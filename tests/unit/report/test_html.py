"""The HTML page: one file, offline, with what the result holds and no more, harmless whatever a run is called."""

import base64
import contextlib
import copy
import functools
import hashlib
import re
import sys
from html.parser import HTMLParser

import documents
import pytest
from documents import HOSTILE
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from batchtune.report.formats import to_html
from batchtune.result import Result
from batchtune.run_folder import RunFolder

ELEMENTS = set(
    re.findall(
        r"\w+",
        "html head meta title link style body header main footer section p h1 h2 h3 strong span b small a dl div dt dd "
        "pre code figure figcaption details summary table caption thead tbody tr th td ul li svg rect line "
        "circle path text i script",
    )
)


class Page(HTMLParser):
    """What a browser would find in a page: its elements, their attributes, the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.shown, self._inside = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1][1] += data
        elif self._inside != "style":
            self.shown.append(data)

    @property
    def texts(self):
        """What is shown, without the blanks between elements."""
        return [text.strip() for text in self.shown if text.strip()]


@functools.cache
def page_of(name):
    """The page of a named document, drawn once for all that is asked about it."""
    return to_html(documents.result(name))


@functools.cache
def read(name):
    """The same page as a browser would find it."""
    return Page(page_of(name))


@pytest.fixture(params=list(documents.DOCUMENTS))
def page_name(request):
    return request.param


@pytest.fixture
def page(page_name):
    return read(page_name)


def headings(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_the_page_is_one_file_that_fetches_nothing(tuned):
    page = to_html(tuned)
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page) == []


def test_the_recommendation_and_its_reason_come_before_the_evidence(tuned):
    page = to_html(tuned)
    assert page.index(tuned.recommendation.reason[1:20]) < page.index("<table")


def test_a_probe_draws_its_certificate(probed):
    assert f"{probed.probe.max_batch_size:,}" in to_html(probed)


def test_hostile_text_appears_as_text_only():
    page = page_of("hostile")
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_every_kind_and_state_of_a_result_makes_a_page_of_known_elements_only(page):
    assert {name for name, _ in page.elements} <= ELEMENTS
    handlers = [key for _, attributes in page.elements for key in attributes if key.startswith("on") or key == "style"]
    assert handlers == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_links_lead_to_places_on_the_page_only(page):
    targets = [attributes["href"] for name, attributes in page.elements if name == "a"]
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert all(target.startswith("#") and target[1:] in ids for target in targets)


def test_only_the_page_s_own_scripts_may_run_each_named_by_its_hash(page):
    policy = next(each["content"] for name, each in page.elements if name == "meta" and "http-equiv" in each)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    running = [text for attributes, text in page.scripts if "type" not in attributes]
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running] == allowed
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def texts(part):
    """Every text of a document: the place that holds it and its key there."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, str):
            yield part, key
        elif isinstance(value, dict | list):
            yield from texts(value)


@functools.cache
def free(name):
    """The numbers of the texts of a document that may say anything, unlike those that are one of a few words."""
    document, found = copy.deepcopy(documents.DOCUMENTS[name]), []
    for number, (place, key) in enumerate(texts(document)):
        kept, place[key] = place[key], "anything"
        with contextlib.suppress(ValidationError):
            Result.model_validate(document)
            found.append(number)
        place[key] = kept
    return set(found)


PIECES = [
    "<script>",
    "</script>",
    "<!--",
    "-->",
    "]]>",
    "'",
    '"',
    "&lt;",
    "<svg onload=x>",
    "javascript:x",
    "${x}",
    "{{x}}",
]
PIECES += [
    "</style>",
    "</title>",
    "\x00",
    "\u2028",
    "\ud800",
    "%{x}",
    "`",
    "<b>",
    "<a href=//evil>",
    "\n",
    "\x1b[31m",
    "x" * 3000,
]


@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(["tune", "probe", "estimate", "failed at once"]), st.lists(st.sampled_from(PIECES), max_size=4))
def test_no_text_in_any_field_of_a_result_can_become_a_part_of_the_page(name, pieces):
    document = copy.deepcopy(documents.DOCUMENTS[name])
    changed = [each for number, each in enumerate(texts(document)) if number in free(name)]
    assert len(changed) >= 4
    for place, key in changed:
        place[key] = "".join(pieces)
    result = Result.model_validate(document)
    plain = read(name)
    for text in (to_html(result), result._repr_html_()):
        page = Page(text)
        assert {element for element, _ in page.elements} <= ELEMENTS
        assert [
            key for _, attributes in page.elements for key in attributes if key.startswith("on") or key == "style"
        ] == []
        assert all(each.get("href", "#").startswith(("#", "data:")) for _, each in page.elements)
        running = [text for attributes, text in page.scripts if "type" not in attributes]
        assert set(running) <= {text for attributes, text in plain.scripts if "type" not in attributes}


@pytest.mark.parametrize("name", ["hostile", "hostile estimate"])
def test_hostile_text_is_readable_as_it_was_written(name):
    assert HOSTILE in "".join(read(name).texts)


@pytest.mark.parametrize("name", ["hostile", "hostile estimate"])
def test_hostile_text_is_harmless_in_a_notebook(result_of, name):
    assert {element for element, _ in Page(result_of(name)._repr_html_()).elements} <= ELEMENTS


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "tune",
            [
                "3× as fast as today (2.7 to 3.3 over 1 fresh seed)",
                "10 s (9 to 11)",
                "30 s (27 to 33)",
                "Reaches the target 3 times",
            ],
        ),
        ("tune without a baseline", ["train with", "10 s (9 to 11)"]),
        ("probe at two precisions", ["bf16: largest batch 176 ran 20 steps", "fp32: largest batch 176"]),
        ("probe where nothing fits", ["failed: nothing fits", "At bf16: out of memory at batch 1."]),
        ("estimate", ["each GPU at bf16, estimated, not measured", "RTX 4090 24.0 GiB 260 290", "high ±4%"]),
        ("failed at once", ["failed: model.py: no build_model"]),
        ("interrupted in its study", ["interrupted", "176 is the largest"]),
    ],
)
def test_a_notebook_shows_the_answer_of_every_kind_and_state(result_of, name, said):
    shown = " ".join(Page(result_of(name)._repr_html_()).texts)
    assert [text for text in said if text not in shown] == []


@pytest.mark.parametrize(("name", "figures"), [("tune", 2), ("probe", 2), ("estimate", 2), ("failed at once", 0)])
def test_a_notebook_shows_warnings_and_the_first_figures_small_and_without_scripts(result_of, name, figures):
    text = result_of(name, warnings=["the GPU was shared"])._repr_html_()
    page = Page(text)
    assert "the GPU was shared" in page.texts
    assert [tag for tag, _ in page.elements].count("figure") == figures
    assert page.scripts == []
    assert len(text) < 60_000


def test_a_notebook_shows_the_metric_where_no_time_counts(result_of):
    best = documents.choice(128, 0.004, 1.0, "best", time_to_target_seconds=None)
    best["value"] = {"median": 0.41, "low": 0.4, "high": 0.43}
    shown = Page(result_of("tune", recommendation=best, baseline=None)._repr_html_()).texts
    assert shown[shown.index("val_loss") + 1] == "0.41 (0.40 to 0.43)"


@pytest.mark.parametrize(("name", "figure"), [("tune", "3×"), ("probe", "176"), ("estimate", "3")])
def test_a_notebook_begins_with_the_answer(result_of, name, figure):
    assert [text for text in Page(result_of(name)._repr_html_()).texts if "{" not in text][1] == figure


def test_a_notebook_counts_the_estimates_that_it_leaves_out(result_of):
    row = documents.estimate("H200", 141)
    shown = " ".join(Page(result_of("estimate", estimates=[row] * 25)._repr_html_()).texts)
    assert shown.partition("Largest batch on each GPU, estimated")[0].count("H200") == 20
    assert "5 more are in to_frame()." in shown


def test_a_study_reads_from_the_answer_to_the_circumstances(result_of):
    page = to_html(result_of("tune", warnings=["the GPU was shared"]))
    assert "3×" in page
    assert "as fast as today (2.7 to 3.3 over 1 fresh seed)" in page
    order = ["Paste", "Time to target", "Certificate", "Figures", "Runs", "Throughput", "Attempts"]
    assert headings(page) == [*order, "Warnings", "Environment"]


def test_the_certificate_names_both_sides_and_the_proof():
    shown = " ".join(read("probe").texts)
    assert "177 (out of memory)" in shown
    assert "ran 20 steps, then evaluation and saving, in a fresh process" in shown
    assert "1.5 GiB (97.5% of the limit)" in shown
    assert "6, of which 2 failed" in shown


def test_an_estimate_says_that_it_is_one():
    page = page_of("estimate")
    assert "Calculated, not measured" in page
    assert headings(page) == ["Paste", "Figures", "Estimates", "Memory", "Environment"]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("tune", ["curves", "landscape", "memory", "throughput", "sensors"]),
        ("probe", ["memory", "throughput", "sensors"]),
        ("probe without sensors", ["memory", "throughput"]),
        ("probe where nothing fits", ["memory"]),
        ("estimate", ["estimates", "efficiency", "step"]),
    ],
)
def test_figures_without_measurements_are_left_out(name, drawn):
    page = read(name)
    assert [each["id"] for name, each in page.elements if name == "figure"] == [f"figure-{name}" for name in drawn]
    assert sum(each.get("role") == "img" for _, each in page.elements) == len(drawn)


def test_a_page_is_small_and_needs_no_plotly(monkeypatch, page_name):
    monkeypatch.setitem(sys.modules, "plotly", None)
    page = to_html(documents.result(page_name))
    assert len(page.encode()) < 400_000
    assert "plotly" not in page.lower()


def test_a_study_of_many_long_runs_still_has_a_page_that_opens(result_of):
    trials = []
    for number in range(600):
        about = documents.DOCUMENTS["tune"]["trials"][number % 7] | {"number": number}
        points = [{"seconds": float(at), "step": at, "samples": at, "value": 9.0 / at} for at in range(1, 100)]
        trials.append(about | {"curve": points})
    page = to_html(result_of("tune", trials=trials))
    assert len(page.encode()) < 400_000
    assert "500 more are in to_frame()." in page


def test_rows_of_the_recommended_configuration_are_marked():
    assert page_of("tune").count('<tr class="best">') == 3  # as a configuration, and both of its runs


def test_a_run_folder_has_the_report_once_it_is_closed(result_of, tmp_path):
    folder = RunFolder("digits", tmp_path)
    folder.open()
    folder.write_result(result_of("tune", status="interrupted"))
    folder.write_result(result_of("tune"))
    assert not (folder.path / "report.html").exists()
    folder.close()
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert '<span class="status complete">' in page
    assert "interrupted" not in Page(page).texts


def test_a_report_that_cannot_be_made_costs_nobody_the_run(result_of, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("no ink")

    monkeypatch.setattr("batchtune.report.formats.to_html", fail)
    folder = RunFolder("digits", tmp_path)
    folder.open()
    result = result_of("tune")
    folder.write_result(result)
    (folder.path / "report.html").write_text("an earlier one, which is no page of this result")
    with pytest.warns(UserWarning, match=r"report\.html was not written: no ink"):
        folder.close()
    assert (folder.path / "result.json").exists()
    assert not (folder.path / "report.html").exists()


def test_what_all_estimates_have_to_note_stands_on_the_page_once(result_of):
    rows = [row.model_dump() | {"notes": ["convolutions differ"]} for row in result_of("estimate").estimates]
    page = result_of("estimate", estimates=rows * 2).to_html()
    assert page.count("note: convolutions differ") == 1


def test_times_on_several_devices_are_marked_as_estimates_beyond_the_one_that_ran(scaled):
    _, _, after = to_html(scaled).partition("<h2>Several devices</h2>")
    section = after.partition("</section>")[0]
    assert (section.count("estimated"), section.count("measured")) == (3, 1)
    assert "15.1 s" in section
    assert "communication takes 50 ms" in section


def test_the_answer_of_a_study_of_energy_is_the_saving():
    page = read("tune of energy")
    answer = " ".join(page.texts).partition("Figures")[0]
    assert "3× less energy than today (2.5 to 3.5 over 1 fresh seed)" in answer
    assert answer.index("Energy to target") < answer.index("Time to target")
    assert "3,000 J" in answer
    assert "energy" in page.texts  # a column of the runs


def test_runs_without_an_energy_counter_have_no_such_column():
    assert "energy" not in read("tune").texts


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        ([documents.attempt(1, "oom")], "nothing fits"),
        ([documents.attempt(1, "user_error")], "nothing trains"),
        ([documents.attempt(8), documents.attempt(8, "oom", purpose="verify")], "nothing passed the final check"),
    ],
)
def test_the_page_says_as_the_terminal_does_why_there_is_no_batch(result_of, attempts, said):
    probe = {"precision": "bf16", "attempts": attempts}
    shown = " ".join(Page(to_html(result_of("probe where nothing fits", probe=probe))).texts)
    answer = shown.partition("Certificate")[0]
    assert said in answer
    assert "of the sizes tried fits" not in answer


def test_a_notebook_has_a_row_for_each_fact_whatever_the_metric_is_called(result_of):
    target = {"metric": "precision", "goal": "maximize"}
    best = documents.choice(128, 0.004, 1.0, "best", time_to_target_seconds=None)
    best["value"] = {"median": 0.9, "low": 0.8, "high": 0.95}
    shown = Page(result_of("tune", target=target, recommendation=best, baseline=None)._repr_html_()).texts
    table = shown[: shown.index("Learning curves against training time")]
    rows = [table[place + 1] for place, text in enumerate(table) if text == "precision"]
    assert rows == ["bf16", "0.90 (0.80 to 0.95)"]
