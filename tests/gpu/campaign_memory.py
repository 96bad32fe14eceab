"""The parts of the campaign that ask how much memory training takes: estimate, probe and peers against the truth."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from campaign_report import goal

Row = dict[str, Any]
Rows = dict[str, Row]
MIB, GIB = 1 << 20, 1 << 30
LATER_STEPS = 50
WHOLE = 0.95  # of the card: the margin of 5 %
PROBED = (  # case of the zoo, limit in GiB; None: the whole card. One of each limit first
    ("Llama, grouped queries", None),
    ("GPT-2", 24),
    ("transformer, bf16", 8),
    ("contrastive, B x B logits", 8),
    ("timm resnet50", 24),
    ("ResNet, bf16", 8),
    ("timm convnext_tiny", None),
)
TRACED = (  # at three batch sizes each
    "transformer, bf16",
    "ResNet",
    "GPT-2",
    "timm vit_small_patch16_224",
    "MLP, AdamW",
    "MLP, fused AdamW",
    "contrastive, B x B logits",
    "transformer, checkpointing",
    "Llama, grouped queries",
    "timm resnet50",
    "ResNet, channels last, fp16",
    "U-Net",
    "LoRA, bf16",
    "MLP, fp16, gradient scaling",
    "nn.TransformerEncoder, bf16",
    "timm convnext_tiny",
    "LSTM",
)
SIDE_BY_SIDE = 7  # of 8 GiB at the most each
LARGEST = TRACED[:4]  # bisected on the device, too
COMPARED = (("ResNet50", 24), ("Gpt2", 24), ("WideContrastive", None))
LAST_OVERHEAD = "addresses of segments, in the order of their creation"
PEER_SECONDS = 60  # in which a method ends, or is told as one that does not
PEERS = ("batchtune", "Lightning binsearch", "Accelerate", "doubling + bisection")


def whole_card() -> int:
    """The card's memory in bytes, without a context."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


def within(limit: int | None) -> tuple[str, int]:
    whole = int(WHOLE * whole_card())
    return (f"{limit} GiB", limit * GIB) if limit else (f"{whole / GIB:.0f} GiB, the whole card", whole)


def share_within(answers: list[tuple[int, int]], tolerance: float = 0.01) -> int:
    """How many answers are within the tolerance of the truth, by one sample at least."""
    return sum(abs(answer - truth) <= max(1, tolerance * truth) for answer, truth in answers)


def true_size(source: SimpleNamespace, precision: str, limit: int, answer: int, *, quick: bool, habit: str) -> Row:
    """What plain loops train: the answer, or bisected to 0.2 %; None where one raised something else than no memory.

    With one habit alone, for a step takes seconds where it fills the card.
    """
    import plain_loop

    (chosen,) = (each for each in plain_loop.HABITS if each.name == habit)
    truth = plain_loop.Truth(source, precision, limit, [chosen])
    found = (answer if truth.trains(answer) else 0) if quick else truth.beside(answer, 0.01, 0.002)
    broken = [each.splitlines()[-1][:200] for each in truth.broken[:1]]
    return {"true_batch_size": None if broken else found, "broken": broken}


# --- what a process takes beside its tensors --------------------------------------------------------------------------


