"""Sizes as allocators and kernels round them."""


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple
