"""A whole probe on a scripted GPU: precisions that fail beside others that do not, and what it learns of contexts."""

from functools import partial
from pathlib import Path

import pytest
from fakes import FakeChild, opened

import batchtune
from batchtune.config.options import check_options
from batchtune.config.probe import ProbeOptions
from batchtune.config.ranks import OF_LAUNCHERS
from batchtune.device.sharing import Sharing
from batchtune.document import Attempt, DeviceProcess, LoaderPoint, TaskInfo, ThroughputPoint
from batchtune.errors import DeviceError, NothingFitsError, RunInterrupted, UsageError, UserCodeError
from batchtune.estimate import calibration
from batchtune.observer import Observer
from batchtune.probe import run, session
from batchtune.protocol.commands import OpenTask
from batchtune.result import Result, load_result
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash

MIB = 2**20
FREE, CONTEXT, CACHED = 1000 * MIB, 400 * MIB, 300 * MIB


class ScriptedGpu(FakeChild):
    """A GPU and the one child there is on it, whose context is complete once it has trained.

    Args:
        outcome: of an attempt, by precision, batch size and whether it is the final check.
        precisions: asked for.
        in_half: those that are why the user's code raises.
    """

    def __init__(self, outcome, precisions, in_half=()):
        self.outcome, self.precisions, self.in_half = outcome, precisions, in_half
        self.free, self.opened = FREE, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def start(self):
        if self.free == FREE:
            self.opened = opened(
                device="cuda:0",
                nvml_uuid="GPU-1",
                environment={
                    "device": "NVIDIA H200",
                    "device_memory_bytes": 2 * FREE,
                    "device_memory_free_bytes": self.free,
                },
                precision=[[name, "asked for"] for name in self.precisions],
                memory_limit_bytes=900,
                train_size=64,
                has_train_dataset=True,
            )
            self.free -= CONTEXT // 2
        return self.opened

    def renew(self, *, as_fork=True):
        self.free = FREE

    close = renew

    def answer(self, command, *, timeout, batch_size, precision="", **arguments):
        self.start()
        if command == "count_flops":
            return {"per_sample": 1.0}
        if command == "time_loader":
            arguments.pop("seconds")
            return LoaderPoint(**arguments, samples_per_second=1e6).model_dump()
        if command == "time_steps":
            self.free = FREE - CONTEXT - CACHED
            speed = {"fp32": 9.0, "bf16": 5.0}[precision]
            return ThroughputPoint(batch_size=batch_size, samples_per_second=speed, step_seconds=1.0).model_dump()
        self.free = FREE - CONTEXT
        outcome = self.outcome(precision, batch_size, arguments["verify"])
        if isinstance(outcome, Exception):
            self.renew()
            raise outcome
        purpose, message = "verify" if arguments["verify"] else "search", None if outcome == "fit" else "no"
        found = Attempt(batch_size=batch_size, outcome=outcome, purpose=purpose, message=message, steps=3)
        return {"attempt": found.model_dump(), "fails_in_half": outcome == "user_error" and precision in self.in_half}


class NoForesight:
    """Nothing is expected."""

    def __init__(self, *_, **__):
        """Nothing to start."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing to end."""

    def look(self, *_, **__):
        return None


@pytest.fixture
def recorded(monkeypatch):
    recorded = []
    monkeypatch.setattr(calibration, "record", lambda *what: recorded.append(what))
    return recorded


@pytest.fixture
def probed(monkeypatch, recorded):
    def probed(outcome, precisions=("fp32", "bf16"), folder=None, asked=("auto",), in_half=(), **options):
        gpu = ScriptedGpu(outcome, precisions, in_half)
        monkeypatch.setattr(session, "EstimatePrior", NoForesight)
        monkeypatch.setattr(run, "Worker", lambda *_, **_how: gpu)
        monkeypatch.setattr(calibration, "look", lambda _uuid: Sharing(gpu.free))
        monkeypatch.setattr(calibration, "SETTLING_SECONDS", (0.0,))
        settings = OpenTask(task=__file__, device="cuda", precision=asked)
        return run.run_probe(settings, ProbeOptions(**options), name="x", observer=Observer(), folder=folder)

    return probed


