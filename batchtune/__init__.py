"""batchtune finds the batch size, learning rate and precision that train a PyTorch model to its goal soonest.

The functions here do what the commands of the same name do and return the same result documents:

    import batchtune
    result = batchtune.probe("model.py", memory_limit="20GiB")
    result.probe.max_batch_size
"""

import sys
from types import ModuleType

try:
    from batchtune.api import check, environment, estimate, find_batch_size, load_result, probe, tune
    from batchtune.sampling.sampler import LengthBatchSampler, length_batches
    from batchtune.version import __version__
except KeyboardInterrupt:
    program = (getattr(sys, "argv", None) or [""])[0]
    if program.endswith(("/batchtune", "\\batchtune")) or (program == "-m" and "batchtune" in sys.orig_argv):
        sys.exit(130)  # the command, which has not begun
    raise

__all__ = [
    "LengthBatchSampler",
    "__version__",
    "check",
    "environment",
    "estimate",
    "find_batch_size",
    "length_batches",
    "load_result",
    "probe",
    "tune",
]


class _Package(ModuleType):
    """Keeps `batchtune.probe`, `.tune` and `.estimate` the functions that people call.

    Importing a package of the same name would put the package in the function's place.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in {"probe", "tune", "estimate"} and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
