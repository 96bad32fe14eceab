"""Threads of libraries that a task loads when it is imported, and whether its runs are forks beside them."""

import subprocess

import pytest
from fixtures.tasks import ONES

from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask

WAITS = """
#include <pthread.h>
#include <unistd.h>
static void *waits(void *nothing) { for (;;) pause(); }
__attribute__((constructor)) static void begin(void) { pthread_t thread; pthread_create(&thread, 0, waits, 0); }
"""


@pytest.mark.parametrize(("name", "forks"), [("libarrow.so.2600", True), ("libother.so", False)])
def test_a_library_whose_threads_begin_anew_in_a_fork_costs_no_import_a_run(tmp_path, name, forks):
    (tmp_path / "waits.c").write_text(WAITS)
    library = tmp_path / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "waits.c", "-lpthread"], check=True)
    task = tmp_path / "model.py"
    task.write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n{ONES}")
    with Worker(OpenTask(task=str(task), device="cpu", precision=("fp32",))) as worker:
        assert worker.start().forks == forks
