"""Errors of this package; each is an AnyfleetError and a ValueError.

AnyfleetError
├── TraceError      the module cannot be traced; the message says what, where and what to do
├── SliceError      a slice does not fit its blueprint
├── ProgramError    a program names something that may not be run
└── VerifyError     the numeric self-check failed
"""

from anyfleet.errors import AnyfleetError


class TraceError(AnyfleetError, ValueError):
    """The module cannot be traced."""


class SliceError(AnyfleetError, ValueError):
    """A slice does not fit its blueprint."""


class ProgramError(AnyfleetError, ValueError):
    """A program asks for an operator or a value that it may not have."""


class VerifyError(AnyfleetError, ValueError):
    """The numeric self-check of a blueprint failed."""
