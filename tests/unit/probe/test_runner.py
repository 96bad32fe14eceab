"""A probe from first attempt to certificate, on a scripted worker: final checks that fail, children that die."""

import itertools
import re

import pytest
from fakes import FakeChild, opened

from batchtune.config.probe import ProbeOptions
from batchtune.document import Attempt, ThroughputPoint
from batchtune.errors import NothingFitsError, UsageError, UserCodeError
from batchtune.lengths.orders import mixed
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.probe.tries import Tries
from batchtune.processes.worker import WorkerDied
from batchtune.protocol.data import LengthsSeen

LOST = {
    "crash": "the process died by SIGSEGV",
    "timeout": "no sign of life for 2 s",
    "lost to memory": "no memory left",
}


class ScriptedWorker(FakeChild):
    """A child whose fate at each size is a function's; a sample takes one of `limit` bytes.

    Args:
        outcome: what comes of an attempt at a size; of LOST, the child does not live to say it.
        checked: the same for the final check; None: as in the search.
        limit: the memory limit in bytes.
        samples: of the data set.
        worn_bytes: what memory an attempt of the search takes more than a fresh process would.
        sample_seconds: of a micro-batch, for each sample; None: attempts tell no time.
        failed_steps: that attempts do before they fail; None: all, so that evaluation is what fails.
        words: of attempts that fail; {0} is the size; None: outcome and size.
        maps_file: whether they fail in mapping a file.
        most_samples: of a batch, which a loader's epoch has and no more.
    """

    def __init__(
        self,
        outcome,
        checked=None,
        *,
        limit=1000,
        samples=None,
        worn_bytes=0,
        sample_seconds=None,
        failed_steps=0,
        words=None,
        maps_file=None,
        most_samples=None,
    ):
        self.outcome, self.checked, self.limit, self.samples = outcome, checked or outcome, limit, samples
        self.worn_bytes, self.sample_seconds = worn_bytes, sample_seconds
        self.failed_steps, self.words, self.maps_file = failed_steps, words, maps_file
        self.most_samples, self.running = most_samples, False
        self.device = "cuda:0"
        self.log, self.arguments = [], []

    def start(self):
        self.running = True
        about = {"memory_limit_bytes": self.limit, "train_size": self.samples}
        return opened(device=self.device, environment={"device": "NVIDIA H200"}, **about)

    def renew(self, *, as_fork=True):
        self.running = False

    def answer(self, command, *, timeout, batch_size, **arguments):
        self.log.append((command, batch_size, arguments.get("steps"), "old" if self.running else "fresh", timeout))
        self.arguments.append(arguments)
        self.start()
        if command == "count_flops":
            return {"per_sample": None}
        verify = arguments.get("verify", False)
        outcome = (self.checked if verify else self.outcome)(batch_size)
        if outcome in LOST:
            self.renew()
            raise WorkerDied("oom" if outcome == "lost to memory" else outcome, LOST[outcome])
        if command == "time_steps":
            return ThroughputPoint(batch_size=batch_size, samples_per_second=9.0, step_seconds=1.0).model_dump()
        fits, purpose, words = (
            outcome == "fit",
            "verify" if verify else "search",
            (self.words or f"{outcome} at {{0}}").format(batch_size),
        )
        peak = batch_size + (0 if verify else self.worn_bytes)
        steps = arguments["steps"] if fits or self.failed_steps is None else self.failed_steps
        evaluates = verify and self.failed_steps is None
        failed = {"message": words, "maps_file": self.maps_file, "in_evaluation": evaluates or None}
        memory = {"steps": steps} | ({"peak_reserved_bytes": peak} if fits else failed)
        if fits and self.sample_seconds is not None:
            memory["step_seconds"] = self.sample_seconds * batch_size * arguments.get("accumulation_steps", 1)
        attempt = Attempt(batch_size=batch_size, outcome=outcome, purpose=purpose, **memory).model_dump()
        too_many = self.most_samples is not None and batch_size > self.most_samples
        return {"attempt": attempt} | ({"most_samples": self.most_samples} if too_many else {})


class Listener(Observer):
    """Writes down what it is told."""

    def __init__(self):
        self.told, self.notes = [], []

    def attempting(self, batch_size, reason):
        self.told.append((batch_size, bool(reason)))

    def attempted(self, attempt):
        self.told.append(attempt)

    def note(self, text):
        self.notes.append(text)


