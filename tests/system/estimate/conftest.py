"""A child process that traces task files."""

from fixtures.tracing import _children_are_forks, ask, child  # noqa: F401
