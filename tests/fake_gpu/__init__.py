"""A machine with GPUs that are not there: what a test sets and reads of the cards that the stand-ins show to CUDA.

The environment variable FAKE_GPU names a file, which is the machine: every process that runs on it maps it, and so
does this module, without loading torch. What machine.h says of its layout is said here again.
"""

import contextlib
import fcntl
import mmap
import os
import re
import tempfile
import time
import uuid
from ctypes import Structure, c_char, c_double, c_int64, sizeof
from pathlib import Path

CARDS, PROCESSES, OTHERS, FAULTS = 32, 64, 8, 16
EXCHANGES, RANKS, SAID_BYTES = 32, 16, 4096
NVML = {"full": 0, "old driver": 1, "wsl": 2, "absent": 3}
READS = {"known": 0, "zero": 1, "stored": 2, "false": 3}
ASSERT, ILLEGAL_ADDRESS, LAUNCH_FAILURE = 710, 700, 719  # the errors after which a CUDA context is lost
ALWAYS = -1

_SETTINGS = ["context_bytes", "cublas_handle_bytes", "cudnn_handle_bytes", "nccl_bytes", "cudnn_workspace_bytes"]
_SETTINGS += ["cublaslt_workspace_bytes", "rnn_workspace_bytes", "rnn_reserve_bytes", "throttle_reasons"]
_RATES = ["launch_seconds", "thread_seconds", "flops", "idle_watts", "full_watts", "busy_by_others"]
_COUNTERS = ["mallocs", "frees", "ooms", "launches"]


class _Other(Structure):
    _fields_ = [("pid", c_int64), ("bytes", c_int64)]


class _Card(Structure):
    _fields_ = [
        ("name", c_char * 96),
        ("uuid", c_char * 64),
        *[(name, c_int64) for name in ("parent", "mig", "capacity", "major", "minor", "multiprocessors", *_SETTINGS)],
        *[(name, c_double) for name in _RATES],
        ("others", _Other * OTHERS),
        *[(name, c_int64) for name in _COUNTERS],
        *[(name, c_double) for name in ("busy_until", "busy_seconds", "looked", "looked_busy")],
        *[(name, c_double) for name in ("utilization", "celsius")],
    ]


class _Process(Structure):
    _fields_ = [("pid", c_int64), ("started", c_int64), ("context", c_int64 * CARDS), ("bytes", c_int64 * CARDS)]


class _Fault(Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("active", "pid", "status", "after", "times")],
        ("function", c_char * 64),
    ]


class _Exchange(Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("communicator", "sequence", "arrived", "left")],
        ("known", c_int64 * RANKS),
        ("said", c_char * SAID_BYTES * RANKS),
    ]


class _Machine(Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("size", "lock", "count", "nvml", "reads", "peers", "faults_set")],
        ("started", c_double),
        ("faults", _Fault * FAULTS),
        ("cards", _Card * CARDS),
        ("processes", _Process * PROCESSES),
        ("exchanges", _Exchange * EXCHANGES),
    ]


class Card:
    """What a GPU shall be; `mig` cuts it into slices: a list of their memory sizes.

    `settings` are the bytes and rates of machine.h's `struct card`: context_bytes, cublas_handle_bytes,
    cudnn_workspace_bytes, launch_seconds, thread_seconds, flops and so on.
    """

    def __init__(
        self, memory="24GiB", *, name="NVIDIA GeForce RTX 3090", capability=(8, 6), multiprocessors=82, uuid=None,
        mig=(), other=None, **settings,
    ):  # fmt: skip
        self.memory, self.name, self.capability, self.multiprocessors = memory, name, capability, multiprocessors
        self.uuid, self.mig, self.other, self.settings = uuid, list(mig), other or {}, settings


class CardOnMachine:
    """One card of a running machine: what is set on it may be changed while processes use it."""

    def __init__(self, machine, index):
        self._machine, self._index, self._raw = machine, index, machine.raw.cards[index]

    @property
    def uuid(self):
        return self._raw.uuid.decode()

    @property
    def slices(self):
        """The MIG slices that this GPU is cut into."""
        raw = self._machine.raw
        return [CardOnMachine(self._machine, i) for i in range(raw.count) if raw.cards[i].parent == self._index]

    @property
    def capacity(self):
        return self._raw.capacity

    @capacity.setter
    def capacity(self, memory):
        self._raw.capacity = to_bytes(memory)

    @property
    def other(self):
        """Bytes by process id: processes that are not on the machine's list of its own."""
        return {other.pid: other.bytes for other in self._raw.others if other.pid}

    @other.setter
    def other(self, bytes_of):
        entries = [*bytes_of.items(), *[(0, 0)] * OTHERS][: max(OTHERS, len(bytes_of))]
        for entry, (pid, memory) in zip(self._raw.others, entries, strict=True):
            entry.pid, entry.bytes = pid, to_bytes(memory)

    @property
    def processes(self):
        """Bytes by process id of the living processes that have a context or memory on the card."""
        found = {}
        for process in self._machine.raw.processes:
            context, memory = process.context[self._index], process.bytes[self._index]
            if (context or memory) and _start_of(process.pid) == process.started:
                found[process.pid] = memory
        return found

    @property
    def contexts(self):
        """The processes that opened a context on the card."""
        return [pid for pid in self.processes if self._context_of(pid)]

    def used_by(self, pid):
        return (self.processes | self.other).get(pid, 0)

    @property
    def used(self):
        return sum(self.processes.values()) + sum(self.other.values()) + sum(part.used for part in self.slices)

    def _context_of(self, pid):
        return any(entry.pid == pid and entry.context[self._index] for entry in self._machine.raw.processes)

    def __getattr__(self, name):
        if name in {*_SETTINGS, *_RATES, *_COUNTERS, "busy_seconds"}:
            return getattr(self._raw, name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        if name in _SETTINGS:
            setattr(self._raw, name, to_bytes(value))
        elif name in _RATES:
            setattr(self._raw, name, value)
        elif name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"a card has no setting {name!r}")


