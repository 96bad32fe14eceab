"""What the tests of real trainings share."""

import sys
from pathlib import Path

from fixtures.quick import as_forks, quick_cli  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))  # its scripts import each other
