"""The child that traces: it does what any child does, and knows the commands of an estimate."""

from __future__ import annotations

from typing import Any

from batchtune.child.server import Child, serve
from batchtune.estimate.commands import EstimateMemory, ExpectMemory, LoadTracer
from batchtune.estimate.tracing.answer import answer, estimate_for_probe, warm_up
from batchtune.protocol.channel import Channel
from batchtune.protocol.commands import Done
from batchtune.protocol.messages import AnyCommand


class TracingChild(Child):
    """A child that never opens a device."""

    def answer(self, command: AnyCommand) -> Any:
        match command:
            case LoadTracer():
                warm_up()
                return Done()
            case EstimateMemory():
                return answer(**dict(command), progress=lambda share: self._channel.send(alive=True, share=share))
            case ExpectMemory():
                return estimate_for_probe(**dict(command))
        return super().answer(command)


def main() -> None:
    """The child of one parent."""
    channel = Channel.on_standard_streams()
    serve(TracingChild(channel), channel)
