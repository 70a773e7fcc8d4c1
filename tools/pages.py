"""Write the pages of the documentation that follow from the code.

    python -m tools.pages

`docs/run_files.md` has every key of a run file, read off the same forms by which run files are
checked; its column "meaning" has the comments beside fields and parameters in the source. The last
section of `docs/glossary.md` has every public class of the core. `docs/evidence.md` and the pages
below it set our results beside the documents'. A test compares the pages with what this would
write, so that they cannot be out of date.
"""

import ast
import importlib
import inspect
import io
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import anyfleet
from anyfleet.cli.methods import as_noun
from anyfleet.cli.parts import parts_page
from anyfleet.config.signatures import ABSENT, Entry, form_of, hints_of
from anyfleet.core.method import Method
from anyfleet.evidence.collection import evidence_page
from anyfleet.evidence.comparison import compare
from anyfleet.evidence.comparison_page import page as comparison_page
from anyfleet.evidence.library import Library
from anyfleet.evidence.pages import item_page, standing_of
from anyfleet.experiment import Experiment
from anyfleet.methods.fedavg import fedavg
from anyfleet.names import HOMES, Factory, public_names
from anyfleet.world import World

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "run_files.md"
GLOSSARY = DOCS / "glossary.md"
PARTS = DOCS / "parts.md"
CORE = Path(anyfleet.__file__).parent / "core"

_LISTED = 9  # values of a default that are written out
_CLASSES = "## Classes of the core"
_INTRODUCTION = """\
# Keys of a run file

A run file is TOML. Its keys are those of an [experiment](#an-experiment). A table with `use` names
a part, and its other keys are that part's. On the command line every key can be overridden by its
path: `anyfleet run FILE method.lr=0.1`. `anyfleet validate FILE` reports everything that is wrong
with a file at once.

```toml
rounds = 20

[task]
use = "Embedded"          # any name of the section "task"
devices = 20

[method]
use = "heterofl"          # any name of the section "method"
lr = 0.05
aggregate = { use = "CoordinateMedian" }    # any slot of the method can be replaced

[fleet]
use = "testbed"
```

## Files that build on others

```toml
extends = "base.toml"     # or a list of files, of which the last wins

[method]
lr = 0.1                  # changes one key of the method in base.toml
```

Tables are joined key by key, and the file that extends has the last word. A table whose `use` names
another part replaces the whole table of that part, so that no key of the former one is left. Lists
are replaced as a whole. A file that is extended may extend others, 20 in a row at most.

Names of files, and all relative paths, refer to the file in which they stand: `file = "fleet.csv"`
in `base.toml` lies beside `base.toml`. Code that the caller allows is looked for beside the run
file alone; `[allow]` in any of the files is a request. Only plain files whose names end in `.toml`
can be extended. A problem names the file in which its key stands, and `config.toml` in the folder
of a run has what all files came to.

## How to read this page

This page is generated: `make pages` writes it anew. What a key means stands beside it or in the
text above its table. A key without a default must be given, and `none` is a key that is left out.
The words are those of the [glossary](glossary.md); what each part is for stands in
[the table of parts](parts.md).
"""

# The sections, in the order in which somebody writes a run file: the field, where its parts are
# defined ("" for anywhere in its home), and what they are.
_SECTIONS = (
    ("task", "specs own pooled", "What is learned, and from whose data."),
    ("model", "", "The network of a task."),
    ("partition", "partition", "How the samples of a task are divided among the devices."),
    ("augment", "augment", "How the samples of a minibatch are varied."),
    ("method", "", "A published method. A key with the name of a slot replaces the part in it."),
    ("select", "", "Which of the idle devices take part."),
    ("schedule", "", "When orders are issued, and when a round ends."),
    ("plan", "", "Which sub-model size and which hyperparameters each device gets."),
    ("choose", "", "How a device chooses from its menu."),
    ("extract", "", "Which channels make up a sub-model."),
    ("train", "", "Local training: trainers, optimisers and learning rates."),
    ("norm", "", "Batch normalisation."),
    ("uplink", "", "How updates are compressed. `downlink` takes the same parts."),
    ("aggregate", "", "How updates become the next model."),
    ("fisher", "", "How Fisher information is measured."),
    ("fleet", "fleet table presets", "Who the devices are: groups, a table, or a preset."),
    ("fleet.groups", "group", "Devices that are described together, one table for each."),
    ("fleet.reports", "world", "How old and how wrong the conditions are that devices report."),
    (
        "any number of a group",
        "distributions processes",
        "A distribution draws a number for each device, a process lets it change with time.",
    ),
    ("link", "links column_loss", "How a device is connected."),
    ("availability", "availability", "When a device is online."),
    ("engine", "", "How orders are carried out."),
    ("limits", "limits", "What is refused of messages."),
)
_SAME_HOME = {
    "partition": "task",
    "augment": "task",
    "fleet.groups": "fleet",
    "fleet.reports": "fleet",
    "any number of a group": "fleet",
    "link": "fleet",
    "availability": "fleet",
}


