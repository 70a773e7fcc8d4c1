import numpy as np
import pytest
import torch

from anyfleet.tasks import Data, Generator
from anyfleet.tasks.split import Division


def made(key: int = 0, **fields: float) -> tuple[Data, Division]:
    return Generator(**fields).generate(key, server=100)  # type: ignore[arg-type]


def classes_and_top(store: Data, cut: Division, device: int) -> tuple[int, float]:
    rows = torch.cat([cut.train_rows[device], cut.test_rows[device]])
    counts = store.y[rows].bincount(minlength=10)
    return int((counts > 0).sum()), float(counts.max() / counts.sum())


def test_devices_split_a_thousand_samples_80_to_20() -> None:
    store, cut = made(devices=4)
    assert store.x.shape == (4000, 60)
    assert [len(rows) for rows in cut.train_rows] == [800] * 4
    assert [len(rows) for rows in cut.test_rows] == [200] * 4
    assert torch.cat([*cut.train_rows, *cut.test_rows]).sort().values.tolist() == list(range(4000))
    assert len(cut.server) == 100


def test_inputs_of_even_devices_have_the_stated_variances() -> None:
    store, _ = made(devices=10, sigma=1.0)
    expected = torch.arange(1, 61, dtype=torch.float32) ** -1.2
    assert torch.allclose(store.x.var(0), expected, rtol=0.08)
    assert store.x.mean(0).abs().max() < 0.05


def test_even_devices_share_one_labelling() -> None:
    store, cut = made(devices=6, sigma=0.5, samples=4000)
    # A least-squares fit on one i.i.d. device labels another, but not a skewed one.
    one_hot = torch.eye(10)[store.y]
    x = torch.cat([store.x, torch.ones(len(store), 1)], 1)
    fit = torch.linalg.lstsq(x[cut.train_rows[0]], one_hot[cut.train_rows[0]]).solution

    def right(device: int) -> float:
        rows = cut.train_rows[device]
        return float(((x[rows] @ fit).argmax(1) == store.y[rows]).float().mean())

    assert right(1) > 0.6
    assert right(2) > 0.6
    assert np.mean([right(3), right(4), right(5)]) < 0.4


def test_skewed_devices_see_fewer_classes_with_shared_weights() -> None:
    # specification §B, seed 0, shared W: about 10 classes with top share .41 against 2.8 with .83.
    store, cut = made(devices=50, sigma=0.2, shared_w=True)
    even = [classes_and_top(store, cut, device) for device in range(10)]
    skewed = [classes_and_top(store, cut, device) for device in range(10, 50)]
    assert np.mean([count for count, _ in even]) == pytest.approx(10, abs=0.3)
    assert np.mean([top for _, top in even]) == pytest.approx(0.41, abs=0.05)
    assert np.mean([count for count, _ in skewed]) == pytest.approx(2.8, abs=0.4)
    assert np.mean([top for _, top in skewed]) == pytest.approx(0.83, abs=0.05)


def test_centres_spread_by_variance_or_by_deviation() -> None:
    def spread(*, rho_is_std: bool) -> float:
        store, _ = made(devices=300, samples=20, sigma=0.0, rho_s=16.0, rho_is_std=rho_is_std)
        return float(store.x.view(300, 20, 60).mean((1, 2)).std())

    assert spread(rho_is_std=False) == pytest.approx(4.0, rel=0.15)
    assert spread(rho_is_std=True) == pytest.approx(16.0, rel=0.15)


def test_the_key_decides() -> None:
    first, again, other = made(1, devices=3)[0], made(1, devices=3)[0], made(2, devices=3)[0]
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


@pytest.mark.parametrize(
    "fields", [{"devices": 0}, {"samples": 1}, {"sigma": 1.2}, {"rho_s": -1.0}]
)
def test_impossible_fields_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Generator"):
        Generator(**fields)  # type: ignore[arg-type]
