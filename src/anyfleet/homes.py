"""Where the parts of each slot live: whose exports plain data may name, field by field.

A short name in a run file means what the home of its field exports. A field without a home of its
own keeps that of the part around it: `inner` of a codec is a codec. What no home exports cannot be
named at all; neither can anything of `cli`, `study`, `store` or `config`.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["HOMES", "STATES"]

HOMES: Mapping[str, str] = MappingProxyType(
    {
        "task": "anyfleet.tasks",
        "model": "anyfleet.tasks.zoo",
        "method": "anyfleet.methods",
        "fleet": "anyfleet.world",
        "engine": "anyfleet.runtime",
        "limits": "anyfleet.runtime",
        "choose": "anyfleet.plan",
        "norm": "anyfleet.train",
        "uplink": "anyfleet.codec",
        "downlink": "anyfleet.codec",
    }
    | {
        name: f"anyfleet.{name}"
        for name in ("select", "schedule", "plan", "extract", "train", "aggregate")
    }
)

# Where the values live that a checkpoint consists of; the module and all below it.
STATES = (
    "anyfleet.aggregate",
    "anyfleet.arrivals",
    "anyfleet.breakdown",
    "anyfleet.codec",
    "anyfleet.columns",
    "anyfleet.elastic",
    "anyfleet.envelope",
    "anyfleet.extract",
    "anyfleet.feedback",
    "anyfleet.fisher",
    "anyfleet.formulas",
    "anyfleet.incoming",
    "anyfleet.issue",
    "anyfleet.ledger",
    "anyfleet.method",
    "anyfleet.offers",
    "anyfleet.outcomes",
    "anyfleet.plan",
    "anyfleet.runtime",
    "anyfleet.schedule",
    "anyfleet.screening",
    "anyfleet.seam",
    "anyfleet.select",
    "anyfleet.server",
    "anyfleet.train",
    "anyfleet.types",
    "anyfleet.world",
)
