"""Fixtures that several folders of tests share."""

from fixtures.training import fake_device, make_linear_task  # noqa: F401
