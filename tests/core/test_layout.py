"""Lanes: tensors column by column, so that a prefix of a stream is a narrower model."""

from dataclasses import replace

import pytest
import torch

from anyfleet.core.layout import MessageLayout, dense, tensor_layouts
from anyfleet.core.orders import downlink, uplink
from anyfleet.elastic import WHOLE, within
from anyfleet.methods import fedrescue, heterofl
from tests.core.test_local_training import orders
from tests.helpers import small

TASK = small.task()
BLUEPRINT = TASK.blueprint
NAMES = tuple(BLUEPRINT.params)
KEY = torch.zeros(1, dtype=torch.int64)


def stacked(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.unsqueeze(0) for name, value in tree.items()}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("width", [0.125, 0.3])
def test_leading_columns_are_the_narrower_model(share: float, width: float) -> None:
    slice_ = BLUEPRINT.prefix(share)
    local, count = BLUEPRINT.local(slice_), -(-share // width)
    around = MessageLayout(
        tensor_layouts(NAMES, slice_, (int(count), width), BLUEPRINT), torch.float32, KEY
    )
    tree = dense(dict(TASK.params), slice_, BLUEPRINT)
    laid = around.flattened(stacked(tree))
    for column in range(int(count) - 1):
        part = within(slice_, (column + 1) * width, BLUEPRINT)
        narrow = dense(tree, part, local)
        for name, tensor_layout in around.tensors.items():
            sent = laid[name][0, : tensor_layout.ends[column]]
            assert torch.equal(sent.sort().values, narrow[name].flatten().sort().values)
    assert all(
        tensor_layout.ends[-1] == tree[name].numel()
        for name, tensor_layout in around.tensors.items()
    )


def test_laying_out_and_shaping_are_inverse() -> None:
    around = MessageLayout(tensor_layouts(NAMES, WHOLE, (8, 0.125), BLUEPRINT), torch.float32, KEY)
    tree = stacked(dict(TASK.params))
    assert small.identical(around.unflattened(around.flattened(tree)), tree)
    assert any(tensor_layout.positions is not None for tensor_layout in around.tensors.values())


def test_a_model_in_one_piece_lies_as_it_is() -> None:
    for tensor_layout in tensor_layouts(NAMES, WHOLE, (1, 1.0), BLUEPRINT).values():
        assert tensor_layout.positions is None
        assert len(tensor_layout.ends) == 1


def test_kernels_of_convolutions_belong_together() -> None:
    found = tensor_layouts(NAMES, WHOLE, (8, 0.125), BLUEPRINT)
    assert {found[name].unit for name in ("0.weight", "4.weight")} == {9}
    assert {found[name].unit for name in NAMES if len(found[name].shape) < 3} == {1}
    assert all(
        end % tensor_layout.unit == 0
        for tensor_layout in found.values()
        for end in tensor_layout.ends
    )


def test_every_reply_has_a_key_of_its_own_and_a_broadcast_has_one() -> None:
    asked = orders(heterofl(widths=(0.5,)), TASK, [0, 1])
    up = uplink(asked, BLUEPRINT, NAMES, torch.float32)
    assert len(set(up.key.tolist())) == 2
    down = [downlink(row, BLUEPRINT, NAMES, torch.float32) for row in asked.rows()]
    assert torch.equal(down[0].key, down[1].key)
    later = downlink(
        replace(asked, cohort_key=asked.cohort_key + 1), BLUEPRINT, NAMES, torch.float32
    )
    assert not torch.equal(later.key, down[0].key)


def test_a_link_that_fails_takes_columns_of_its_own_width() -> None:
    asked = orders(fedrescue(), TASK, [0])
    for width, count in ((1.0, 1), (0.25, 4), (0.3, 4)):
        order = replace(
            asked, column_width=asked.column_width * 0 + width, width=asked.width * 0 + 1.0
        )
        assert uplink(order, BLUEPRINT, NAMES, torch.float32).columns == count
