"""Fixtures that several folders of tests share."""

from fixtures.tasks import clean_imports, load, result_file  # noqa: F401
