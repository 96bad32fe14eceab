"""What stands for a character that the encoding of the output lacks: one of the same width that says the same."""

from __future__ import annotations

from rich.cells import cell_len

_STAND_INS = {
    "×": "x", "µ": "u", "°": " ", "±": "~", "·": "*", "…": ".", "–": "-", "—": "-", "’": "'",
    "α": "a", "β": "b", "█": "#", "●": "o", "◉": "@", "╌": "-", "─": "-", "│": "|", "┤": "+", "┬": "+", "└": "+",
} | dict.fromkeys("▏▎▍▌▋▊▉", "#") | dict.fromkeys("╭╮╰╯", "+")  # fmt: skip
_DOTS = range(0x2800, 0x2900)  # Braille: the dots of a curve


def written_in(encoding: str, text: str) -> str:
    """The text with nothing in it that an encoding cannot write; its width on the screen stays the same."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_known(encoding, character) for character in text)
    return text


def _known(encoding: str, character: str) -> str:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return "." if ord(character) in _DOTS else _STAND_INS.get(character, "?" * cell_len(character))
    return character
