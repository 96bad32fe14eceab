"""A result: the document, and how it shows itself in a terminal, a notebook, a page and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema

from batchtune.document import Document
from batchtune.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


class Result(Document):
    """The document that every command prints with --json and keeps as result.json."""

    def to_frame(self) -> pd.DataFrame:
        """The rows behind the answer: trials of a study, attempts of a probe, or estimates, one row each.

        Returns:
            A data frame whose columns are the JSON keys (curves are left out); counts are whole numbers, with or
            without gaps.
        """
        from batchtune.report.export.frame import frame_of

        return frame_of(self)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from batchtune.report.page.html import to_html

        return to_html(self)

    def plot_memory(self) -> go.Figure:
        """Peak memory against batch size, with the limit; UsageError where nothing was attempted."""
        return self._plot("memory")

    def plot_throughput(self) -> go.Figure:
        """Samples per second against batch size, with the fitted step time; UsageError where it was not measured."""
        return self._plot("throughput")

    def plot_sensors(self) -> go.Figure:
        """What the device's sensors said at each batch size; UsageError where there were none."""
        return self._plot("sensors")

    def plot_estimates(self) -> go.Figure:
        """The largest batch on each GPU as calculated; UsageError where nothing was estimated."""
        return self._plot("estimates")

    def plot_curves(self) -> go.Figure:
        """Learning curves against training time, with the target; UsageError where no run was evaluated."""
        return self._plot("curves")

    def plot_landscape(self) -> go.Figure:
        """The runs over batch size and learning rate; UsageError where there are fewer than two configurations."""
        return self._plot("landscape")

    def plot_efficiency(self) -> go.Figure:
        """Samples per second and per joule on each GPU as calculated; UsageError where no GPU's rates are known."""
        return self._plot("efficiency")

    def plot_step(self) -> go.Figure:
        """Memory over two training steps at the estimated batch; UsageError where nothing was estimated."""
        return self._plot("step")

    def _plot(self, name: str) -> go.Figure:
        from batchtune.report.figures.plots import figure

        drawn = figure(self, name)
        if drawn is None:
            raise UsageError(f"this {self.kind} result ({self.status}) has no measurements for plot_{name}()")
        return drawn

    def __rich__(self) -> object:
        from batchtune.report.terminal.report import render

        return render(self)

    def _repr_html_(self) -> str:
        from batchtune.report.page.html import notebook

        return notebook(self)


def result_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the result document."""
    return {"$schema": GenerateJsonSchema.schema_dialect} | Result.model_json_schema(by_alias=True)
