"""Methods: one paper per file, each a composition of parts."""

from anyfleet.methods.fedavg import fedavg
from anyfleet.methods.feddrop import feddrop
from anyfleet.methods.fedprox import fedprox
from anyfleet.methods.fedrolex import fedrolex
from anyfleet.methods.heterofl import heterofl
from anyfleet.methods.references import centralised, local

__all__ = ["centralised", "fedavg", "feddrop", "fedprox", "fedrolex", "heterofl", "local"]
