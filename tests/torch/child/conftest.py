"""Fixtures that several folders of tests share."""

from fixtures.heartbeats import listen  # noqa: F401
from fixtures.training import fake_device, make_linear_task  # noqa: F401
