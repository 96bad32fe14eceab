"""What a real shell makes of the exported variables."""

import subprocess

from batchtune.report.view.trainers import EXPORTS


def test_the_shell_reads_the_variables_as_they_are(tuned):
    text = EXPORTS["env"].text(tuned)
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "BATCH_SIZE=128",
        "GRADIENT_ACCUMULATION_STEPS=2",
        "LEARNING_RATE=0.0003",
        "PRECISION=bf16",
    ]
    script = f'{text}\nprintf "%s " "$BATCH_SIZE" "$LEARNING_RATE"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == "128 0.0003 "