class DrawnBatches(ScriptedWorker):
    """A child whose batches differ in size; in its process 3 fewer samples train than in the others.

    Args:
        fits: the largest size there.
    """

    def __init__(self, fits):
        super().__init__(up_to(1000))
        self._fits = fits

    def answer(self, command, *, batch_size, process=0, **arguments):
        known, self.checked = self.checked, up_to(self._fits if process == 3 else 1000)
        found = super().answer(command, batch_size=batch_size, process=process, **arguments)
        self.checked = known
        return found | {"batches_differ": True} if "attempt" in found else found

    def processes(self):
        """Of each check: its size, and the numbers of its processes."""
        every = zip(self.log, self.arguments, strict=True)
        checks = [(size, each["process"]) for (_, size, *_), each in every if each.get("verify")]
        return [(size, [at for _, at in some]) for size, some in itertools.groupby(checks, key=lambda each: each[0])]


class OneLength(ScriptedWorker):
    """A child whose inputs have one length."""

    def start(self):
        return super().start().model_copy(update={"lengths": LengthsSeen(edges=(512,))})


def on_a_cpu(worker):
    worker.device = "cpu"
    return worker


def up_to(largest, otherwise="oom"):
    return lambda size: "fit" if size <= largest else otherwise


class LeakingWorker(ScriptedWorker):
    """A child whose every step leaves so many bytes behind; 100 bytes are the model's."""

    def __init__(self, leaked_bytes, *, limit):
        super().__init__(lambda size: "fit", limit=limit)
        self.leaked_bytes = leaked_bytes

    def answer(self, command, *, batch_size, **arguments):
        asked = arguments["steps"]
        taken = min(asked, max(0, self.limit - 100 - batch_size) // self.leaked_bytes)
        self.outcome = self.checked = lambda _: "fit" if taken == asked else "oom"
        self.failed_steps = taken
        told = super().answer(command, batch_size=batch_size, **arguments)
        seen = {"growth_bytes_per_step": self.leaked_bytes if taken >= 7 else None}
        peak = {"peak_reserved_bytes": 100 + batch_size + taken * self.leaked_bytes} if taken == asked else {}
        return {"attempt": told["attempt"] | seen | peak}


class SettlingWorker(ScriptedWorker):
    """A child whose final checks fail above a size after a few steps of ever higher peaks, as a CPU's do by chance."""

    def __init__(self, *, limit, settles_at):
        super().__init__(lambda _: "fit", limit=limit)
        self.settles_at = settles_at

    def answer(self, command, *, batch_size, **arguments):
        settles = batch_size <= self.settles_at
        self.outcome, self.checked = up_to(self.limit), up_to(self.settles_at)
        self.failed_steps = None if settles or not arguments.get("verify") else 6
        told = super().answer(command, batch_size=batch_size, **arguments)
        rises = {"growth_bytes_per_step": self.limit // 10} if self.failed_steps else {}
        return {"attempt": told["attempt"] | rises} if "attempt" in told else told


def probe(worker, observer=None, known=(), **options):
    return Probe(worker, ProbeOptions(**{"throughput": False} | options), "fp32", observer or Observer(), known)


def sizes(result, purpose):
    return [each.batch_size for each in result.attempts if each.purpose == purpose]


def assert_certified(result):
    """The answer ran the final check's steps, and what is called a failure above it failed last."""
    last = {each.batch_size: each for each in result.attempts}
    answer = last[result.max_batch_size]
    assert result.verified_in_fresh_process
    assert (answer.outcome, answer.purpose, answer.steps) == ("fit", "verify", result.verify_steps)
    assert not last[result.first_failing_batch_size].fits
    assert result.first_failing_batch_size > result.max_batch_size


class TestTheAnswer:
    def test_it_is_proven_from_both_sides_and_has_run_in_a_fresh_process(self):
        worker = ScriptedWorker(up_to(700))
        result = probe(worker, tolerance=0.0, verify_steps=33).run()
        assert (result.max_batch_size, result.first_failing_batch_size, result.limited_by) == (700, 701, "memory")
        assert_certified(result)
        assert worker.log[-1][:4] == ("attempt", 700, 33, "fresh")
        assert (result.peak_reserved_bytes, result.memory_limit_bytes) == (700, 1000)

    def test_the_search_goes_on_in_one_child_while_it_is_healthy(self):
        worker = ScriptedWorker(up_to(700))
        result = probe(worker).run()
        assert [process for *_, process, _ in worker.log] == ["old"] * len(sizes(result, "search")) + ["fresh"]

    def test_every_attempt_is_announced_with_its_reason_and_told_when_it_ended(self):
        listener = Listener()
        result = probe(ScriptedWorker(up_to(40)), listener).run()
        assert listener.told == [told for each in result.attempts for told in ((each.batch_size, True), each)]

    def test_attempts_of_an_earlier_start_are_not_made_again(self):
        earlier = probe(ScriptedWorker(up_to(700))).run()
        searched = [each for each in earlier.attempts if each.purpose == "search"]
        worker = ScriptedWorker(up_to(700))
        again = probe(worker, known=searched).run()
        assert again.max_batch_size == earlier.max_batch_size
        assert [size for _, size, *_ in worker.log] == [earlier.max_batch_size]  # its final check is all there is to do

    def test_an_interrupted_probe_knows_what_it_had_found_and_that_it_is_not_verified(self):
        def interrupted(_size):
            raise KeyboardInterrupt

        interrupting = probe(ScriptedWorker(up_to(700), interrupted))
        with pytest.raises(KeyboardInterrupt):
            interrupting.run()
        result = interrupting.result()
        assert 690 < result.max_batch_size <= 700
        assert not result.verified_in_fresh_process
        assert result.verify_steps is None


class TestTheFinalCheck:
    def test_where_it_fails_the_next_lower_size_that_passes_is_the_answer(self):
        result = probe(ScriptedWorker(up_to(700), up_to(690))).run()
        assert_certified(result)
        assert 0.97 * 690 < result.max_batch_size <= 690
        assert sizes(result, "verify")[-2:] == [result.first_failing_batch_size, result.max_batch_size]
        assert result.first_failing_batch_size - result.max_batch_size <= 0.01 * result.max_batch_size

    @pytest.mark.parametrize("boundary", [600, 350, 90, 7])
    def test_an_evaluation_that_needs_much_more_than_training_is_searched_to_the_tolerance(self, boundary):
        result = probe(ScriptedWorker(up_to(700), up_to(boundary))).run()
        assert_certified(result)
        assert result.max_batch_size <= boundary < result.first_failing_batch_size
        assert result.first_failing_batch_size - result.max_batch_size <= max(1, 0.01 * boundary)

    def test_what_only_a_worn_process_could_not_hold_is_the_answer_once_fresh_ones_held_it(self):
        worker = ScriptedWorker(up_to(650), up_to(700), limit=700, worn_bytes=50)
        result = probe(worker).run()
        assert_certified(result)
        assert 693 <= result.max_batch_size <= 700 < result.first_failing_batch_size
        assert {age for _, size, _, age, _ in worker.log if size > 660} == {"fresh"}
        assert len(sizes(result, "verify")) <= 5

    def test_a_worn_process_that_takes_next_to_nothing_more_ends_the_search(self):
        result = probe(ScriptedWorker(up_to(697), up_to(700), limit=700, worn_bytes=3)).run()
        assert len(sizes(result, "verify")) == 1

    def test_every_size_it_falls_back_to_keeps_to_the_multiple_and_the_minimum(self):
        result = probe(ScriptedWorker(up_to(700), up_to(300)), multiple_of=16, minimum=32).run()
        assert {size % 16 for size in sizes(result, "verify")} == {0}
        assert result.max_batch_size == 288

    def test_a_child_that_dies_in_it_is_a_failure_like_any_other(self):
        result = probe(ScriptedWorker(up_to(700), up_to(690, "crash"))).run()
        assert_certified(result)
        assert result.limited_by == "crash"
        assert result.max_batch_size <= 690

    def test_a_check_that_is_silent_twice_in_a_row_ends_the_probe_with_a_word_on_why(self):
        worker = ScriptedWorker(up_to(700), up_to(0, "timeout"))
        failing = probe(worker, timeout=2.0)
        with pytest.raises(NothingFitsError) as raised:
            failing.run()
        first, second = sizes(failing.result(), "verify")
        assert second == first // 2  # what takes long at half the size is not the size
        assert re.fullmatch(
            f"nothing passes the final check: it said nothing for 2 s at batch sizes {first} and {second}, most likely "
            "in evaluation or saving, since the training steps of the search passed; make evaluate.. quicker, .*",
            str(raised.value),
        )

    def test_it_may_be_silent_for_longer_than_an_attempt(self):
        worker = ScriptedWorker(up_to(700))
        probe(worker, timeout=2.0, verify_timeout=30.0, throughput=False).run()
        assert {timeout for _, _, steps, _, timeout in worker.log if steps == 3} == {2.0}
        assert {timeout for _, _, steps, _, timeout in worker.log if steps == 20} == {30.0}

    def test_one_that_is_silent_once_goes_on_below(self):
        worker = ScriptedWorker(up_to(700), lambda size: "timeout" if size > 697 else up_to(690)(size))
        assert 680 < probe(worker, tolerance=0.0).run().max_batch_size <= 690

    def test_each_try_of_it_is_in_a_fresh_process(self):
        worker = ScriptedWorker(up_to(700), up_to(650))
        result = probe(worker).run()
        checks = [process for _, _, steps, process, _ in worker.log if steps == 20]
        assert len(checks) >= 3
        assert set(checks) == {"fresh"}
        assert result.max_batch_size <= 650

    def test_an_error_of_the_users_code_there_is_theirs_since_training_went_well(self):
        failing = probe(ScriptedWorker(up_to(700), up_to(0, "user_error")))
        with pytest.raises(UserCodeError, match=r"user_error at (69\d|700)"):
            failing.run()
        assert not failing.result().verified_in_fresh_process

    def test_nothing_fits_where_no_size_passes_it(self):
        worker = ScriptedWorker(up_to(50), up_to(0))
        with pytest.raises(NothingFitsError, match="nothing fits"):
            probe(worker).run()
        assert min(size for _, size, *_ in worker.log) == 1


class TestEvaluation:
    """Memory may end there though training passes, and then far below what training alone fits."""

    @pytest.mark.parametrize(("boundary", "most"), [(350, 12), (90, 14), (7, 16)])
    def test_two_checks_that_failed_there_are_enough_to_go_on_by_halves(self, boundary, most):
        worker = ScriptedWorker(up_to(700), up_to(boundary), failed_steps=None)
        result = probe(worker).run()
        assert_certified(result)
        checks = sizes(result, "verify")
        assert checks[2] == checks[1] - checks[1] // 2
        assert len(checks) <= most
        assert 0.98 * boundary <= result.max_batch_size <= boundary
        assert ("attempt", result.max_batch_size, 20, "fresh") in [entry[:4] for entry in worker.log]

    def test_that_it_is_the_limit_is_said_once(self):
        found = probe(ScriptedWorker(up_to(700), up_to(90), failed_steps=None))
        largest, (trained, *_) = found.run().max_batch_size, sizes(found.result(), "verify")
        (said,) = found.result().warnings
        why = f"evaluation or saving does not beyond {largest}: evaluate in smaller batches"
        assert said == f"training alone fits {trained}, but {why}"

    @pytest.mark.parametrize(("boundary", "steps"), [(90, 19), (696, None)])
    def test_it_is_not_where_training_fails_too_or_next_to_nothing_is_lost(self, boundary, steps):
        found = probe(ScriptedWorker(up_to(700), up_to(boundary), failed_steps=steps))
        found.run()
        assert found.result().warnings == []

    @pytest.mark.parametrize(("unit", "minimum", "largest"), [(1, 64, 90), (8, 61, 88)])
    def test_halves_stop_at_the_minimum(self, unit, minimum, largest):
        worker = ScriptedWorker(up_to(100), up_to(90), failed_steps=None)
        result = probe(worker, minimum=minimum, multiple_of=unit, tolerance=0.0).run()
        assert result.max_batch_size == largest
        assert min(sizes(result, "verify")) >= 64

    def test_an_error_of_the_users_code_in_it_is_no_matter_of_memory(self):
        failing = probe(ScriptedWorker(up_to(700), up_to(0, "user_error"), failed_steps=None))
        with pytest.raises(UserCodeError):
            failing.run()
        assert not any("training alone fits" in said for said in failing.result().warnings)

    def test_where_nothing_passes_it_the_remedy_is_to_evaluate_less_at_once(self):
        with pytest.raises(
            NothingFitsError, match=r"training alone fits \d+, but .* at any size that was tried: "
        ) as no:
            probe(ScriptedWorker(up_to(700), up_to(0), failed_steps=None)).run()
        assert "evaluate in smaller batches" in str(no.value)
        assert "smaller model" not in str(no.value)


class TestFailures:
    @pytest.mark.parametrize("outcome", ["crash", "timeout", "kernel_limit"])
    def test_a_model_that_fails_above_300_otherwise_than_by_memory_has_the_answer_300(self, outcome):
        found = probe(ScriptedWorker(up_to(300, outcome)), tolerance=0.0)
        result = found.run()
        assert_certified(result)
        assert (result.max_batch_size, result.first_failing_batch_size, result.limited_by) == (300, 301, outcome)
        assert f"batch size 301 ended in {outcome}: " in found.result().warnings[0]

    def test_a_child_that_is_lost_leaves_an_attempt_with_its_end(self):
        result = probe(ScriptedWorker(up_to(300, "crash"))).run()
        lost = [each for each in result.attempts if each.outcome == "crash"]
        assert lost
        assert {each.message for each in lost} == {LOST["crash"]}

    def test_an_allocation_that_fails_outside_the_attempt_is_an_oom(self):
        result = probe(ScriptedWorker(up_to(300, "lost to memory"))).run()
        assert result.limited_by == "memory"
        assert {each.outcome for each in result.attempts} == {"fit", "oom"}

    def test_the_worker_is_given_the_patience_that_was_asked_for(self):
        worker = ScriptedWorker(up_to(10))
        probe(worker, timeout=7.5).run()
        assert {timeout for *_, timeout in worker.log} == {7.5}

    def test_a_size_that_the_model_rejects_is_passed_over_and_told(self):
        found = probe(ScriptedWorker(lambda size: "user_error" if size == 1 else up_to(300)(size)))
        assert 297 <= found.run().max_batch_size <= 300
        assert found.result().warnings == [
            "batch size 1 ended in an error of the task's code, and the search went on above it: user_error at 1",
        ]

    @pytest.mark.parametrize(
        ("outcome", "words"),
        [
            ("oom", "a larger --memory-limit"),
            ("timeout", "raise --timeout"),
            ("crash", "run the task by itself"),
        ],
    )
    def test_nothing_fits_is_said_with_the_reason_and_a_remedy(self, outcome, words):
        limit = 64 << 20
        with pytest.raises(NothingFitsError) as raised:
            probe(ScriptedWorker(lambda _: outcome, limit=limit), minimum=4).run()
        assert f"nothing fits within 64 MiB: batch size 4 ended in {outcome} (" in str(raised.value)
        assert words in str(raised.value)

    @pytest.mark.parametrize(("bounds", "said"), [({"minimum": 4}, True), ({"multiple_of": 8}, True), ({}, False)])
    def test_where_smaller_sizes_were_not_asked_for_that_is_the_first_remedy(self, bounds, said):
        with pytest.raises(NothingFitsError) as raised:
            probe(ScriptedWorker(lambda _: "oom"), **bounds).run()
        assert ("smaller sizes were not asked for: lower --min and --multiple-of" in str(raised.value)) == said

    def test_memory_that_is_full_after_the_same_steps_at_any_size_is_kept_by_the_task(self):
        found = probe(ScriptedWorker(up_to(700), up_to(0), failed_steps=3))
        with pytest.raises(NothingFitsError) as raised:
            found.run()
        assert f"whatever the batch size: from {max(each.batch_size for each in found.attempts if each.fits)} " in str(
            raised.value
        )
        assert "down to 1 every final check was out of it after 3 steps (something keeps what" in str(raised.value)
        assert "smaller model" not in str(raised.value)
        assert len(found.result().warnings) == 1

    def test_on_a_cpu_the_first_size_to_be_checked_leaves_the_room_that_another_process_may_need(self):
        worker = on_a_cpu(ScriptedWorker(up_to(1000)))
        found = probe(worker, throughput=False).run()
        assert [size for _, size, steps, _, _ in worker.log if steps == 20] == [667] + [833] * 5 + [989] * 5
        assert [each.get("process") for each in worker.arguments if each.get("verify")] == [*range(5), *range(5)]
        assert (found.max_batch_size, found.attempts[-1].kept_back_bytes) == (989, 10)

    def test_batches_that_differ_are_checked_in_six_orders(self):
        worker = DrawnBatches(1000)
        assert probe(worker, throughput=False, tolerance=0).run().max_batch_size == 1000
        assert worker.processes() == [(1000, [*range(6)])]

    def test_where_an_order_failed_the_answer_is_smaller_than_what_passed_and_passes_in_three_times_as_many(self):
        worker = DrawnBatches(980)
        found = probe(worker, throughput=False, tolerance=0).run()
        assert worker.processes() == [
            (1000, [0, 1, 2, 3]),
            (970, [3, 0, 1, 2, 4, 5]),
            (940, [3, 0, 1, 2, *range(4, 18)]),
        ]
        assert found.max_batch_size == 940

    @pytest.mark.parametrize(("device", "processes"), [("cuda:0", [0]), ("cpu", [3, 0])])
    def test_after_a_failure_in_a_further_process_all_lengths_still_train_in_the_first(self, device, processes):
        worker = DrawnBatches(600)
        worker.device, worker.limit = device, 910
        tries = Tries(worker, ProbeOptions(), "fp32", Observer(), [], None)
        assert tries.run(tries.command(900, 20, verify=True)).outcome == "oom"
        worker.log.clear(), worker.arguments.clear()
        assert tries.run(mixed(tries.command(500, 20, verify=True), {512: 500, 128: 600}, 0, 6, asked=20)).fits
        assert [at for _, some in worker.processes() for at in some] == processes

    def test_on_a_cpu_what_fresh_processes_leave_is_used(self):
        worker = on_a_cpu(ScriptedWorker(up_to(700), up_to(1000), worn_bytes=300))
        found = probe(worker, throughput=False).run()
        assert 700 < found.max_batch_size <= 990

    def test_on_a_cpu_the_answer_passes_in_several_fresh_processes_and_with_what_they_differ(self):
        worker = on_a_cpu(ScriptedWorker(up_to(1000)))
        peaks = iter([950, 990, *[940, 950, 930, 935, 945] * 3])
        tell = worker.answer

        def answer(command, *, batch_size, **arguments):
            told = tell(command, batch_size=batch_size, **arguments)
            if arguments.get("verify"):
                told["attempt"]["peak_reserved_bytes"] = next(peaks)
            return told

        worker.answer = answer
        found = probe(worker, throughput=False).run()
        checks = [(size, process) for _, size, steps, process, _ in worker.log if steps == 20]
        assert [size for size, _ in checks] == [667, 833, 833, *[792] * 5]
        assert {process for _, process in checks[1:]} == {"fresh"}
        assert (found.max_batch_size, found.peak_reserved_bytes) == (792, 950)

    def test_a_file_that_cannot_be_mapped_has_a_remedy_of_its_own(self):
        words = "[Errno 12] Cannot allocate memory"
        with pytest.raises(NothingFitsError) as raised:
            probe(on_a_cpu(ScriptedWorker(up_to(0), words=words, maps_file=True))).run()
        assert f"ended in oom ({words}); a file that is memory-mapped during training counts" in str(raised.value)
        assert "map it at import" in str(raised.value)
        assert "smaller model" not in str(raised.value)

    def test_code_that_raises_at_every_size_is_the_users_fault_and_not_too_large(self):
        hint = r"user_error at 2 \(sizes 1, 2 were tried; others can be asked for, by --min and --multiple-of, in a "
        with pytest.raises(UserCodeError, match=hint):
            probe(ScriptedWorker(lambda _: "user_error")).run()

    @pytest.mark.parametrize(
        ("text", "helps"),
        [
            (
                "compute_loss raised NameError at batch size {0} (not an out-of-memory error): m.py:9: no 'targets'",
                False,
            ),
            ("compute_loss raised NameError at batch size {0}: m.py:9: name 'batch' is not defined", False),
            ("compute_loss raised RuntimeError at batch size {0}: m.py:9: selected index k out of range", True),
            (
                "a library raised RuntimeError at batch size {0}: mat1 and mat2 cannot be multiplied ({0}x8 and 9x4)",
                False,
            ),
            ("train_step called optimizer.step(); call context.step(optimizer)", False),
            ("compute_loss raised RuntimeError at batch size {0}: shape '[4, 8]' is invalid for input of {0}", True),
            ("compute_loss raised AssertionError at batch size {0}: m.py:9: (no message)", True),
            ("compute_loss raised ValueError at batch size {0}: m.py:9: batch must be divisible by 4", True),
        ],
    )
    def test_other_sizes_are_named_where_one_may_cure_it(self, text, helps):
        with pytest.raises(UserCodeError) as raised:
            probe(ScriptedWorker(lambda _: "user_error", words=text)).run()
        assert ("sizes 1, 2 were tried" in str(raised.value)) == helps


class TestCaps:
    @pytest.mark.parametrize(
        ("samples", "maximum", "answer", "limited_by"),
        [(37, None, 37, "dataset"), (None, 50, 50, "max"), (37, 50, 37, "dataset"), (64, 50, 50, "max")],
    )
    def test_the_smaller_cap_is_the_answer_and_named(self, samples, maximum, answer, limited_by):
        worker = ScriptedWorker(up_to(700), samples=samples)
        result = probe(worker, maximum=maximum).run()
        assert (result.max_batch_size, result.limited_by, result.first_failing_batch_size) == (answer, limited_by, None)
        assert max(size for _, size, *_ in worker.log) == answer

    @pytest.mark.parametrize(
        ("samples", "maximum", "answer", "limited_by"),
        [
            (None, 1000, 512, "max"),
            (1000, None, 512, "dataset"),
            (900, 1000, 512, "dataset"),
            (4000, None, 1024, "user_error"),
        ],
    )
    def test_a_cap_that_is_no_power_of_two_limits_a_task_that_takes_powers_only(
        self, samples, maximum, answer, limited_by
    ):
        worker = ScriptedWorker(lambda size: "user_error" if 1024 % size else "fit", limit=10**6, samples=samples)
        result = probe(worker, maximum=maximum).run()
        assert (result.max_batch_size, result.limited_by) == (answer, limited_by)

    @pytest.mark.parametrize(("multiple_of", "maximum", "answer"), [(1, None, 37), (8, None, 32), (1, 900, 37)])
    def test_what_an_epoch_of_a_loader_has_is_the_cap_once_it_was_met(self, multiple_of, maximum, answer):
        worker = ScriptedWorker(lambda size: "fit" if size <= 37 else "user_error", limit=10**6, most_samples=37)
        result = probe(worker, multiple_of=multiple_of, maximum=maximum).run()
        assert (result.max_batch_size, result.limited_by, result.first_failing_batch_size) == (answer, "dataset", None)
        assert all(attempt.fits for attempt in result.attempts)
        assert result.warnings == []
        assert sum(size > 37 for _, size, *_ in worker.log) == 1

    @pytest.mark.parametrize("cap", [{"samples": 800}, {"most_samples": 800}, {"maximum": 800}])
    def test_on_a_cpu_no_larger_size_than_the_cap_is_checked_for_the_room_that_is_left(self, cap):
        options = {"maximum": cap["maximum"]} if "maximum" in cap else {}
        about = {name: value for name, value in cap.items() if name != "maximum"}
        worker = on_a_cpu(ScriptedWorker(up_to(700), up_to(5000), limit=2000, **about))
        found = probe(worker, throughput=False, **options).run()
        assert found.max_batch_size == 800
        assert sum(size > 800 for _, size, *_ in worker.log) <= ("most_samples" in cap)

    @pytest.mark.timeout(20)
    def test_the_end_of_an_epoch_that_only_the_room_that_is_left_leads_to_is_met_once(self):
        checked = up_to(1500, "user_error")
        worker = ScriptedWorker(up_to(1000), checked, limit=2000, worn_bytes=1000, most_samples=1500)
        found = probe(on_a_cpu(worker), throughput=False).run()
        assert (found.max_batch_size, found.limited_by) == (1500, "dataset")
        assert sum(size > 1500 for _, size, *_ in worker.log) == 1

    def test_an_epoch_with_too_few_samples_for_the_least_size_is_refused(self):
        worker = ScriptedWorker(lambda _: "user_error", most_samples=37)
        with pytest.raises(
            UsageError, match="40 is the least multiple of 1 from 40 up, but an epoch of train_loader has"
        ):
            probe(worker, minimum=40).run()

    def test_memory_that_ends_below_the_cap_is_what_limits(self):
        assert probe(ScriptedWorker(up_to(30)), maximum=500).run().limited_by == "memory"

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"minimum": 40}, "40 is the least multiple of 1 from 40 up, but train_dataset has 37 samples"),
            ({"multiple_of": 64}, "64 is the least multiple of 64 from 1 up, but train_dataset has 37 samples"),
            ({"minimum": 9, "multiple_of": 8, "maximum": 15}, "16 is the least .* but the maximum is 15"),
        ],
    )
    def test_bounds_that_leave_no_size_are_refused_before_any_attempt(self, options, why):
        worker = ScriptedWorker(up_to(700), samples=37)
        with pytest.raises(UsageError, match=why):
            probe(worker, **options)
        assert worker.log == []


