"""The run folder `.batchtune/<name>/`: what stands in it, and who may write to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from batchtune.config.fields import is_run_name
from batchtune.document import Attempt, Document
from batchtune.errors import RunInterrupted, UsageError
from batchtune.result import ROOT, kept_value, load_result

SHOWN_EVERY_SECONDS = 5
"""Between two pages of a run that goes on."""
THE_CODE = "the task's code"
"""What the hashes of the task's file are called among what must not change; earlier versions have kept the first."""
_SHOWING_SHARE = 0.005  # of the time a processor may work on them
_OURS = ("config.yaml", "study.log", "attempts.jsonl", "result.json", "report.html", "identity.json")
_ASIDE = ".earlier"


class RunFolder:
    """One run's files; results are replaced atomically, attempts and trials are appended.

    What cannot be written (no space, read-only) is a UsageError that names the file.

    Args:
        name: the folder's name; it cannot leave `root`.
        root: where run folders are kept.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self.path = root / name
        self._lock: IO[str] | None = None
        self._latest: Document | None = None
        self._show_due = math.inf
        self._is_shown = False

    def open(self) -> None:
        """Creates the folder, takes it for this process, and takes away what killed processes left half done.

        Raises UsageError where it cannot be written, or another process has it.
        """
        self._lock, self._show_due, self._is_shown = _taken(self.path), time.monotonic() + SHOWN_EVERY_SECONDS, False
        try:
            with _writing(self.path):
                self._settle()
                for name in _OURS:
                    for half in self.path.glob(f".{name}.*.tmp"):
                        half.unlink(missing_ok=True)
                cut_to_whole_lines(self.path / "attempts.jsonl")
        except UsageError:
            self.close()
            raise

    def set_aside(self) -> None:
        """Starts over: all that runs have written is set aside, and comes back if nothing is measured in its place."""
        with _writing(aside := self.path / _ASIDE):
            aside.mkdir()
            for name in _OURS:
                if (self.path / name).exists():
                    (self.path / name).replace(aside / name)

    def _settle(self) -> None:
        """Takes away what was set aside, or takes it back."""
        aside = self.path / _ASIDE
        if not aside.is_dir():
            return
        if self.identity() is None:  # nothing was measured
            self._latest, self._is_shown = None, False
            for name in _OURS:
                (self.path / name).unlink(missing_ok=True)
            for each in aside.iterdir():
                each.replace(self.path / each.name)
        shutil.rmtree(aside)

    def close(self) -> None:
        """Draws the report of the result as it is now, and lets another process have the folder.

        Raises:
            RunInterrupted: while the report was drawn; with the result, which is saved.
        """
        with contextlib.suppress(OSError):  # the next to open it does
            self._settle()
        latest, self._latest = self._latest, None
        try:
            if latest is None and self._is_shown:  # of a run that came to nothing: the page is an earlier one's again
                with contextlib.suppress(OSError, UsageError):
                    (self.path / "report.html").unlink(missing_ok=True)
                    latest = load_result(self.path)
            if latest is not None:
                self._write_report(latest)
        except KeyboardInterrupt:
            interrupted = RunInterrupted("interrupted; the result is saved, and 'batchtune report' draws its page")
            interrupted.result = latest
            raise interrupted from None
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                _let_go(self.path, lock)

    def check_identity(self, identity: Mapping[str, object]) -> None:
        """Refuses to mix: what decides the meaning of the measurements that are kept must be what it was.

        These are dotted configuration keys, the task's hash and the device, with their values.

        Raises:
            UsageError: a value differs from that of the folder, naming it; or nobody can tell what that was.
        """
        known = self.identity()
        if known == {}:
            file = self.path / "identity.json"
            raise UsageError(
                f"{file} is damaged, so that what was measured here cannot be told; start over with --fresh"
            )
        before, now = known or {}, json.loads(json.dumps(identity))
        changed = [key for key in now if key in before and differs(key, before[key], now[key])]
        if changed:
            key, remedy = changed[0], "Use --fresh to start over, or another 'name' to keep both"
            what = f"measured with {key} = {_shown(before[key])}, now {_shown(now[key])}"
            if key == THE_CODE:  # whose hash tells a reader nothing
                what, remedy = f"{now.get('task')} has changed since", f"Put it back as it was; or {remedy.lower()}"
            raise UsageError(f"{self.path}: {what}; results would mix. {remedy}")

    def keep_identity(self, identity: Mapping[str, object]) -> None:
        """Keeps what decides the meaning of what is measured from now on; see `check_identity`."""
        self.write("identity.json", json.dumps(identity, indent=2))

    def identity(self) -> dict[str, object] | None:
        """What decides the meaning of what was measured here; None: nothing was, empty: the file is damaged."""
        try:
            found = json.loads((self.path / "identity.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def forget_attempts(self) -> None:
        """Those kept so far are of an earlier search; a new one begins."""
        with _writing(file := self.path / "attempts.jsonl"):
            file.unlink(missing_ok=True)

    def append_attempt(self, attempt: Attempt, **about: object) -> None:
        """Adds one attempt to `attempts.jsonl`."""
        line = json.dumps(about | attempt.model_dump(exclude_none=True))
        file = self.path / "attempts.jsonl"
        with _writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def attempts(self) -> Iterator[dict[str, object]]:
        """The attempts of earlier starts; a line that is none, cut off by a crash for one, is passed over."""
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "attempts.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                    Attempt.model_validate(entry)
                    yield entry

    def write(self, name: str, text: str) -> None:
        """Replaces one file of the folder."""
        with _writing(self.path / name):
            write_atomically(self.path / name, text)

    def has_result(self) -> bool:
        """Whether a result is kept here, this run's or an earlier one's."""
        return (self.path / "result.json").exists()

    def write_result(self, result: Document) -> None:
        """Replaces `result.json`; `report.html` follows it when the folder is closed."""
        self.write("result.json", result.to_json() + "\n")
        self._latest = result

    def show(self, document: Callable[[], Document], words: str) -> None:
        """Redraws `report.html` for who watches a run, every few seconds, less often where that takes long."""
        if time.monotonic() < self._show_due:
            return
        from batchtune.report.formats import to_html

        began = time.thread_time()
        with contextlib.suppress(Exception):  # whatever it is, the page at the end says it
            running = document().model_copy(update={"status": "running", "error": None})
            self.write("report.html", to_html(running, refresh_seconds=SHOWN_EVERY_SECONDS, words=words))
            self._is_shown = True
        took = time.thread_time() - began
        self._show_due = time.monotonic() + max(SHOWN_EVERY_SECONDS, took / _SHOWING_SHARE)

    def _write_report(self, result: Document) -> None:
        """Replaces `report.html`; a page that cannot be made costs nobody the run whose result is saved already.

        An older page goes: it is another result's, or says that the run goes on.
        """
        from batchtune.report.formats import to_html

        try:
            self.write("report.html", to_html(result))
        except Exception as error:  # noqa: BLE001 - whatever it is, the result is there and can be drawn again
            warnings.warn(f"report.html was not written: {error}; result.json is complete", stacklevel=2)
            with contextlib.suppress(OSError):
                (self.path / "report.html").unlink(missing_ok=True)


def differs(key: str, before: object, now: object) -> bool:
    """Whether what must not change has changed; code has not where one of its hashes is what it was."""
    if key != THE_CODE:
        return before != now
    known, own = ({*each} if isinstance(each, list) else {each} for each in (before, now))
    return not known & own


def _taken(path: Path) -> IO[str]:
    """The lock of a folder, which is made where it is missing, with the number of this process in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; run from another folder") from None
    with contextlib.suppress(ImportError):  # no such locks on Windows
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise UsageError(
                f"{path}: process {holder} is running in it; wait, stop it, or choose another name or folder"
            ) from None
    lock.truncate(0)
    with contextlib.suppress(OSError):  # no space: the process id is for people, the lock holds without
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return lock


