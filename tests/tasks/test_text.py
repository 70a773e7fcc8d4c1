import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.tasks.text import text_windows


def test_targets_are_the_inputs_moved_by_one() -> None:
    windows = text_windows(["hello world"], 4)
    read = [["".join(windows.vocabulary[c] for c in row) for row in side] for side in windows[:2]]
    assert read == [["hell", "o wo"], ["ello", " wor"]]
    assert windows.vocabulary == " dehlorw"


def test_owners_are_positions_of_texts_and_short_texts_give_nothing() -> None:
    windows = text_windows(["abcde", "ab", "abcdefghi"], 4)
    assert windows.owners.tolist() == [0, 2, 2]
    assert windows.vocabulary == "abcdefghi"


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=5).filter(
        lambda texts: any(len(text) > 3 for text in texts)
    )
)
def test_windows_spell_the_beginning_of_each_text(texts: list[str]) -> None:
    windows = text_windows(texts, 3)
    for position, text in enumerate(texts):
        rows = windows.x[windows.owners == position]
        assert "".join(windows.vocabulary[c] for c in rows.flatten()) == text[: rows.size]
        assert rows.size == max(0, (len(text) - 1) // 3 * 3)
    assert windows.x.dtype == np.int64
    assert windows.x.max() < len(windows.vocabulary)


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        text_windows(["abc"], 0)
    for texts in (["abc"], []):
        with pytest.raises(ValueError, match="more than 5"):
            text_windows(texts, 5)