def fits(_precision, size, _verify):
    return "fit" if size <= 8 else "oom"


def but(name, otherwise, *, only_checked=False):
    """As `fits`, but for one precision."""
    return lambda precision, size, verify: (
        otherwise if precision == name and verify >= only_checked else fits(precision, size, verify)
    )


class TestPrecisions:
    @pytest.mark.parametrize("throughput", [True, False])
    @pytest.mark.parametrize("failing", ["fp32", "bf16"])
    @pytest.mark.parametrize(
        ("otherwise", "only_checked", "why"),
        [
            ("oom", False, "nothing fits within 0 MiB: batch size 1 ended in oom"),
            ("user_error", False, "no"),
            (UserCodeError("compute_loss returned nan"), False, "compute_loss returned nan"),
            ("user_error", True, "no"),
        ],
        ids=["no room", "an error", "no number", "an error in evaluation"],
    )
    def test_one_that_fails_is_told_of_and_another_is_the_answer(
        self, probed, failing, otherwise, only_checked, why, throughput
    ):
        result = probed(but(failing, otherwise, only_checked=only_checked), throughput=throughput)
        assert result.status == "complete"
        assert {each.precision for each in result.probes} == {"fp32", "bf16"}
        assert (result.probe.precision != failing, result.probe.max_batch_size) == (True, 8)
        assert any(warning.startswith(f"{failing}: {why}") for warning in result.warnings)
        (failed,) = (each for each in result.probes if each.precision == failing)
        assert (failed.max_batch_size, failed.limited_by, failed.verified_in_fresh_process) == (None, None, False)
        assert (result.probe.input_pipeline is not None) == throughput

    def test_what_the_search_found_stays_where_the_final_check_was_not_made(self, probed):
        gone = but("bf16", UserCodeError("importing it once more ended in crash"), only_checked=True)
        result = probed(gone)
        (failed,) = (each for each in result.probes if each.precision == "bf16")
        assert (failed.max_batch_size, failed.verified_in_fresh_process) == (8, False)

    def test_a_device_that_others_fill_after_the_check_costs_the_timing_only(self, probed, monkeypatch):
        told = []
        monkeypatch.setattr(Observer, "note", lambda _self, text: told.append(text))

        def answer(gpu, command, **arguments):
            if command == "time_steps":
                raise DeviceError("--device cuda: cannot be used now: out of memory")
            return whole(gpu, command, **arguments)

        whole = ScriptedGpu.answer
        monkeypatch.setattr(ScriptedGpu, "answer", answer)
        result = probed(fits, precisions=("fp32",))
        assert (result.status, result.probe.max_batch_size) == ("complete", 8)
        assert "no more is timed: --device cuda: cannot be used now: out of memory" in told

    @pytest.mark.parametrize("only_checked", [False, True])
    def test_where_the_half_precision_that_nobody_asked_for_is_why_fp32_takes_its_place(self, probed, only_checked):
        fails = but("bf16", "user_error", only_checked=only_checked)
        result = probed(fails, precisions=("bf16",), in_half={"bf16"})
        assert (result.probe.precision, result.probe.max_batch_size, result.probes) == ("fp32", 8, None)
        assert result.warnings == ["fp32 and not bf16, since no"]
        assert result.options == "--precision fp32 --device cuda"  # what goes on from here does so, too
        with pytest.raises(UserCodeError, match="no"):
            probed(fails, precisions=("bf16",), asked=("bf16",), in_half={"bf16"})
        with pytest.raises(UserCodeError, match="no"):
            probed(fails, precisions=("bf16",))

    def test_an_error_that_speaks_of_autocast_at_fp32_too_is_raised(self, probed):
        with pytest.raises(UserCodeError, match="no"):
            probed(lambda *_: "user_error", precisions=("bf16",), in_half={"bf16", "fp32"})

    def test_where_fp32_in_the_place_of_a_half_precision_fits_nowhere_both_are_told(self, probed):
        outcomes = {"bf16": "user_error", "fp32": "oom"}
        with pytest.raises(NothingFitsError) as raised:
            probed(lambda precision, *_: outcomes[precision], precisions=("bf16",), in_half={"bf16"})
        assert raised.value.result.warnings[0] == "fp32 and not bf16, since no"
        assert raised.value.result.probe.precision == "fp32"

    def test_where_all_fail_the_first_error_is_raised_and_the_others_are_told_of(self, probed):
        errors = {"fp32": UserCodeError("not in fp32"), "bf16": NothingFitsError("not in bf16")}
        with pytest.raises(UserCodeError, match="not in fp32") as raised:
            probed(lambda precision, _size, _verify: errors[precision])
        result = raised.value.result
        assert (result.status, result.error.message, result.warnings) == (
            "failed",
            "not in fp32",
            ["bf16: not in bf16"],
        )

    def test_where_all_do_well_the_fastest_is_the_answer(self, probed):
        result = probed(fits)
        assert (result.probe.precision, result.warnings) == ("fp32", [])


