"""Which line of the user's, or of a library of theirs, an operator or an exception comes from."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).resolve().parent)
_BATCHTUNE = str(Path(__file__).resolve().parents[2])
_STANDARD = sysconfig.get_path("stdlib")


def place_outside_torch(frame: FrameType | None) -> str | None:
    """`file:line` of the innermost caller that is neither torch nor batchtune; None where batchtune called torch."""
    left_the_recorder = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_BATCHTUNE):
            if left_the_recorder:
                return None
        else:
            left_the_recorder = True
            if not _is_internal(path):
                return f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def place_of_error(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of an exception that is neither torch's nor batchtune's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_BATCHTUNE) and not _is_internal(frame.filename)
    ]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


@cache
def _is_internal(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "site-packages" not in path and "dist-packages" not in path
    return standard or path.startswith((_TORCH, "<frozen"))


@cache
def _short(path: str) -> str:
    file = Path(path)
    if "site-packages" in file.parts:
        return "/".join(file.parts[file.parts.index("site-packages") + 1 :])
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else path
