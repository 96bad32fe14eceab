"""What a report shows of a study: its answer beside what runs today, its runs, and what several devices would take."""

from __future__ import annotations

from batchtune.document import Document, Interval, Recommendation, Scaling, Trial
from batchtune.report.export.settings import is_of
from batchtune.report.view.columns import counts, numbers, seconds, table, words
from batchtune.report.view.model import Bar, Bars, Fact, Headline, Section, Table
from batchtune.report.view.select import JOULES, SECONDS, VALUE, best_first, metric_of, objective
from batchtune.report.view.words import batch_text, clipping_text, named_values, ranks, tone
from batchtune.units import bounds, duration, interval, number, time_interval

_OURS, _THEIRS = "train with", "today"


def headline(found: Recommendation) -> Headline:
    """What is gained, and what to choose for it."""
    facts = {"batch size": batch_text(found), "learning rate": number(found.learning_rate)}
    facts |= {"optimizer": named_values(found.optimizer_arguments)}
    facts |= {"gradient clipping": clipping_text(found.gradient_clipping), "precision": found.precision}
    choice = [Fact(name, text) for name, text in facts.items() if text not in {"", "-"}]
    if found.seeds_to_confirm is not None:
        return Headline("not confirmed", "too few runs to compare with what you run today", choice, found.reason)
    gain, words_ = found.speedup_over_baseline, "the speed of what you run today"
    if gain is None:
        gain, words_ = found.energy_saving_over_baseline, "less energy until the target than what you run today"
    if gain is None:
        return Headline(f"{found.global_batch_size:,}", "is the batch size to train with", choice, found.reason)
    if gain.at_least:
        return Headline(f"≥ {number(gain.low)}×", words_, choice, found.reason)
    between = bounds(number(gain.low), number(gain.high))
    said = f"{words_} ({between})" if between else words_
    return Headline(f"{number(gain.median)}×", said, choice, found.reason)


def comparison(result: Document, found: Recommendation) -> Table:
    """The recommended configuration and, where it was measured, today's: a row for each fact known of the first.

    The first row is the batch size. A metric may be called what another row is.
    """
    shown = [found] if result.baseline is None else [found, result.baseline]
    clipped = [clipping_text(each.gradient_clipping) for each in shown]
    rows = [
        ("batch size", [batch_text(each) for each in shown]),
        ("learning rate", [number(each.learning_rate) for each in shown]),
        ("optimizer", [named_values(each.optimizer_arguments) or "-" for each in shown]),
        ("gradient clipping", [each or "none" for each in clipped] if any(clipped) else ["-"]),
        ("schedule", [f"{each.total_steps:,} steps" if each.total_steps else "-" for each in shown]),
        ("precision", [each.precision for each in shown]),
        ("time to target", [time_interval(each.time_to_target_seconds) for each in shown]),
        ("energy to target", [interval(each.energy_to_target_joules, " J") for each in shown]),
        (metric_of(result), [interval(each.value) for each in shown]),
        ("speed-up", [interval(found.speedup_over_baseline, "×"), "1×"][: len(shown)]),
        ("energy saving", [interval(found.energy_saving_over_baseline, "×"), "1×"][: len(shown)]),
    ]
    known = [(name, cells) for name, cells in rows if cells[0] != "-"]
    columns = [words("", [name for name, _ in known])]
    columns += [
        words(name, [cells[at] for _, cells in known]) for at, name in enumerate((_OURS, _THEIRS)[: len(shown)])
    ]
    return table("", columns)


def bars(result: Document, found: Recommendation) -> list[Bars]:
    """Recommendation and baseline side by side for all that is known of the first, the study's objective first."""
    titles = {SECONDS: "Time to target", JOULES: "Energy to target", VALUE: f"{metric_of(result)} reached"}
    shown = [found] if result.baseline is None else [found, result.baseline]
    made = []
    for key in sorted(titles, key=lambda each: each != objective(result)):
        values = [(each, getattr(each, key)) for each in shown if getattr(each, key) is not None]
        if getattr(found, key) is not None:
            made.append(Bars(titles[key], _drawn(values, found, key)))
    return made


