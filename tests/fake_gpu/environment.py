"""Makes the environment of the lane `cuda`: PyTorch's CUDA wheel, unmodified, on libraries that stand in for a GPU.

    python tests/fake_gpu/environment.py [--torch 2.11.0] [--folder .venv-cuda]

A second run is quick: packages are installed when the torch version or the project's requirements changed, the
stand-ins are built when their sources did. Exit code 2, with one line that says what to install, where that fails.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS_NEED = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "psutil", "pytorch-lightning"}
ASK_FOR_TORCH = {"accelerate", "pytorch-lightning"}  # installed without dependencies: theirs would bring torch's own
NO_PART = re.compile(r"nvidia-(?!ml-py)|cuda-|triton")  # what the CUDA wheel asks for and the stand-ins replace
FAILED = 2
_RECIPE = (ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__).resolve())


class CannotMake(Exception):
    """What is missing, and what to install."""


def main():
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--torch", default="2.11.0", help="version of the CUDA wheel, 2.9.0 to 2.15.0")
    options.add_argument("--folder", type=Path, default=ROOT / ".venv-cuda")
    chosen = options.parse_args()
    try:
        Environment(chosen.folder.resolve(), chosen.torch).make()
    except CannotMake as reason:
        print(f"environment.py: {reason}", file=sys.stderr)
        return FAILED
    return 0


class Environment:
    """A virtual environment with what was installed into it written down in its stamp."""

    def __init__(self, folder, torch):
        self.folder, self.torch = folder, torch
        self.python = folder / "bin" / "python"
        self._stamp = folder / "fake_gpu.json"

    def make(self):
        if not shutil.which("gcc") or not shutil.which("readelf"):
            raise CannotMake("no C compiler here; install one: apt-get install gcc libc6-dev binutils")
        done = json.loads(self._stamp.read_text()) if self._stamp.exists() else {}
        packages = {"torch": self.torch, "requirements": _digest(*_RECIPE)}
        if done.get("packages") != packages:
            self._install()
            done = {"packages": packages}
            self._stamp.write_text(json.dumps(done))
        sources = _digest(HERE / "build.py", HERE / "preload.py", *sorted(HERE.glob("*.[ch]")))
        if done.get("sources") != sources:
            self._build()
            self._stamp.write_text(json.dumps(done | {"sources": sources}))
        print(f"{self.python}: torch {self.torch} on the stand-ins of {HERE.relative_to(ROOT)}")

    def _install(self):
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        minor = int(self.torch.split(".")[1])
        self._pip("--no-deps", f"torch=={self.torch}")
        plain, bare = _requirements(self._needs_of("torch"))
        vision = min(minor + 15, 29)  # 0.24 is torch 2.9's and both count on; 0.29 is for torch 2.14 and later
        bare |= {"timm", "torchmetrics", f"torchvision==0.{vision}.*"}
        with tempfile.TemporaryDirectory() as scratch:
            constraints = Path(scratch) / "constraints.txt"
            lines = (ROOT / "constraints.txt").read_text().splitlines()
            constraints.write_text("\n".join(line for line in lines if not re.match(r"torch|triton", line)))
            self._pip("-c", constraints, "lightning-utilities", "pillow", *sorted(plain))
            self._pip("-c", constraints, "--no-deps", *sorted(bare))
        self._pip("--no-deps", "-e", ROOT)
        listed = json.loads(_output(self.python, "-m", "pip", "list", "--format=json"))
        if brought := sorted(package["name"] for package in listed if NO_PART.match(package["name"])):
            raise CannotMake(f"{self.folder} holds {', '.join(brought)}, which would be loaded instead; remove it")

    def _build(self):
        """Headers of the CUDA version that this torch was built with are needed for as long as the compiler runs."""
        with tempfile.TemporaryDirectory() as scratch:
            self._pip("--no-deps", "--target", scratch, *_header_packages(self._needs_of("torch")))
            headers = [folder for folder in Path(scratch).glob("nvidia/*/include") if folder.is_dir()]
            packages = self._site_packages()
            build = subprocess.run(
                [sys.executable, HERE / "build.py", packages / "torch", packages / "fake_gpu_libraries", *headers],
                check=False,
            )
        if build.returncode:
            raise CannotMake("the stand-ins do not compile; the compiler's words are above")
        shutil.copy(HERE / "preload.py", packages / "fake_gpu_preload.py")
        (packages / "fake_gpu_preload.pth").write_text("import fake_gpu_preload\n")

    def _needs_of(self, package):
        code = f"import importlib.metadata as m, json; print(json.dumps(m.requires('{package}')))"
        return json.loads(_output(self.python, "-c", code))

    def _site_packages(self):
        return Path(_output(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())

    def _pip(self, *what):
        command = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *map(str, what)]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip said nothing"]
            wanted = " ".join(str(part) for part in what if not str(part).startswith("-"))
            raise CannotMake(f"cannot install {wanted} (pip install says: {said[-1]})")


def _requirements(torch_needs):
    """The project's requirements: those for pip to resolve, and those that must come without their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["recipes"], *extras["transformers"]]
    wanted += [need for need in extras["test"] if _name(need) in TESTS_NEED]
    wanted += [need for need in torch_needs if "extra ==" not in need and not NO_PART.match(need)]
    wanted = {need for need in wanted if _name(need) != "torch"}
    bare = {need for need in wanted if _name(need) in ASK_FOR_TORCH}
    return wanted - bare, bare


def _header_packages(torch_needs):
    """cuda_runtime_api.h, cuda.h and what they include, of the CUDA version in torch's own requirements."""
    for need in torch_needs:
        if found := re.match(r"cuda-toolkit\[.*\]==(\d+\.\d+)", need):  # CUDA 13: one package names all versions
            return [f"nvidia-cuda-runtime=={found[1]}.*", f"nvidia-cuda-crt=={found[1]}.*"]
        if found := re.match(r"nvidia-cuda-runtime-cu12==(\d+\.\d+)\.(\d+)", need):
            return [f"nvidia-cuda-runtime-cu12=={found[1]}.{found[2]}", f"nvidia-cuda-nvcc-cu12=={found[1]}.*"]
    raise CannotMake("this torch asks for no CUDA runtime: is it the CUDA wheel, on Linux x86-64?")


def _name(requirement):
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


def _digest(*paths):
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _output(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
