"""The folder of a run: what was run, every round, every order, checkpoints and the model.

    config.toml         the experiment, complete; `anyfleet run` takes it again
    environment.json    what its numbers depend on too: libraries, machine, threads
    papers.bib          BibTeX for the papers of the method and of its parts
    rounds.jsonl        one line per round: time, traffic, energy, scores (RoundRecord)
    ledger.jsonl        one line per order: device, plan, cost, failure (Ledger)
    checkpoints/        the last two states from which `anyfleet resume` goes on
    lock                held by the process that writes
    model.safetensors   the shared model: the server's parameters and buffers
    summary.json        how it ended, and what it ran on
    curves.png          if matplotlib is installed
    remarks.json        what went wrong, of a run of a study

docs/runs.md has the details. A folder belongs to one run: only `anyfleet resume` writes into it
again.

The model of a plain method is the module's state_dict: `module.load_state_dict(load_file(…))`. With
normalisation of its own for every width (`PerWidth`) there are further entries `…@…`: the name of a
tensor, then the width it belongs to. Leave them out to load the whole model.
"""

from anyfleet.store.recording import Origin, Past, Recording
from anyfleet.store.resuming import Reopened, Terms, at_its_score, finished, reopen
from anyfleet.store.run_folder import (
    claim,
    describe,
    fresh,
    read_ledger,
    read_rounds,
    read_wall_seconds,
)
from anyfleet.store.serialisation import Document, decode, encode

__all__ = [
    "Document",
    "Origin",
    "Past",
    "Recording",
    "Reopened",
    "Terms",
    "at_its_score",
    "claim",
    "decode",
    "describe",
    "encode",
    "finished",
    "fresh",
    "read_ledger",
    "read_rounds",
    "read_wall_seconds",
    "reopen",
]
