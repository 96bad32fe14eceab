"""The run folder `.batchtune/<name>/`: what stands in it, who may write to it, and when it belongs to another run."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from batchtune.config.schema import is_run_name
from batchtune.document import Attempt, Document
from batchtune.errors import RunInterrupted, UsageError
from batchtune.files import write_atomically

ROOT = Path(".batchtune")
_MOST_NAMED = 10
_AT_ONCE_SECONDS = 1.0  # between two files that are written one after the other
_OURS = ("config.yaml", "study.log", "attempts.jsonl", "result.json", "report.html", "identity.json")


class RunFolder:
    """One run's files; results are replaced atomically, attempts and trials are appended.

    Args:
        name: the folder's name; it cannot leave `root`.
        root: where run folders are kept.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self.path = root / name
        self._lock: IO[str] | None = None
        self._latest: Document | None = None

    def open(self) -> None:
        """Creates the folder, takes it for this process, and takes away what killed processes left half done.

        Raises:
            UsageError: it cannot be written, or another process has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+", encoding="ascii")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror}; run from another folder") from None
        with contextlib.suppress(ImportError):  # no such locks on Windows
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                lock.close()
                raise UsageError(
                    f"{self.path}: process {holder} is running in it; wait, stop it, or choose another name"
                ) from None
        lock.truncate(0)
        with contextlib.suppress(OSError):  # no space: the process id is for people, the lock holds without
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
        self._lock = lock
        try:
            for name in _OURS:
                for half in self.path.glob(f".{name}.*.tmp"):
                    half.unlink(missing_ok=True)
            cut_to_whole_lines(self.path / "attempts.jsonl")
        except OSError as error:
            self.close()
            raise _not_written(self.path, error) from None

    def clear(self) -> None:
        """Takes away all that runs write, to start over.

        Raises:
            UsageError: it cannot be taken away.
        """
        try:
            for name in _OURS:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise _not_written(self.path, error) from None

    def close(self) -> None:
        """Draws the report of the result as it is now, and lets another process have the folder.

        Raises:
            RunInterrupted: while the report was drawn; with the result, which is saved.
        """
        latest, self._latest = self._latest, None
        try:
            if latest is not None:
                self._write_report(latest)
        except KeyboardInterrupt:
            interrupted = RunInterrupted("interrupted; the result is saved, and 'batchtune report' draws its page")
            interrupted.result = latest
            raise interrupted from None
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # read-only by now: nothing is lost by the number of a process
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None
            with contextlib.suppress(OSError):  # a run that came to nothing leaves nothing
                if [each.name for each in self.path.iterdir()] == ["lock"]:
                    (self.path / "lock").unlink()
                    self.path.rmdir()

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Refuses to mix: what decides the meaning of the measurements that are kept must be what it was.

        Args:
            identity: dotted configuration keys (and the task's hash, the device) with their values.

        Raises:
            UsageError: a value differs from that of the folder, naming it.
        """
        before, now = self.identity() or {}, json.loads(json.dumps(identity))
        changed = [key for key in now if key in before and before[key] != now[key]]
        if changed:
            key = changed[0]
            raise UsageError(
                f"{self.path}: measured with {key} = {_shown(before[key])}, now {_shown(now[key])}; results would "
                "mix. Use --fresh to start over, or another 'name' to keep both"
            )

    def keep_identity(self, identity: dict[str, Any]) -> None:
        """Keeps what decides the meaning of what is measured from now on; see `check_identity`.

        Raises:
            UsageError: the folder cannot be written.
        """
        self.write("identity.json", json.dumps(identity, indent=2))

    def identity(self) -> dict[str, Any] | None:
        """What decides the meaning of what was measured here; None: nothing was, empty: the file is damaged."""
        try:
            found = json.loads((self.path / "identity.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def forget_attempts(self) -> None:
        """Those kept so far are of an earlier search; a new one begins.

        Raises:
            UsageError: the folder cannot be written.
        """
        file = self.path / "attempts.jsonl"
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _not_written(file, error) from None

    def append_attempt(self, attempt: Attempt, **about: Any) -> None:
        """Adds one attempt to `attempts.jsonl`.

        Raises:
            UsageError: it cannot be written (no space, read-only).
        """
        line = json.dumps(about | attempt.model_dump(exclude_none=True))
        file = self.path / "attempts.jsonl"
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        except OSError as error:
            raise _not_written(file, error) from None

    def attempts(self) -> Iterator[dict[str, Any]]:
        """The attempts of earlier starts; a line that is none, cut off by a crash for one, is passed over."""
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "attempts.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                    Attempt.model_validate(entry)
                    yield entry

    def write(self, name: str, text: str) -> None:
        """Replaces one file of the folder.

        Raises:
            UsageError: it cannot be written (no space, read-only).
        """
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise _not_written(self.path / name, error) from None

    def has_result(self) -> bool:
        """Whether a result is kept here, this run's or an earlier one's."""
        return (self.path / "result.json").exists()

    def write_result(self, result: Document) -> None:
        """Replaces `result.json`; `report.html` follows it when the folder is closed."""
        self.write("result.json", result.to_json() + "\n")
        self._latest = result

    def _write_report(self, result: Document) -> None:
        """Replaces `report.html`; a page that cannot be made costs nobody the run whose result is saved already."""
        from batchtune.report.page.html import to_html

        try:
            self.write("report.html", to_html(result))
        except Exception as error:  # noqa: BLE001 - whatever it is, the result is there and can be drawn again
            warnings.warn(f"report.html was not written: {error}; result.json is complete", stacklevel=2)


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


def find_run(run: str | None, root: Path = ROOT) -> Path:
    """The result that a person means by a run's name, a folder or a file; by nothing, the newest.

    Raises:
        UsageError: there is no run of this name, but there are others.
    """
    if run is None:
        return latest_run(root)
    named = root / run
    if is_run_name(run) and (named / "result.json").is_file():
        return named
    kept = sorted(path.parent.name for path in root.glob("*/result.json"))
    if kept and is_run_name(run) and not Path(run).exists():
        near = difflib.get_close_matches(run, kept, n=1)
        told = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(kept[-_MOST_NAMED:])}"
        raise UsageError(f"{run}: no such run; {told}")
    return Path(run)


def is_behind(run: Path) -> bool:
    """Whether a study went on after its result was last written: it runs at the moment, or was killed."""
    journal, result = run / "study.log", run / "result.json"
    written = [file.stat().st_mtime for file in (result, journal) if file.is_file()]
    return len(written) == 2 and written[1] > written[0] + _AT_ONCE_SECONDS  # noqa: PLR2004 - both are there


def running_in(run: Path) -> str | None:
    """The process that is running in a run folder; None where none is, or the system does not tell."""
    try:
        import fcntl

        with (run / "lock").open(encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "unknown"
    except (ImportError, OSError):  # no such locks on Windows; no run folder, but a file
        pass
    return None


def probe_folder(name: str, task: str, root: Path = ROOT) -> RunFolder:
    """The run folder of a probe: by its name, unless that has the result of another task.

    Args:
        name: `probe-` and what the task is called.
        task: as the user named it.
        root: where run folders are kept.
    """
    path = Path(task.partition(":")[0]).resolve()
    candidates = [name, f"{name}-{path.parent.name}", f"{name}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"]
    free = [each for each in candidates if is_run_name(each) and _kept(root / each, "task", "path") in (task, None)]
    return RunFolder(free[0] if free else name, root)


def _kept(run: Path, *keys: str) -> Any:
    """A value of a run's result; None where there is none that can be read."""
    try:
        found: Any = json.loads((run / "result.json").read_text(encoding="utf-8"))
        for key in keys:
            found = found.get(key)
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return found


def latest_run(root: Path = ROOT) -> Path:
    """The run folder whose result is the newest of those that did not fail, or of all if all did.

    Raises:
        UsageError: there is none below the current folder.
    """
    found = sorted(root.glob("*/result.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no result in {root}/ here; run 'batchtune probe' or 'batchtune tune' first, or name a file")
    runs = [path.parent for path in reversed(found)]
    return next((run for run in runs if _kept(run, "status") != "failed"), runs[0])


def _not_written(file: Path, error: OSError) -> UsageError:
    return UsageError(f"{file}: cannot be written: {error.strerror}; make room and start again")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."  # noqa: PLR2004 - a line stays a line
