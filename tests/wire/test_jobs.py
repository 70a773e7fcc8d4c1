"""Jobs: the parts that an order names, and what it may not name."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anyfleet.errors import BadMessage
from anyfleet.methods import fedavg
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.codec import ErrorFeedback, Qsgd, Stc
from anyfleet.runtime import Limits, Sequential, Stacked, Threads
from anyfleet.wire import decode_order, encode_order
from tests.core.test_local_training import orders
from tests.helpers.exchanged import SENT, TASK, refused
from tests.helpers.messages import taken_apart, with_header

JOB = msgspec.msgpack.decode(taken_apart(SENT)[0]["job"])


def with_job(job: Any) -> bytes:
    return with_header(SENT, job=msgspec.msgpack.encode(job))


@pytest.mark.parametrize(
    "part",
    [
        {"use": "os:system", "command": "true"},
        {"use": "anyfleet.experiment:load", "path": "a file"},  # reads files
        {"use": "anyfleet.tasks:TextFile", "path": "a file"},
        {"use": "anyfleet.cli.app:app"},
        {"use": "anyfleet.parts.codec.raw:distortion", "sent": {}, "received": {}},  # a function
        {"use": "anyfleet.parts.codec:Raw", "precision": "os:system"},
        {"use": "anyfleet.parts.codec:Raw", "precision": "fp99"},
        {"use": "anyfleet.parts.codec:Raw", "more": 1},
        {"use": "anyfleet.parts.train:Sgd"},  # a part, but no codec
        {"use": "anyfleet.parts.codec:Absent"},
        {"use": 7},
        "anyfleet.parts.codec:Raw",
        7,
        None,
        b"bytes",
    ],
    ids=repr,
)
def test_a_job_names_parts_of_devices_only(part: Any) -> None:
    refused(with_job({**JOB, "uplink": part}), "job")
    refused(with_job({**JOB, "downlink": part}), "job")


def test_a_module_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_parts.py").write_text("class Part:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(with_job({**JOB, "uplink": {"use": "foreign_parts:Part"}}), "job", "allowed packages")
    assert "foreign_parts" not in sys.modules
    with pytest.raises(BadMessage, match="Part"):
        decode_order(
            with_job({**JOB, "uplink": {"use": "foreign_parts:Part"}}), TASK, ["foreign_parts"]
        )
    assert "foreign_parts" in sys.modules
    del sys.modules["foreign_parts"]


def test_a_function_is_not_called_even_if_its_package_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "called_parts.py").write_text("CALLS = []\n\ndef part():\n    CALLS.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadMessage, match="not a part"):
        decode_order(
            with_job({**JOB, "uplink": {"use": "called_parts:part"}}), TASK, ["called_parts"]
        )
    assert sys.modules.pop("called_parts").CALLS == []


def test_an_abstract_codec_is_refused() -> None:
    refused(with_job({**JOB, "uplink": {"use": "anyfleet.parts.codec:Quantiser"}}), "job")


def test_a_job_is_bounded_in_depth_length_and_numbers() -> None:
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    refused(with_job({**JOB, "report": nested}), "job")
    refused(with_job({**JOB, "report": ["x" * 70_000]}), "too large")
    refused(
        with_job({**JOB, "uplink": {"use": "anyfleet.parts.codec:Qsgd", "bucket": 10**9}}),
        "too large",
    )
    refused(with_job({**JOB, "report": ["mood"]}), "job")
    refused(with_header(SENT, job=b"\x91" * 5000), "job")
    refused(with_header(SENT, job=b"\xc1"), "job")


def test_what_is_refused_of_a_job_is_told_with_its_place() -> None:
    inner = {"use": "anyfleet.parts.codec:Qsgd", "quantisation_levels": 2_000_000}
    wide = {"use": "anyfleet.parts.codec:ErrorFeedback", "inner": inner}
    place = "uplink.inner.quantisation_levels of a job"
    told = f"2000000 is above limits.count, which is 1000000, at {place}"
    refused(with_job({**JOB, "uplink": wide}), "too large", told)
    raised = decode_order(with_job({**JOB, "uplink": wide}), TASK, limits=Limits(count=2_000_000))
    assert raised.job.uplink == ErrorFeedback(Qsgd(quantisation_levels=2_000_000))


@dataclass(frozen=True)
class Foreign(Stc):
    """A part from a package that nobody allows."""


def test_a_method_is_held_against_the_limits_before_a_run() -> None:
    method, limits = (
        replace(fedavg(), uplink=Qsgd(quantisation_levels=2_000_000, bucket=9**9)),
        Limits(),
    )
    told = Threads().misfits(method.job(), limits)
    assert told == {
        "uplink.quantisation_levels": "2000000 is above limits.count, which is 1000000",
        "uplink.bucket": "387420489 is above limits.count, which is 1000000",
    }
    assert Threads().misfits(method.job(), Limits(count=9**9)) == {}
    assert Sequential().misfits(method.job(), limits) == {}
    assert Stacked().misfits(method.job(), limits) == {}
    assert "job of" in Threads().misfits(fedavg().job(), Limits(job=20))[""]
    foreign = replace(fedavg(), uplink=Foreign()).job()
    assert "allowed packages" in Threads().misfits(foreign, limits)["uplink"]
    assert Threads(allow=(__name__,)).misfits(foreign, limits) == {}


def test_infinite_numbers_of_a_job_survive_the_wire() -> None:
    """JSON would have made nothing of them."""
    order = orders(fedavg(), TASK, [0])
    sent = replace(order, job=replace(order.job, choose=LargestInTime(math.inf)))
    assert decode_order(encode_order(sent, TASK), TASK).job == sent.job