class Machine:
    """The machine that a file holds."""

    def __init__(self, path):
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self.raw = _Machine.from_buffer(mmap.mmap(file.fileno(), sizeof(_Machine)))

    @property
    def cards(self):
        return [CardOnMachine(self, i) for i in range(self.raw.count) if self.raw.cards[i].parent < 0]

    @property
    def nvml(self):
        return next(name for name, number in NVML.items() if number == self.raw.nvml)

    @nvml.setter
    def nvml(self, flavour):
        self.raw.nvml = NVML[flavour]

    @property
    def reads(self):
        return next(name for name, number in READS.items() if number == self.raw.reads)

    @reads.setter
    def reads(self, what):
        self.raw.reads = READS[what]

    def fail(self, function, status, *, after=0, times=1, pid=0):
        """Let `function` return `status`, after `after` calls that succeed, `times` over; pid 0: in all processes."""
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # among those who ask; the libraries only read what is active
            entry = next((fault for fault in self.raw.faults if not fault.active or not fault.times), None)
            if entry is None:
                raise ValueError(f"a machine has room for {FAULTS} faults at a time")
            entry.active = 0
            entry.pid, entry.status, entry.after, entry.times = pid, status, after, times
            entry.function = function.encode()
            entry.active = 1
            self.raw.faults_set = 1

    def mend(self):
        """End all faults."""
        self.raw.faults_set = 0
        for fault in self.raw.faults:
            fault.active = 0


@contextlib.contextmanager
def machine(*cards, nvml="full", reads="known", data=False, peers=True):
    """A machine with these cards, for this process and those it starts.

    Args:
        cards: what its GPUs are; none: a machine with a driver and no GPU.
        nvml: "full", "old driver" (of 2021), "wsl" or "absent".
        reads: what comes back from the card. "known": what a copy put there and no kernel can have changed since, else
            zeros, and 1 for a single byte, which is a flag; "false": the same, but 0 for a flag; "zero": zeros;
            "stored": all copies are real.
        data: short for reads="stored".
        peers: whether the ranks of a communicator hear each other, and wait for it, in collectives of up to 4 KiB;
            False: a rank is alone, and the others are taken to hold what it holds.
    """
    handle, path = tempfile.mkstemp(prefix="fake-gpu-")
    os.close(handle)
    before = os.environ.get("FAKE_GPU")
    try:
        yield create(path, *cards, nvml=nvml, reads="stored" if data else reads, peers=peers)
    finally:
        os.environ.pop("FAKE_GPU")
        if before is not None:
            os.environ["FAKE_GPU"] = before
        Path(path).unlink()


def create(path, *cards, nvml="full", reads="known", peers=True):
    """Write a machine to a file and make it this process' and its children's."""
    Path(path).write_bytes(bytes(sizeof(_Machine)))
    made = Machine(path)
    made.raw.size, made.raw.started = sizeof(_Machine), time.monotonic()
    made.nvml, made.reads, made.raw.peers = nvml, reads, peers
    for card in cards:
        parent = _add(made, card, card.memory, card.name, card.uuid or f"GPU-{_uuid(made)}", -1)
        if card.mig:
            made.raw.cards[parent].mig = 1
        for memory in card.mig:
            gigabytes = round(to_bytes(memory) / 2**30)
            _add(made, card, memory, f"{card.name} MIG {max(1, gigabytes // 5)}g.{gigabytes}gb",
                 f"MIG-{_uuid(made)}", parent)  # fmt: skip
    os.environ["FAKE_GPU"] = str(path)
    return made


def this_machine():
    """The machine that this process runs on."""
    return Machine(os.environ["FAKE_GPU"])


def poison(status=ASSERT):
    """From now on every CUDA call of this process fails, as after an error inside a kernel."""
    this_machine().fail("*", status, times=ALWAYS, pid=os.getpid())


def fail(function, status, *, after=0, times=1):
    """Let a function of a CUDA library fail in this process: see `Machine.fail`."""
    this_machine().fail(function, status, after=after, times=times, pid=os.getpid())


def to_bytes(size):
    """A number of bytes, or a text such as 24GiB or 500MiB."""
    if not isinstance(size, str):
        return int(size)
    number, unit = re.fullmatch(r"([\d.]+) ?([KMGT]i?B|B)", size).groups()
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** " KMGT".index(unit[0] if unit != "B" else " "))


def _add(made, card, memory, name, uuid, parent):
    index = made.raw.count
    raw = made.raw.cards[index]
    raw.name, raw.uuid, raw.parent = name.encode(), uuid.encode(), parent
    raw.major, raw.minor = card.capability
    raw.multiprocessors = card.multiprocessors
    raw.idle_watts, raw.full_watts, raw.celsius = 25, 350, 35
    raw.capacity = to_bytes(memory)
    made.raw.count = index + 1
    on_machine = CardOnMachine(made, index)
    if parent < 0:
        on_machine.other = card.other
    for setting, value in card.settings.items():
        setattr(on_machine, setting, value)
    return index


def _uuid(made):
    return uuid.uuid5(uuid.NAMESPACE_OID, f"card {made.raw.count}")


def _start_of(pid):
    """When a process started (proc(5), field 22), or None: it is gone, or a zombie, whose memory is given back."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
