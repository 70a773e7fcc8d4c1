"""References to compare with: no sharing at all, and all data in one place."""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.parts.codec import Nothing
from anyfleet.parts.schedule import Surveyed, Synchronous
from anyfleet.parts.select import Everyone


@checked
def local(**training: Unpack[Training]) -> Method:
    """Return training without sharing: every device has a model of its own and sends nothing.

    Its accuracy is that of the devices' own models on their own test data, so they are surveyed.
    """
    base = fedavg(**training)
    return replace(
        base,
        select=Everyone(),
        schedule=Surveyed(Synchronous()),
        uplink=Nothing(),
        downlink=Nothing(),
        cache=True,
    )


@checked
def centralised(**training: Unpack[Training]) -> Method:
    """Return plain training; meant for a `Pooled` task, where one device owns all data."""
    return replace(fedavg(**training), select=Everyone())
