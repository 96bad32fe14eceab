"""The first thing the HTML report and a notebook say: the answer, how sure it is, and why."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.document import Document, Estimate, Interval, ProbeResult, Recommendation
from batchtune.report.page.markup import Markup, facts, join, tag
from batchtune.report.view.select import JOULES, SECONDS, VALUE, believed, estimated, named_values, objective, probes_of
from batchtune.report.view.words import (
    CONFIGURATIONS,
    batch_text,
    certificate,
    configurations,
    largest_batch,
    ranks,
    step_time,
)
from batchtune.units import duration, number, size

_MOST_ESTIMATES = 20


def answer(result: Document) -> Markup | None:
    """The recommendation of a study, the largest batch of a probe or of an estimate; None where there is none."""
    if result.recommendation is not None:
        return _recommended(result, result.recommendation)
    if result.kind == "estimate":
        return _estimated(result)
    probe = result.probe or next(iter(probes_of(result)), None)
    return _probed(probe) if probe is not None else None


def _hero(figure: str, words: str, *rest: Markup | None) -> Markup:
    big = tag("p", tag("strong", figure), tag("span", words), class_="figure")
    return tag("section", big, *rest, class_="answer", id_="answer")


def _recommended(result: Document, found: Recommendation) -> Markup:
    rows: list[tuple[str, object]] = [
        ("batch size", batch_text(found)),
        ("learning rate", number(found.learning_rate)),
        ("optimizer", named_values(found.optimizer_arguments)),
        ("precision", found.precision),
    ]
    rows = [row for row in rows if row[1]]
    why = tag("p", _sentence(found.reason), class_="why")
    data = _data(result.probe) if result.probe else None
    details = [facts(rows, class_="choice"), why, *_bars(result, found), _target(result), *_prior(result), data]
    gain, words = found.speedup_over_baseline, "the speed of what you run today"
    if gain is None:
        gain, words = found.energy_saving_over_baseline, "less energy until the target than what you run today"
    if gain is None:
        return _hero(f"{found.global_batch_size:,}", "is the batch size to train with", *details)
    if gain.at_least:
        return _hero(f"≥ {number(gain.low)}×", words, *details)
    return _hero(f"{number(gain.median)}×", f"{words} ({number(gain.low)} to {number(gain.high)})", *details)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".") if text else ""


def _prior(result: Document) -> list[Markup]:
    """Why the search looked where it did."""
    prior = result.prior
    if prior is None:
        return []
    reasons = {
        "Why these batch sizes: ": prior.batch_sizes_reason,
        "Why this micro-batch: ": prior.micro_batch_reason,
        "Why these learning rates: ": believed(prior),
    }
    return [tag("p", tag("b", name), f"{why}.", class_="target") for name, why in reasons.items() if why]


def _target(result: Document) -> Markup | None:
    target = result.target
    if target is None or target.value is None:
        return None
    sign = "at most" if target.goal == "minimize" else "at least"
    why = f" – {target.reason}" if target.reason else ""
    return tag("p", tag("b", "Target: "), f"{target.metric} {sign} {number(target.value, 4)}{why}.", class_="target")


def _bars(result: Document, found: Recommendation) -> Iterator[Markup]:
    """Recommendation and baseline side by side, each a bar with its interval, for all that is known of the first."""
    metric = result.target.metric if result.target else "metric"
    headings = {SECONDS: "Time to target", JOULES: "Energy to target", VALUE: f"{metric} reached"}
    for key in sorted(headings, key=lambda each: each != objective(result)):
        if (ours := getattr(found, key)) is not None:
            yield _compared(headings[key], key, found, ours, result.baseline)


def _compared(heading: str, key: str, found: Recommendation, ours: Interval, base: Recommendation | None) -> Markup:
    theirs = getattr(base, key, None)
    shown: list[tuple[str, str, Recommendation, Interval]] = [("recommended", "ours", found, ours)]
    if base is not None and theirs is not None:
        shown.append(("today", "theirs", base, theirs))
    longest = max(each.high for *_, each in shown)
    drawable = longest > 0 and all(each.low >= 0 for *_, each in shown) and len(shown) > 1
    rows = [
        tag(
            "div",
            tag("span", tag("b", name), tag("small", f"{batch_text(each)} @ {number(each.learning_rate)}")),
            _bar(value, longest, class_) if drawable else tag("i"),
            tag("span", _figure(value, key), class_="number"),
            class_="bar",
        )
        for name, class_, each, value in shown
    ]
    return tag("div", tag("h2", heading), *rows, class_="bars")


def _bar(value: Interval, longest: float, class_: str) -> Markup:
    middle, low, high = (100 * each / longest for each in (value.median, value.low, value.high))
    bar = tag("rect", x="0", y="2", width=f"{middle:.2f}", height="10", class_=class_)
    whisker = tag("line", x1=f"{low:.2f}", x2=f"{high:.2f}", y1="7", y2="7", class_="whisker")
    return tag("svg", bar, whisker, viewBox="0 0 100 14", preserveAspectRatio="none", aria_hidden="true")


def _figure(value: Interval, key: str) -> Markup:
    if key == SECONDS:
        median, low, high = (duration(each) for each in (value.median, value.low, value.high))
    else:
        unit = " J" if key == JOULES else ""
        median, low, high = (f"{number(each, 4)}{unit}" for each in (value.median, value.low, value.high))
    shown = (f"≥ {low}", "cut off") if value.at_least else (median, f"{low} to {high}")
    return join([tag("b", shown[0]), tag("small", shown[1])])


def _probed(probe: ProbeResult) -> Markup:
    if probe.max_batch_size is None:
        why = tag("p", _sentence(f"at {probe.precision}: the attempts below say why"), class_="why")
        figure, words = largest_batch(probe).split(" ", 1)
        return _hero(figure, words, why)
    best = max(probe.throughput, key=lambda point: point.samples_per_second, default=None)
    knee = probe.throughput_fit.batch_size_within_5_percent if probe.throughput_fit else None
    rows: list[tuple[str, object]] = [
        ("precision", probe.precision),
        ("peak memory", size(probe.peak_reserved_bytes)),
        ("best speed", f"{number(best.samples_per_second)} samples/s at {best.batch_size:,}" if best else None),
        ("within 5 % of it", f"from batch {knee:,}" if knee is not None else None),
    ]
    words = "is the largest micro-batch size that trains"
    why = tag("p", _sentence(certificate(probe)), class_="why")
    more = [_step_time(probe), _ranks(probe), _data(probe)]
    return _hero(f"{probe.max_batch_size:,}", words, facts(rows, class_="choice"), why, *more)


def _step_time(probe: ProbeResult) -> Markup | None:
    fit = probe.throughput_fit
    if fit is None:
        return None
    return tag("p", tag("b", "Step time: "), f"{step_time(fit)}.", class_="target")


def _ranks(probe: ProbeResult) -> Markup | None:
    found = probe.data_parallel
    return None if found is None else tag("p", tag("b", "Ranks: "), _sentence(ranks(found)), class_="target")


def _data(probe: ProbeResult) -> Markup | None:
    fed = probe.input_pipeline
    return None if fed is None else tag("p", tag("b", "Data: "), _sentence(fed.verdict), class_="target")


def _estimated(result: Document) -> Markup | None:
    asked = result.estimates or []
    rows = [row for row in asked if row.max_batch_size]
    if not rows:
        return _hero("0", "GPUs asked about could train it") if asked else None
    if len(asked) > 1:
        return _estimated_on_several(rows)
    (row,) = rows
    details: list[tuple[str, object]] = [
        ("GPU", row.gpu),
        ("precision", row.precision),
        ("safe", estimated(row, row.safe_max_batch_size)),
        ("confidence", row.confidence),
    ]
    why = tag("p", "Calculated, not measured: 'probe' on this GPU gives the size that runs.", class_="why")
    words = "is the largest micro-batch size expected to fit"
    return _hero(estimated(row, row.max_batch_size), words, facts(details, class_="choice"), why)


def _estimated_on_several(rows: list[Estimate]) -> Markup:
    rows = sorted(rows, key=lambda row: (row.memory_bytes, row.max_batch_size or 0))
    gpus = len({row.gpu for row in rows})
    ends = {"least memory": rows[0], "most memory": rows[-1]}
    details: list[tuple[str, object]] = [
        (name, join([estimated(row, row.max_batch_size), tag("small", f"{row.gpu}, {size(row.memory_bytes)}")]))
        for name, row in ends.items()
    ]
    details.append(("precision", ", ".join(dict.fromkeys(row.precision for row in rows))))
    why = tag("p", "Calculated, not measured: 'probe' on a GPU gives the size that runs there.", class_="why")
    return _hero(
        str(gpus), "GPUs could train it" if gpus > 1 else "GPU could train it", facts(details, class_="choice"), why
    )


def notebook(result: Document) -> str:
    """A compact table for notebooks: the answer and the sentence why, without plots or styles."""
    heading = tag("b", f"batchtune {result.kind}: {result.name or result.task.path}")
    state = tag("p", f"{result.status}: {result.error.message}" if result.error else result.status)
    parts: list[Markup | None] = [tag("p", heading), state if result.status != "complete" else None]
    if result.recommendation is not None:
        rows = configurations(result)
        names = CONFIGURATIONS[: len(rows[0][1])]
        body = [tag("tr", tag("th", name), *(tag("td", cell) for cell in cells)) for name, cells in rows]
        head = tag("tr", tag("th"), *(tag("th", name) for name in names))
        parts += [tag("table", tag("thead", head), tag("tbody", *body))]
        parts += [tag("p", _sentence(result.recommendation.reason))]
    for probe in probes_of(result):
        fits = probe.max_batch_size is not None
        largest = largest_batch(probe)
        largest = f"largest batch {largest} {certificate(probe)}" if fits else largest
        parts.append(tag("p", f"{probe.precision}: {largest}."))
    estimates = result.estimates or []
    for row in estimates[:_MOST_ESTIMATES]:
        largest = estimated(row, row.max_batch_size) if row.max_batch_size else "nothing"
        sure = f", confidence {row.confidence}" if row.confidence else ""
        parts.append(tag("p", f"{row.gpu}, {row.precision}: {largest} expected to fit (estimated{sure})."))
    left = len(estimates) - _MOST_ESTIMATES
    parts.append(tag("p", f"{left} more are in to_frame().") if left > 0 else None)
    return tag("div", *parts)
