from batchtune.document import ThroughputPoint
from batchtune.tune.plan.prior import fastest_split, split_batch


def test_micro_batches_fit_and_divide_evenly():
    for batch in (1, 7, 96, 1000, 1024, 997):
        micro, steps = split_batch(batch, 100)
        assert micro * steps == batch
        assert micro <= 100
    assert split_batch(1024, 300) == (256, 4)
    assert split_batch(64, 64) == (64, 1)


def timed(batch_size, speed):
    return ThroughputPoint(batch_size=batch_size, samples_per_second=speed, step_seconds=512 / speed)


def test_of_two_splits_that_are_as_fast_the_larger_micro_batch_is_taken():
    assert fastest_split(512, [timed(128, 995.0), timed(64, 1000.0), timed(32, 900.0)])[0] == 128
    chosen, reason = fastest_split(512, [timed(128, 950.0), timed(64, 1000.0)])
    assert chosen == 64
    assert reason == "global batch 512 is kept; measured 1,000 samples/s as 64 × 8, 950 samples/s as 128 × 4"
