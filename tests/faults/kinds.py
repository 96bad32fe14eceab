"""What can befall a run: each kind strikes a running command once, and says with which exit codes it may then end."""

import contextlib
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from faults.scene import PATIENCE_SECONDS, Scene

INTERRUPTED, REFUSED = 130, 2
AT_ONCE_SECONDS = 10.0  # of wall time on a busy machine, within which a second signal must have stopped everything
HOUR_SECONDS = 3600
_MOUNTING = threading.Lock()  # one at a time: the system's table of mounts is one file


class TooLate(Exception):
    """The command had ended, or what was to be struck is not there."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        strike: injects it into the running command; returns the exit codes that are right then.
        around: what must be there before the command starts; yields what to lay over its environment.
        missing: why this kind cannot be injected here; empty where it can.
    """

    strike: Callable[[Scene], set[int]]
    around: Callable[[Scene], AbstractContextManager[dict[str, str]]] = lambda scene: nullcontext({})
    missing: Callable[[], str] = lambda: ""


def _kill(scene: Scene, *, parent: bool, child: bool) -> set[int]:
    leader = scene.running.process.pid
    children = [process for process in scene.everybody() if process.pid != leader]
    if child and not children:
        raise TooLate
    victims = scene.dice.sample(children, 1) if child else []
    for process in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    if parent:
        scene.running.process.kill()
        return {-signal.SIGKILL}
    return {0, 3, 4}  # a crash of one size or one run, of the user's code on opening, of all there was to try


