"""A run on disk: what was run, every step as it happened, checkpoints, the model, the end.

    config.toml         the experiment, complete; `anyfleet run` takes it again
    environment.json    what its numbers depend on besides: libraries, machine, threads
    papers.bib          BibTeX for the papers of the method and of its parts
    rounds.jsonl        one line per server step: time, traffic, energy, scores (study.Point)
    ledger.jsonl        one line per order: who, what it cost, why it was lost (ledger.Entries)
    checkpoints/        the last two states from which `anyfleet resume` goes on
    lock                held by the process that writes
    model.safetensors   the shared model: the server's parameters and buffers
    summary.json        how it ended, and what it ran on
    curves.png          when matplotlib is there

docs/runs.md has all about it. A folder belongs to one run: only resuming writes into it again.

The model of a plain method is the module's state_dict: `module.load_state_dict(load_file(…))`. With
normalisation of its own for every width (`norm.PerWidth`) there are further entries `…@…`: the
name of a tensor, then the width it belongs to. Leave them out to load the whole model.
"""

from anyfleet.store.decode import decode
from anyfleet.store.encode import Document, encode
from anyfleet.store.recording import Origin, Past, Recording, claim, fresh
from anyfleet.store.resuming import Reopened, Terms, finished, reopen
from anyfleet.store.run_folder import describe, read_ledger, read_rounds

__all__ = [
    "Document",
    "Origin",
    "Past",
    "Recording",
    "Reopened",
    "Terms",
    "claim",
    "decode",
    "describe",
    "encode",
    "finished",
    "fresh",
    "read_ledger",
    "read_rounds",
    "reopen",
]
