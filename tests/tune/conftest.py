import importlib.util
import sys
from pathlib import Path

# the tests' law of training is shared by several files, which importlib mode does not put on the path
_spec = importlib.util.spec_from_file_location("law", Path(__file__).parent / "law.py")
law = importlib.util.module_from_spec(_spec)
sys.modules["law"] = law
_spec.loader.exec_module(law)
