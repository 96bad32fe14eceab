"""The recommendation in a result document, for the callbacks that apply one."""

from __future__ import annotations

import os
import warnings

from batchtune.document import Recommendation
from batchtune.errors import UsageError
from batchtune.files import load_result


def recommended(path: str | os.PathLike[str]) -> Recommendation:
    """What a result file or run folder recommends.

    Raises:
        UsageError: there is no such file, or it recommends nothing.
    """
    result = load_result(path)
    if result.recommendation is None:
        raise UsageError(f"{os.fspath(path)}: a result of '{result.kind}' that recommends nothing; apply one of 'tune'")
    return result.recommendation


def say(difference: str) -> None:
    """Tells the user what a callback could not apply."""
    warnings.warn(f"batchtune: {difference}", stacklevel=3)


def require_world(found: Recommendation, world_size: int) -> None:
    """Says so where training runs on another number of ranks than the recommendation is for."""
    if world_size != found.world_size:
        batch = found.micro_batch_size * found.gradient_accumulation_steps * world_size
        say(
            f"the result is for {found.world_size} ranks and this is training on {world_size}, so the global "
            f"batch size is {batch} instead of {found.global_batch_size}"
        )
