"""What a trial's attributes keep of its curve, and what they say of one that never came to a point."""

from batchtune.document import CurvePoint, Target
from batchtune.tune.study.history import curve_attribute, to_curve
from batchtune.tune.study.targets import measured


def test_a_curve_comes_back_with_what_the_machine_slowed_down_and_what_it_took():
    curve = [
        CurvePoint(seconds=0.0, samples=0, value=2.0),
        CurvePoint(seconds=1.0, samples=10, value=None, joules=3.0),
        CurvePoint(seconds=2.0, samples=20, value=1.0, measured_seconds=2.5),
    ]
    rows = curve_attribute(curve)
    assert to_curve(rows) == curve
    assert [len(row) for row in rows] == [3, 4, 5]


def test_a_run_that_came_to_no_point_has_trained_for_no_known_time():
    assert measured([], "crash", Target(metric="val_loss", goal="minimize", value=0.1)) == {"outcome": "crash"}