def _stages(answers: Any, questions: Any) -> None:
    """In a process of its own: tells what the allocator holds after each stage, and waits to be asked for the next."""
    import torch
    from torch.nn import functional

    def asked(case: str, **figures: int) -> None:
        answers.put({"case": case, "reserved_bytes": torch.cuda.memory_reserved(), **figures})
        questions.get()

    def beyond(work: Any) -> dict[str, int]:
        """Bytes that stay and bytes at the peak, beyond the tensors that were there before and the result."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = list(work())
        made_bytes = torch.cuda.memory_allocated()
        made.clear()
        torch.cuda.synchronize()
        time.sleep(0.1)  # until autograd's thread has let go, too
        stays = torch.cuda.memory_allocated()
        made_bytes -= stays
        peak = torch.cuda.max_memory_allocated()
        return {"workspace_bytes": stays - before, "scratch_bytes": peak - stays - made_bytes}

    asked("nothing")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    asked("context")
    left, right = (torch.ones(512, 512, device="cuda", requires_grad=True) for _ in range(2))
    asked("cuBLAS, forward", **beyond(lambda: (torch.mm(left.detach(), right.detach()),)))
    product = torch.mm(left, right).sum()
    asked("cuBLAS, backward", **beyond(lambda: torch.autograd.grad(product, (left, right))))
    asked("cuBLASLt", **beyond(lambda: (functional.linear(left.detach(), right.detach(), left[0].detach()),)))
    for kind, layout in (("fp32", torch.contiguous_format), ("bf16", torch.channels_last)):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        images = torch.ones(32, 64, 56, 56, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
        kernel = torch.ones(64, 64, 3, 3, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
        with torch.no_grad():
            asked(f"cuDNN, {kind}, forward", **beyond(lambda: (functional.conv2d(images, kernel, padding=1),)))  # noqa: B023
        out = functional.conv2d(images, kernel, padding=1)
        gradient = torch.ones_like(out)
        figures = beyond(lambda: torch.autograd.grad(out, (images, kernel), gradient))  # noqa: B023
        asked(f"cuDNN, {kind}, backward", **figures)
    asked(LAST_OVERHEAD, **_directions(torch))
    answers.put(None)


def _directions(torch: Any) -> dict[str, int]:
    """How often the next new segment of the allocator lies above the one before, and how often below."""
    held, addresses, known = [], [], {each["address"] for each in torch.cuda.memory_snapshot()}
    for _ in range(12):
        held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        new = {each["address"] for each in torch.cuda.memory_snapshot()} - known
        addresses += sorted(new)
        known |= new
    rises = sum(later > earlier for earlier, later in itertools.pairwise(addresses))
    return {"rises": rises, "falls": len(addresses) - 1 - rises}


def overheads() -> Iterator[Row]:
    """Context and workspaces as they are, beside what overheads.py says of this generation."""
    import pynvml

    from batchtune.device.gpus import find_gpu
    from batchtune.estimate.memory.overheads import overhead_of

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    table = overhead_of(find_gpu(pynvml.nvmlDeviceGetName(card)).generation)
    told = {"context": table.context_bytes, "cuBLAS, forward": table.gpu.cublas_bytes}
    context = multiprocessing.get_context("spawn")
    answers, questions = context.Queue(), context.Queue()
    process, before = context.Process(target=_stages, args=(answers, questions), daemon=True), None
    process.start()
    while True:
        try:
            row = answers.get(timeout=30)
        except queue.Empty:  # it died, or hangs
            break
        if row is None:
            break
        used = pynvml.nvmlDeviceGetMemoryInfo(card).used
        before = used if before is None else before
        outside = max(0, used - before - row["reserved_bytes"])
        questions.put("next")
        if row["case"] != "nothing":
            figures = {"workspace_bytes": None, "scratch_bytes": None} | row
            yield figures | {"outside_allocator_bytes": outside, "in_the_table_bytes": told.get(row["case"])}
    process.join(10)
    if process.exitcode:
        raise RuntimeError("the process that takes workspaces died")


# --- the probe --------------------------------------------------------------------------------------------------------


def probes(quick: bool, there: Rows) -> Iterator[Row]:
    import zoo

    import batchtune

    for name, gib in (("MLP, bf16", 1),) if quick else PROBED:
        case = next((each for each in zoo.CASES if each.name == name), None)
        text, limit = within(gib)
        if case is None or f"{name}, {text}" in there:  # its library is missing, or an earlier call did it
            continue
        began = time.perf_counter()
        task = f"{zoo.__file__}:{case.slug}"
        found = batchtune.probe(
            task,
            device="cuda",
            precision=case.precision,
            memory_limit=limit,
            throughput=False,
            max=64 if quick else 1 << 20,
        ).probe
        searched = [each for each in found.attempts if each.purpose == "search"]
        row: Row = {"case": f"{name}, {text}", "batch_size": found.max_batch_size, "attempts": len(searched)}
        row |= {"ooms": sum(each.outcome == "oom" for each in found.attempts), "seconds": time.perf_counter() - began}
        row |= true_size(
            case.source(), case.precision, limit, found.max_batch_size or 1, quick=quick, habit="all of it"
        )
        yield row | {"peak_reserved_bytes": found.peak_reserved_bytes}


def judge_probes(rows: list[Row]) -> list[Row]:
    answers = [(row["batch_size"] or 0, row["true_batch_size"] or 0) for row in rows]
    above = sum(answer > truth for answer, truth in answers)
    attempts, ooms = (sum(row[name] for row in rows) / len(rows) for name in ("attempts", "ooms"))
    near = share_within(answers)
    return [
        goal("never an answer that the plain loop cannot train", f"{above} of {len(rows)} are", met=not above),
        goal("within 1 % of the largest that it can", f"{near} of {len(rows)}", met=near == len(rows)),
        goal(
            "attempts at most 5, OOMs at most 1.4 in the mean",
            f"{attempts:.1f} and {ooms:.1f}",
            met=attempts <= 5 and ooms <= 1.4,
        ),
    ]


# --- and its peers ----------------------------------------------------------------------------------------------------


def peers(quick: bool, there: Rows) -> Iterator[Row]:
    """Every method in a process of its own with nothing beside it, as tests/benchmarks/probe_peers.py runs them."""
    from probe_peers import UNFINISHED, Case, outcome, search
    from probe_tasks import TASKS

    for name, gib in (("Mlp", 1),) if quick else COMPARED:
        text, limit = within(gib)
        case, task = Case(name, text, limit, "cuda:0"), TASKS[name]()
        members = ("build_model", "make_batch", "compute_loss", "build_optimizer")
        source = SimpleNamespace(**{each: getattr(task, each) for each in members})
        true: int | None = None
        lived = 0
        for method in PEERS[:1] if quick else PEERS:
            row = there.get(f"{name}, {text}, {method}")
            if row is None:
                # ours starts from its estimate, theirs from the power of two above the truth: a user's best guess
                ours = method == PEERS[0]
                found = search(
                    case, method, 0 if ours else 1 << (true or 64).bit_length(), *() if ours else (PEER_SECONDS,)
                )
                if ours:
                    truth = true_size(source, "fp32", limit, found.answer or 64, quick=quick, habit="bare")
                    true = truth["true_batch_size"]
                later = "fit" if found.answer else None  # where a larger one lives through the steps, it does
                if found.answer and found.answer > lived:
                    later = outcome(case, found.answer, 5 if quick else LATER_STEPS)
                row = {
                    "case": f"{name}, {text}, {method}",
                    "batch_size": found.answer,
                    "true_batch_size": true,
                    "attempts": len(found.attempts),
                    "ooms": found.ooms,
                    "seconds": found.seconds,
                    "later": later,
                    "trouble": f"{found.trouble} in {PEER_SECONDS} s" if found.trouble == UNFINISHED else found.trouble,
                }
                yield row
            true = row["true_batch_size"]
            if row["later"] == "fit":
                lived = max(lived, row["batch_size"])


def judge_peers(rows: list[Row]) -> list[Row]:
    ours = [row for row in rows if row["case"].endswith("batchtune")]
    lived, near = sum(row["later"] == "fit" for row in ours), 0
    near = share_within([(row["batch_size"] or 0, row["true_batch_size"] or 0) for row in ours])
    ratios = []
    for row in ours:
        theirs = {each["case"]: each for each in rows}.get(row["case"].replace("batchtune", "Lightning binsearch"))
        ratios += [theirs["seconds"] / row["seconds"]] if theirs and theirs["batch_size"] else []
    told = ", ".join(f"{ratio:.1f}" for ratio in ratios) or "it answered nowhere"
    return [
        goal(f"answers live through {LATER_STEPS} steps", f"{lived} of {len(ours)}", met=lived == len(ours)),
        goal("within 1 % of the true boundary", f"{near} of {len(ours)}", met=near == len(ours)),
        goal("Lightning's binsearch takes 3 times as long", told, met=min(ratios) >= 3 if ratios else None),
    ]


# --- the estimate -----------------------------------------------------------------------------------------------------


def _traced(name: str, gpu: Row, limit: int) -> Row:
    import estimate_allocator
    import zoo

    case = next(case for case in zoo.CASES if case.name == name)
    try:
        return estimate_allocator.estimated(case, gpu, limits=(limit,))
    except Exception as error:  # noqa: BLE001 - one case that cannot be traced is one row less
        return {"refused": f"{type(error).__name__}: {error}"[:200]}


def estimates(quick: bool, there: Rows) -> Iterator[Row]:
    """Overheads, then peaks at three batch sizes and the largest batches, cases side by side."""
    import estimate_allocator
    import torch
    import zoo

    cases = {case.name: case for case in zoo.CASES}
    limit, wanted = (GIB, ("MLP, AdamW",)) if quick else (8 * GIB, TRACED)
    told = {
        *there,
        *(case.rpartition(", ")[0] for case in there),
    }  # cases that are refused, and those with a batch size
    peaks = [name for name in wanted if name in cases and name not in told]
    sizes = [name for name in (wanted if quick else LARGEST) if name in cases and _largest_in(name, limit) not in there]
    torch.set_num_threads(1)  # threads do not outlive a fork
    if LAST_OVERHEAD not in there:
        yield from overheads()  # with nothing beside it
    gpu = estimate_allocator.forked(estimate_allocator.card)
    jobs = [(name, gpu, limit, name in peaks, name in sizes) for name in dict.fromkeys((*peaks, *sizes))]
    with multiprocessing.get_context("fork").Pool(SIDE_BY_SIDE, maxtasksperchild=1) as pool:
        for rows in pool.imap_unordered(_of_one_case, jobs):
            yield from rows


def _of_one_case(job: tuple[str, Row, int, bool, bool]) -> list[Row]:
    """Traces a case, and takes real steps of it."""
    import estimate_allocator
    import zoo

    name, gpu, limit, wants_peaks, wants_largest = job
    guess = estimate_allocator.forked(_traced, name, gpu, limit)
    case = next(case for case in zoo.CASES if case.name == name)
    rows = list(_peaks(case, guess)) if wants_peaks else []
    return rows + ([_largest(case, guess, limit)] if wants_largest and "limits" in guess else [])


def _largest_in(name: str, limit: int) -> str:
    return f"{name}, largest in {limit // GIB} GiB"


def _measured(case: Any, guess: Row, limits: tuple[int, ...]) -> Row:
    """The same from real steps, each attempt in a process of its own."""
    import estimate_allocator

    def measured() -> Row:
        estimate_allocator.LIMITS = limits  # in a fork
        return estimate_allocator.measured(case, guess, expandable=False)

    try:
        found: Row = estimate_allocator.forked(measured)
    except RuntimeError as error:
        return {"failed": str(error)[:200]}
    return found


def _peaks(case: Any, guess: Row) -> Iterator[Row]:
    if "refused" in guess:
        yield {"case": case.name, "refused": guess["refused"]}
        return
    truth = _measured(case, guess | {"limits": []}, ())
    if "failed" in truth:
        yield {"case": case.name, "failed": truth["failed"]}
        return
    for size, (allocated, reserved) in truth["peaks"].items():
        told, kept, _ = guess["peaks"][size]
        row = {"case": f"{case.name}, {size}", "allocated_bytes": allocated, "estimated_allocated_bytes": told}
        row |= {"allocated_error": told / allocated - 1, "reserved_bytes": reserved, "estimated_reserved_bytes": kept}
        yield row | {"reserved_error": kept / reserved - 1}


def _largest(case: Any, guess: Row, limit: int) -> Row:
    truth = _measured(case, guess | {"peaks": {}}, (limit,))
    told = guess["limits"][0]
    return {
        "case": _largest_in(case.name, limit),
        "true_batch_size": truth["limits"][0]["max"] if "limits" in truth else None,
        "estimated_batch_size": told["max_batch_size"],
        "safe_batch_size": told["safe_max_batch_size"],
        "confidence": told["confidence"],
        "failed": truth.get("failed", ""),
    }


def judge_estimates(rows: list[Row]) -> list[Row]:
    peaks = [row for row in rows if "reserved_error" in row]
    sizes = [row for row in rows if "safe_batch_size" in row]
    answers = [(row["estimated_batch_size"], row["true_batch_size"] or 0) for row in sizes]
    exact, near = (
        sum(abs(row[name]) <= off for row in peaks) for name, off in (("allocated_error", 0), ("reserved_error", 0.01))
    )
    unsafe, right = sum(row["safe_batch_size"] > (row["true_batch_size"] or 0) for row in sizes), share_within(answers)
    lost = [row["case"] for row in rows if "refused" in row or row.get("failed")]
    table = {row["case"]: row for row in rows if row.get("in_the_table_bytes")}
    context, cublas = table["context"]["outside_allocator_bytes"], table["cuBLAS, forward"]["workspace_bytes"]
    told = [table[case]["in_the_table_bytes"] for case in ("context", "cuBLAS, forward")]
    return [
        goal("allocated exact to the byte", f"{exact} of {len(peaks)}", met=exact == len(peaks) > 0),
        goal("reserved within 1 %", f"{near} of {len(peaks)}", met=near == len(peaks) > 0),
        goal("largest batch within 1 %", f"{right} of {len(sizes)}", met=right == len(sizes) > 0),
        goal("a safe batch fits", f"{unsafe} of {len(sizes)} do not", met=not unsafe and len(sizes) > 0),
        goal("every case is traced and trains", ", ".join(lost) or "all", met=not lost),
        goal(
            "the context is at most the table's",
            f"{context / MIB:.0f} of {told[0] / MIB:.0f} MiB",
            met=context <= told[0],
        ),
        goal(
            "cuBLAS's workspace is the table's", f"{cublas / MIB:.3f} of {told[1] / MIB:.3f} MiB", met=cublas == told[1]
        ),
    ]
