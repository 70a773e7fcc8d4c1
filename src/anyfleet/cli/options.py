"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="A run file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Changes to the file, such as rounds=5 or method.lr=0.1.",
        show_default=False,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE",
        help="A package that you trust, whose code may be named and run; repeat for more.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="The folder to write; must be new or empty.", show_default="a new one in runs/"
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        min=1,
        help="Threads of torch. The same seed gives the same bytes only with the same number.",
    ),
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE... [KEY=VALUE]...",
        help="Run files (TOML), and changes to all of them.",
        show_default=False,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each file.")]
Target = Annotated[
    float | None,
    typer.Option(
        help="The accuracy (0 to 1), or value of the task's own metric, whose cost is compared.",
        show_default="the best that all runs reach",
    ),
]
Width = Annotated[
    float | None,
    typer.Option(
        help="The width at which it is to be reached, one of the files' widths.",
        show_default="the first",
    ),
]
Equal = Annotated[
    list[str] | None,
    typer.Option(
        metavar="flops|time|energy|bytes",
        help="Also compare what runs had learned for the same amount of this; repeat for more.",
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        help="That amount, with a single --equal: FLOP, simulated seconds, joules or bytes.",
        show_default="the most that all runs spend",
    ),
]
Every = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Server steps from one checkpoint to the next; 0: none, the run cannot be resumed.",
        show_default="as often as 5 % of the time allow",
    ),
]
