"""What cuDNN takes for convolutions beside their results, and what the estimate says.

    python tests/benchmarks/convolution_workspaces.py                        # compares, writes results/convolutions.md
    python tests/benchmarks/convolution_workspaces.py --measure --seconds 60 # on a GPU, writes data/convolutions.json

The convolutions are those of nine models of torchvision at 224 x 224 and a few of other kinds, 32 samples each; and
narrow ones, transposed ones and ones in groups, of 32 to 512 samples. Every one is called by itself, forward and for
each gradient; its workspace is what was asked of the allocator at the peak beyond what stays.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
import on_gpu  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from batchtune.estimate.memory.events import Block, Gpu, Steps  # noqa: E402
from batchtune.estimate.memory.scratch import inside  # noqa: E402

aten = torch.ops.aten
DATA, RESULT = HERE / "data" / "convolutions.json", HERE / "results" / "convolutions.md"
MODELS = (
    "resnet18", "resnet50", "vgg11", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "densenet121",
    "vit_b_16", "shufflenet_v2_x1_0",
)  # fmt: skip
MORE: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)),
    (lambda: nn.Conv2d(16, 16, 3, padding=1), (16, 64, 64)),
    (lambda: nn.Conv2d(32, 32, 3, padding=1), (32, 64, 64)),
    (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 56, 56)),
    (lambda: nn.Conv2d(128, 128, 3, padding=2, dilation=2), (128, 32, 32)),
    (lambda: nn.Conv2d(32, 64, 5), (32, 12, 12)),
    (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4), (64, 56, 56)),
    (lambda: nn.ConvTranspose2d(256, 128, 2, stride=2), (256, 28, 28)),
    (lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), (64, 32, 32)),
    (lambda: nn.Conv1d(80, 384, 3, padding=1), (80, 3000)),
    (lambda: nn.Conv1d(512, 512, 3, stride=2), (512, 1000)),
    (lambda: nn.Conv3d(3, 64, 3, padding=1), (3, 16, 56, 56)),
    (lambda: nn.Conv3d(64, 64, 3, padding=1), (64, 8, 28, 28)),
)
LAYOUTS = ("contiguous", "channels last")
KINDS = (*itertools.product(("tf32", "bf16"), LAYOUTS), ("fp32", "contiguous"))
BATCHES = (32, 128, 512)
TRANSPOSED = ((32, 16, 2), (64, 32, 2), (128, 64, 2), (64, 3, 4), (64, 32, 4), (32, 3, 4))  # channels, results, kernel
GROUPED = ((128, 32), (256, 32), (48, 2), (120, 5), (64, 64))  # channels and groups
WIDE = ((3, 64), (64, 64), (64, 256), (256, 64), (128, 128), (512, 512))  # channels and results
TYPES = {"tf32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = {"forward": None, "input": [True, False, False], "weight": [False, True, False]}
SHARE, LEAST = 0.05, 1 << 20  # of what was measured, and bytes: so far off is right
Row = dict[str, Any]


def shapes() -> Iterator[Row]:
    """Every different convolution."""
    import torchvision

    found: list[Row] = []

    def see(module: Any, given: tuple[torch.Tensor], result: torch.Tensor) -> None:
        settings = {name: list(getattr(module, name)) for name in ("stride", "padding", "dilation")}
        row = {
            "size": list(given[0].shape[1:]),
            "filter": list(module.weight.shape),
            **settings,
            "groups": module.groups,
        }
        row |= {"transposed": module.transposed}
        found.extend([row] if row not in found else [])

    with torch.device("meta"):
        models = [(torchvision.models.get_model(name, weights=None), (3, 224, 224)) for name in MODELS]
        for model, size in [*models, *((make(), size) for make, size in MORE)]:
            for each in model.modules():
                if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d):
                    each.register_forward_hook(see)
            model.eval()(torch.empty(1, *size))
    yield from found


def square(
    channels: int, results: int, side: int, kernel: int, *, stride: int = 1, groups: int = 1, transposed: bool = False
) -> Row:
    """One of a square image; a transposed one without a border, or with one for a kernel of 4."""
    padding = (kernel - 2) // 2 if transposed else kernel // 2
    weights = [channels, results // groups] if transposed else [results, channels // groups]
    row: Row = {"size": [channels, side, side], "filter": [*weights, kernel, kernel]}
    pairs = {"stride": [stride] * 2, "padding": [padding] * 2, "dilation": [1, 1]}
    return row | pairs | {"groups": groups, "transposed": transposed}


def more_jobs() -> Iterator[tuple[Row, str, str]]:
    """Those of other batches than 32, too: shape with the batch, dtype and layout."""
    product = itertools.product
    for channels, results, side, batch in product(
        (4, 16, 32, 64, 128), (8, 16, 32, 64), (14, 16, 28, 32, 56, 64), BATCHES
    ):
        yield {"batch": batch} | square(channels, results, side, 3), "tf32", "contiguous"
    for channels, results, side, batch in product((16, 32, 64), (32, 64), (28, 32), BATCHES[::2]):
        row = {"batch": batch}
        yield row | square(channels, results, side, 5), "tf32", "contiguous"
        yield row | square(channels, results, 2 * side, 3, stride=2), "tf32", "contiguous"
        yield row | square(channels, results, side, 3), "bf16", "contiguous"
    for shape, side, batch, dtype in product(TRANSPOSED, (16, 32), (32, 256), ("tf32", "bf16")):
        channels, results, kernel = shape
        row = square(channels, results, side, kernel, stride=2, transposed=True)
        yield {"batch": batch} | row, dtype, "contiguous"
    for (channels, groups), side, stride, dtype in product(GROUPED, (56, 28, 14), (1, 2), ("tf32", "bf16")):
        row = square(channels, channels, side, 3, stride=stride, groups=groups)
        for batch, layout in ((32, LAYOUTS[0]), (256, LAYOUTS[0]), (256, LAYOUTS[1])):
            yield {"batch": batch} | row, dtype, layout
    for (channels, results), side, kernel, batch in product(WIDE, (56, 14), (1, 3, 7), (32, 256)):
        if kernel != 7 or channels == 3:
            yield {"batch": batch} | square(channels, results, side, kernel), "tf32", "channels last"


def beyond(work: Callable[[], object]) -> int:
    """Bytes asked of the allocator at the peak of some work, beyond what stays."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    del result
    return int(stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])


