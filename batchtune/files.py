"""Result documents on disk: read back with a clear word on what is wrong, written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

from pydantic import ValidationError

from batchtune.document import SCHEMA_VERSION
from batchtune.errors import UsageError
from batchtune.result import Result
from batchtune.version import __version__

MAX_BYTES = 128 << 20  # 600 trials that were evaluated 1200 times each have some 110 million
_MAX_BYTES_OF_A_PIPE = 64 << 20  # which does not say how long it is


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result document from a JSON file or a run folder.

    Raises:
        UsageError: there is none, it is not one, or a newer batchtune wrote it.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "result.json"
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size or _MAX_BYTES_OF_A_PIPE
            content = stream.read(size + 1) if size <= MAX_BYTES else b""
        if not len(content) <= size <= MAX_BYTES:
            raise UsageError(f"{file}: larger than {min(size, MAX_BYTES) >> 20} MiB; this is no result")
        document = json.loads(content.decode("utf-8"))
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with temporary.open("x", encoding="utf-8") as stream:  # a new file or none, and as private as the umask has it
        try:
            if path.exists():
                shutil.copymode(path, temporary)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
