"""One reading of a result: what the view holds, every report shows, and the codes in it are put into words once."""

import io
import shlex
from html.parser import HTMLParser

import documents
import pytest
from documents import probed, trial, tuned
from rich.console import Console

from batchtune.config.load import config_of_task
from batchtune.config.probe import typed_options
from batchtune.document import ProbeResult
from batchtune.report.formats import to_markdown
from batchtune.report.terminal import render
from batchtune.report.view import probe as probe_view
from batchtune.report.view.model import Column, Table, byte_sizes, counts, numbers
from batchtune.report.view.read import view_of
from batchtune.report.view.settings import UNCHECKED, is_checked, to_train_with
from batchtune.report.view.words import certificate, certificate_facts
from batchtune.result import Result
from batchtune.units import number


class Cells(HTMLParser):
    """The tables of a page: a list of rows each, the heading's first."""

    def __init__(self, text):
        super().__init__()
        self.tables, self._inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = tag in {"td", "th"} or (self._inside and tag == "span")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in {"td", "th"}

    def handle_data(self, data):
        if self._inside:
            self.tables[-1][-1][-1] += data


def rows_of(made):
    return [
        [column.name for column in made.columns],
        *map(list, zip(*(each.cells for each in made.columns), strict=True)),
    ]


def test_the_page_has_every_row_of_every_table_of_the_view(any_result):
    expected = [rows_of(made) for section in view_of(any_result).sections for made in section.tables]
    assert Cells(any_result.to_html()).tables == expected


def test_a_verbose_terminal_has_every_cell_of_the_same_tables(any_result):
    page = io.StringIO()
    Console(file=page, width=400).print(render(any_result, verbose=True))
    shown = " ".join(page.getvalue().split())
    for section in view_of(any_result).sections:
        for made in section.tables:
            for column in made.columns:
                cells = column.lined_up or column.cells
                told = [cell for cell in cells if not column.drawn]
                assert [cell for cell in told if " ".join(cell.split())[:90] not in shown] == []


def test_markdown_has_the_tables_of_a_summary_and_no_others(any_result):
    text = to_markdown(any_result)
    titles = {made.title: made.summary for section in view_of(any_result).sections for made in section.tables}
    for title, summary in titles.items():
        assert (" ".join(title.split())[1:] in text) is summary


def test_columns_in_which_nothing_is_known_are_no_columns():
    made = Table("rows", [Column("name", ["a", "b"]), Column("note", ["", "-"]), byte_sizes("peak", [None, None])])
    assert [column.name for column in made.columns] == ["name"]


def test_a_column_of_figures_has_them_alone_and_in_one_unit():
    column = byte_sizes("peak", [3 << 20, None, 5 << 30])
    assert (column.cells, column.unit, column.lined_up) == (
        ["3 MiB", "-", "5.0 GiB"],
        "GiB",
        ["0.00293", "-      ", "5      "],
    )
    assert numbers("power", [88.0, None], unit="W").cells == ["88 W", "-"]
    assert counts("batch", [1024, None]).cells == ["1,024", "-"]


def test_settings_that_no_fresh_process_checked_say_so_whatever_the_words(result_of):
    result = result_of("probe")
    open_ended = result.probe.model_copy(update={"verified_in_fresh_process": False})
    unchecked = result.model_copy(update={"probe": open_ended})
    assert (is_checked(result), is_checked(unchecked)) == (True, False)
    assert to_train_with(unchecked).reason == UNCHECKED
    assert is_checked(result_of("tune").model_copy(update={"probe": open_ended}))


def test_a_code_of_a_later_version_is_shown_as_it_is(result_of):
    probe = ProbeResult(precision="fp8", max_batch_size=4)
    (certificate,) = view_of(result_of("probe", probe=probe.model_dump())).certificates
    assert (certificate.precision, certificate.largest) == ("fp8", "4")
    assert certificate.proof == "not yet checked in a fresh process"


def test_what_is_not_confirmed_has_no_ratio_but_the_command_that_confirms_it(result_of):
    found = result_of("tune").recommendation
    command = "batchtune tune .batchtune/digits/config.yaml confirm.seeds=3"
    few = {"speedup_over_baseline": None, "seeds_to_confirm": 3, "confirm_command": command, "reason": "not confirmed"}
    view = view_of(result_of("tune", recommendation=found.model_dump(exclude_none=True) | few))
    assert view.headline.figure == "not confirmed"
    assert "×" not in view.headline.words + view.headline.reason
    assert ("to confirm", command) in [(line.name, line.text) for line in view.commands]


def test_what_a_cpus_answer_keeps_back_is_told_with_its_certificate():
    probe = ProbeResult.model_validate(probed())
    checked = probe.attempts[-1].model_copy(update={"kept_back_bytes": 12 << 20})
    kept = probe.model_copy(update={"attempts": [*probe.attempts[:-1], checked]})
    assert {fact.name: fact.text for fact in certificate_facts(kept)}["kept back"].startswith("12 MiB, as the same")
    assert "kept back" not in {fact.name for fact in certificate_facts(probe)}


