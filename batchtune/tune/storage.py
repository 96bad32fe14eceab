"""Where a study is kept: a journal in the run folder, mended after a kill, or a storage of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from batchtune.errors import UsageError


def open_storage(storage: str | None, folder: Path) -> BaseStorage:
    """The study's storage: a journal in the run folder, or the user's own.

    Raises:
        UsageError: the storage cannot be reached, or its driver is not installed.
    """
    if storage is None:
        journal = folder / "study.log"
        _mend_journal(journal)
        return JournalStorage(JournalFileBackend(str(journal)))
    try:
        return optuna.storages.get_storage(storage)
    except Exception as error:  # noqa: BLE001 - drivers raise what they like
        place = storage.rpartition("@")[2]
        text = (str(error).strip() or type(error).__name__).splitlines()[0].replace(storage, place)
        raise UsageError(f"storage at {place} cannot be opened: {text[:200]}") from None


def _mend_journal(journal: Path) -> None:
    """Takes away what a kill left behind: a last line cut off in the middle, and the lock of a dead process."""
    lock = Path(f"{journal}.lock")
    if lock.is_symlink() or lock.exists():
        lock.unlink()  # the run folder's own lock says that no living process has it
    if not journal.exists():
        return
    content = journal.read_bytes()
    end = content.rfind(b"\n") + 1
    while end > 0:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        try:
            json.loads(content[begin:end])
            break
        except ValueError:
            end = begin
    if end < len(content):
        with journal.open("r+b") as stream:
            stream.truncate(end)
