"""The rows behind a result's answer, as a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchtune.document import Document

if TYPE_CHECKING:
    import pandas as pd


def frame_of(document: Document) -> pd.DataFrame:
    """Trials of a study, attempts of a probe, or estimates, one row each; see `Result.to_frame`."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    if document.trials:
        rows = [trial.model_dump(exclude={"curve"}) for trial in document.trials]
    elif document.estimates:
        rows = [estimate.model_dump() for estimate in document.estimates]
    else:
        probes = document.probes or ([document.probe] if document.probe else [])
        rows = [{"precision": p.precision, **a.model_dump()} for p in probes for a in p.attempts]
    frame = pd.DataFrame(rows)
    for name in frame:
        values = [row[str(name)] for row in rows]
        known = [value for value in values if value is not None]
        if 0 < len(known) < len(values) and all(type(value) is int for value in known):
            frame[name] = pd.array(values, dtype="Int64")  # numpy's integers have no gaps, and floats lose digits
    return frame
