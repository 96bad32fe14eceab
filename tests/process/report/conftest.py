"""Fixtures that several folders of tests share."""

from fixtures.reports import probe, tuned  # noqa: F401
