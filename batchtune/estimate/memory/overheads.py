"""What training takes from a GPU beside the tensors a trace can see, and how far an estimate may be off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

from batchtune.device.gpus import find_gpu
from batchtune.errors import UsageError
from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.events import Assumption, Gpu

_CONVOLUTION, _RECURRENT = "aten.convolution", "aten._cudnn_rnn."
_SOLVERS = tuple(f"aten.linalg_{name}" for name in ("cholesky", "eig", "inv", "ldl", "lstsq", "lu", "qr", "solve"))
# The confidence that is left, and the library, or none: kernels of torch's own that take much which no formula here
# tells, as tests/benchmarks/estimate_allocator.py found.
_NOT_SEEN = (
    ("low", "cuFFT", ("aten._fft_",)),
    ("low", "cuSOLVER", ("aten._linalg_", *_SOLVERS)),
    ("low", "kernels of sparse tensors", ("aten._sparse", "aten.sparse", "torch.sparse_")),
    ("medium", "", ("aten.sort.", "aten.argsort.", "aten.topk.", "aten.kthvalue.", "aten._unique", "aten.unique")),
    ("low", "", ("aten._cdist_", "aten.cdist.")),
)
# Of sparse gradients, as the fake card saw them: `inside` in scratch.py has what they take.
_SEEN = (
    "aten._sparse_coo_tensor_with_dims_and_tensors.default",
    "aten._embedding_bag_backward.default",
    "aten._coalesce.default",
    "aten.sparse_mask.default",
    "aten.clone.default",
)
_TORCHS_OWN = ("torch.sparse_", "aten.", "prims.", "prim.", "c10d.", "_c10d_functional.", "higher_order.")


@dataclass(frozen=True)
class Overhead:
    """One generation's fixed costs.

    Attributes:
        context_bytes: driver, kernels and libraries of a process that trains, outside the caching allocator.
        gpu: what scratch is calculated from, for the largest of the generation.
    """

    context_bytes: int
    gpu: Gpu


# Contexts: 767 MiB were measured on an H100 (driver 580, CUDA 13, torch 2.11), 619 of them before cuBLAS and cuDNN were
# there. The others are not measured: about 300 MB with lazily loaded kernels, which CUDA has since 11.7 (a maintainer
# in pytorch#107667), to 500 MB on parts with many multiprocessors. Multiprocessors: taken to be those of the
# generation's largest part, not looked up; threads of each: CUDA C++ Programming Guide. cuBLAS has a workspace of
# 8,519,680 bytes a handle and stream, 32 MiB on compute capability 9.0 (CublasHandlePool.cpp, pytorch#120925) and, from
# torch 2.12 on, on 10 and 12 (pytorch#175344). ROCm's are not known.
OVERHEADS = {
    "Pascal": Overhead(350 * MIB, Gpu(56, 2048, matrix_units=())),
    "Volta": Overhead(400 * MIB, Gpu(80, 2048, matrix_units=(2,))),
    "Turing": Overhead(350 * MIB, Gpu(72, 1024, matrix_units=(2,))),
    "Ampere": Overhead(450 * MIB, Gpu(108, 2048)),
    "Ada": Overhead(450 * MIB, Gpu(142, 1536)),
    "Hopper": Overhead(770 * MIB, Gpu(132, 2048, 32 * MIB)),
    "Blackwell": Overhead(770 * MIB, Gpu(188, 2048, 32 * MIB)),
}
_OTHER = Overhead(770 * MIB, Gpu(304, 2048, 32 * MIB))
_LARGER_ON_BLACKWELL = (2, 12)
APPLE_SHARE = 0.75  # of unified memory that Metal recommends as a working set on machines with 36 GiB and more
# multi_processor_count in public logs of torch (A5000, A10G); the other six from pages of vendors and databases. For
# all other GPUs the largest of the generation is taken, with which reductions are spread further and scratch is larger.
_KNOWN_MULTIPROCESSORS = {
    "T4": 40,
    "A100-40GB": 108,
    "A100-80GB": 108,
    "A10G": 80,
    "RTX A5000": 64,
    "RTX 3090": 82,
    "RTX 4090": 128,
    "H100 SXM": 132,
}
# Most threads of a multiprocessor by compute capability: CUDA C++ Programming Guide, technical specifications.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_BANDS = {"high": 0.04, "medium": 0.15, "low": 0.45}  # from sure to unsure


@dataclass(frozen=True)
class Offsets:
    """Medians of what was measured; None for a term that was not.

    Attributes:
        context_bytes: taken from the device by a process beside what its allocator reserves.
        convolution_share: allocated beside the trace's storages in steps with convolutions, as a share of its peak.
        recurrent_share: the same in steps with recurrent layers.
        probes: how many measurements the best-known term rests on.
    """

    context_bytes: int | None = None
    convolution_share: float | None = None
    recurrent_share: float | None = None
    probes: int = 0


UNMEASURED = Offsets()


def gpu_of(name: str, generation: str) -> Gpu:
    """What scratch is calculated from on a GPU; what is not known of it is that of its generation's largest."""
    largest = overhead_of(generation).gpu
    if generation == "Blackwell" and torch_release() < _LARGER_ON_BLACKWELL:
        largest = replace(largest, cublas_bytes=Gpu.cublas_bytes)
    try:
        known = find_gpu(name)
    except UsageError:
        return largest
    threads = _THREADS.get(known.compute_capability or (0, 0), largest.threads)
    multiprocessors = _KNOWN_MULTIPROCESSORS.get(known.name, largest.multiprocessors)
    return replace(largest, multiprocessors=multiprocessors, threads=threads)


