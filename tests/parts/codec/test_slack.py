"""How far the said bits of a column may lie above its bytes: receivers refuse what is beyond."""

import pytest
import torch

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.slots import Codec, Slack
from anyfleet.parts.codec import ErrorFeedback, Nothing, Qsgd, Raw, TopK, Uveq
from anyfleet.parts.codec.bitstream import SLACK

MANY = 600_000
STILL, SPARSE = torch.zeros(1, MANY), torch.zeros(1, MANY).index_fill_(1, torch.arange(9), 1.0)


@pytest.mark.parametrize("codec", [Qsgd(1, MANY), Uveq(dimension=1), TopK(0.9, Qsgd())], ids=repr)
@pytest.mark.parametrize("values", [STILL, SPARSE], ids=["still", "sparse"])
def test_many_entries_that_cost_next_to_nothing_stay_within_the_slack(
    codec: Codec, values: torch.Tensor
) -> None:
    """What each is said to cost more than it does adds up to more than a column's own slack."""
    around = MessageLayout(
        {"w": TensorLayout((MANY,), (MANY,))}, torch.float32, rng.root(0, "slack")[None]
    )
    sent = codec.compress({"w": values}, torch.tensor([torch.nan]), around, {})
    (column,) = codec.pack(sent.symbols, around)
    said = float(sent.bits.sum())
    more = SLACK.column + SLACK.share * said + SLACK.entry * MANY
    assert 0 <= said - 8 * len(column) <= more


def test_codecs_say_how_exact_they_are() -> None:
    assert Raw().slack == Nothing().slack == ErrorFeedback(Raw()).slack == Slack()
    assert Qsgd().slack == ErrorFeedback().slack == SLACK > Slack()