class TestTime:
    """What whoever asks has no time for is left out, and the certificate says how much was done."""

    def test_the_final_check_takes_as_many_steps_as_there_is_time_for(self):
        result = probe(ScriptedWorker(up_to(100), sample_seconds=0.01), verify_seconds=7.5).run()
        assert result.verify_steps == 7
        assert_certified(result)

    @pytest.mark.parametrize(("seconds", "steps"), [(0.0, 3), (1e6, 20)])
    def test_it_never_takes_fewer_than_an_attempt_nor_more_than_asked_for(self, seconds, steps):
        assert (
            probe(ScriptedWorker(up_to(100), sample_seconds=0.01), verify_seconds=seconds).run().verify_steps == steps
        )

    def test_sizes_whose_steps_are_too_slow_to_be_of_use_are_not_tried(self):
        worker = ScriptedWorker(up_to(900), sample_seconds=0.01)
        probing = probe(worker, max_step_seconds=2.0)
        result = probing.run()
        assert 160 <= result.max_batch_size <= 200
        assert result.limited_by == "timeout"
        assert max(size for _, size, *_ in worker.log) == result.max_batch_size
        assert "budget.run has room for too few of their steps" in probing.result().warnings[0]

    @pytest.mark.parametrize(
        ("timeout", "options"), [(120.0, {}), (30.0, {}), (30.0, {"accumulation_steps": 64}), (30.0, {"steps": 50})]
    )
    def test_sizes_of_which_few_batches_take_longer_than_the_timeout_are_not_tried(self, timeout, options):
        """Where memory grows hardly at all with the batch, as with a gradient cache, its end is hours of steps away."""
        worker = ScriptedWorker(up_to(50_000), sample_seconds=0.01)
        probing = probe(worker, timeout=timeout, **options)
        result = probing.run()
        longest = int(timeout / 3 / 0.01)
        assert 0.8 * longest <= result.max_batch_size <= longest
        assert (result.limited_by, result.first_failing_batch_size) == ("timeout", None)
        assert max(size for _, size, *_ in worker.log) == result.max_batch_size
        assert f"one takes longer than a third of --timeout ({timeout:g} s); raise it" in probing.result().warnings[0]

    def test_near_the_largest_size_of_use_the_search_ends(self):
        known = [Attempt(batch_size=170, outcome="fit", purpose="search", steps=3, step_seconds=1.7)]
        worker = ScriptedWorker(up_to(900), sample_seconds=0.01)
        assert probe(worker, known=known, max_step_seconds=2.0).run().max_batch_size == 170
        assert [size for _, size, *_ in worker.log] == [170]

    def test_a_useful_size_is_tried_however_slow_it_is(self):
        result = probe(ScriptedWorker(up_to(900), sample_seconds=0.01), max_step_seconds=2.0, useful_size=400).run()
        assert 320 <= result.max_batch_size <= 400

    def test_each_size_is_timed_as_long_as_asked_for(self):
        worker = ScriptedWorker(up_to(12))
        probe(worker, throughput=True, timing_seconds=0.25).run()
        asked = [arguments["seconds"] for arguments in worker.arguments if "seconds" in arguments]
        assert asked == [0.25] * 5

    def test_fewer_sizes_are_timed_where_their_steps_are_too_slow(self):
        worker = ScriptedWorker(up_to(12), sample_seconds=1.0)
        probe(worker, throughput=True, timing_within=9.0).run()
        assert [size for command, size, *_ in worker.log if command == "time_steps"] == [2, 8, 12]

    @pytest.mark.parametrize(("device", "counted"), [("cpu", False), ("cuda:0", True)])
    def test_flops_that_are_only_wanted_as_a_share_are_counted_where_the_device_s_peak_is_known(self, device, counted):
        worker = ScriptedWorker(up_to(12))
        worker.device = device
        probing = Probe(worker, ProbeOptions(flops=False), "bf16", Observer())
        probing.run()
        assert ("count_flops" in [command for command, *_ in worker.log]) == counted
        assert worker.running != counted  # after counting, the next work begins in a fresh child


