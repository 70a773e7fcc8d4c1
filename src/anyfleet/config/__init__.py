"""Frozen dataclasses to plain data and back: a run is a file, checked as a whole.

A part is a table: `use` names its class or function, the other keys are its fields or arguments.

    [method]
    use = "heterofl"                     # short: the caller of `load` says where methods live
    shares = [1.0, 0.5, 0.25]            # an argument of the function
    [method.select]                      # a field of the Method that the function returns
    use = "anyfleet.parts.select:Uniform"
    count = 5

`load` reports everything that is wrong at once, with its path. A table without `use` changes the
part that stands there by default. None, which TOML lacks, is written `{ use = "none" }`, or as
the word "none" where no text is expected. Names mean parts of their slot's home package, and code
of packages that the caller allows; `[allow]` in a file only asks for them. See `naming`, `homes`.
"""

from anyfleet.config.dumping import dump
from anyfleet.config.files import Source, override, read
from anyfleet.config.loading import load
from anyfleet.config.toml import to_toml

__all__ = ["Source", "dump", "load", "override", "read", "to_toml"]
