"""One glossary: every public class of the core has an entry, and no banned identifier returns."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "anyfleet"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

# What was said before, and the word of the glossary instead.
BANNED = {
    "answer": "reply",
    "answered": "reply",
    "answers": "replies",
    "arrivals": "updates",
    "client": "device",
    "clients": "devices",
    "course": "phase",
    "envelope": "layout",
    "fate": "failure",
    "flight": "order status",
    "flying": "under_way",
    "gives": "provides",
    "heard": "acknowledged",
    "judge": "server_loss",
    "judges": "server_loss",
    "laid": "flattened",
    "lane": "tensor layout",
    "lanes": "tensor layouts",
    "letter": "reply",
    "lost": "failures",
    "mail": "reply",
    "memories": "states",
    "moment": "round result",
    "needs": "requires",
    "notes": "diagnostics",
    "numbers": "hyperparameters",
    "offer": "menu entry",
    "rate": "lr, sent_fraction or bit_rate",
    "rates": "lrs, sent_fractions or bit rates",
    "ratios": "widths",
    "share": "width",
    "shares": "widths",
    "squeeze": "compress",
    "squeezed": "compressed",
    "step": "round_index or local_step",
    "steps": "rounds or local_steps",
    "tells": "diagnostics",
    "uncut": "a sent fraction of 1",
    "want": "size",
    "wants": "reports",
}

# Identifiers that may stay, each with its reason: "module.Class.field" or "module.function".
EXCEPTIONS: dict[str, str] = {
    "analysis.metric.Metric.share": "tells whether a metric is a share of 1, which is not a width",
    "core.layout.Symbols.numbers": "holds tensors that are sent as plain numbers",
    "core.seam.Runtime.offer": "lets devices choose from menus, which are of several entries",
    "core.slots.Slack.share": "is a share of the bits of a column",
    "core.slots.Train.step": "performs one local step, as an optimiser's step does",
    "device.conditions.Meter.rates": "are the bit rates of both directions of a link",
    "device.memory.Memory.answer": "writes what a letter is answered with, which may be a refusal",
    "device.resident.Received.letter": "is what either side sends, not a reply alone",
    "elastic.tracing.rules.squeeze": "is the rule of the torch operator of this name",
    "formulas.reference.theory.FedpmtConstants.steps": "is the letter of the paper's bound",
    "measure.fisher.Observed.step": "performs one local step, as an optimiser's step does",
    "methods.optimal_aggregation.Leaving.share": "is a share of the updates that stay",
    "methods.optimal_aggregation.optimal_aggregation.share": "is a share of the updates that stay",
    "parts.aggregate.by_rank.TrimmedMean.share": "is a share of the updates that are left out",
    "parts.aggregate.server_optimiser.ServerAdam.step": "performs one optimiser step",
    "parts.aggregate.server_optimiser.ServerOptimiser.step": "performs one optimiser step",
    "runtime.flower.connection.Received.letter": "is what either side sends, not a reply alone",
    "runtime.flower.envelopes.Incoming.letter": "is what either side sends, not a reply alone",
    "runtime.flower.envelopes.Letter": "is what either side sends, not a reply alone",
    "runtime.flower.hosting.Arrival.letter": "is what either side sends, not a reply alone",
    "runtime.flower.fleet.FlowerFleet.arrivals": "are all that came in, choices and failures too",
    "runtime.flower.fleet.FlowerFleet.offer": "lets devices choose, as the seam does",
    "runtime.flower.fleet.Patience.offer": "is the time for choosing from a menu that was offered",
    "runtime.replayed.Replayed.offer": "lets devices choose, as the seam does",
    "runtime.simulated.simulator.Simulated.offer": "lets devices choose, as the seam does",
    "parts.aggregate.server_optimiser.ServerSgd.step": "performs one optimiser step",
    "parts.aggregate.subset.Subset.share": "is a share of the updates that stay",
    "parts.codec.bitstream.Column.numbers": "holds the plain numbers of a column",
    "parts.codec.bitstream.SymbolFormat.numbers": "tells how plain numbers are packed",
    "parts.train.gradient.Gradient.step": "performs one local step, as an optimiser's step does",
    "parts.train.nested.Nested.step": "performs one local step, as an optimiser's step does",
    "tasks.augment.InTurn.steps": "are the augmentations that are applied in turn",
    "tasks.dataset_files.Speech.client": "is the word of the data set's own file",
    "tasks.partition.by_owner.Domains.share": "is a share of the samples",
    "tasks.partition.by_size.Iid.share": "is a share of the samples",
    "world.availability.Intermittent.share": "is a share of the time",
}


def trees(room: str = "") -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of a package of Anyfleet, or of all of it, with their names."""
    for file in sorted((SOURCE / room).rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        yield module.removesuffix(".__init__"), ast.parse(file.read_text(encoding="utf-8"))


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the public fields and methods of a class."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def identifiers() -> Iterator[str]:
    """Yield every public name of the package, with its module: what users and authors write."""
    for module, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}"
                yield from (f"{module}.{node.name}.{each}" for each in members(node))
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}"
                if module.startswith(("methods", "world.presets")):
                    keys = [*node.args.args, *node.args.kwonlyargs]
                    yield from (f"{module}.{node.name}.{each.arg}" for each in keys)


def banned(names: Iterator[str]) -> dict[str, str]:
    """Return the names that end in a banned word, each with what to say instead."""
    found = {}
    for name in names:
        last = name.rpartition(".")[2]
        word = re.sub(r"(?<!^)(?=[A-Z])", "_", last).lower()
        if not last.startswith("_") and word in BANNED and name not in EXCEPTIONS:
            found[name] = BANNED[word]
    return found


def test_no_banned_identifier_returns() -> None:
    assert banned(identifiers()) == {}


def test_heads_of_tables_are_words_of_the_glossary() -> None:
    heads = [f"{kind.__name__}.{f.name}" for kind in (Ledger, RoundRecord) for f in fields(kind)]
    assert banned(iter(heads)) == {}


def test_a_banned_identifier_would_be_found() -> None:
    assert banned(iter(["core.messages.Arrivals", "methods.fedavg.sgd.rate"])) == {
        "core.messages.Arrivals": "updates",
        "methods.fedavg.sgd.rate": BANNED["rate"],
    }


def test_every_exception_is_needed_and_has_a_reason() -> None:
    known = set(identifiers())
    assert [name for name in EXCEPTIONS if name not in known] == []
    assert all(len(reason.split()) > 2 for reason in EXCEPTIONS.values())


def core_classes() -> list[str]:
    return [
        node.name
        for module, tree in trees("core")
        if module != "core"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


@pytest.mark.parametrize("name", core_classes())
def test_a_public_class_of_the_core_has_an_entry(name: str) -> None:
    assert f"`{name}`" in GLOSSARY, f"docs/glossary.md does not tell what {name} is"


def test_the_glossary_names_no_class_that_is_gone() -> None:
    section = GLOSSARY.partition("## Classes of the core")[2]
    named = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
    assert named == set(core_classes())