def calls(row: Row, device: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The operator and the arguments of each pass; the result, which the gradients need, is made on the way."""
    layout = torch.channels_last if row["layout"] == "channels last" else torch.contiguous_format
    tensors = [
        torch.ones(shape, device=device, dtype=TYPES[row["dtype"]]).to(memory_format=layout)
        for shape in ([row["batch"], *row["size"]], row["filter"])
    ]
    sides = len(row["stride"])
    how = (row["stride"], row["padding"], row["dilation"], row["transposed"], [0] * sides, row["groups"])
    yield "forward", aten.convolution.default, (*tensors, None, *how)
    result = aten.convolution.default(*tensors, None, *how)
    gradient = torch.ones_like(result).to(memory_format=layout)  # meta tensors forget it
    del result
    for name, mask in PASSES.items():
        if mask:
            yield name, aten.convolution_backward.default, (gradient, *tensors, None, *how, mask)


def measure(seconds: float) -> None:
    """As many as there is time for, in an order that spreads over all kinds."""
    jobs = [({"batch": 32} | row, *kind) for kind, row in itertools.product(KINDS, shapes())]
    jobs += more_jobs()
    random.Random(1).shuffle(jobs)
    end, rows = time.monotonic() + seconds, []
    for shape, dtype, layout in jobs:
        if time.monotonic() > end:
            break
        if layout == "channels last" and len(shape["size"]) != 3:  # an image
            continue
        row = shape | {"dtype": dtype, "layout": layout}
        torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        for name, operator, arguments in calls(row, "cuda"):
            row[name] = beyond(lambda: operator(*arguments))  # noqa: B023
        rows.append(row)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {dt.datetime.now(dt.UTC):%Y-%m-%d}"
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    DATA.write_text(f'{{"machine": "{machine}",\n "rows": [\n{lines}\n]}}\n')


def estimated(row: Row) -> dict[str, int]:
    """The workspace of each pass by the estimate."""

    def blocks(steps: Steps) -> int:
        return sum(
            blocks(step) if isinstance(step, tuple) else step.formula(Gpu(), *step.lengths)
            for step in steps
            if isinstance(step, tuple | Block)
        )

    return {name: blocks(inside(operator, arguments)) for name, operator, arguments in calls(row, "meta")}


def is_right(row: Row, name: str, guess: int) -> bool:
    return abs(guess - row[name]) <= max(SHARE * row[name], LEAST)


def compare() -> None:
    """Writes the table."""
    data = json.loads(DATA.read_text())
    rows = [(row, estimated(row)) for row in data["rows"]]
    text = [
        "# cuDNN's workspaces",
        "",
        f"What convolutions of 32 to 512 samples took beside their results ({data['machine']}), and what the",
        "estimate says of them. Right is what is off by 5 % or 1 MiB at most. Made by",
        "`python tests/benchmarks/convolution_workspaces.py`. fp32 is strict here, without TF32,",
        "which is not torch's default; the estimate takes it for TF32.",
        "",
        "| computed in | layout | groups | pass | right | measured, all together | estimated |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for (dtype, layout), grouped, name in itertools.product(KINDS, (False, True), PASSES):
        kind = (dtype, layout, grouped)
        chosen = [(row, guess) for row, guess in rows if (row["dtype"], row["layout"], row["groups"] > 1) == kind]
        right = sum(is_right(row, name, guess[name]) for row, guess in chosen)
        sums = [
            sum(each) / (1 << 30) for each in zip(*((row[name], guess[name]) for row, guess in chosen), strict=True)
        ]
        of = "several" if grouped else "one"
        text.append(
            f"| {dtype} | {layout} | {of} | {name} | {right} of {len(chosen)} | {sums[0]:.2f} GiB | {sums[1]:.2f} GiB |"
        )
    RESULT.write_text("\n".join(text) + "\n")
    print("\n".join(text[6:]))


if __name__ == "__main__":
    on_gpu.run(__doc__, measure, compare, seconds=60.0)
