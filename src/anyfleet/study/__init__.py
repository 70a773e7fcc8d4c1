"""Studies: several experiments with several seeds, in one folder that can be gone on with.

    study = settle(Study(cells_of(Sources(files, settings=settings)))).study
    state_file.record(folder, study)
    for event in conduct(folder, study, Means(jobs=2)):
        ...
    runs, warnings = results(folder, study)

The folder holds `study.toml`, which says what the study is, and the folders of all runs. What is
finished is read from there, what was interrupted is resumed, and what is missing is played.
"""

from anyfleet.study import state_file
from anyfleet.study.conducting import Means, Standing, conduct, processes, results, standing
from anyfleet.study.plan import Cell, PlannedRun, Study
from anyfleet.study.playing import stop
from anyfleet.study.settling import Settled, assemble_all, settle
from anyfleet.study.sources import Setting, Sources, cells_of, settings_of

__all__ = [
    "Cell",
    "Means",
    "PlannedRun",
    "Setting",
    "Settled",
    "Sources",
    "Standing",
    "Study",
    "assemble_all",
    "cells_of",
    "conduct",
    "processes",
    "results",
    "settings_of",
    "settle",
    "standing",
    "state_file",
    "stop",
]
