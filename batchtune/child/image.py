"""An image: torch and the user's code imported, with its data sets, and no device opened; children are forks of it.

Whatever a run leaves behind in the user's modules, in libraries or in torch ends with the fork that it ran in, and the
next begins as the first did, without an import. Where a fork would not be as good as a new process (another system than
Linux, a task that starts threads or asks for a GPU when it is imported), the image is itself the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import multiprocessing
import os
import select
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path

import torch

from batchtune.child.server import Child, serve
from batchtune.protocol.commands import OpenTask
from batchtune.protocol.messages import Channel, Command, Json, end_if_closed, end_with_parent, move_standard_streams
from batchtune.task.contract import Task
from batchtune.task.load import load_task, set_libraries_apart

_HARD_PAUSE = 2  # omp.h: omp_pause_hard
_OWN_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch asks NVML whether there is a GPU: CUDA itself cannot be forked
_FILES = Path("/proc/self/fd")
_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/")  # open as soon as a GPU was asked for, by whatever library
_BEAR_FORKS = ("libarrow.so",)  # pyarrow's, which pandas loads: its pools and its jemalloc have handlers of forks
_EVERYWHERE = ("libc.so", "libstdc++.so", "libpthread.so", "libgcc_s.so", "ld-linux", "[vdso]")  # below any thread
_STACK_BYTES = 4096
_LOOKS, _LOOK_SECONDS = 10, 0.01  # until a thread waits


def main() -> None:
    """The child of one parent, or its image."""
    serve_forks(*move_standard_streams(), Child)


def serve_forks(commands: int, answers: int, make: Callable[..., Child]) -> None:
    """Answers what comes on a line, of two file descriptors, in one child after the other; see `Session`."""
    first: Json | None = json.loads(_read_line(commands))
    load: Callable[[str], Task] = load_task
    number, leave = 0, None
    asked = Command.from_message(first or {})
    if sys.platform == "linux" and isinstance(asked, OpenTask):
        own = os.getpid()
        with _ending_with_parent(commands):
            load = _imported(asked)
            if os.getpid() != own:
                os._exit(0)  # a copy that the user's code has forked off
        if _can_fork():
            number, leave = _fork_one_by_one(answers)
            first = None if number else first
    channel = Channel(commands, answers, first)
    serve(make(channel, load=load, leave=leave, fork=number), channel)


def _imported(command: OpenTask) -> Callable[[str], Task]:
    """The task as it was imported, or what that raised, to be raised where it is asked for."""
    found: Task | Exception
    is_ours = _OWN_CHECK not in os.environ
    os.environ.setdefault(_OWN_CHECK, "1")
    try:
        found = load_task(command.task)
        with contextlib.suppress(Exception):  # it is raised again, where it is looked for
            found.require(command.purpose)
            found.train_size()
            found.find_lengths(command.lengths, command.lengths_seen)
            found.find_worst_samples(command.samples)
    except Exception as error:  # noqa: BLE001 - all of it is the answer's to tell
        found = error
    finally:
        if is_ours:
            os.environ.pop(_OWN_CHECK, None)
    set_libraries_apart()

    def load(_: str) -> Task:
        if isinstance(found, Exception):
            raise found
        return found

    return load


def _read_line(file: int) -> bytes:
    """One line and not a byte of the next, which is for another process to read."""
    line = b""
    while not line.endswith(b"\n"):
        found = os.read(file, 1)
        if not found:
            sys.exit(0)  # the parent is gone
        line += found
    return line


@contextlib.contextmanager
def _ending_with_parent(commands: int) -> Iterator[None]:
    """Within, a thread ends this process when its parent closes the line; afterwards there is no other thread."""
    told, tell = os.pipe()

    def watch() -> None:
        watched = select.poll()
        watched.register(commands, select.POLLRDHUP)  # nothing but its end, which sockets tell otherwise than pipes
        watched.register(told, select.POLLIN)
        if dict(watched.poll()).get(commands, 0) & (select.POLLHUP | select.POLLRDHUP):
            end_with_parent()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        try:
            os.fstat(commands)
            os.write(tell, b".")
            thread.join()
            os.close(told)
            os.close(tell)
        except OSError as error:
            end_if_closed(error)
            raise


def _can_fork() -> bool:
    """Whether a fork of this process is as good as a new one: no other thread is lost, and no device is open."""
    _end_openmp_threads()
    _end_progress_threads()
    pid = os.fork()  # before which libraries that can be forked end threads of theirs
    if pid == 0:
        os._exit(torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork())  # noqa: SLF001 - torch has no public name
    asked_torch = os.waitpid(pid, 0)[1] != 0
    links = [_target(file) for file in _FILES.iterdir()]
    others = [each for each in Path("/proc/self/task").iterdir() if each.name != str(os.getpid())]
    alone = all(map(_bears_forks, others))
    return alone and not asked_torch and not any(link.startswith(_DEVICES) for link in links)


def _bears_forks(thread: Path) -> bool:
    """Whether a thread of this process that waits is of a library that begins its threads anew in a fork.

    The addresses on its stack tell: they lie in the code of that library, and of none that does not bear it.
    """
    try:
        for _ in range(_LOOKS):
            if (state := (thread / "syscall").read_text().split()) != ["running"]:
                break
            time.sleep(_LOOK_SECONDS)
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            memory.seek(int(state[-2], 16))
            stack = memory.read(_STACK_BYTES)
    except (OSError, ValueError, IndexError):  # it has ended, or the system does not tell
        return False
    code = [each.split() for each in Path("/proc/self/maps").read_text().splitlines() if " r-xp " in each]
    words = [word for (word,) in struct.iter_unpack("N", stack[: len(stack) // 8 * 8])]
    found = set()
    for span, *_, file in code:
        begin, end = (int(each, 16) for each in span.split("-"))
        if any(begin <= word < end for word in words):
            found.add(Path(file).name)
    own = {name for name in found if not name.startswith(_EVERYWHERE)}
    return bool(own) and all(name.startswith(_BEAR_FORKS) for name in own)


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # the one by which the folder is read
        return ""


def _end_openmp_threads() -> None:
    """Ends those that computing at import has started; they come again when they are needed."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    end = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None) if library.is_file() else None
    if end is not None:
        end(_HARD_PAUSE)


