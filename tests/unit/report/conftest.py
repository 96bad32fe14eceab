"""Fixtures that several folders of tests share."""

from fixtures.reports import any_result, probe, probed, result_of, scaled, tuned  # noqa: F401