def _drawn(values: list[tuple[Recommendation, Interval]], found: Recommendation, key: str) -> list[Bar]:
    longest = max(value.high for _, value in values)
    drawable = longest > 0 and all(value.low >= 0 for _, value in values) and len(values) > 1
    unit = " J" if key == JOULES else ""
    made = []
    for each, value in values:
        ends = (value.low, value.median, value.high)
        low, median, high = (duration(end) if key == SECONDS else f"{number(end, 4)}{unit}" for end in ends)
        text, between = (f"≥ {low}", "cut off") if value.at_least else (median, bounds(low, high))
        shares = (value.low / longest, value.median / longest, value.high / longest) if drawable else None
        ours = each is found
        about = f"{batch_text(each)} @ {number(each.learning_rate)}"
        made.append(Bar("recommended" if ours else "today", about, text, between, shares, ours))
    return made


def runs(result: Document) -> Table:
    """The runs of a study, best first, those of the recommended configuration marked."""
    shown, key = best_first(result)
    marked = [row for row, trial in enumerate(shown) if is_of(trial, result.recommendation)]
    several = len({trial.precision for trial in shown}) > 1  # else the recommendation names it
    outcomes = [trial.outcome or trial.state for trial in shown]
    columns = [
        words("", ["●" if row in marked else "" for row in range(len(shown))]),
        counts("run", [trial.number for trial in shown], cells=[str(trial.number) for trial in shown], spare=4),
        words("role", [trial.role for trial in shown], spare=2),
        counts("batch", [trial.batch_size for trial in shown]),
        words("micro × acc.", [_made_up(trial) for trial in shown], detail=True),
        numbers("learning rate", [trial.learning_rate for trial in shown]),
        words("optimizer", [named_values(trial.optimizer_arguments) for trial in shown], spare=3),
        words("precision", [trial.precision if several else "" for trial in shown], spare=2),
        seconds("to target", [trial.time_to_target_seconds for trial in shown], spare=3 if key == JOULES else 0),
        numbers("energy", [each.energy_to_target_joules for each in shown], unit="J", spare=0 if key == JOULES else 3),
        counts("samples", [trial.samples_to_target for trial in shown], detail=True),
        numbers(
            f"best {metric_of(result)}", [trial.value for trial in shown], digits=4, spare=0 if key == VALUE else 3
        ),
        seconds("trained", [trial.training_seconds for trial in shown], detail=True),
        words("outcome", outcomes, tones=[*map(tone, outcomes)], spare=1),
        words("note", [trial.message or "" for trial in shown], detail=True),
    ]
    title = "every run, best first" + ("; ● with what is recommended" if marked else "")
    return table(title, columns, marked=marked, folded=True)


def _made_up(trial: Trial) -> str:
    accumulated = (trial.gradient_accumulation_steps or 1) > 1
    return f"{trial.micro_batch_size} × {trial.gradient_accumulation_steps}" if accumulated else "-"


def scaling(found: Scaling) -> Section:
    """What to train with on 1, 2, 4 and 8 ranks, and which were timed for that."""
    points = found.points
    each_rank = [
        f"{each.micro_batch_size:,}"
        + (f" × {each.gradient_accumulation_steps}" if each.gradient_accumulation_steps > 1 else "")
        for each in points
    ]
    columns = [
        counts("ranks", [each.world_size for each in points]),
        counts("batch", [each.global_batch_size for each in points]),
        counts("of each rank", [each.micro_batch_size for each in points], cells=each_rank, spare=2),
        numbers("learning rate", [each.learning_rate for each in points], spare=1),
        words("time to target", [time_interval(each.time_to_target_seconds) for each in points], wraps=True),
        words(" ", ["estimated" if each.is_estimate else "measured" for each in points]),
    ]
    return Section("Several devices", [table("on several devices", columns)], [f"ranks timed: {ranks(found.measured)}"])
