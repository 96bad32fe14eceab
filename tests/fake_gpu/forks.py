"""New Python processes in milliseconds: forks of one that has imported torch and has never asked for a GPU.

Most of what a test waits for is the import of torch, seconds for each process. `Popen` and `run` of this module take
commands of this interpreter (`python -c CODE …`, `python -m MODULE …`) and have a server fork for them, with the
environment, folder and files asked for, in a session of its own. Like a process that was started, a fork is a child of
its caller's, has no context on any card and ends with an exit status of its own. Unlike one it has torch's modules
already: variables that torch or OpenMP read when they are loaded come too late.

`children_are_forks` has batchtune start its children so. In a fork that is no child itself, batchtune and torch's
launcher start forks, too; any other process that a fork starts is started as ever. The system tells of a fork what it
tells of a process that was started: its command line and its environment.
"""

import array
import atexit
import ctypes
import functools
import gc
import inspect
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parents[1]
_LARGEST_REQUEST = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36  # sys/prctl.h
_SERVER = "import sys, fake_gpu.forks; fake_gpu.forks.serve(int(sys.argv[1]))"
_ROOM = 1 << 15  # for the command line of a fork, and as much for its environment
_STARTS_NOBODY = "batchtune.child."
_FOR_THE_SERVER = ("PATH", "HOME", "TMPDIR", "LANG", "LC_", "LD_")


class Popen(subprocess.Popen):
    """As subprocess.Popen, with the environment, the folder and the three files to choose."""

    def _execute_child(self, *arguments):
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        files = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        request = {
            "arguments": [os.fsdecode(each) for each in given["args"]][1:],
            "folder": os.fsdecode(given["cwd"] or Path.cwd()),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
        }
        self.pid = _fork(request, [own if file == -1 else file for own, file in enumerate(files)])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command, *, timeout, **how):
    """What the command printed, and its exit status."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def children_are_forks(set_attribute=setattr):
    """From now on the children that batchtune starts in this process are forks."""
    from batchtune.processes import local, torchrun

    quick = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    for module in (local, torchrun):
        set_attribute(module, "subprocess", quick)


_turn = threading.Lock()


@functools.cache
def _start_server():
    """The line to a server of this process' own, which can adopt only what its own children leave behind."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {key: value for key, value in os.environ.items() if key.startswith(_FOR_THE_SERVER)}
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno()), " " * _ROOM],
            env=environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ROOM": " " * _ROOM},
            pass_fds=[theirs.fileno()],
        )
    atexit.register(lambda: (ours.close(), server.wait()))  # it ends with the line
    return ours


def _fork(request, files):
    """The new process' number. It is orphaned at once, and comes to us, who can then wait for it."""
    rights = array.array("i", files).tobytes()
    with _turn:
        line = _start_server()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            line.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            return int(line.recv(64))
        finally:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ---- the server


def serve(descriptor):
    """Forks for every request until the line is closed; in each fork, runs what was asked for."""
    _import_much()
    code, status = _requested(socket.socket(fileno=descriptor)), 0
    try:
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking all of torch down takes as long as what most tests do


def _requested(line):
    """The code to run, in the fork that is to run it."""
    while True:
        words, control, *_ = line.recvmsg(_LARGEST_REQUEST, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not words:
            os._exit(0)
        files = array.array("i", control[0][2])
        pid, ours = _orphan()
        if ours:
            line.close()
            return _become(json.loads(words), files)
        line.send(str(pid).encode())
        for each in files:
            os.close(each)


def _orphan():
    """Forks twice: the number of the second fork, and whether we are it; it goes on when the first has ended."""
    told, tell = os.pipe()
    begin, hold = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(hold)
        if os.fork() == 0:
            os.setsid()  # before anybody knows of it, who may kill its group
            os.write(tell, str(os.getpid()).encode())
            os.read(begin, 1)
            for each in (told, tell, begin):
                os.close(each)
            return 0, True
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 64))
    for each in (told, tell, begin, hold):
        os.close(each)
    return pid, False


def _import_much():
    gc.disable()
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # that Triton is missing is known
    import torch
    import torch.distributed.launcher.api

    import batchtune.cli
    import batchtune.estimate.prior
    import batchtune.estimate.tracing.server
    import batchtune.estimate.tracing.trace
    import batchtune.probe.run
    import batchtune.tune.run  # noqa: F401
    from batchtune.child.ranks.parallel import load_early
    from batchtune.task.load import set_libraries_apart

    set_libraries_apart()
    load_early()
    assert not torch.cuda.is_initialized()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    gc.freeze()  # a collection in a fork copies none of these pages
    gc.enable()


def _become(request, files):
    """Makes this fork the process that was asked for; what is left to do is to run its code, which is returned."""
    if _STARTS_NOBODY not in " ".join(request["arguments"]) and (code := _serve_its_own(files)):
        return code
    for own, file in enumerate(files):
        os.dup2(file, own)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    _tell([sys.executable, *request["arguments"]], [f"{key}={value}" for key, value in request["environment"].items()])
    os.chdir(request["folder"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    kind, *rest = itertools.dropwhile(lambda each: each in {"-P", "-u"}, request["arguments"])
    sys.argv = [kind, *rest[kind in {"-c", "-m"} :]]
    if kind == "-c":
        return rest[0]
    run = f"module({rest[0]!r}, alter_sys=True, " if kind == "-m" else f"path({kind!r}, "
    return f"import runpy; runpy.run_{run}run_name='__main__')"


def _serve_its_own(files):
    """A server of this fork's own, which is a fork of it; the code to run, in the forks of that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for each in files:
            os.close(each)
        return _requested(theirs)
    theirs.close()
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as elastic

    globals()["_start_server"] = lambda: ours
    children_are_forks()
    elastic.Popen = Popen
    return None


def _tell(*texts):
    """Has the system tell this command line and this environment of us (proc(5): arg_start and what follows it)."""
    bounds = [int(each) for each in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    for begin, end, words in zip(bounds[::2], bounds[1::2], texts, strict=True):
        told = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, told, len(told))
