"""batchtune takes trainings as people write them, or says what to do; measure.py has their figures."""

import pytest
from cases import CASES

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture
def run(quick_cli):
    def run(case, command, *options):
        if case.missing:
            pytest.skip(f"{case.name} needs {', '.join(case.missing)}")
        return quick_cli(command, *options, "--json")

    return run


def taken(case):
    return pytest.param(case, id=case.name)


@pytest.mark.parametrize("case", [taken(case) for case in CASES])
class TestTaken:
    def test_probe(self, run, case):
        size = max(case.batch_size // 2, 2)
        options = ("--max", size, "--steps", 2, "--verify-steps", 2, "--no-throughput", "--precision", case.precision)
        done = run(case, "probe", case.task, *options)
        assert done.code == 0, done.err
        assert done.document["probe"]["max_batch_size"] == size

    def test_estimate(self, run, case):
        done = run(case, "estimate", case.task, "--gpu", "4090", "--precision", case.precision)
        if case.not_estimated:
            assert (done.code, case.not_estimated in " ".join(done.err.split())) == (4, True), done.err
            return
        assert done.code == 0, done.err
        found = done.document["estimates"][0]
        assert found["max_batch_size"] >= found["safe_max_batch_size"] > case.batch_size

    def test_tune_has_all_that_it_needs(self, run, cli, case):
        cli.write("config.yaml", case.configuration)
        done = run(case, "tune", "config.yaml", "--dry-run")
        assert done.code == 0, done.err