def page() -> str:
    """Return the page of all keys."""
    pieces = [_INTRODUCTION, "## An experiment\n", _told(Experiment), _table(Experiment)]
    for field, modules, what in _SECTIONS:
        home = HOMES[_SAME_HOME.get(field, field)]
        pieces += [f"## `{field}`\n", f"{what} Package `{home}`.\n"]
        for name in public_names(home):
            found = getattr(importlib.import_module(home), name)
            if _can_stand(found, field) and _is_from(found, modules.split()):
                pieces += [f"### {name}\n", _told(found), _table(found)]
    return "\n".join(piece for piece in pieces if piece)


def _is_from(found: Any, modules: Sequence[str]) -> bool:
    """Return whether something is defined in one of these modules; without any, True."""
    return not modules or bool(set(modules) & set(found.__module__.split(".")[2:]))


def _can_stand(found: Any, field: str) -> bool:
    """Return whether a run file may name this: a part, or a function that makes one."""
    if field in ("engine", "fisher", "limits") and not is_dataclass(found):
        return False
    if field == "engine" and found.__module__.endswith("limits"):
        return False
    if found is World:  # what a fleet becomes
        return False
    if inspect.isclass(found):
        return not getattr(found, "_is_protocol", False) and not inspect.isabstract(found)
    return inspect.isfunction(found)


def _told(target: Any) -> str:
    """Return the docstring without its examples and a leading "Return", by paragraphs."""
    text = as_noun(inspect.getdoc(target) or "")
    kept = [each for each in re.split(r"\n\s*\n", text) if not each.lstrip().startswith(">>>")]
    return "\n\n".join(kept) + "\n" if text else ""