def _signal(scene: Scene, number: signal.Signals, *, twice: bool = False) -> set[int]:
    scene.running.process.send_signal(number)
    if twice:
        time.sleep(scene.dice.uniform(0, 0.3))
        scene.running.process.send_signal(scene.dice.choice((signal.SIGINT, signal.SIGTERM)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            scene.running.process.wait(AT_ONCE_SECONDS)
        if not scene.has_ended():
            raise AssertionError("a second signal did not stop it at once")
    codes = {INTERRUPTED, -signal.SIGINT, -signal.SIGTERM}  # by the signal itself: Python was still starting
    return codes | {0} if scene.has_its_result() else codes  # or ending, with all done


def _limit_files(scene: Scene) -> set[int]:
    """No file may grow beyond a size a little above that of the journal: writing fails in the middle of a line."""
    journal = scene.folder / "study.log"
    most = (journal.stat().st_size if journal.exists() else 0) + scene.dice.randrange(3_000)
    for process in scene.everybody():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    return {REFUSED, 0}


@contextmanager
def _small_disk(scene: Scene) -> Iterator[dict[str, str]]:
    """The run folder on a disk of its own, and back afterwards."""
    root, kept = scene.folder.parent, scene.folder.parent.with_name("kept")
    root.mkdir(exist_ok=True)
    shutil.copytree(root, kept, symlinks=True)
    _run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", root)
    try:
        shutil.copytree(kept, root, dirs_exist_ok=True, symlinks=True)
        yield {}
        (root / "ballast").unlink(missing_ok=True)
        shutil.rmtree(kept)
        shutil.copytree(root, kept, symlinks=True)
    finally:
        _run("umount", "-l", root)
        shutil.rmtree(root)
        kept.rename(root)


def _fill_disk(scene: Scene) -> set[int]:
    root = scene.folder.parent
    free = shutil.disk_usage(root).free
    with contextlib.suppress(OSError):
        (root / "ballast").write_bytes(bytes(max(0, free - 4096 * scene.dice.randrange(4))))
    return {REFUSED, 0}


@contextmanager
def _mounted(scene: Scene) -> Iterator[dict[str, str]]:
    """Takes away afterwards what `_make_read_only` put over the run folder."""
    try:
        yield {}
    finally:
        with contextlib.suppress(OSError):  # the blow came too late, and nothing was put there
            _run("umount", "-l", scene.folder)


def _make_read_only(scene: Scene) -> set[int]:
    scene.folder.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "--bind", scene.folder, scene.folder)
        _run("mount", "-o", "remount,bind,ro", scene.folder)
    except OSError as error:  # the folder was replaced meanwhile
        raise TooLate from error
    return {REFUSED, 0}


def _damage(scene: Scene, name: str, *, cut: bool) -> set[int]:
    """Kills all, as a power failure would, and then spoils the end of a file."""
    file = scene.folder / name
    if not file.exists() or not file.stat().st_size:
        raise TooLate
    for process in scene.everybody():
        process.kill()
    scene.running.process.wait()
    content = file.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    if cut:
        content = content[: scene.dice.randrange(last + 1, len(content))]
    else:
        at = scene.dice.randrange(last, len(content))
        length = scene.dice.randrange(1, 40)
        rubbish = scene.dice.choice((bytes(length), scene.dice.randbytes(length) + b"\xff"))
        content = content[:at] + rubbish + scene.dice.choice((b"", content[at:], b"\n"))
    file.write_bytes(content)
    return {-signal.SIGKILL}


@cache
def _clock_library() -> Path:
    import tempfile

    library = Path(tempfile.mkdtemp(), "clock.so")
    _run("cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("clock.c"))
    return library


@contextmanager
def _own_clock(scene: Scene) -> Iterator[dict[str, str]]:
    shift = scene.cli.folder.parent / f"clock-{scene.mark}"
    shift.write_bytes(struct.pack("q", 0))
    yield {"LD_PRELOAD": str(_clock_library()), "CLOCK_SHIFT": str(shift)}


def _jump(scene: Scene) -> set[int]:
    seconds = scene.dice.choice((-1, 1)) * scene.dice.randrange(60, 48 * HOUR_SECONDS)
    with (scene.cli.folder.parent / f"clock-{scene.mark}").open("r+b") as file:
        file.write(struct.pack("q", seconds))
    return {0}


def _second_process(scene: Scene) -> set[int]:
    lock, first = scene.folder / "lock", scene.running.process.pid
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (lock.exists() and lock.read_text() == f"{first}\n"):
        if scene.has_ended() or time.monotonic() > deadline:
            raise TooLate
        time.sleep(0.05)
    second = scene.start({}).finish(PATIENCE_SECONDS)
    if second.code == 0:
        raise TooLate  # the first ended in between
    if second.code != REFUSED or not re.search(rf"process {first} is running in it", second.err):
        raise AssertionError(f"the second process ended with {second.code} and was told: {second.err}")
    return {0}


def _run(*words: object) -> None:
    with _MOUNTING:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


@cache
def _no_mounts() -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("mount", "-t", "tmpfs", "tmpfs", folder)
        except OSError as error:
            return f"nothing can be mounted here: {error}"
        _run("umount", folder)
    return ""


def _no_compiler() -> str:
    return "" if shutil.which("cc") else "there is no C compiler for the clock"


KINDS = {
    "SIGKILL of the parent": Kind(partial(_kill, parent=True, child=False)),
    "SIGKILL of a child": Kind(partial(_kill, parent=False, child=True)),
    "SIGKILL of both": Kind(partial(_kill, parent=True, child=True)),
    "Ctrl-C": Kind(partial(_signal, number=signal.SIGINT)),
    "SIGTERM": Kind(partial(_signal, number=signal.SIGTERM)),
    "Ctrl-C, then one more signal": Kind(partial(_signal, number=signal.SIGINT, twice=True)),
    "SIGTERM, then one more signal": Kind(partial(_signal, number=signal.SIGTERM, twice=True)),
    "files may not grow (RLIMIT_FSIZE)": Kind(_limit_files),
    "disk full (tmpfs)": Kind(_fill_disk, _small_disk, _no_mounts),
    "run folder read-only (bind mount)": Kind(_make_read_only, _mounted, _no_mounts),
    "power failure, last attempt cut off": Kind(partial(_damage, name="attempts.jsonl", cut=True)),
    "power failure, last attempt garbled": Kind(partial(_damage, name="attempts.jsonl", cut=False)),
    "power failure, journal cut off": Kind(partial(_damage, name="study.log", cut=True)),
    "power failure, journal garbled": Kind(partial(_damage, name="study.log", cut=False)),
    "wall clock jumps": Kind(_jump, _own_clock, _no_compiler),
    "second process on the folder": Kind(_second_process),
}
ONLY_TUNE = {name for name in KINDS if "journal" in name}  # a probe has none
