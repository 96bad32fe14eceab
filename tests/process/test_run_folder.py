"""A run folder whose process is killed."""

import subprocess
import sys

from batchtune.run_folder import RunFolder


def test_it_is_free_again_after_its_process_was_killed(tmp_path):
    code = (
        "import os, pathlib; from batchtune.run_folder import RunFolder; "
        f"RunFolder('digits', pathlib.Path({str(tmp_path)!r})).open(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    folder = RunFolder("digits", tmp_path)
    folder.open()
    folder.close()
