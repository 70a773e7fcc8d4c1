"""The device's half of a method as bytes: parts by name, and numbers.

What comes from outside names parts only from where the parts of devices live, and from packages
that the receiver allows. No function is called, no other module imported.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from anyfleet import config
from anyfleet.errors import AnyfleetError, BadMessage
from anyfleet.method import MEASURES, Job
from anyfleet.naming import find
from anyfleet.runtime.limits import Limits

HOMES = ("anyfleet.codec", "anyfleet.fisher", "anyfleet.method", "anyfleet.plan", "anyfleet.train")
DEEPEST = 16  # parts within parts


@lru_cache(maxsize=64)
def dumped(job: Job) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(config.dump(job))


@lru_cache(maxsize=64)
def loaded(data: bytes, allow: tuple[str, ...], limits: Limits) -> Job:
    """The inverse of `dumped`."""
    if len(data) > limits.job:
        raise BadMessage(f"a job of {len(data)} bytes; at most {limits.job}", "too large")
    try:
        plain = msgspec.msgpack.decode(data)
        _check(plain, allow, limits)
        job = config.load(plain, Job, allow=allow)
    except BadMessage:
        raise
    except (AnyfleetError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"a job that cannot be read: {error}", "job") from error
    except Exception as error:  # a part's own check meets values that nobody thought of
        raise BadMessage(f"a job that cannot be made: {type(error).__name__}", "job") from error
    if not set(job.report) <= MEASURES:
        raise BadMessage("a job that asks for what no device measures", "job")
    return job


def _check(plain: Any, allow: tuple[str, ...], limits: Limits) -> None:
    """Refuses names from elsewhere, numbers beyond the limit, and what is no plain data."""
    open_, depth = [plain], 0
    while open_:
        depth += 1
        if depth > 2 * DEEPEST:
            raise BadMessage(f"a job of more than {DEEPEST} parts within parts", "job")
        below: list[Any] = []
        for value in open_:
            if isinstance(value, Mapping):
                _check_use(value.get("use"), allow)
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            else:
                _check_single(value, allow, limits)
        open_ = below


def _check_use(use: object, allow: tuple[str, ...]) -> None:
    if isinstance(use, str):
        _check_name(use, allow)
        if not isinstance(find(use, allow), type):
            raise BadMessage(f"a job with {_brief(use)}, which is no part", "job")


def _check_single(value: object, allow: tuple[str, ...], limits: Limits) -> None:
    if isinstance(value, str):
        if ":" in value:
            _check_name(value, allow)
    elif isinstance(value, int):
        if abs(value) > limits.count:
            raise BadMessage(f"{value} in a job; numbers go up to {limits.count}", "too large")
    elif value is not None and not isinstance(value, float):
        raise BadMessage(f"a {type(value).__name__} in a job", "job")


def _check_name(name: str, allow: tuple[str, ...]) -> None:
    module, _, _ = name.partition(":")
    for package in (*HOMES, *allow):
        if module == package or module.startswith(f"{package}."):
            return
    known = ", ".join((*HOMES, *allow))
    raise BadMessage(f"{_brief(name)} is outside the allowed packages ({known})", "job")


def _brief(name: str) -> str:
    return repr(name[:60])
