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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql+psycopg://you:secret@host:5432/studies", "postgresql+psycopg://you:***@host:5432/studies"),
        ("mysql://you:p@ss:w@host/studies", "mysql://you:***@host/studies"),
        ("mysql://you:a/b@host/studies", "mysql://you:***@host/studies"),  # SQLAlchemy takes this for a password
        ("mysql://:secret@host/studies", "mysql://:***@host/studies"),
        (
            "postgresql://host/studies?user=you&Password=secret&sslmode=on",
            "postgresql://host/studies?user=you&Password=***&sslmode=on",
        ),
        ("'storage=mysql://you:secret@host' is wrong", "'storage=mysql://you:***@host' is wrong"),
        ("postgresql://you@host/studies", "postgresql://you@host/studies"),
        ("postgresql://host:5432/studies", "postgresql://host:5432/studies"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
        ("see https://example.org/a?b=c: you@example.org", "see https://example.org/a?b=c: you@example.org"),
    ],
)
def test_no_password_of_a_url_is_shown(text, shown):
    assert errors.without_passwords(text) == shown
    assert str(errors.UsageError(text)) == shown


def test_a_text_made_to_take_long_does_not():
    assert len(errors.without_passwords("://a:" * 20_000)) == 100_000


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.UsageError("9 bytes is more", setting="memory_limit"), "memory.limit 9 bytes is more"),
        (errors.DeviceError("tpu9: no such device", setting="device"), "device tpu9: no such device"),
        (errors.NothingFitsError("nothing fits; a larger --memory-limit"), "nothing fits; a larger memory.limit"),
        (errors.UsageError("--lengths auto: no sample_length"), "batch_size.unit tokens: no sample_length"),
        (errors.UsageError("--devices 2"), "--devices 2"),
    ],
)
def test_who_has_a_configuration_is_told_of_its_keys(error, told):
    found = error.in_configuration()
    assert (type(found), str(found)) == (type(error), told)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("--no-oom x y: must be True", "no_oom=x y: must be True"),
        ("--gpu RTX: says too little. '--gpu all' lists", "gpus=RTX: says too little. 'gpus=all' lists"),
        ("start over with --no-oom; --no-oomph is none", "start over with no_oom=True; --no-oomph is none"),
        ("m.py: needs --lengths: 'batchtune probe --gpu 3'", "m.py: needs --lengths: 'batchtune probe --gpu 3'"),
        ("a search ends there: --gpu looks for more", "a search ends there: gpus looks for more"),
        ("--gpu 3: m.py raised ValueError: --gpu 3 --no-oom", "gpus=3: m.py raised ValueError: --gpu 3 --no-oom"),
        ("--set lr=3: not here", "--set lr=3: not here"),
        ("use --gpu cpu", "use gpus=cpu"),
    ],
)
def test_who_has_called_a_function_is_told_of_its_arguments(told, said):
    error = errors.UserCodeError(told, "frames")
    error.say_arguments({"--gpu": "gpus", "--no-oom": "no_oom=True"})
    assert (str(error), error.detail, error.frames) == (said, said, "frames")


def test_what_is_advised_behind_the_users_words_names_arguments_too():
    names = {"--min": "min", "--precision": "precision"}
    error = errors.UserCodeError("m.py raised ValueError: --min 3", "frames", " (others by --min)")
    error.say_arguments(names)
    assert str(error) == "m.py raised ValueError: --min 3 (others by min)"
    half = errors.HalfPrecisionError(f"m.py raised RuntimeError: --min 3.{errors.HalfPrecisionError.remedy}")
    half.say_arguments(names)
    assert str(half).startswith("m.py raised RuntimeError: --min 3. Take ")
    assert str(half).endswith("or use precision=fp32 (in a configuration precision: fp32)")


@pytest.mark.parametrize(
    ("value", "kind"), [(3, "an int"), ("", "a str"), (None, "a NoneType"), (OSError(), "an OSError")]
)
def test_a_kind_of_value_has_its_article(value, kind):
    assert errors.kind_of(value) == kind
