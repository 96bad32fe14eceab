"""What groups of ranks that train the answer to the target come to: times that are measured, or estimates that stay."""

import contextlib

import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.config.schema import Budget, Confirm
from batchtune.document import DataParallel, Interval, Scaling, ScalingPoint
from batchtune.errors import DeviceError
from batchtune.observer import Observer
from batchtune.tune import group_runs
from batchtune.tune.group_runs import train_groups
from batchtune.tune.study.phases import TuneStudy

pytestmark = pytest.mark.usefixtures("few_particles")
SLOWER = 1.5  # than the law of one device, which such a group's training follows otherwise


@pytest.fixture(scope="module")
def study():
    plan = law.plan(budget=Budget(run=120.0, total=3600.0, trials=4), confirm=Confirm(seeds=2, top=1))
    made = TuneStudy(plan, FakeCrew(law.LawWorker()), optuna.storages.InMemoryStorage(), Observer())
    made.run()
    return made


@pytest.fixture
def scaling(study):
    found = study.answer()

    def point(world_size):
        return ScalingPoint(
            world_size=world_size,
            global_batch_size=found.global_batch_size,
            micro_batch_size=found.global_batch_size // world_size,
            gradient_accumulation_steps=1,
            learning_rate=found.learning_rate,
            precision=found.precision,
            gradient_clipping=found.gradient_clipping,
            step_seconds=0.1,
            time_to_target_seconds=Interval(median=10.0, low=9.0, high=60.0),
            is_estimate=world_size > 1,
        )

    group = DataParallel(world_size=2, strategy="ddp", backend="gloo", batch_size=8, global_batch_size=16)
    return Scaling(measured=group, points=[point(1), point(2), point(4)])


@pytest.fixture
def groups(monkeypatch):
    """The workers that groups are, each with its ranks; a number of ranks among `broken` cannot start."""
    made, broken = [], set()

    class Group(law.LawWorker):
        def __init__(self, settings, launcher):
            super().__init__(slower=lambda _: SLOWER)
            self.settings, self.ranks = settings, launcher._world_size

        def call(self, command, **how):
            if self.ranks in broken:
                raise DeviceError("busy")
            self.batch = command.spec.batch_size
            alone = {"micro_batch_size": self.batch // command.spec.accumulation_steps}  # what the law takes
            return super().call(command.but(spec=group_runs.replace(command.spec, **alone)), **how)

    @contextlib.contextmanager
    def worker(settings, launcher):
        made.append(Group(settings, launcher))
        yield made[-1]

    monkeypatch.setattr(group_runs, "Worker", worker)
    return made, broken


def test_as_many_ranks_as_there_are_train_to_the_target_on_the_seeds_of_one(study, scaling, groups):
    one, two, four = train_groups(study, scaling, None, "cpu", Observer()).points
    assert (one, four) == (scaling.points[0], scaling.points[2])
    (group,) = groups[0]
    assert (group.ranks, group.batch, group.settings.device) == (2, two.global_batch_size, "cpu")
    fresh = {trial.seed for trial in study.records() if trial.role == "confirm" and trial.batch_size == group.batch}
    assert {spec["seed"] for spec in group.specs} == fresh
    assert (two.is_estimate, two.estimated_seconds) == (False, 10.0)
    needed = SLOWER * law.seconds_to_target(two.global_batch_size, two.learning_rate, target=study.target.value)
    assert two.time_to_target_seconds.median == pytest.approx(needed, rel=0.15)
    assert two.energy_to_target_joules.median > 0


def test_what_an_earlier_start_has_measured_is_not_trained_again(study, scaling, groups):
    known = train_groups(study, scaling, None, "cpu", Observer())
    del groups[0][:]
    assert train_groups(study, scaling, known, "cpu", Observer()) == known
    assert groups[0] == []


@pytest.mark.parametrize("how", ["cannot start", "is far too slow"])
def test_where_a_group_does_not_reach_the_target_the_estimate_stays(study, scaling, groups, how, monkeypatch):
    groups[1].update({2} if how == "cannot start" else {})
    monkeypatch.setattr(group_runs, "_PATIENCE", 0.001)
    told = []
    observer = Observer()
    observer.note = told.append
    assert train_groups(study, scaling, None, "cpu", observer) == scaling
    assert told[-1] == "the time on 2 ranks stays an estimate"
    assert ("2 ranks did not train to the target: busy" in told) == (how == "cannot start")