def _end_progress_threads() -> None:
    """Ends those that look whether tqdm's bars are stuck; the next bar starts another."""
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            methodcaller("exit")(thread)


def _fork_one_by_one(answers: int) -> tuple[int, Callable[[], None]]:
    """Returns in one fork after the other: its number, and what ends it in favour of the next.

    A fork that ends in another way takes the image along, with the same exit status.
    """
    is_followed, offsets = mmap.mmap(-1, 1), _offsets()

    def leave() -> None:
        for child in multiprocessing.active_children():
            child.kill()
        is_followed[0] = 1
        os._exit(0)

    for number in itertools.count():
        is_followed[0] = 0
        for file, offset in offsets.items():
            os.lseek(file, offset, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            return number, leave
        status = os.waitpid(pid, 0)[1]
        if not is_followed[0]:
            _end_as(os.waitstatus_to_exitcode(status))
        os.write(answers, b'{"done": null}\n')
    raise AssertionError


def _offsets() -> dict[int, int]:
    """Where the files stand that the user's code has opened: forks share that."""
    files = [int(each.name) for each in _FILES.iterdir() if _target(each)]
    plain = [file for file in files if stat.S_ISREG(os.fstat(file).st_mode)]
    return {file: os.lseek(file, 0, os.SEEK_CUR) for file in plain}


def _end_as(code: int) -> None:
    """Ends this process as a fork has ended."""
    if code < 0:
        import resource  # there is none on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # nobody handles SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
