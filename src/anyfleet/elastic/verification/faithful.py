"""The safety net under the tracer: a blueprint that is not its module's own function is refused.

The check (`verify`) is made once for the same content: what a module is made of, its code, its
attributes and its buffers, but not its weights, which the check draws at random.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor, nn

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.verification.module_content import UnknownContent, content_of
from anyfleet.elastic.verification.verify import Report, verify
from anyfleet.errors import VerifyError

_SHOWN = 3  # problems in a message; the others follow from them


def require_faithful(
    module: nn.Module, example_inputs: tuple[Tensor, ...], blueprint: Blueprint
) -> None:
    """Raise VerifyError unless the blueprint computes what the module does, as `verify` says.

    Takes a fraction of a second for a small network and a few seconds for a large one; nothing for
    one that was checked before in this process. Neither the module nor a random generator changes.
    """
    report = _report(module, example_inputs, blueprint)
    if report.ok:
        return
    (first, *_) = (check for check in report.checks if not check.ok)
    problems = "\n".join(f"  {problem}" for problem in report.problems[:_SHOWN])
    raise VerifyError(
        f"{type(module).__name__}: the traced network is not the function that the module is, so "
        f"that devices would train another one. Tried on two samples, with random weights:\n"
        f"{problems}\n{first.advice}"
    )


def _report(module: nn.Module, inputs: tuple[Tensor, ...], blueprint: Blueprint) -> Report:
    shapes = tuple((x.dtype, tuple(x.shape[1:])) for x in inputs)
    try:
        content = (content_of(module), shapes)
    except UnknownContent:
        return verify(module, inputs, blueprint, trials=1)
    return _of_content(_Case(content, blueprint, [(module, inputs)]))


@dataclass(frozen=True)
class _Case:
    """The content that decides a check; `subject` is what is checked, and is let go afterwards."""

    content: Hashable
    blueprint: Blueprint
    subject: list[tuple[nn.Module, tuple[Tensor, ...]]] = field(compare=False)


@functools.lru_cache(maxsize=256)
def _of_content(case: _Case) -> Report:
    module, inputs = case.subject.pop()
    return verify(module, inputs, case.blueprint, trials=1)
