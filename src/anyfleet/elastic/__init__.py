"""What a model is made of, and small dense models cut out of it."""

from anyfleet.elastic.blueprint import Axis, BatchNormSite, Blueprint, Layer, Slice
from anyfleet.elastic.errors import ProgramError, SliceError, TraceError, VerifyError
from anyfleet.elastic.interpret import apply
from anyfleet.elastic.replaced import COLLECT, EVALUATE, EVALUATE_BATCH, STATIC, TRAIN, Mode
from anyfleet.elastic.slicing import Params, cut, paste, place
from anyfleet.elastic.tracer import trace

__all__ = [
    "COLLECT",
    "EVALUATE",
    "EVALUATE_BATCH",
    "STATIC",
    "TRAIN",
    "Axis",
    "BatchNormSite",
    "Blueprint",
    "Layer",
    "Mode",
    "Params",
    "ProgramError",
    "Slice",
    "SliceError",
    "TraceError",
    "VerifyError",
    "apply",
    "cut",
    "paste",
    "place",
    "trace",
]
