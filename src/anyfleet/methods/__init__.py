"""Methods: one paper per file, each a composition of parts."""

from anyfleet.methods.anycost import anycost
from anyfleet.methods.bn2 import bn2
from anyfleet.methods.fedadp import fedadp
from anyfleet.methods.fedavg import fedavg
from anyfleet.methods.feddrop import feddrop
from anyfleet.methods.fedhq import fedhq
from anyfleet.methods.fedpmt import fedpmt
from anyfleet.methods.fedpns import fedpns
from anyfleet.methods.fedprox import fedprox
from anyfleet.methods.fedrescue import fedrescue
from anyfleet.methods.fedrolex import fedrolex
from anyfleet.methods.fedrush import fedrush
from anyfleet.methods.fedseq import fedseq
from anyfleet.methods.fedslim import fedslim
from anyfleet.methods.fjord import fjord
from anyfleet.methods.heterofl import heterofl
from anyfleet.methods.optimal_aggregation import optimal_aggregation
from anyfleet.methods.qsgd import qsgd
from anyfleet.methods.references import centralised, local
from anyfleet.methods.stc import stc
from anyfleet.methods.uveqfed import uveqfed
from anyfleet.methods.whale import whale

__all__ = [
    "anycost",
    "bn2",
    "centralised",
    "fedadp",
    "fedavg",
    "feddrop",
    "fedhq",
    "fedpmt",
    "fedpns",
    "fedprox",
    "fedrescue",
    "fedrolex",
    "fedrush",
    "fedseq",
    "fedslim",
    "fjord",
    "heterofl",
    "local",
    "optimal_aggregation",
    "qsgd",
    "stc",
    "uveqfed",
    "whale",
]
