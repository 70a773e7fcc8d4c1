"""Jobs as bytes: the device's half of a method, as names of parts and numbers.

A job from outside names parts by the rule of `anyfleet.names`: what the home packages of the slots
of devices export, and code of packages that the receiver allows. No function is called, and no
other module is imported.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from anyfleet import config
from anyfleet.core.limits import Limits
from anyfleet.core.method import Job
from anyfleet.core.slots import MEASURES
from anyfleet.errors import AnyfleetError, BadMessage, BadName
from anyfleet.names import HOMES, find, name_of

SLOTS = ("train", "choose", "uplink", "downlink", "norm", "measures")
_PACKAGES = tuple(dict.fromkeys(HOMES[slot] for slot in SLOTS))
_TOP = name_of(Job)
DEEPEST = 16  # parts within parts
_LONGEST = 60  # characters of a name or a path that are repeated


@lru_cache(maxsize=64)
def encode_job(job: Job) -> bytes:
    """Return a job as it travels."""
    return msgspec.msgpack.encode(config.dump(job))


@lru_cache(maxsize=64)
def decode_job(data: bytes, allow: tuple[str, ...], limits: Limits) -> Job:
    """Return the job that `encode_job` encoded; raise BadMessage for one that is not allowed."""
    try:
        plain = _plain(data, limits)
        for fault in _faults(plain, allow, limits):
            raise BadMessage(f"{fault.what}, at {fault.path or 'the top'} of a job", fault.reason)
        job = config.load(plain, Job, allow=allow)
    except BadMessage:
        raise
    except (AnyfleetError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a job that cannot be read: {error}", "job") from error
    except Exception as error:  # a part's own check meets values that nobody thought of
        raise BadMessage(f"a job that cannot be made: {type(error).__name__}", "job") from error
    if not set(job.report) <= MEASURES.union(*(each.names for each in job.measures)):
        raise BadMessage("a job that asks for what no device measures", "job")
    for path, why in _unavailable(job).items():
        raise BadMessage(f"{path}: {why}", "library")
    return job


def misfits(job: Job, allow: tuple[str, ...], limits: Limits) -> dict[str, str]:
    """Return why devices would refuse orders with this job, by path inside it; empty if none."""
    try:
        plain = _plain(encode_job(job), limits)
        found = {fault.path: fault.what for fault in _faults(plain, allow, limits)}
        return _unavailable(job) | found
    except AnyfleetError as error:  # too long, or a part without a name
        return {"": str(error)}


def _unavailable(job: Job) -> dict[str, str]:
    """Return the codecs whose bytes this machine cannot make or read, and why."""
    codecs = {"uplink": job.uplink, "downlink": job.downlink}
    return {path: codec.unavailable for path, codec in codecs.items() if codec.unavailable}


def _plain(data: bytes, limits: Limits) -> Any:
    if len(data) > limits.job:
        raise BadMessage(f"a job of {len(data)} bytes; limits.job is {limits.job}", "too large")
    return msgspec.msgpack.decode(data)


class _Fault(NamedTuple):
    """What is wrong with a job, where, and the reason for which it is refused."""

    path: str
    what: str
    reason: str = "job"


def _faults(plain: Any, allow: tuple[str, ...], limits: Limits) -> Iterator[_Fault]:
    """Yield names from elsewhere, numbers beyond the limits, and values that are not plain."""
    open_, depth = [("", plain)], 0
    while open_:
        depth += 1
        if depth > 2 * DEEPEST:
            yield _Fault(open_[0][0], f"more than {DEEPEST} parts within parts")
            return
        below: list[tuple[str, Any]] = []
        for path, value in open_:
            if isinstance(value, Mapping):
                yield from _use_faults(path, value.get("use"), allow)
                below += [(path, key) for key in value]
                below += [(_joined(path, k), v) for k, v in value.items() if k != "use"]
            elif isinstance(value, list):
                below += [(path, inner) for inner in value]
            else:
                yield from _value_faults(path, value, allow, limits)
        open_ = below


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}".removeprefix(".")[:_LONGEST]


def _use_faults(path: str, use: object, allow: tuple[str, ...]) -> Iterator[_Fault]:
    if use is None:
        return
    if not isinstance(use, str):
        yield _Fault(path, f"{_brief(repr(use))} is not the name of a part")
        return
    top = not path and use == _TOP
    outside = [] if top else list(_name_faults(path, use, allow))
    yield from outside
    if not outside and not top and not isinstance(find(use, allow, _PACKAGES), type):
        yield _Fault(path, f"{_brief(use)} is not a part")


def _value_faults(
    path: str, value: object, allow: tuple[str, ...], limits: Limits
) -> Iterator[_Fault]:
    if isinstance(value, str):
        if ":" in value:
            yield from _name_faults(path, value, allow)
    elif isinstance(value, int):
        if abs(value) > limits.count:
            what = f"{value} is above limits.count, which is {limits.count}"
            yield _Fault(path, what, "too large")
    elif value is not None and not isinstance(value, float):
        yield _Fault(path, f"a {type(value).__name__} is not a plain value")


def _name_faults(path: str, name: str, allow: tuple[str, ...]) -> Iterator[_Fault]:
    try:
        find(name, allow, _PACKAGES)
    except BadName as error:
        long = len(name) > _LONGEST
        yield _Fault(path, f"{_brief(name)} is not the name of a part" if long else str(error))


def _brief(name: str) -> str:
    return repr(name[:_LONGEST])