class TestTheRunFolder:
    """What stands in it once another probe there ended early."""

    @pytest.fixture
    def folder(self, tmp_path):
        return RunFolder("probe-x", tmp_path)

    @pytest.mark.parametrize("earlier", [None, "garbled", "failed", "complete", "another's"])
    @pytest.mark.parametrize("end", [KeyboardInterrupt(), NothingFitsError("no")])
    def test_only_a_whole_result_outlives_only_an_interruption(self, probed, folder, earlier, end):
        def ends(_precision, size, _verify):
            if size > 2:
                raise end
            return "fit"

        if earlier in {"failed", "complete", "another's"}:
            status = "failed" if earlier == "failed" else "complete"
            task = TaskInfo(path=__file__, sha256="0" * 64 if earlier == "another's" else file_hash(__file__))
            folder.open()
            folder.write_result(Result(kind="probe", status=status, name="earlier", task=task))
            folder.close()
        elif earlier:
            folder.path.mkdir()
            (folder.path / "result.json").write_text("{")
        with pytest.raises((RunInterrupted, NothingFitsError)) as raised:
            probed(ends, precisions=("fp32",), folder=folder)
        assert raised.value.result.probe.max_batch_size in {1, 2, None}
        stays = earlier == "complete" and isinstance(end, KeyboardInterrupt)
        assert (load_result(folder.path).name == "earlier") == stays