def torch_release() -> tuple[int, ...]:
    """The version of the torch that is installed, such as (2, 11); it is not imported for that."""
    return tuple(map(int, version("torch").split(".")[:2]))


def overhead_of(generation: str) -> Overhead:
    """The fixed costs on GPUs of a generation; those of the costliest for one that is not in the table."""
    return next((found for name, found in OVERHEADS.items() if generation.startswith(name)), _OTHER)


def kind_of(ops: Iterable[str]) -> Literal["plain", "convolution", "recurrent"]:
    """Whether cuDNN's convolutions or its recurrent layers take memory that a trace of these operators does not see."""
    names = set(ops)
    if any(name.startswith(_RECURRENT) for name in names):
        return "recurrent"
    return "convolution" if any(name.startswith(_CONVOLUTION) for name in names) else "plain"


def custom_operators(ops: Iterable[str]) -> list[str]:
    """Operators that are not torch's own: what happens inside them is not seen."""
    return sorted(name for name in ops if not name.startswith(_TORCHS_OWN))


def unseen_share(ops: Iterable[str], measured: Offsets) -> float:
    """What cuDNN takes on top of a traced peak, as a share of it; 0 where nothing was measured."""
    shares = {"convolution": measured.convolution_share, "recurrent": measured.recurrent_share}
    return shares.get(kind_of(ops)) or 0.0


def capacity_bytes(
    memory_bytes: int,
    generation: str,
    vendor: str,
    ops: Iterable[str],
    limit: int | None,
    measured: Offsets = UNMEASURED,
) -> int:
    """What the caching allocator may reserve for tensors.

    Args:
        memory_bytes: what the device reports as its total.
        generation: the architecture's name.
        vendor: NVIDIA, AMD or Apple.
        ops: operators of the step; some take what no trace sees.
        limit: bytes that the user allows the process to reserve.
        measured: what probes of this GPU found, in the place of the table's figures.
    """
    context = overhead_of(generation).context_bytes if measured.context_bytes is None else measured.context_bytes
    total = int(memory_bytes * APPLE_SHARE) if vendor == "Apple" else memory_bytes
    reservable = total - context if limit is None else min(total - context, limit)
    return max(0, int(reservable / (1 + unseen_share(ops, measured))))


@dataclass(frozen=True)
class Confidence:
    """How far peak memory may be off, as a share of it, and why.

    Attributes:
        name: high, medium or low.
        band: share of the peak by which the truth may be higher.
        notes: the reasons.
        calibrated: whether probes of this GPU stand behind its overheads.
    """

    name: str
    band: float
    notes: tuple[str, ...]
    calibrated: bool = False

    def __str__(self) -> str:
        return f"{self.name} (±{self.band:.0%} of memory){', calibrated' if self.calibrated else ''}"


def confidence(
    ops: Iterable[str],
    assumed: Sequence[Assumption],
    *,
    aligned: bool,
    vendor: str,
    precision: str,
    measured: Offsets = UNMEASURED,
) -> Confidence:
    """The confidence that the operators of a step and what its trace assumed leave.

    The bands come from an H100, tests/benchmarks/results/gpu_peaks.md: 4 % for steps whose scratch is known, 15 % for
    convolutions in half precision, 45 % for those in fp32, where cuDNN chooses among more algorithms. What was never
    compared (cuDNN's recurrent layers, other libraries, branches that depend on data) has the widest.
    """
    names, custom = set(ops), custom_operators(ops)
    found = [("low" if each.depends_on_data else "medium", each.text) for each in assumed]
    if any(name.startswith(_CONVOLUTION) for name in names):
        level = "medium" if precision in {"bf16", "fp16"} else "low"
        found.append((level, "convolutions: cuDNN's workspace depends on the algorithm it chooses"))
    if kind_of(names) == "recurrent":
        found.append(
            (
                "low",
                "recurrent layers: what cuDNN keeps for backward is taken from one GPU of 2017; it is not documented",
            )
        )
    for level, library, operators in _NOT_SEEN:
        kernels = [name for name in sorted(names) if name.startswith(operators) and not name.endswith(_SEEN)]
        unseen = [library] if library and kernels else kernels
        found += [(level, f"{each}: the memory inside of it is not seen") for each in unseen]
    if custom:
        found.append(("low", f"custom operators: memory inside {', '.join(custom[:3])} is not seen"))
    if vendor != "NVIDIA":
        found.append(("low", f"{vendor}: traced as on an NVIDIA GPU; kernels and allocator differ"))
    level = max(["high" if aligned else "medium", *(level for level, _ in found)], key=list(_BANDS).index)
    notes = [reason for _, reason in found]
    if measured.probes:
        notes.append(f"overheads as measured in {measured.probes} probe{'s' * (measured.probes > 1)} of this GPU here")
    return Confidence(level, _BANDS[level], tuple(notes), calibrated=measured.probes > 0)
