"""Reads which CUDA libraries and functions an installed torch needs, and compiles stand-ins for all of them.

    python build.py TORCH_FOLDER OUTPUT_FOLDER HEADERS…

A function that no file here defines becomes a generic one: it refuses where its library can say "not supported",
else it reports success. Each of them can be made to fail by name (`fake_gpu.fail`).
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc"
    r"|nvshmem_host|nvJitLink|nvToolsExt|cudss)\.so"
)
# Functions without a version say by their name where they belong; the rest are versioned with their library's name.
PREFIXES = [
    ("cufile", "cuFile"),
    ("cusparseLt", "cusparseLt"),
    ("nccl", "p?nccl"),
    ("nvshmem_host", "nvshmem"),
    ("nvrtc", "nvrtc"),
    ("nvToolsExt", "nvtx"),
    ("cuda", "cu[A-Z]"),
]
# What a generic function returns: each library's own "not supported"; where none is named, success.
REFUSALS = {"cudart": 801, "cuda": 801, "cusolver": 9, "cusparse": 10, "cusparseLt": 10, "nccl": 5, "cufile": 5001}


def main(torch, output, *headers):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("*.so*"):
        old.unlink()
    libraries = sorted(Path(torch, "lib").glob("*.so*"))
    functions, versions = needed(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        compiler = Compiler(output, Path(scratch), [*(f"-I{folder}" for folder in headers), *built_with(torch)])
        compiler.library("libfake_gpu.so", [HERE / "machine.c", HERE / "limits.c"])
        for library in sorted(functions):
            compiler.stand_in(library, functions[library], versions.get(library))


def built_with(torch):
    """The versions of cuDNN and NCCL that this torch asks for, by its metadata: it refuses to run with older ones."""
    metadata = next(Path(torch).parent.glob("torch-*.dist-info/METADATA")).read_text()
    for library, name in (("cudnn", "CUDNN_VERSION"), ("nccl", "NCCL_VERSION")):
        major, minor, patch = re.search(rf"nvidia-{library}-cu\d+==(\d+)\.(\d+)\.(\d+)", metadata).groups()
        yield f"-D{name}={int(major) * 10000 + int(minor) * 100 + int(patch)}"


def needed(libraries):
    """The CUDA libraries that torch's own libraries name, the functions of each, and the symbol version it has."""
    names, wanted, own = {"libcuda.so.1", "libnvidia-ml.so.1"}, {}, set()
    for library in libraries:
        dynamic = tool("readelf", "-d", library)
        names |= {name for name in re.findall(r"NEEDED.*\[(.*?)\]", dynamic) if LIBRARY.match(name)}
        own |= {symbol.partition("@")[0] for symbol in symbols(library, "--defined-only")}
        wanted |= dict(symbol.partition("@")[::2] for symbol in symbols(library, "-u"))
    functions, versions = {name: set() for name in names}, {}
    for symbol, version in wanted.items():
        if symbol in own:
            continue
        name = version.lstrip("@")
        home = name if name in names else _home(symbol, names)
        if home:
            functions[home].add(symbol)
        if home and name:
            versions[home] = name
    c10 = next(library for library in libraries if library.name == "libc10_cuda.so")
    # c10/cuda/driver_api.cpp looks these up by name when it needs them: they are texts in the library
    texts = re.findall(rb"\0(cu[A-Z][a-z][A-Za-z0-9]+(?:_v2)?)(?=\0)", c10.read_bytes())
    functions["libcuda.so.1"] |= {text.decode() for text in texts}
    return functions, versions


def _home(symbol, names):
    for short, prefix in PREFIXES:
        if re.match(prefix, symbol):
            return next((name for name in names if name.startswith(f"lib{short}.so")), None)
    return None


class Compiler:
    """gcc, and where its files go."""

    def __init__(self, output, scratch, flags):
        self._output, self._scratch = output, scratch
        self._flags = [f"-I{HERE}", *flags]

    def stand_in(self, library, functions, version):
        """One library: what its C file defines, and generic functions for the rest that torch needs."""
        short = library.removeprefix("lib").partition(".so")[0]
        source = HERE / f"{'nvml' if short == 'nvidia-ml' else short}.c"
        sources, defined = [], set()
        if source.exists():
            binary = self._scratch / f"{short}.o"
            self._gcc("-c", source, "-o", binary)
            sources, defined = [binary], set(symbols(binary, "--defined-only"))
        generic = self._scratch / f"{short}_generic.c"
        head = "int fake_gpu_fault(const char *);\n#define OR_ELSE(status, other) (status ?: other)\n"
        ends = f", {REFUSALS.get(short, 0)}); }}\n"
        body = [f'int {name}(void) {{ return OR_ELSE(fake_gpu_fault("{name}")' + ends for name in functions - defined]
        generic.write_text(head + "".join(sorted(body)))
        self.library(library, [generic, *sources], version)
        print(f"{library:24} {len(functions & defined):4} of its {len(functions)} functions by hand")

    def library(self, name, sources, version=None):
        options = [f"-Wl,-soname,{name}", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", f"-L{self._output}"]
        if version:
            script = self._scratch / f"{name}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script,{script}")
        ours = [] if name == "libfake_gpu.so" else ["-lfake_gpu"]
        self._gcc("-shared", *options, "-o", self._output / name, *sources, *ours, "-lm", "-ldl", "-lpthread")

    def _gcc(self, *what):
        warnings = ["-Wall", "-Wno-builtin-declaration-mismatch", "-Wno-unknown-pragmas"]
        command = ["gcc", "-std=gnu11", "-O2", "-fPIC", *warnings, *self._flags, *map(str, what)]
        subprocess.run(command, check=True)


def symbols(library, which):
    dynamic = [] if str(library).endswith(".o") else ["-D"]
    return [line.split()[-1] for line in tool("nm", *dynamic, which, library).splitlines() if line.strip()]


def tool(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
