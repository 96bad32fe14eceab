"""The catalogue of GPUs in a process of its own."""

import subprocess
import sys


def test_the_catalogue_is_read_without_torch():
    code = "import sys; from batchtune.device.gpus import all_gpus; all_gpus(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
