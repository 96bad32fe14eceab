"""Each error a user can meet has the exit code that the README documents."""

import pytest

from batchtune import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.BatchtuneError, 1),
        (errors.UsageError, 2),
        (errors.UserCodeError, 3),
        (errors.NothingFitsError, 4),
        (errors.DeviceError, 5),
        (errors.RunInterrupted, 130),
    ],
)
def test_every_error_has_its_exit_code_and_says_what_it_was_told(kind, code):
    error = kind("no such file")
    assert (error.exit_code, str(error), error.result) == (code, "no such file", None)
    assert isinstance(error, errors.BatchtuneError)


def test_an_error_of_the_users_code_carries_their_frames():
    assert errors.UserCodeError("compute_loss raised", 'File "model.py"').frames == 'File "model.py"'
