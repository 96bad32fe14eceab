"""`probe` inside of the user's own torchrun: one answer, told once."""


def test_the_ranks_that_torchrun_started_are_probed_and_the_first_one_answers(cli):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "batchtune")
    options = ("--device", "cpu", "--max", "4", "--verify-steps", "2", "--no-throughput", "--json")
    done = cli.start("probe", "linear.py", *options, python=torchrun).finish(200)
    assert done.code == 0, done.err
    probe = done.document["probe"]
    assert (probe["max_batch_size"], probe["limited_by"], probe["verified_in_fresh_process"]) == (4, "max", True)
    ranks = probe["data_parallel"]
    assert (ranks["world_size"], ranks["strategy"], ranks["global_batch_size"]) == (2, "ddp", 8)
