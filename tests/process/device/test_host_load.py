"""Another program beside this one."""

import subprocess
import sys
import time

from batchtune.device.host import watching_others


def test_another_program_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with watching_others() as load:
            time.sleep(0.6)
    finally:
        busy.kill()
        busy.wait()
    assert load.others > 0.05
