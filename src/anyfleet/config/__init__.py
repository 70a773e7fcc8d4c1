"""Run files: frozen dataclasses to plain data and back, checked as a whole.

A part is a table: `use` names its class or function, the other keys are its fields or arguments.

    [method]
    use = "heterofl"                     # short: the caller of `load` says where methods live
    widths = [1.0, 0.5, 0.25]            # an argument of the function
    [method.select]                      # a field of the Method that the function returns
    use = "anyfleet.parts.select:Uniform"
    count = 5

`load` reports all problems at once, each with its path. A table without `use` changes the part that
stands there by default. None, which TOML lacks, is written `{ use = "none" }`, or "none" where no
text is due. A name means a part of its slot's home package, or code of a package that the caller
allows; `[allow]` in a file only asks for that. See `anyfleet.names`.
"""

from anyfleet.config.dumping import dump, to_toml, toml_value
from anyfleet.config.extending import laid_over
from anyfleet.config.loading import load
from anyfleet.config.run_files import Source, override, read

__all__ = ["Source", "dump", "laid_over", "load", "override", "read", "to_toml", "toml_value"]