class TestTiming:
    def test_sizes_up_to_the_answer_are_timed_after_the_final_check(self):
        worker = ScriptedWorker(up_to(12))
        result = probe(worker, throughput=True, tolerance=0.0).run()
        assert [point.batch_size for point in result.throughput] == [1, 2, 4, 8, 12]
        commands = [command for command, *_ in worker.log]
        assert commands.index("time_steps") == commands.index("count_flops") - 5 == len(result.attempts)
        assert result.throughput_fit is not None

    def test_a_size_that_cannot_be_timed_is_left_out_with_a_note_and_the_answer_stands(self):
        worker, listener = ScriptedWorker(up_to(12)), Listener()
        timing = probe(worker, listener, throughput=True, tolerance=0.0)
        fate = worker.outcome
        worker.outcome = lambda size: "crash" if worker.log[-1][0] == "time_steps" and size == 4 else fate(size)
        result = timing.run()
        assert [point.batch_size for point in result.throughput] == [1, 2, 8, 12]
        assert result.max_batch_size == 12
        assert f"no throughput at batch size 4: {LOST['crash']}" in listener.notes


class TestLeaks:
    def test_a_leak_is_named_after_a_few_checks_and_no_larger_size_is_looked_for(self):
        worker = LeakingWorker(20_000, limit=2_000_000)
        found = probe(worker, throughput=False).run()
        checks = [each for each in found.attempts if each.purpose == "verify"]
        assert len(checks) <= 3
        assert checks[-1].fits
        assert found.verified_in_fresh_process
        assert any("memory grew by 20 KiB a step" in warning for warning in found.warnings)

    def test_a_leak_that_no_size_lives_with_ends_the_probe_at_once(self):
        worker = LeakingWorker(110_000, limit=2_000_000)
        with pytest.raises(NothingFitsError, match=r"; memory grew by 107 KiB a step at batch size") as raised:
            probe(worker, throughput=False, maximum=100_000).run()
        assert "out of memory" not in str(raised.value)

    def test_a_rise_of_peaks_that_smaller_sizes_do_not_show_ends_no_probe(self):
        found = probe(SettlingWorker(limit=1000, settles_at=600), throughput=False).run()
        assert (found.max_batch_size, found.verified_in_fresh_process) == (600, True)
        assert not any("grew" in warning for warning in found.warnings)

    def test_a_small_leak_costs_little_of_the_answer(self):
        found = probe(LeakingWorker(100, limit=2_000_000), throughput=False, tolerance=0.0).run()
        assert found.max_batch_size > 0.98 * 2_000_000


def test_the_answer_at_one_length_is_the_one_that_its_final_check_has_left():
    worker = OneLength(up_to(100), up_to(80))
    result = probe(worker, lengths=(512,)).run()
    assert_certified(result)
    (point,) = result.lengths
    assert (point.max_batch_size, point.first_failing_batch_size) == (80, result.first_failing_batch_size)
    assert result.max_batch_size == 80
    assert result.attempts[-1].batch_size == 80
