"""A notebook in a real Jupyter kernel: progress in one place under the cell, and results that show themselves."""

import re

import pytest

from tests.conftest import LINEAR

nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed; install '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="Jupyter is not installed; install '.[test]'")

CELLS = (
    "import batchtune\nresult = batchtune.probe('linear.py', device='cpu', max=8)",
    "result",
    """
import torch
model = torch.nn.Linear(8, 1)

@batchtune.find_batch_size(max=8, device="cpu")
def step(batch_size):
    model(torch.randn(batch_size, 8)).sum().backward()

step.batch_size
""",
    "result.plot_memory()",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell shows."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "linear.py").write_text(LINEAR, encoding="utf-8")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_probe_shows_its_progress_in_one_place(outputs):
    (shown,) = [each for each in outputs[0] if each.output_type == "display_data"]
    assert "timing" in shown.data["text/html"]
    assert [each for each in outputs[0] if each.output_type == "stream"] == []


def test_a_result_shows_itself_with_its_answer(outputs):
    (shown,) = outputs[1]
    assert "8 is the largest" in re.sub("<[^>]+>", "", shown.data["text/html"])


def test_find_batch_size_is_a_decorator_there_too(outputs):
    assert outputs[2][-1].data["text/plain"] == "8"


def test_a_plot_is_drawn(outputs):
    (shown,) = outputs[3]
    assert shown.data["application/vnd.plotly.v1+json"]["data"]