class TestContexts:
    @pytest.mark.parametrize("throughput", [True, False])
    def test_what_a_child_takes_beside_its_tensors_is_kept(self, probed, recorded, throughput):
        probed(fits, throughput=throughput)
        assert recorded == [("NVIDIA H200", "context_bytes", CONTEXT)]

    def test_what_somebody_else_took_meanwhile_is_not(self, probed, recorded, monkeypatch):
        monkeypatch.setattr(calibration, "SAME_BYTES", -1)
        probed(fits)
        assert recorded == []

    def test_a_child_that_is_still_ending_is_not_somebody_else(self, monkeypatch):
        gpu = ScriptedGpu(fits, ("fp32",))
        ending = Sharing(FREE - CONTEXT, (DeviceProcess(pid=7, memory_bytes=CONTEXT),))
        monkeypatch.setattr(calibration, "look", lambda _uuid: ending)
        monkeypatch.setattr(calibration, "is_of_a_child", (7).__eq__)
        free = calibration.FreeMemory(gpu)
        free.look_after(gpu.start())
        assert free.after == FREE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": None}, "the task is a NoneType; it must be a path"),
        ({"timeout": None}, "timeout=None: must be seconds"),
        ({"timeout": 0}, "timeout=0: must be seconds greater than 0"),
        ({"timeout": float("nan")}, "timeout=nan: must be seconds"),
        ({"min": 1.5}, "min=1.5: must be an int, not a float"),
        ({"max": "100"}, "max=100: must be an int, not a str"),
        ({"verify_steps": "20"}, "verify_steps=20: must be an int"),
        ({"nproc_per_node": None}, "nproc_per_node=None: must be an int"),
        ({"device": 0}, "device=0: must be a text, not an int"),
        ({"precision": None}, "precision=None: must be a text, not a NoneType"),
        ({"precision": ["bf16", 5]}, "precision=5: must be a text, not an int"),
        ({"precision": []}, r"precision=\(none\): name at least one"),
        ({"no_oom": "x"}, "no_oom=x: must be True or False, not a str"),
        ({"run_folders": 3}, "run_folders 3: must be a text, not an int"),
    ],
)
def test_options_of_the_library_that_make_no_sense_are_named(options, words):
    with pytest.raises(UsageError, match=words):
        batchtune.probe(**{"task": __file__} | options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(batchtune.environment, None), "device=None: must be a text, not a NoneType"),
        (partial(batchtune.estimate, __file__, gpus=[]), r"gpus=\(none\): name at least one"),
        (partial(batchtune.estimate, __file__, gpus=None), "gpus=None: must be a text, not a NoneType"),
        (partial(batchtune.estimate, __file__, gpus=["A100-80GB", 3]), "gpus=3: must be a text, not an int"),
        *(
            (
                partial(call, __file__, observer=observer),
                rf"observer=.*: must be a batchtune\.observer\.Observer, not {kind}",
            )
            for call in (
                batchtune.probe,
                batchtune.estimate,
                batchtune.tune,
                batchtune.check,
                batchtune.find_batch_size,
            )
            for observer, kind in ((3, "an int"), (object(), "an object"), (batchtune.observer.Observer, "a type"))
        ),
        (partial(batchtune.tune, __file__, fresh=3), "fresh=3: must be True or False, not an int"),
        (partial(batchtune.tune, __file__, overrides=[3]), "overrides 3: must be a text, not an int"),
        (partial(batchtune.tune, __file__, warm_start=3), "warm_start=3: must be a text, not an int"),
        (partial(batchtune.tune, __file__, run_folders=None), "run_folders None: must be a text, not a NoneType"),
        (partial(batchtune.check, "model.py"), r"the configuration is a str; it must be a batchtune\.config"),
        (
            partial(batchtune.probe, __file__, strategy="fsdp"),
            "strategy=fsdp: there is nothing to share on one rank; add nproc_per_node=2, or drop it",
        ),
        (
            partial(batchtune.estimate, __file__, strategy="fsdp"),
            "strategy=fsdp: there is nothing to share on one rank; add world_size=2, or drop it",
        ),
        (partial(batchtune.load_result, 3), "path 3: must be a text, not an int"),
    ],
)
def test_arguments_of_the_other_functions_that_make_no_sense_are_named(call, words):
    with pytest.raises(UsageError, match=f"^{words}"):
        call()


@pytest.mark.parametrize("function", [batchtune.probe, batchtune.estimate, batchtune.tune])
@pytest.mark.parametrize("given", [{"task": "model.py"}, None, pytest])
def test_what_names_no_task_is_refused_by_every_function(function, given):
    with pytest.raises(
        UsageError, match=r"the task is a \w+; it must be a path or a text such as 'model.py:attribute'"
    ):
        function(given)


@pytest.mark.parametrize("function", [batchtune.probe, batchtune.estimate, batchtune.tune])
def test_an_empty_task_is_refused_though_the_folder_has_one(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").touch()
    with pytest.raises(UsageError, match=r"^the task is empty; use model\.py, path\.py:name or pkg\.module:name$"):
        function("")


def test_ranks_that_torchrun_has_started_share_what_no_option_says(monkeypatch):
    for name in OF_LAUNCHERS:
        monkeypatch.setenv(name, "2")
    given = {"strategy": "fsdp", "nproc_per_node": 1}
    check_options(batchtune.probe, given)
    assert given == {"strategy": "fsdp", "nproc_per_node": 1}


def test_an_argument_that_no_function_has_is_told_with_the_function():
    with pytest.raises(TypeError, match=r"batchtune\.probe\(\): got an unexpected keyword argument 'maximum'"):
        batchtune.probe("model.py", maximum=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nproc_per_node": 2}, "nproc_per_node=2: not with inference=True"),
        ({"accumulation": 4}, "accumulation=4: not with inference=True"),
    ],
)
def test_inference_is_of_one_device_and_has_no_optimizer_step(options, words):
    with pytest.raises(UsageError, match=words):
        batchtune.probe(__file__, inference=True, **options)
    with pytest.raises(UsageError, match="takes neither"):
        batchtune.estimate(__file__, inference=True, world_size=2)
