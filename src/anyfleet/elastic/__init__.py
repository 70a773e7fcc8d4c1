"""Elastic models: the blueprint of a network, and small dense models cut out of it."""

from anyfleet.elastic.blueprint import WHOLE, Axis, BatchNormSite, Blueprint, Layer, Slice
from anyfleet.elastic.budget import Budget, largest
from anyfleet.elastic.channel_strength import channel_order
from anyfleet.elastic.cost.training_cost import Cost, Priced, cost
from anyfleet.elastic.execution.dense import DenseModel, dense
from anyfleet.elastic.execution.interpret import apply
from anyfleet.elastic.execution.modes import (
    COLLECT,
    EVALUATE,
    EVALUATE_BATCH,
    OBSERVE,
    OBSERVED,
    STATIC,
    TRAIN,
    Mode,
)
from anyfleet.elastic.slice_width import (
    channel_share,
    columns,
    narrowed,
    trained_share,
    width,
    within,
)
from anyfleet.elastic.slicing import Params, cut, cut_stack, paste, paste_stack, permute, place
from anyfleet.elastic.traced import traced
from anyfleet.elastic.tracing.mixed_rows import mixed_rows
from anyfleet.elastic.tracing.tracer import left_behind, trace
from anyfleet.elastic.verification.faithful import require_faithful
from anyfleet.elastic.verification.verify import Check, Report, verify
from anyfleet.errors import ProgramError, SliceError, TraceError, VerifyError

__all__ = [
    "COLLECT",
    "EVALUATE",
    "EVALUATE_BATCH",
    "OBSERVE",
    "OBSERVED",
    "STATIC",
    "TRAIN",
    "WHOLE",
    "Axis",
    "BatchNormSite",
    "Blueprint",
    "Budget",
    "Check",
    "Cost",
    "DenseModel",
    "Layer",
    "Mode",
    "Params",
    "Priced",
    "ProgramError",
    "Report",
    "Slice",
    "SliceError",
    "TraceError",
    "VerifyError",
    "apply",
    "channel_order",
    "channel_share",
    "columns",
    "cost",
    "cut",
    "cut_stack",
    "dense",
    "largest",
    "left_behind",
    "mixed_rows",
    "narrowed",
    "paste",
    "paste_stack",
    "permute",
    "place",
    "require_faithful",
    "trace",
    "traced",
    "trained_share",
    "verify",
    "width",
    "within",
]
