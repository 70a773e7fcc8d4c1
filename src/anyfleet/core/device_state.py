"""What a device keeps between visits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from anyfleet.core.messages import ChooserState, Params
from anyfleet.core.stacks import Replies


@dataclass(frozen=True, eq=False)
class DeviceState:
    """What a device keeps between visits."""

    tensors: Mapping[str, Params] = field(default_factory=dict)  # in coordinates of the whole model
    held: Replies | None = None  # a result that waits to be fetched
    chooser: ChooserState = field(default_factory=dict)
    last_sent_order: int = -1  # the order whose result it last sent, which may not have arrived
