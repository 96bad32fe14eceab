"""What every GPU people train on can hold and do at best: the catalogue in gpus.csv, and how a name finds its row."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from batchtune.errors import UsageError
from batchtune.vocabulary import PRECISIONS

COMMON = (
    "A100-80GB", "RTX 4090", "H100 SXM", "T4", "RTX 5090", "H200 SXM", "A100-40GB", "RTX 3060 12GB", "B200",
    "RTX 4060 Ti 8GB",
)  # fmt: skip
"""Names of a few that most people have or rent, the first of them first."""
_TERA, _LISTED_AT_MOST = 1e12, 8
# Words that drivers and people put before or after the part that tells one GPU from another.
_GIGABYTES = re.compile(r"\b(\d+) ?(?:g|gib|gb)\b")
_OTHER_CARDS = ("ti", "super")  # a card with one of these in its name is none of those without
_NOISE = re.compile("nvidia|geforce|tesla|amd|radeon|instinct|apple|rtx|gtx|rx|graphics|generation|edition|gpu")


@dataclass(frozen=True)
class Gpu:
    """One part, as its vendor describes it; what is not known for certain is absent, never guessed.

    Attributes:
        name: the shortest name that people use for it.
        vendor: NVIDIA, AMD or Apple.
        generation: the vendor's name of the architecture.
        memory_bytes: the vendor's gigabytes, read as GiB; for Apple the largest configuration.
        usable_memory_bytes: the total that the device reports, which is less (firmware, ECC): the smallest found in
            public logs from Linux with ECC as shipped; drivers since 2025 report up to 130 MiB less than older ones.
        bandwidth_bytes_per_second: peak memory bandwidth.
        tflops: peak dense 10^12 FLOP/s by precision, multiplied by matrix units where they exist and accumulated in
            fp32. GeForce cards do that at half the rate of their fp16 accumulation, and vendors often print the
            doubled figure for sparse matrices: neither of those is in here.
        compute_capability: CUDA compute capability; None for other vendors.
        board_power_watts: the most the board may draw; None where the vendor states it for a whole module.
        source: where the figures come from.
        aliases: other names, as drivers report them.
    """

    name: str
    vendor: str
    generation: str
    memory_bytes: int
    usable_memory_bytes: int | None
    bandwidth_bytes_per_second: float
    tflops: Mapping[str, float] = field(hash=False)
    compute_capability: tuple[int, int] | None
    board_power_watts: int | None
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> int:
        """The memory to plan with: what the device reports where that is known, otherwise what the vendor says."""
        return self.usable_memory_bytes or self.memory_bytes


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every part of the catalogue: NVIDIA, AMD, Apple, each from old to new."""
    text = files("batchtune.device").joinpath("gpus.csv").read_text(encoding="utf-8")
    return tuple(_gpu(row) for row in csv.DictReader(text.splitlines()))


def find_gpu(name: str) -> Gpu:
    """The part that a person or a driver calls `name`: "4090", "A100-80GB", "NVIDIA A100-SXM4-80GB", "Tesla T4".

    Raises:
        UsageError: no part has this name, or several do.
    """
    found = gpus_called(name)
    if len(found) == 1:
        return found[0]
    listed = ", ".join([gpu.name for gpu in found[:_LISTED_AT_MOST]] + ["…"] * (len(found) > _LISTED_AT_MOST))
    raise UsageError(f"--gpu {name}: {len(found)} GPUs are called that ({listed}); name one of them")


def gpus_called(name: str) -> list[Gpu]:
    """All parts that may be meant: "H100" is three, "4090" is one.

    Raises:
        UsageError: no part has this name.
    """
    if found := _matching(name):
        return found
    known = {"".join(label): gpu.name for gpu in all_gpus() for label in _labels(gpu)}
    close = difflib.get_close_matches("".join(_words(name)), known, n=3, cutoff=0.5)
    names = " or ".join(dict.fromkeys(known[key] for key in close))
    hint = f"Did you mean {names}?" if names else "'--gpu all' lists every GPU that is."
    fault = "not in the catalogue" if _words(name) else "says too little"
    raise UsageError(f"--gpu {name}: {fault}. {hint} For any other, use --memory-limit")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s of the device a driver reports, the denominator of model FLOPs utilisation (MFU).

    Returns:
        FLOP/s; None where the part or its rate is not known, or the name fits parts with different rates.
    """
    rates = {gpu.tflops.get(precision) for gpu in _matching(device_name)}
    rate = rates.pop() if len(rates) == 1 else None
    return rate * _TERA if rate is not None else None


def _gpu(row: Mapping[str, str]) -> Gpu:
    major, _, minor = row["compute_capability"].partition(".")
    return Gpu(
        name=row["name"],
        vendor=row["vendor"],
        generation=row["generation"],
        memory_bytes=int(row["memory_bytes"]),
        usable_memory_bytes=int(row["usable_memory_bytes"]) if row["usable_memory_bytes"] else None,
        bandwidth_bytes_per_second=float(row["bandwidth_bytes_per_second"]),
        tflops={p: float(row[f"{p}_tflops"]) for p in PRECISIONS if row[f"{p}_tflops"]},
        compute_capability=(int(major), int(minor)) if major else None,
        board_power_watts=int(row["board_power_watts"]) if row["board_power_watts"] else None,
        source=row["source"],
        aliases=tuple(alias for alias in row["aliases"].split(";") if alias),
    )


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", _GIGABYTES.sub(r"\1gb", _NOISE.sub(" ", name.lower())))


def _labels(gpu: Gpu) -> list[list[str]]:
    return [_words(label) for label in (gpu.name, *gpu.aliases)]


def _matching(name: str) -> list[Gpu]:
    """The parts called exactly so; failing that, those with a name that begins so or holds all the words."""
    words = _words(name)
    key = "".join(words)
    if exact := [gpu for gpu in all_gpus() if any("".join(label) == key for label in _labels(gpu))]:
        return exact

    def fits(label: list[str]) -> bool:
        if any(word in label and word not in key for word in _OTHER_CARDS):
            return False
        return set(words) <= set(label) or any("".join(label[:end]) == key for end in range(1, len(label)))

    return [gpu for gpu in all_gpus() if words and any(fits(label) for label in _labels(gpu))]
