"""A probe or an estimate of inference: every report says what it is, and none takes its batch for one to train with."""

import io

import documents
import pytest
from rich.console import Console

from batchtune.errors import UsageError
from batchtune.report.formats import FORMATS, notebook
from batchtune.report.terminal import render
from batchtune.report.view.read import view_of
from batchtune.report.view.settings import pytorch, to_train_with
from batchtune.report.view.trainers import EXPORTS


def in_terminal(result):
    console = Console(file=io.StringIO(), width=400)
    console.print(render(result, verbose=True))
    return console.file.getvalue()


REPORTS = {"terminal": in_terminal, "notebook": notebook} | {name: FORMATS[name] for name in ("markdown", "html")}


@pytest.fixture
def inference(result_of):
    return result_of("probe", probe=documents.probed() | {"inference": True})


@pytest.fixture
def estimated(result_of):
    rows = result_of("estimate").model_dump()["estimates"]
    return result_of("estimate", estimates=[row | {"inference": True} for row in rows])


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_says_that_it_is_inference_and_names_no_training(inference, report):
    text = REPORTS[report](inference)
    assert "inference batch" in text
    assert "an 20 forward passes" in text  # a sentence in a notebook begins with it
    assert "inference throughput at bf16" in text.lower()
    for of_training in ("size that trains", "evaluation and saving", "accumulation_steps", "train_batch_size"):
        assert of_training not in text


def test_the_document_has_a_key_for_it_and_those_of_training_do_not(inference, result_of):
    assert '"inference": true' in inference.to_json()
    assert '"inference"' not in result_of("probe").to_json()


def test_it_is_no_batch_to_train_with(inference):
    assert to_train_with(inference) is None
    assert pytorch(inference).startswith("evaluation_batch_size = 176  # the largest under torch.inference_mode()")
    for export in EXPORTS.values():
        with pytest.raises(UsageError, match="is of inference: it has no batch to train with; probe without --inf"):
            export.text(inference)


@pytest.mark.parametrize("report", ["terminal", "markdown", "html"])
def test_an_estimate_says_so_too(estimated, report):
    text = REPORTS[report](estimated)
    assert "inference batch on each gpu" in text.lower()
    assert "could train it" not in text


def test_what_an_estimate_says_to_run_next_is_of_inference_too(estimated, result_of):
    assert view_of(estimated).commands[-1].text == "batchtune probe model.py --inference"
    assert view_of(result_of("estimate")).commands[-1].text == "batchtune probe model.py"
