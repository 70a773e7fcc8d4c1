import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from anyfleet import config, rng
from anyfleet.tasks import Augment, Flip, InTurn, Shift

X = torch.arange(5 * 2 * 6 * 7, dtype=torch.float32).reshape(5, 2, 6, 7) + 1
PARTS: list[Augment] = [Shift(2), Shift(1, fill=-1.0), Flip(), InTurn(), InTurn((Flip(), Shift(1)))]


def key(seed: int) -> Tensor:
    return rng.root(seed, "augment")


@given(seed=st.integers(0, 10_000))
def test_a_shift_is_a_window_of_the_padded_image(seed: int) -> None:
    padded = torch.nn.functional.pad(X, (2, 2, 2, 2))
    shifted = Shift(2)(X, key(seed))
    for image, result in zip(padded, shifted, strict=True):
        windows = image.unfold(1, 6, 1).unfold(2, 7, 1)  # [2, 5, 5, 6, 7]
        same = (windows == result[:, None, None]).flatten(3).all(-1).all(0)
        assert int(same.sum()) == 1


def test_shifts_reach_every_place() -> None:
    white = torch.ones(2000, 1, 4, 4)
    corners = Shift(1)(white, key(0))
    seen = {tuple(image.flatten().tolist()) for image in corners}
    assert len(seen) == 9


def test_a_flip_mirrors_some_images_and_only_those() -> None:
    x = X.repeat(100, 1, 1, 1)
    flipped = Flip(0.3)(x, key(1))
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    kept = (flipped == x).flatten(1).all(1)
    assert torch.equal(mirrored, ~kept)
    assert 0.2 < mirrored.float().mean() < 0.4
    assert torch.equal(Flip(0.0)(x, key(1)), x)
    assert torch.equal(Flip(1.0)(x, key(1)), x.flip(-1))


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_the_key_alone_decides(part: Augment) -> None:
    assert torch.equal(part(X, key(3)), part(X, key(3)))
    assert any(not torch.equal(part(X, key(3)), part(X, key(other))) for other in range(4, 9))
    assert part(X, key(3)).shape == X.shape


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_padding_the_batch_changes_no_sample(part: Augment) -> None:
    longer = torch.cat([X, torch.zeros_like(X)])
    assert torch.equal(part(longer, key(3))[: len(X)], part(X, key(3)))


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_a_stack_equals_its_members(part: Augment) -> None:
    keys = torch.stack([key(seed) for seed in range(3)])
    batches = torch.stack([X, X.flip(0), X + 1])
    stacked = vmap(part)(batches, keys)
    alone = [part(batch, each) for batch, each in zip(batches, keys, strict=True)]
    assert torch.equal(stacked, torch.stack(alone))


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_written_down_and_read_back_it_is_the_same(part: Augment) -> None:
    assert config.load(config.dump(part)) == part


def test_steps_do_not_share_a_key() -> None:
    twice = InTurn((Shift(1), Shift(1)))
    # With one key for both, every image would move the same way twice: by 0 or 2, never by 1.
    centre = torch.zeros(200, 1, 7, 7)
    centre[:, :, 3, 3] = 1
    rows = twice(centre, key(0)).flatten(1).argmax(1) // 7
    assert set(rows.tolist()) == {1, 2, 3, 4, 5}


def test_impossible_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="padding"):
        Shift(0)
    with pytest.raises(ValueError, match="chance"):
        Flip(1.5)
