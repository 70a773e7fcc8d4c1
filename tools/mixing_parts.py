"""The parts that `tools.mixing` mixes: a row for each, by slot; and what each needs around it.

A new public part is one row here: `missing` names those that have none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import ModuleType
from typing import Any

from anyfleet.core.method import Method
from anyfleet.core.slots import Choose, Plan
from anyfleet.measure import Fisher
from anyfleet.methods import heterofl
from anyfleet.parts import aggregate, choose, codec, extract, norm, plan, schedule, select, train

# Two levels train models of two widths, so that whatever is mixed meets unequal slices.
WIDTHS = (1.0, 0.5, 0.25)
LOCAL = train.Gradient(train.Decaying(0.05), train.Sgd(), batch_size=8)
BASE = replace(
    heterofl(widths=(1.0, 0.5)),
    select=select.Everyone(),
    train=LOCAL,
    norm=norm.BatchStatistics(),
    aggregate=aggregate.Mean(),
)
# In which the faster devices of `tools.mixing_trial` are done with the whole model, and the slower
# ones with a quarter of it, or with half.
SECONDS, LONGER = 0.02, 0.03


@dataclass(frozen=True)
class Row:
    """What a part is in a method, and what it cannot work without.

    `company` steps back where the partner is one of its fields: a composition error is then the
    honest result.
    """

    parts: Mapping[str, Any]  # by field of `Method`
    company: Mapping[str, Any] = field(default_factory=dict)


def mixed(one: Row, other: Row) -> Method:
    """Return the base method with the parts of both rows."""
    company = {**one.company, **other.company}
    return replace(BASE, **{**company, **one.parts, **other.parts})


# --- the rows ---------------------------------------------------------------------------------


def _rows(field_: str, parts: Mapping[str, Any]) -> dict[str, Row]:
    return {name: Row({field_: part}) for name, part in parts.items()}


def _choosing(plan_: Plan, choose: Choose) -> Row:
    return Row({"plan": plan_, "choose": choose})


_LABELLING = aggregate.Subset(share=0.5, statistic="mean")  # somebody in every round
_LABELS = {"aggregate": _LABELLING}
_HOLDS = {"schedule": schedule.HoldAndFetch()}
_ADAPTS = {"uplink": codec.Fgc()}
_LEVELS = plan.WidthByLevel((1.0, 0.5))
_MENU = plan.WidthMenu(WIDTHS)

SELECTION = {
    **_rows(
        "select",
        {
            "Everyone": select.Everyone(),
            "Uniform": select.Uniform(3),
            "Quota": select.Quota(4),
            "InOrder": select.InOrder(2),
        },
    ),
    "Learned": Row({"select": select.Learned(4)}, _LABELS),
    "Largest": Row({"select": select.Largest(5, 3)}, _HOLDS),
}
PLANS = {
    **_rows(
        "plan",
        {
            "WholeModel": plan.WholeModel(),
            "WidthByLevel": _LEVELS,
            "WidthByLevel, linear": plan.WidthByLevel((1.0, 0.5), layers="linear"),
            "TrainedLayersByLevel": plan.TrainedLayersByLevel(),
            "LargestFitting": plan.LargestFitting(WIDTHS),
            "LocalStepsWithin": plan.LocalStepsWithin(SECONDS, _LEVELS),
            "WorkByLevel": plan.WorkByLevel((8, 4), (2, 1), (0.05, 0.02), _LEVELS),
            "JustInTime": plan.JustInTime(LONGER, _LEVELS),
            "Assigned(WidthMenu, LargestInTime)": plan.Assigned(
                _MENU, choose.LargestInTime(SECONDS)
            ),
            "Assigned(WidthMenu, MostGain)": plan.Assigned(_MENU, choose.MostGain(LONGER)),
            "Assigned(TrainedLayersMenu, MostGain)": plan.Assigned(
                plan.TrainedLayersMenu(), choose.MostGain(LONGER)
            ),
        },
    ),
    "WidthMenu + First": _choosing(_MENU, choose.First()),
    "WidthMenu + LargestInTime": _choosing(_MENU, choose.LargestInTime(SECONDS)),
    "WidthMenu + MostGain": _choosing(_MENU, choose.MostGain(LONGER)),
    "TargetSeconds(WidthMenu) + FisherUtility": _choosing(
        plan.TargetSeconds(_MENU), choose.FisherUtility(3)
    ),
    "TrainedLayersMenu + LargestInTime": _choosing(
        plan.TrainedLayersMenu(), choose.LargestInTime(SECONDS)
    ),
    "TrainedLayersMenu + MostGain": _choosing(plan.TrainedLayersMenu(), choose.MostGain(LONGER)),
    "TargetSeconds(TrainedLayersMenu) + FisherUtility": _choosing(
        plan.TargetSeconds(plan.TrainedLayersMenu(3)), choose.FisherUtility(3)
    ),
    "SentFractionByLevel": Row({"plan": plan.SentFractionByLevel((0.5, 0.1), _LEVELS)}, _ADAPTS),
    "SentFractionByLink": Row({"plan": plan.SentFractionByLink(0.2, inner=_LEVELS)}, _ADAPTS),
    "TargetSeconds(SentFractionByLink(WidthMenu)) + FisherUtility": Row(
        {
            "plan": plan.TargetSeconds(plan.SentFractionByLink(0.2, inner=_MENU)),
            "choose": choose.FisherUtility(3),
        },
        _ADAPTS,
    ),
}
EXTRACTION = _rows(
    "extract",
    {
        "Leading": extract.Leading(),
        "Random": extract.Random(),
        "Rolling": extract.Rolling(),
        "FisherBlocks": extract.FisherBlocks(4),
        "Strongest": extract.Strongest(),
    },
)
TRAINING = _rows(
    "train",
    {
        "Gradient": LOCAL,
        "Gradient, momentum": replace(
            LOCAL, lr=train.Inverse(4.0, 10.0), optimiser=train.Sgd(0.9, nesterov=True), clip=1.0
        ),
        "Gradient, AdamW": replace(LOCAL, lr=train.Decaying(0.01), optimiser=train.AdamW()),
        "Gradient, proximal": replace(LOCAL, proximal=0.1),
        "Gradient, masked": replace(LOCAL, masked=True),
        "Gradient, label rows": replace(LOCAL, label_rows=True),
        "Gradient, scaler": replace(LOCAL, scaler=True),
        "Gradient, inverted": replace(LOCAL, inverted=True),
        "FrozenPrefix": train.FrozenPrefix(
            LOCAL.lr, epochs=LOCAL.epochs, batch_size=LOCAL.batch_size, frozen=0.25
        ),
        "Slim": train.Slim(LOCAL, WIDTHS),
        "Fjord": train.Fjord(LOCAL, WIDTHS),
        "Progressive": train.Progressive(LOCAL, WIDTHS, samples=2),
        "Rush": train.Rush(LOCAL, WIDTHS, samples=2),
    },
)
NORMS = _rows(
    "norm",
    {
        "BatchStatistics": norm.BatchStatistics(),
        "Tracked": norm.Tracked(),
        "OnDevice": norm.OnDevice(),
        "Static": norm.Static(),
        "PerWidth": norm.PerWidth(),
    },
)
CODECS = _rows(
    "uplink",
    {
        "Raw": codec.Raw(),
        "Raw, fp16": codec.Raw("fp16"),
        "Plain": codec.Plain(),
        "Nothing": codec.Nothing(),
        "TopK": codec.TopK(0.2),
        "TopK(Qsgd)": codec.TopK(0.2, codec.Qsgd()),
        "TopK(Uveq)": codec.TopK(0.2, codec.Uveq()),
        "Stc": codec.Stc(0.1),
        "Qsgd": codec.Qsgd(),
        "Uveq": codec.Uveq(),
        "Hq": codec.Hq(),
        "Fgc": codec.Fgc(),
        "ErrorFeedback(Stc)": codec.ErrorFeedback(codec.Stc(0.1)),
        "ErrorFeedback(TopK)": codec.ErrorFeedback(codec.TopK(0.1)),
        "ErrorFeedback(Fgc)": codec.ErrorFeedback(codec.Fgc()),
    },
)
AGGREGATION = _rows(
    "aggregate",
    {
        "Mean": aggregate.Mean(),
        "Mean, equal": aggregate.Mean("equal", discount=0.5),
        "Aio": aggregate.Aio(),
        "ErrorWeighted": aggregate.ErrorWeighted(),
        "AngleWeighted": aggregate.AngleWeighted(),
        "AngleWeighted(Aio)": aggregate.AngleWeighted(base=aggregate.Aio()),
        "Subset": _LABELLING,
        "Subset(Aio)": aggregate.Subset(aggregate.Aio(), 0.5),
        "Clipped": aggregate.Clipped(),
        "Clipped(Aio)": aggregate.Clipped(aggregate.Aio(), times=2.0),
        "TrimmedMean": aggregate.TrimmedMean(),
        "CoordinateMedian": aggregate.CoordinateMedian(),
        "Diagnosed(Aio)": aggregate.Diagnosed(aggregate.Aio(), ("norm", "fisher"), (Fisher(),)),
        "ServerOptimised": aggregate.ServerOptimised(optimiser=aggregate.ServerSgd(0.5, 0.9)),
        "ServerOptimised(Subset), Adam": aggregate.ServerOptimised(
            _LABELLING, aggregate.ServerAdam(0.01)
        ),
    },
)

SLOTS: Mapping[str, Mapping[str, Row]] = {
    "selection": SELECTION,
    "plan or choice": PLANS,
    "extraction": EXTRACTION,
    "training": TRAINING,
    "normalisation": NORMS,
    "codec": CODECS,
    "aggregation": AGGREGATION,
}
PACKAGES: tuple[ModuleType, ...] = (select, plan, extract, train, codec, aggregate)


# --- nothing is forgotten ---------------------------------------------------------------------


def missing() -> list[str]:
    """Return the public parts of the packages that no row has, alone or inside of another."""
    rows = [row for slot in SLOTS.values() for row in slot.values()]
    there = {type(part) for row in rows for each in row.parts.values() for part in inside(each)}
    return [
        f"{package.__name__}.{name}"
        for package in PACKAGES
        for name in package.__all__
        if is_dataclass(getattr(package, name)) and getattr(package, name) not in there
    ]


def inside(part: Any) -> Iterator[Any]:
    """Yield a part and all that it is made of."""
    yield part
    if is_dataclass(part):
        for each in fields(part):
            yield from inside(getattr(part, each.name))