def test_a_size_that_fitted_with_too_little_room_for_other_processes_is_not_said_to_have_failed():
    probe = ProbeResult.model_validate(probed())
    assert f"{probe.first_failing_batch_size:,} did not (oom)" in certificate(probe)
    near = [each.model_copy(update={} if each.fits else {"kept_back_bytes": 12 << 20}) for each in probe.attempts]
    told = certificate(probe.model_copy(update={"attempts": near}))
    assert f"{probe.first_failing_batch_size:,} may not in every process (oom)" in told


def test_a_larger_size_that_fitted_once_is_told_beside_the_answer():
    probe = ProbeResult.model_validate(probed())
    larger = probe.attempts[-1].model_copy(update={"batch_size": 2 * probe.max_batch_size, "purpose": "search"})
    with_it = probe.model_copy(update={"attempts": [*probe.attempts, larger]})
    assert f"{2 * probe.max_batch_size:,} fitted in one process, and others may need more" in certificate(with_it)
    assert "in one process" not in certificate(probe)


def test_runs_that_were_cut_off_count_as_no_fresh_seeds():
    document = tuned()
    whole = view_of(Result.model_validate(document)).headline.words
    cut_off = trial(99, 128, 0.004, None, role="confirm", state="fail", value=None)
    document["trials"].append(cut_off | {"message": "budget.total was used up"})
    assert view_of(Result.model_validate(document)).headline.words == whole
    assert "fresh seed" in whole


def test_what_an_estimate_says_to_run_next_asks_for_the_same(result_of):
    asked = "--precision fp32 --memory-limit 4GiB --accumulation 2 --world-size 2 --strategy fsdp"
    (there,) = view_of(result_of("estimate", options=asked)).commands
    assert there.text == f"batchtune probe model.py {asked.replace('--world-size', '--nproc-per-node')}"
    many = [documents.estimate(f"GPU {each}", each) for each in range(1, 12)]
    more, _ = view_of(result_of("estimate", options=asked, estimates=many)).commands
    assert more.text == f"batchtune estimate model.py {asked} --gpu A100-80GB"


def test_what_a_probe_was_asked_with_is_kept_as_it_is_typed():
    typed = "--precision bf16 --memory-limit 3072MiB --margin 0.1 --device cuda:1"
    assert typed_options(("bf16",), 3 << 30, 0.1, "cuda:1") == typed
    assert typed_options(("bf16", "fp32"), 5000000001, 0.05, "auto") == "--memory-limit 5000000001"
    assert typed_options(("auto",), None, 0.05, "auto") is typed_options(("all",), None, 0.05, "auto") is None


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        (None, {}),
        (
            "--precision bf16 --memory-limit 3072MiB --margin 0.1 --device cuda:1",
            {"precision": "bf16", "memory.limit": 3 << 30, "memory.margin": 0.1, "device": "cuda:1"},
        ),
        ("--memory-limit 5000000001", {"memory.limit": 5000000001}),
        ("of another --version", {}),
    ],
)
def test_what_a_probe_says_to_run_next_asks_for_the_same_in_words_that_tune_takes(result_of, asked, keys):
    ((text, *_),) = [(fact.text,) for fact in view_of(result_of("probe", options=asked)).commands]
    assert text.startswith("batchtune tune model.py")
    given = ["baseline.batch_size=8", "baseline.learning_rate=0.1"]
    config = config_of_task("model.py", "model", [*given, *shlex.split(text)[3:]], environment={})
    found = {"precision": config.precision, "memory.limit": config.memory.limit, "memory.margin": config.memory.margin}
    found |= {"device": config.device}
    usual = {"precision": "auto", "memory.limit": None, "memory.margin": 0.05, "device": "auto"}
    assert found == usual | keys


@pytest.mark.parametrize(("others", "sign", "cell"), [(0.41, "≥ ", "41%"), (0.05, "", None), (None, "", None)])
def test_a_speed_beside_other_programs_is_a_least_one(others, sign, cell):
    made = probed()
    fastest = max(made["throughput"], key=lambda point: point["samples_per_second"])
    fastest["processors_used_by_others"] = others
    found = ProbeResult(**made)
    choice = {fact.name: fact.text for fact in probe_view.headline(found).choice}
    speed = f"{number(fastest['samples_per_second'])} samples/s at batch {fastest['batch_size']}"
    assert choice["best speed"] == sign + speed
    cells = {column.name: column.cells for column in probe_view.throughput(found).columns}.get("other programs")
    assert cells == (cell and [cell if point is fastest else "-" for point in made["throughput"]])
