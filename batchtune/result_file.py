"""Result documents on disk: read back with a clear word on what is wrong, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from pydantic import ValidationError

from batchtune import __version__
from batchtune.errors import UsageError
from batchtune.results import SCHEMA_VERSION, Result


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result document from a JSON file or a run folder.

    Raises:
        UsageError: there is none, it is not one, or a newer batchtune wrote it.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "result.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file}: no such result; run 'batchtune probe' or 'batchtune tune' first") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not a JSON document ({str(error)[:100]})") from None
    name, _, version = str(document.get("schema", "") if isinstance(document, dict) else "").partition("/")
    if name != "batchtune.result":
        raise UsageError(f"{file}: not a batchtune result (its 'schema' is not batchtune.result/{SCHEMA_VERSION})")
    number = int(version[:9]) if version.isascii() and version.isdigit() else 0
    if number > SCHEMA_VERSION:
        raise UsageError(
            f"{file}: a newer batchtune wrote it (schema {number}); this is {__version__}, which reads schema "
            f"{SCHEMA_VERSION}: upgrade batchtune to read it"
        )
    if number != SCHEMA_VERSION:
        raise UsageError(f"{file}: 'schema' is batchtune.result/{version[:20]}, and there never was such a version")
    try:
        return Result.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: {where}: {first['msg']} ({error.error_count()} problem(s) in all)") from None


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one move, so that a reader or a crash never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
