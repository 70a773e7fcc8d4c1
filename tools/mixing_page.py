"""`docs/mixing.md`: what `tools.mixing` found, as a page; and back again, for the tests."""

import inspect
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

from tools.mixing_parts import SLOTS
from tools.mixing_trial import REFUSED, ROUNDS, RUNS, Outcome, Pair

from anyfleet import __version__
from anyfleet.core import signals

PAGE = Path(__file__).parents[1] / "docs" / "mixing.md"
GOOD = "✓"

_INTRODUCTION = f"""# What mixes with what

Every part of every slot with every part of every other slot, {ROUNDS} rounds each, on a tiny task:
a convolution, batch normalisation and two linear layers; six devices of two widths with unequal
speeds, links, classes and energy budgets. Everything else is HeteroFL's levels with plain SGD, raw
messages and the mean; what a part cannot work without comes along unless its partner stands in that
place (`Learned` brings `Subset`, `Largest` brings `HoldAndFetch`, `SentFractionBy…` bring `Fgc`).

A pair **runs** ({GOOD}) when every parameter stays finite, the model moves in every round (but with
`Nothing`, which shares nothing), replies count, and the ledger has what they cost. Otherwise it is
**refused** when the method is composed, before anything runs, with an error that says what is
missing, where, and what to use instead; the numbers in the grids are those of the
list at the end. There is no third kind: the command below fails if it finds one.

Written by `make mixing` (`python -m tools.mixing`); not to be edited by hand.
"""

_SIGNALS = """## Signals

A **signal** is what one part hands to another. Every part names the signals that it `requires`,
those that it `provides`, and those that it `decides` (values of an order that only one part may
set). `Method` compares them when it is made. It refuses a method in which a part requires a signal
that no part provides, and one in which two parts decide the same signal. The error names both the
signal and a part to use. A part of your own declares its signals in the same way, as frozensets of
`anyfleet.core.signals`.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the whole page."""
    found = {outcome.pair: outcome for outcome in outcomes}
    kinds = list(dict.fromkeys(o.kind for o in outcomes if o.result == REFUSED))
    blocks = [
        _INTRODUCTION,
        f"Made with {_versions()}.\n",
        *_signals(),
        *_parts(),
        *_counts(outcomes),
        *_grids(found, kinds),
        *_refusals(outcomes, kinds),
    ]
    return "\n".join(blocks)


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    names = {name: version(name).partition("+")[0] for name in ("torch", "numpy")}
    told = {"Anyfleet": __version__, "Python": python, **names}
    return ", ".join(f"{name} {number}" for name, number in told.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _signals() -> Iterator[str]:
    """Yield what parts hand to each other, and which part usually provides it."""
    yield _SIGNALS
    kinds = sorted(signals.Signal.__subclasses__(), key=lambda kind: kind.__name__)
    rows = [(f"`{kind.__name__}`", *_told(kind)) for kind in kinds]
    head, rule, *body = _table(("signal", "what it is", "usually from"), rows).splitlines()
    yield "\n".join((head, rule.replace(":-:", "---"), *body)) + "\n"


def _told(kind: type[signals.Signal]) -> tuple[str, str]:
    line = (inspect.getdoc(kind) or "").partition("\n")[0]
    usual = kind.usual_provider if "usual_provider" in vars(kind) else "the part that decides it"
    return line, usual


def _parts() -> Iterator[str]:
    yield "## The parts\n"
    for slot, rows in SLOTS.items():
        yield f"- **{slot}**: {', '.join(f'`{name}`' for name in rows)}"
    yield ""


def _counts(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## How many\n"
    rows = []
    for slots in (*combinations(SLOTS, 2), ()):
        of = [o for o in outcomes if not slots or o.pair.slots == slots]
        run = sum(outcome.result == RUNS for outcome in of)
        name, refused = " × ".join(slots) or "**all**", len(of) - run
        rows.append((name, str(len(of)), str(run), str(refused), f"{run / len(of):.1%}"))
    yield _table(("slots", "pairs", "run", "refused", "share"), rows)


def _grids(found: Mapping[Pair, Outcome], kinds: Sequence[str]) -> Iterator[str]:
    for slots in combinations(SLOTS, 2):
        yield f"## {slots[0]} × {slots[1]}\n"
        down, across = _orientation(slots)
        rows = [
            (part, *(_mark(found[_pair(slots, part, other)], kinds) for other in SLOTS[across]))
            for part in SLOTS[down]
        ]
        yield _table(("", *SLOTS[across]), rows)


def _orientation(slots: tuple[str, str]) -> tuple[str, str]:
    """Return the slot that goes down and the one that goes across: the longer one down."""
    one, two = slots
    return (one, two) if len(SLOTS[one]) >= len(SLOTS[two]) else (two, one)


def _pair(slots: tuple[str, str], down: str, across: str) -> Pair:
    parts = (down, across) if _orientation(slots) == slots else (across, down)
    return Pair(slots, parts)


def _mark(outcome: Outcome, kinds: Sequence[str]) -> str:
    if outcome.result == RUNS:
        return GOOD
    return f"[{kinds.index(outcome.kind) + 1}](#refusals)"


def _refusals(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> Iterator[str]:
    yield "## Refusals\n"
    for number, kind in enumerate(kinds, start=1):
        those = [outcome for outcome in outcomes if outcome.kind == kind]
        example = "\n".join(f"   > {line}" for line in those[0].said.splitlines())
        yield f"{number}. {len(those)} pairs: {kind}\n"
        yield f"   For example {those[0].pair}:\n"
        yield f"{example}\n"


# --- and back ---------------------------------------------------------------------------------


def read(text: str) -> dict[Pair, bool]:
    """Return the pairs of a page, and whether each runs."""
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        slots = tuple(title.split(" × "))
        if len(slots) != 2:
            continue
        head, _, *rows = [_cells(line) for line in body.splitlines() if line.startswith("|")]
        for part, *marks in rows:
            for other, mark in zip(head[1:], marks, strict=True):
                found[_pair(slots, part, other)] = mark == GOOD
    return found


def _cells(line: str) -> list[str]:
    return re.split(r" *\| *", line)[1:-1]