def _table(target: Any) -> str:
    """Return the keys of a part as a table, or nothing if it has none."""
    try:
        entries = form_of(target).entries
    except (TypeError, ValueError):  # a class that is made by code only
        return ""
    if not entries:
        return ""
    meanings = _comments(target)
    if target.__module__.startswith(HOMES["method"]):
        meanings = _comments(fedavg) | meanings  # every method has some of its keys
        entries = {**entries, **_handed_on(target(), entries)}
    rows = [
        f"| `{name}` | {_kind(entry.kind)} | {_default(entry)} | {meanings.get(name, '')} |"
        for name, entry in entries.items()
        if not name.startswith("_")
    ]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _handed_on(method: Method, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the keys that a method hands on to its parts, with the defaults that these have."""
    trainer: Any = getattr(method.train, "base", method.train)
    aggregate: Any = method.aggregate
    known = {"lr": trainer.lr.start, "decay": trainer.lr.factor}
    for part in (trainer.optimiser, trainer, aggregate):
        known = {each.name: getattr(part, each.name) for each in fields(part)} | known
    open_ = [name for name, entry in entries.items() if entry.default is ABSENT]
    return {name: replace(entries[name], default=known[name]) for name in open_}


def _kind(kind: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin in (typing.Union, UnionType):
        return " or ".join(_kind(each) for each in inner if each is not NoneType)
    if origin is typing.Literal:
        return ", ".join(map(_plain, inner))
    if origin in (tuple, list):
        return f"list of {_kind(inner[0])}" if inner else "list"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f'`"{each.value}"`' for each in kind)
    if kind is Factory:
        return "a function or class by name"
    if kind is Path:
        return "path"
    return f"{kind.__name__}" if isinstance(kind, type) else "value"


def _default(entry: Entry) -> str:
    """Return the default of a key as a run file would have it, or in words where that is long."""
    if entry.required:
        return "must be given"
    if entry.default is None:
        return "none"
    if isinstance(entry.default, tuple):
        return _listed(entry.default)
    return _plain(entry.default)


def _listed(values: Sequence[Any]) -> str:
    if not values:
        return "empty"
    kinds = {type(each) for each in values if is_dataclass(each)}
    if len(kinds) == 1 and len(values) > 1:
        return f"{len(values)} of {_plain(values[0])}"
    if len(values) > _LISTED:
        return f"{_plain(values[0])}, {_plain(values[1])} … {_plain(values[-1])} ({len(values)})"
    return ", ".join(map(_plain, values))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Factory):
        return f"`{value.use.rpartition(':')[2]}`"
    if is_dataclass(value) or inspect.isfunction(value):
        return f"`{getattr(value, '__name__', type(value).__name__)}`"
    if isinstance(value, Mapping):
        return "empty" if not value else "…"
    return f'`"{value}"`' if isinstance(value, str) else str(value)


def _comments(target: Any) -> dict[str, str]:
    """Return what the source says beside each key: `lr: float  # what it is`.

    A key is a field of a class or of the classes that it derives from, or a parameter of a function
    or of an `__init__`. Keys that a function takes by `**name: Unpack[Keys]` are fields of `Keys`.
    """
    found: dict[str, str] = {}
    for owner in _owners(target):
        if not getattr(owner, "__module__", "").startswith(anyfleet.__name__):
            continue
        try:
            source = inspect.getsource(owner)
        except (OSError, TypeError):
            continue
        found |= dict(_beside(textwrap.dedent(source)))
    return found


def _owners(target: Any) -> Iterator[Any]:
    """Yield where the keys of something are declared, what is nearest last."""
    if typing.is_typeddict(target):  # its `__mro__` does not have what it derives from
        (node,) = ast.parse(inspect.getsource(target)).body
        for base in typing.cast("ast.ClassDef", node).bases:
            found = getattr(inspect.getmodule(target), ast.unparse(base))
            if typing.is_typeddict(found):
                yield from _owners(found)
        yield target
    elif inspect.isclass(target):
        yield from reversed(target.__mro__)
    else:
        for kind in hints_of(target).values():
            if typing.get_origin(kind) is typing.Unpack:
                yield from _owners(typing.get_args(kind)[0])
        yield target


def _beside(source: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that a class or a function declares, each with the comment on its line."""
    comments = {
        token.end[0]: token.string.lstrip("# ").replace("|", "\\|")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "noqa" not in token.string
    }
    (node,) = ast.parse(source).body
    for each in _declared(node):
        name = each.arg if isinstance(each, ast.arg) else ast.unparse(each.target)
        beside = comments.get(each.lineno) or comments.get(each.end_lineno or 0)
        if beside:
            yield name, beside


def _declared(node: ast.stmt) -> Iterator[ast.arg | ast.AnnAssign]:
    if isinstance(node, ast.FunctionDef):
        yield from (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    elif isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.AnnAssign):
                yield each
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                yield from _declared(each)


def glossary() -> str:
    """Return the glossary with its last section, the classes of the core, made anew."""
    written = GLOSSARY.read_text(encoding="utf-8").partition(_CLASSES)[0].rstrip()
    rows = [f"| `{name}` | `{module}` | {what} |" for name, module, what in core_classes()]
    head = ["| class | module | what it is |", "|---|---|---|"]
    told = (
        "`make pages` writes this table from the code. Authors of parts import the classes that "
        "they meet from `anyfleet.parts`."
    )
    return "\n".join([written, "", _CLASSES, "", told, "", *head, *rows]) + "\n"


def core_classes() -> Iterator[tuple[str, str, str]]:
    """Yield every public class of the core: its name, its module, and its first sentence."""
    for file in sorted(CORE.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                sentence = re.split(r"(?<=[.!?])\s", text)[0]
                yield node.name, f"core/{file.name}", sentence.replace("|", "\\|")


def evidence_pages() -> dict[Path, str]:
    """Return the pages about the evidence, by file."""
    library = Library(DOCS.parent)
    known = library.cells()
    standings = [
        standing_of(item, library.results(item.name), elsewhere=known) for item in library.items()
    ]
    found = {DOCS / "evidence.md": evidence_page(standings)}
    for each in standings:
        if each.item.tuning:
            there = None if each.results is None else compare(each.item, each.results)
            found[DOCS / "comparison.md"] = comparison_page(each.item, there)
            continue
        own = [other for other in standings if other.item.explains == each.item.name]
        found[DOCS / "evidence" / f"{each.item.name}.md"] = item_page(each, own)
    return found


def main() -> None:
    """Write the generated pages."""
    PAGE.write_text(page(), encoding="utf-8")
    GLOSSARY.write_text(glossary(), encoding="utf-8")
    PARTS.write_text(parts_page(), encoding="utf-8")
    for file, text in evidence_pages().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
