import sys
from pathlib import Path

# the benchmarks are scripts that import each other, which importlib mode does not put on the path
sys.path.insert(0, str(Path(__file__).parent))
