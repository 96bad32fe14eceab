"""Fixtures that several folders of tests share."""

from fixtures.reports import any_result, probe, result_of, tuned  # noqa: F401