def _let_go(path: Path, lock: IO[str]) -> None:
    """Gives the folder up; one of a run that came to nothing goes with it."""
    with contextlib.suppress(OSError):  # read-only by now: nothing is lost by the number of a process
        lock.truncate(0)
    lock.close()
    with contextlib.suppress(OSError):
        if [each.name for each in path.iterdir()] == ["lock"]:
            (path / "lock").unlink()
            path.rmdir()


def cut_to_whole_lines(file: Path) -> None:
    """Takes away the end of a file of JSON objects, a line each, that a crash left cut off or garbled.

    Whoever adds a line would otherwise add it to half of another.
    """
    content = file.read_bytes() if file.exists() else b""
    end = content.rfind(b"\n") + 1
    while end > 0:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(content[begin:end]), dict):
                break
        end = begin
    if end < len(content):
        with file.open("r+b") as stream:
            stream.truncate(end)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Says which file it was that could not be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}; make room and start again") from None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."  # noqa: PLR2004 - a line stays a line


def probe_folder(name: str, task: str, root: Path = ROOT) -> RunFolder:
    """The run folder of a probe of the task (as its user named it): of that name, unless another task has it."""
    path = Path(task.partition(":")[0]).resolve()
    candidates = [name, f"{name}-{path.parent.name}", f"{name}-{hashlib.sha256(os.fsencode(task)).hexdigest()[:8]}"]
    named = [each for each in candidates if is_run_name(each)]
    free = [each for each in named if kept_value(root / each, "task", "path") in (task, None)]
    return RunFolder(free[0] if free else name, root)


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
