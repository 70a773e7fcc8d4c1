"""The device's half of a method as bytes: parts by name, and numbers.

What comes from outside names parts by the rule of `naming`: only what the homes of the slots that
devices have export, and code of packages that the receiver allows. No function is called, no other
module imported.
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
def dumped(job: Job) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(config.dump(job))


@lru_cache(maxsize=64)
def loaded(data: bytes, allow: tuple[str, ...], limits: Limits) -> Job:
    """The inverse of `dumped`."""
    try:
        plain = _plain(data, limits)
        for wrong in _complaints(plain, allow, limits):
            raise BadMessage(f"{wrong.what}, at {wrong.path or 'the top'} of a job", wrong.reason)
        job = config.load(plain, Job, allow=allow)
    except BadMessage:
        raise
    except (AnyfleetError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a job that cannot be read: {error}", "job") from error
    except Exception as error:  # a part's own check meets values that nobody thought of
        raise BadMessage(f"a job that cannot be made: {type(error).__name__}", "job") from error
    if not set(job.report) <= MEASURES.union(*(each.names for each in job.measures)):
        raise BadMessage("a job that asks for what no device measures", "job")
    return job


def misfits(job: Job, allow: tuple[str, ...], limits: Limits) -> dict[str, str]:
    """Why a device would refuse orders with this job, by path inside it."""
    try:
        plain = _plain(dumped(job), limits)
        return {wrong.path: wrong.what for wrong in _complaints(plain, allow, limits)}
    except AnyfleetError as error:  # too long, or a part without a name
        return {"": str(error)}


def _plain(data: bytes, limits: Limits) -> Any:
    if len(data) > limits.job:
        told = f"a job of {len(data)} bytes; limits.job is {limits.job}"
        raise BadMessage(told, "too large")
    return msgspec.msgpack.decode(data)


class _Complaint(NamedTuple):
    """What is wrong with a job, where, and the reason for which it is refused."""

    path: str
    what: str
    reason: str = "job"


def _complaints(plain: Any, allow: tuple[str, ...], limits: Limits) -> Iterator[_Complaint]:
    """Names from elsewhere, numbers beyond the limit, and what is no plain data."""
    open_, depth = [("", plain)], 0
    while open_:
        depth += 1
        if depth > 2 * DEEPEST:
            yield _Complaint(open_[0][0], f"more than {DEEPEST} parts within parts")
            return
        below: list[tuple[str, Any]] = []
        for path, value in open_:
            if isinstance(value, Mapping):
                yield from _of_use(path, value.get("use"), allow)
                below += [(path, key) for key in value]
                below += [(_joined(path, k), v) for k, v in value.items() if k != "use"]
            elif isinstance(value, list):
                below += [(path, inner) for inner in value]
            else:
                yield from _of_single(path, value, allow, limits)
        open_ = below


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}".removeprefix(".")[:_LONGEST]


def _of_use(path: str, use: object, allow: tuple[str, ...]) -> Iterator[_Complaint]:
    if use is None:
        return
    if not isinstance(use, str):
        yield _Complaint(path, f"{_brief(repr(use))} is no name of a part")
        return
    top = not path and use == _TOP
    outside = [] if top else list(_of_name(path, use, allow))
    yield from outside
    if not outside and not top and not isinstance(find(use, allow, _PACKAGES), type):
        yield _Complaint(path, f"{_brief(use)} is no part")


def _of_single(
    path: str, value: object, allow: tuple[str, ...], limits: Limits
) -> Iterator[_Complaint]:
    if isinstance(value, str):
        if ":" in value:
            yield from _of_name(path, value, allow)
    elif isinstance(value, int):
        if abs(value) > limits.count:
            told = f"{value} is above limits.count, which is {limits.count}"
            yield _Complaint(path, told, "too large")
    elif value is not None and not isinstance(value, float):
        yield _Complaint(path, f"a {type(value).__name__} is no plain value")


def _of_name(path: str, name: str, allow: tuple[str, ...]) -> Iterator[_Complaint]:
    try:
        find(name, allow, _PACKAGES)
    except BadName as error:
        told = str(error) if len(name) <= _LONGEST else f"{_brief(name)} is no name of a part"
        yield _Complaint(path, told)


def _brief(name: str) -> str:
    return repr(name[:_LONGEST])
