"""What a run of any method or codec consists of comes back from a checkpoint."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from anyfleet import methods
from anyfleet.cli.methods import known_methods
from anyfleet.core.loop import run
from anyfleet.core.method import Method
from anyfleet.core.slots import Codec, Schedule
from anyfleet.parts import codec as codecs
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.parts.schedule import Buffered, Synchronous
from anyfleet.runtime import Sequential, Simulated
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.store import Document, checkpoint, decode, encode
from tests.helpers import small
from tests.helpers.late import Late

CODECS = [Fgc(), Hq(), Qsgd(), Raw(), Stc(), TopK(), Uveq(), ErrorFeedback()]


@pytest.mark.parametrize("name", known_methods())
def test_the_state_of_every_method_comes_back(name: str) -> None:
    assert_it_comes_back(known_methods()[name].make())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_the_state_of_every_codec_comes_back(codec: Codec) -> None:
    assert {type(each).__name__ for each in CODECS} >= set(codecs.__all__) - {
        "Nothing",
        "Plain",
        "Quantiser",
    }
    schedule = Buffered(
        concurrency=4, buffer_size=2
    )  # some answers are known, and have not arrived
    assert_it_comes_back(replace(methods.heterofl(lr=0.1), schedule=schedule, uplink=codec))


@pytest.mark.parametrize("schedule", [Synchronous(), Buffered(concurrency=4, buffer_size=2)])
def test_numbers_that_nobody_has_read_come_back(schedule: Schedule) -> None:
    method, task = replace(methods.fedavg(lr=0.1), schedule=schedule), small.task()
    back = assert_it_comes_back(method, Late())
    runtime = Simulated(task, small.world(task))
    runtime.restore(back["fleet"])
    third = next(run(method, task, runtime, 0, resume=back["loop"]))
    expected = small.steps(method, task, 3)[-1]
    assert small.identical(third.params, expected.params)
    assert repr(third.ledger.as_dicts()) == repr(expected.ledger.as_dicts())


def assert_it_comes_back(method: Method, engine: Engine | None = None) -> dict[str, Any]:
    """Write the state after two rounds, and read it: it must be the same. Return what was read."""
    task = small.task()
    runtime = Simulated(task, small.world(task), engine=engine or Sequential())
    steps = run(method, task, runtime, 0)
    next(steps)
    after = next(steps)
    document = encode({"loop": after.snapshot, "fleet": after.fleet}, checkpoint.SURROUNDINGS)
    flat = {key: block.reshape(-1).clone() for key, block in document.blocks.items()}
    known = {"world": small.world(task), "task": task, "blueprint": task.blueprint}
    text = msgspec.json.encode(document.root)
    back = decode(Document(msgspec.json.decode(text), flat), known)
    again = encode(back, checkpoint.SURROUNDINGS)
    assert msgspec.json.encode(again.root) == text
    assert again.blocks.keys() == document.blocks.keys()
    for key, block in document.blocks.items():
        assert torch.equal(again.blocks[key], block), key
    found: dict[str, Any] = back
    return found
