"""What fakes of a worker share: an opened task, commands as plain words, and children that answer by a script."""

import threading

from batchtune.document import CurvePoint
from batchtune.processes.pool import work_alone
from batchtune.protocol import commands
from batchtune.protocol.messages import RunEnd

WORDS = {
    commands.TryBatchSize: "attempt",
    commands.TryLengths: "attempt",
    commands.TimeSteps: "time_steps",
    commands.CountFlops: "count_flops",
    commands.TimeLoader: "time_loader",
    commands.RunRangeTest: "range_test",
    commands.MeasureNoiseScale: "noise_scale",
}


def opened(**known):
    """An opened task; `environment` may be a dict."""
    usual = {
        "device": "cpu",
        "device_count": 1,
        "environment": {"device": "a fake device"},
        "nvml_uuid": None,
        "counts_energy": False,
        "precision": (("fp32", "asked for"),),
        "train_size": None,
        "has_train_dataset": False,
        "memory_limit_bytes": None,
        "optimizer_defaults": {},
        "optimizer": "SGD",
    }
    return commands.Opened.model_validate(usual | known)


class ScriptedLauncher:
    """Starts children that answer each message with the next of `answers`; a class of errors is raised instead.

    Attributes:
        started: its children, the oldest first; each tells what it was `asked` and whether it `is_closed`.
    """

    def __init__(self, *answers):
        self.answers, self.started = list(answers), []

    def start(self):
        self.started.append(ScriptedProcess(self.answers))
        return self.started[-1]


class ScriptedProcess:
    def __init__(self, answers):
        self.pid, self.asked, self.is_closed, self._answers = 1, [], False, answers

    def send(self, message):
        self.asked.append(message)

    def answer(self, seconds):
        found = self._answers.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found() if callable(found) else found

    def last_output(self):
        return "it ended", False

    def kill(self):
        self._answers.insert(0, None)

    def close(self):
        self.is_closed = True


def refusal(error):
    """What a child answers that cannot do what it is asked for."""
    return {"error": str(error), "exit_code": error.exit_code, "frames": ""}


class FakeChild:
    """Answers commands by `answer(word, timeout=…, **arguments)`, which returns what JSON would hold."""

    def call(self, command, *, timeout, on_event=None):
        done = self.answer(WORDS[type(command)], timeout=timeout, **dict(command))
        return command.read({"usable": True, **done} if isinstance(command, commands.TryBatchSize) else done)


class FakeCrew:
    """One worker, or several names for it, that do their work one after another."""

    def __init__(self, worker, at_once=1):
        self.first, self._at_once, self.lock = worker, at_once, threading.RLock()

    def __len__(self):
        return self._at_once

    def warm_up(self):
        pass

    def work(self, step):
        work_alone(self.first, step)

    def any_one(self, do):
        return do(self.first)


class FakeTrainer:
    """Runs by `train(timeout=…, on_event=…, **spec)`, which tells points (or dicts) and returns how the run ended.

    Steps are timed in turn by `step_seconds(spec)`, where there is one.
    """

    def call(self, command, *, timeout, on_event=None):
        if isinstance(command, commands.TimeInTurn):
            return (tuple(map(self.step_seconds, command.specs)),) * 3
        assert isinstance(command, commands.Train)
        tell = lambda event: on_event(CurvePoint(**event) if isinstance(event, dict) else event)  # noqa: E731
        end = self.train(timeout=timeout, on_event=tell, **vars(command.spec))
        return RunEnd(**end)
