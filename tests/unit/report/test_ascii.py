"""Text for outputs that know few characters: as wide as before, and as telling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from batchtune.report.terminal import written_in

PRINTABLE = st.text(st.characters(exclude_categories=["C", "M", "Zl", "Zp"], max_codepoint=0xFFFF))


@settings(deadline=None)
@given(PRINTABLE, st.sampled_from(["ascii", "cp1252", "latin-1", "utf-8"]))
def test_whatever_the_text_it_can_be_written_and_is_as_wide_as_before(text, encoding):
    written = written_in(encoding, text)
    assert written.encode(encoding).decode(encoding) == written
    assert cell_len(written) == cell_len(text)


@pytest.mark.parametrize(
    ("encoding", "text"), [("utf-8", "3.1× ●⠒ 模"), ("latin-1", "3.1× .. ??"), ("ascii", "3.1x .. ??")]
)
def test_only_what_an_encoding_lacks_is_replaced(encoding, text):
    expected = {"utf-8": text, "latin-1": "3.1× o. ??", "ascii": "3.1x o. ??"}[encoding]
    assert written_in(encoding, "3.1× ●⠒ 模") == expected
