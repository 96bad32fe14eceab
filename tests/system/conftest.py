"""Fixtures that several folders of tests share."""

from fixtures.heartbeats import listen  # noqa: F401
from fixtures.quick import as_forks, new_quick_cli, quick_cli  # noqa: F401
