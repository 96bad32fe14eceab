"""`probe` inside of the user's own torchrun: one answer, told once."""

import json
import socket

from fake_gpu import forks

NOSY = """
import os
from pathlib import Path
Path(f"told-{os.getpid()}").write_text(repr(dict(os.environ)))
"""


def test_the_ranks_that_torchrun_started_are_probed_and_the_first_one_answers(cli):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "batchtune")
    options = ("--device", "cpu", "--max", "4", "--verify-steps", "2", "--no-throughput", "--json")
    cli.write("linear.py", NOSY + (cli.folder / "linear.py").read_text())
    secret = {"BATCHTUNE_STORAGE": "postgresql://you:secret@host/studies"}
    done = cli.start("probe", "linear.py", *options, python=torchrun, environment=secret).finish(200)
    assert done.code == 0, done.err
    told = [path.read_text() for path in cli.folder.glob("told-*")]
    assert len(told) >= 2  # each rank's
    assert [text for text in told if "secret" in text] == []
    probe = done.document["probe"]
    assert (probe["max_batch_size"], probe["limited_by"], probe["verified_in_fresh_process"]) == (4, "max", True)
    ranks = probe["data_parallel"]
    assert (ranks["world_size"], ranks["strategy"], ranks["global_batch_size"]) == (2, "ddp", 8)


PROGRAM = """
import json, os, sys
from pathlib import Path
import batchtune

found = [batchtune.probe("linear.py", device="cpu", max=size, throughput=False, verify_steps=2) for size in (2, 4)]
try:
    batchtune.probe("linear.py", device="cpu", nproc_per_node=3)
except batchtune.errors.UsageError as error:
    told = str(error)
told = [[each.probe.max_batch_size for each in found], told]
Path(f"told-{os.environ['RANK']}").write_text(json.dumps(told))
"""


def test_a_program_of_ones_own_has_the_same_answers_and_errors_on_all_ranks(cli):
    program = cli.write("program.py", PROGRAM)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(program))
    done = cli.start(python=torchrun, popen=forks.Popen).finish(200)  # the test above starts torchrun for real
    assert done.code == 0, done.err
    told = [json.loads((cli.folder / f"told-{rank}").read_text()) for rank in range(2)]
    assert told[0] == told[1] == [[2, 4], "nproc_per_node=3: torchrun has started 2 ranks; leave the option out"]


def test_a_port_in_use_is_told_in_one_line_before_anything_trains(cli):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = cli.start("probe", "linear.py", "--device", "cpu", environment=launched).finish()
    told = f"batchtune: MASTER_PORT {port}: another program listens there; choose another\n"
    assert (done.code, done.out, done.err) == (2, "", told)
