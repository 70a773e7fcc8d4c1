"""The command line: commands, their arguments and options. What they do is in the modules beside.

Torch takes seconds to import, so that a command imports its work only when it is called.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import anyfleet
from anyfleet.cli.importing import importing
from anyfleet.errors import AnyfleetError, AnyfleetWarning, BadReturn, ConfigError
from anyfleet.stopping import Terminated, exit_code, terminable
from anyfleet.tracebacks import note, raised_inside


class Commands(TyperGroup):
    """The commands; an error that Anyfleet raises on purpose becomes a message.

    Other errors keep their traceback, and so does whatever a user's part, data set, loss or metric
    raises. Warnings of Anyfleet become notes, each printed once.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminable(), warnings.catch_warnings():
                warnings.showwarning = _noted(warnings.showwarning)
                return super().invoke(ctx)
        except (AnyfleetError, FileExistsError) as error:
            if raised_inside(error) and not isinstance(error, BadReturn):
                raise
            _tell(error)
            ctx.exit(2 if isinstance(error, FileExistsError) else 1)
        except KeyboardInterrupt as stop:
            typer.echo("Stopped.", err=True)
            ctx.exit(exit_code(stop))


def _printable(message: object) -> str:
    """Return a text with control characters spelt out: a file must not control the terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1]
        for letter in str(message)
    )


def _noted(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Return what prints warnings as notes; those of other packages are shown as before."""
    told: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if not issubclass(category, AnyfleetWarning):
            otherwise(message, category, *rest, **more)
        elif str(message) not in told:
            told.add(str(message))
            typer.echo(f"note: {_printable(message)}", err=True)

    return show


def _tell(error: Exception) -> None:
    """Print what went wrong, and how to go on, to the standard error."""
    if isinstance(error, ConfigError):
        count = len(error.problems)
        typer.echo(f"{count} problem{'s' * (count > 1)}:", err=True)
        for problem in error.problems:
            typer.echo(f"  {_printable(problem)}", err=True)
    else:
        typer.echo(f"Error: {_printable(error)}", err=True)
    if line := note(error):
        typer.echo(line, err=True)


app = typer.Typer(
    cls=Commands,
    help="Federated learning on unequal devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anyfleet {anyfleet.__version__}")
        raise typer.Exit


# --- options that several commands share --------------------------------------------------------

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
        help="A package that you trust, whose code may be used; repeat for more.",
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


def _device(default: str) -> Any:
    """Return the option that names a device of torch."""
    return typer.Option(
        metavar="auto|cpu|cuda|cuda:1",
        help="Device of torch that trains; auto: a GPU where there is one.",
        show_default=default,
    )


def _engine(default: str) -> Any:
    """Return the option that names an engine."""
    return typer.Option(
        metavar="auto|Sequential|Stacked|…",
        help="How orders are carried out; auto: as is the fastest here, for all runs alike.",
        show_default=default,
    )


Device = Annotated[str | None, _device("as the file says")]
Engine = Annotated[str | None, _engine("as the file says")]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE... [KEY=VALUE]...",
        help="Run files (TOML), and changes to all of them.",
        show_default=False,
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each file, with seeds from its own on.")]
StudyOut = Annotated[
    Path | None,
    typer.Option(
        help="The folder to write; must be new or empty, or hold this study, which goes on.",
        show_default="a new one in runs/",
    ),
]
Jobs = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Runs at once on a CPU, each in a process; auto: as there are cores for. No result "
        "depends on it.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print lines of JSON instead: rounds, runs and the result.")
]
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
        help="The width at which the target is to be reached, one of the files' widths.",
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
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="The metric to compare by: accuracy, loss, or another one of the task.",
        show_default="that of the task",
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="The run from which differences are taken, by the name of its file without .toml.",
        show_default="the first",
    ),
]
Over = Annotated[
    list[str] | None,
    typer.Option(
        "--x",
        metavar="rounds|time|energy|bytes|flops",
        help="A horizontal axis of the picture; repeat for more.",
        show_default="time and bytes",
    ),
]
Every = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Rounds from one checkpoint to the next; 0: none, the run cannot be resumed.",
        show_default="as often as 5 % of the time allows",
    ),
]


# --- commands -----------------------------------------------------------------------------------


@app.callback()
def front(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run federated learning on unequal devices."""


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every method.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of data, fleet, cohorts and training.")] = 0,
    references: Annotated[
        bool, typer.Option("--references", help="Also train alone, and with all data in one place.")
    ] = False,
    out: StudyOut = None,
    threads: Threads = 1,
    jobs: Jobs = "auto",
    device: Annotated[str | None, _device("auto")] = None,
    engine: Annotated[str | None, _engine("auto")] = None,
    json: Json = False,
) -> None:
    """Train twenty unequal devices with six methods, from FedAvg to AnycostFL, and compare.

    Takes about a quarter of a minute; with --references a minute or two more.
    """
    with importing():
        from anyfleet.cli.demo import demonstrate
        from anyfleet.cli.run import Means
        from anyfleet.cli.study import Manner, jobs_of

    means, manner = Means(threads, device, engine), Manner(out, jobs_of(jobs), json)
    demonstrate(rounds=rounds, seed=seed, references=references, means=means, manner=manner)


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    allow: Allow = None,
    *,
    out: Out = None,
    threads: Threads = 1,
    device: Device = None,
    engine: Engine = None,
    checkpoint_every: Every = None,
    json: Json = False,
) -> None:
    """Run an experiment and write a run folder. Ctrl-C or SIGTERM keeps everything; see `resume`.

    FILE is a run file (TOML); KEY=VALUE changes it, such as rounds=5 or method.lr=0.1.
    """
    with importing():
        from anyfleet.cli.run import Means, Writing, run_file

    means, writing = Means(threads, device, engine), Writing(out, checkpoint_every, json)
    run_file(file, overrides or [], allow=allow or [], means=means, writing=writing)


@app.command()
def resume(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run or a study.", show_default=False),
    ],
    *,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds to have in all.", show_default="as planned"),
    ] = None,
    not_identical: Annotated[
        bool,
        typer.Option(
            "--not-identical", help="Also if numbers can differ from the uninterrupted run."
        ),
    ] = False,
    allow: Allow = None,
    checkpoint_every: Every = None,
    jobs: Jobs = "auto",
    json: Json = False,
) -> None:
    """Resume a run or a study that was stopped or killed, as if nothing had happened.

    RUN is the folder that `anyfleet run`, `compare`, `sweep`, `demo` or `fleet serve` wrote; a run
    of the last goes on with the devices that come back. Threads and precision are as they were;
    anything else that has changed since is listed, and needs --not-identical.
    """
    with importing():
        from anyfleet.cli.resume import resume_folder
        from anyfleet.cli.study import Manner, jobs_of
        from anyfleet.store import Terms

    terms = Terms(rounds, tuple(allow or ()), not_identical)
    resume_folder(folder, Manner(folder, jobs_of(jobs), json, terms), every=checkpoint_every)


@app.command()
def validate(file: File, overrides: Overrides = None, allow: Allow = None) -> None:
    """Check a run file: print all its problems at once, or its method and the sizes of its model.

    FILE is a run file (TOML); KEY=VALUE changes it, such as rounds=5 or method.lr=0.1.
    """
    with importing():
        from anyfleet.cli.validate import validate_file

    validate_file(file, overrides or [], allow=allow or [])


@app.command()
def compare(  # noqa: PLR0913 - its options
    context: typer.Context,
    files: Words,
    *,
    seeds: Seeds = 3,
    target: Target = None,
    width: Width = None,
    equal: Equal = None,
    budget: Budget = None,
    metric: MetricName = None,
    reference: Reference = None,
    over: Over = None,
    allow: Allow = None,
    out: StudyOut = None,
    threads: Threads = 1,
    jobs: Jobs = "auto",
    device: Device = None,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Run every file with several seeds: tables of means with 95 % intervals, and a picture.

    FILE is a run file (TOML); KEY=VALUE, such as rounds=5, changes all of them. Seeds count up
    from each file's own. The tables: where runs ended, what a target cost, and with --equal what
    they had learned for the same FLOP, simulated time, energy or traffic; each with the differences
    from the first run, or from --reference, over the same seeds. Stopped or killed, the same
    command with the same --out goes on, and so does `resume`.
    """
    with importing():
        from anyfleet.analysis.comparison import Goal
        from anyfleet.cli.compare import compare_files, options_given
        from anyfleet.cli.report import axes
        from anyfleet.cli.run import Means
        from anyfleet.cli.study import Manner, jobs_of, resources
        from anyfleet.store import Terms

    goal = Goal(target, width, resources(equal or []), budget, metric, reference, axes(over or []))
    terms = Terms(allow=tuple(allow or ()))
    means, manner = Means(threads, device, engine), Manner(out, jobs_of(jobs), json, terms)
    given = options_given(context)
    compare_files(files, seeds=seeds, means=means, goal=goal, manner=manner, given=given)


@app.command()
def sweep(  # noqa: PLR0913 - its options
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... KEY=[VALUE, ...]...",
            help="Run files (TOML), lists of values to try, and changes to all of them.",
            show_default=False,
        ),
    ],
    *,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each combination.", show_default="3, or seed=[…]"),
    ] = None,
    target: Target = None,
    width: Width = None,
    equal: Equal = None,
    budget: Budget = None,
    metric: MetricName = None,
    reference: Reference = None,
    over: Over = None,
    allow: Allow = None,
    out: StudyOut = None,
    threads: Threads = 1,
    jobs: Jobs = "auto",
    device: Device = None,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Run files with every combination of settings, each with several seeds, and compare.

    FILE is a run file (TOML). 'method.lr=[0.01, 0.1]' tries both values; several such lists make
    all combinations. KEY=VALUE without a list changes all runs. A setting that is itself a list
    needs a list of lists: 'widths=[[1.0], [1.0, 0.5]]'. 'seed=[1, 2]' names the seeds. Stopped or
    killed, the same command with the same --out goes on, and so does `resume`.
    """
    with importing():
        from anyfleet.analysis.comparison import Goal
        from anyfleet.cli.compare import options_given
        from anyfleet.cli.report import axes
        from anyfleet.cli.run import Means
        from anyfleet.cli.study import Manner, jobs_of, resources
        from anyfleet.cli.sweep import sweep_files
        from anyfleet.store import Terms

    goal = Goal(target, width, resources(equal or []), budget, metric, reference, axes(over or []))
    terms = Terms(allow=tuple(allow or ()))
    means, manner = Means(threads, device, engine), Manner(out, jobs_of(jobs), json, terms)
    given = options_given(context)
    sweep_files(files, seeds=seeds, means=means, goal=goal, manner=manner, given=given)


@app.command()
def reproduce(
    item: Annotated[
        str | None,
        typer.Argument(
            metavar="ITEM",
            help="A table or figure of a document, such as thesis/table_3_1.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Options of the engine: engine.precision=tf32."
        ),
    ] = None,
    *,
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Show all items, or those whose names begin with ITEM: what each takes, "
            "where it stands.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Play small runs for a look; write no result file.")
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Play only runs that the result file lacks.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each cell.", show_default="as the item says; quick: 2"),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Play only this case; repeat for more.", show_default="all"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Play only this method; repeat for more.", show_default="all"),
    ] = None,
    out: StudyOut = None,
    threads: Threads = 1,
    jobs: Jobs = "auto",
    device: Device = None,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Run a table or figure of a document, and set our numbers beside the document's.

    All runs are one study that can be stopped and gone on with by the same command. What comes of
    it is written into evidence/, from which docs/evidence.md is made. It is run in a copy of the
    project; data sets are read as `anyfleet run` reads them.
    """
    if item is None and not list_:
        raise typer.BadParameter("name one ITEM, or ask for the --list of all.")
    with importing():
        from anyfleet.cli.reproduce import Asked, list_items, reproduce_item
        from anyfleet.cli.study import Manner, jobs_of

    if list_ or item is None:
        list_items(item or "", json=json)
        return
    if missing and quick:
        raise typer.BadParameter("A --quick look has no result file: leave --missing out.")
    asked = Asked(
        seeds=seeds,
        cases=tuple(case or ()),
        methods=tuple(method or ()),
        quick=quick,
        missing=missing,
        threads=threads,
        device=device,
        engine=engine,
        changes=tuple(changes or ()),
    )
    reproduce_item(item, asked, Manner(out, jobs_of(jobs), json))


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to show in full.", show_default=False)
    ] = None,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="List the formulas instead: section and signature.")
    ] = False,
    advise: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Name methods to try for the fleet that a run file (TOML) describes.",
            show_default=False,
        ),
    ] = None,
    allow: Allow = None,
) -> None:
    """List the methods with their papers, show one in full, list formulas, or advise.

    NAME is a method of the list, such as heterofl: its parameters and parts are shown. Advice comes
    from the comparison of all methods (docs/comparison.md): those that did best in the cases most
    like the fleet, with the rows that say so.
    """
    with importing():
        from anyfleet.cli.advice import show_advice
        from anyfleet.cli.methods import list_formulas, list_methods, show_method

    if formulas and name is not None:
        raise typer.BadParameter("--formulas lists all formulas: leave NAME out.")
    if advise is not None and (formulas or name is not None):
        raise typer.BadParameter("--advise answers for a fleet: leave NAME and --formulas out.")
    if advise is not None:
        show_advice(advise, tuple(allow or ()))
    elif formulas:
        list_formulas()
    elif name is None:
        list_methods()
    else:
        show_method(name)


@app.command()
def parts(
    slot: Annotated[
        str | None,
        typer.Argument(
            help="A slot, such as select or uplink; all without one.", show_default=False
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/parts.md instead.")
    ] = False,
) -> None:
    """List the parts that can fill the slots of a method and of a run file.

    SLOT is one of them, such as select or uplink: only its parts are listed.
    """
    with importing():
        from anyfleet.cli.parts import list_parts, parts_page

    if markdown and slot is not None:
        raise typer.BadParameter("--markdown prints the page of all parts: leave SLOT out.")
    if markdown:
        typer.echo(parts_page(), nl=False)
    else:
        list_parts(slot)


@app.command()
def cite(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WHAT...", help="Run folders, run files (TOML), names of methods."),
    ],
    allow: Allow = None,
) -> None:
    """Print BibTeX for what a run used: methods, their parts, and Anyfleet itself."""
    with importing():
        from anyfleet.cli.cite import cite_all

    cite_all(words, allow=allow or [])


fleet = typer.Typer(
    help="Show a simulated fleet, measure this machine as a row of one, or make a real fleet.",
    no_args_is_help=True,
)
app.add_typer(fleet, name="fleet")

FleetDir = Annotated[
    Path,
    typer.Argument(metavar="FLEET", help="The folder of a real fleet.", show_default=False),
]
DeviceName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a device.", show_default=False)
]
Days = Annotated[
    int, typer.Option(min=1, max=3650, help="Days for which the server's certificate is valid.")
]


@fleet.command()
def init(
    folder: FleetDir,
    file: File,
    overrides: Overrides = None,
    *,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where devices reach the server.", show_default=False
        ),
    ],
    days: Days = 825,
    allow: Allow = None,
) -> None:
    """Make the folder of a real fleet: certificates, a roster, and what every device gets.

    FLEET is the folder to make; it must be new or empty. FILE is a run file (TOML) with the model
    that the fleet trains; KEY=VALUE changes it.
    """
    with importing():
        from anyfleet.cli.fleet_server import init_fleet

    init_fleet(folder, file, overrides or [], address=address, days=days, allow=allow or [])


@fleet.command()
def add(
    folder: FleetDir,
    name: DeviceName,
    *,
    key: Annotated[
        Path | None,
        typer.Option(
            help="The device's device.pub; - is the standard input.",
            show_default="the standard input",
        ),
    ] = None,
) -> None:
    """Add a device to a real fleet by its public key, also while the fleet is served.

    NAME is a name for the device. Its public key is in device.pub, which `anyfleet device join`
    makes there.
    """
    with importing():
        from anyfleet.cli.fleet_server import add_device

    add_device(folder, name, key)


@fleet.command()
def remove(folder: FleetDir, name: DeviceName) -> None:
    """Revoke a device of a real fleet for ever, also while the fleet is served.

    NAME may be enrolled again later, with a new key and as a new device.
    """
    with importing():
        from anyfleet.cli.fleet_server import remove_device

    remove_device(folder, name)


@fleet.command(name="list")
def list_(
    folder: FleetDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the devices that were ever enrolled in a real fleet."""
    with importing():
        from anyfleet.cli.fleet_server import list_devices

    list_devices(folder, as_json=as_json)


@fleet.command()
def renew(folder: FleetDir, *, days: Days = 825) -> None:
    """Replace the certificate of a real fleet's server; devices need not be told."""
    with importing():
        from anyfleet.cli.fleet_server import renew_server

    renew_server(folder, days=days)


@fleet.command()
def preflight(
    folder: FleetDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Check a real fleet's server: files, certificates, ports, clock, disk, versions.

    The exit code is 0 if all is well, 1 if something failed, and 3 if there are warnings only.
    """
    with importing():
        from anyfleet.cli.fleet_server import check_server

    raise typer.Exit(check_server(folder, as_json=as_json))


@fleet.command()
def bundle(
    folder: FleetDir, file: File, overrides: Overrides = None, *, allow: Allow = None
) -> None:
    """Write what every device gets anew, for another model or another version of Anyfleet.

    FILE is a run file (TOML) with the model; KEY=VALUE changes it. Devices need the new folder
    `device` before they can take part.
    """
    with importing():
        from anyfleet.cli.fleet_server import renew_bundle

    renew_bundle(folder, file, overrides or [], allow or [])


@fleet.command()
def serve(
    folder: FleetDir,
    file: File,
    overrides: Overrides = None,
    *,
    wait_for: Annotated[
        int,
        typer.Option(
            min=0,
            help="Devices that must have checked in before the run begins.",
            show_default="all that are enrolled",
        ),
    ] = 0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the reply to an order.")
    ] = 600.0,
    absence: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds that a device with an order may be offline."),
    ] = 45.0,
    metrics: Annotated[
        int,
        typer.Option(
            min=-1,
            max=65535,
            help="Port on loopback for Prometheus; -1: none.",
            show_default="any free one",
        ),
    ] = 0,
    allow: Allow = None,
    out: Out = None,
) -> None:
    """Play a run file on the devices of a real fleet; `anyfleet resume` takes it up again.

    FILE is a run file (TOML) with the model that the fleet was made for; KEY=VALUE changes it, such
    as rounds=5. Its task is needed here for the test set only: devices have data of their own.
    """
    with importing():
        from anyfleet.cli.fleet_serve import serve_fleet
        from anyfleet.deployment.serving import Service

    service = Service(
        fleet="",
        run="",
        wait_for=wait_for,
        metrics=metrics,
        order_patience=patience,
        absence=absence,
    )
    serve_fleet(folder, file, overrides or [], allow=allow or [], out=out, service=service)


@fleet.command()
def status(
    folder: FleetDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what a real fleet is doing: its run, its devices, what failed and why.

    The exit code is 0 while the fleet is served, and 3 if what is shown is old.
    """
    with importing():
        from anyfleet.cli.fleet_serve import show_status

    raise typer.Exit(show_status(folder, as_json=as_json))


@fleet.command()
def practise(
    file: File,
    overrides: Overrides = None,
    *,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many devices.", show_default="as the run file says"),
    ] = None,
    identical: Annotated[
        bool,
        typer.Option(
            "--identical", help="Equal threads and given conditions: must match the simulator."
        ),
    ] = False,
    allow: Allow = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder to keep everything in.", show_default="a temporary one"),
    ] = None,
) -> None:
    """Practise a run on a real fleet on this machine, and compare it with the simulator.

    Server and devices are processes of their own, on loopback, with certificates and keys. FILE is
    a run file (TOML); KEY=VALUE changes it. With --identical the exit code is 1 unless the model is
    that of the simulator, bit for bit.
    """
    with importing():
        from anyfleet.cli.fleet_practise import practise_file

    told = practise_file(
        file, overrides or [], devices=devices, identical=identical, allow=allow or [], out=out
    )
    raise typer.Exit(told)


@fleet.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A fleet with a name (levels, testbed, cell, lossy …), or a file with [fleet].",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    *,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many devices, for a fleet without a fixed size.",
            show_default="those of the file's task, or 20",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.")] = 0,
    allow: Allow = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A picture (PNG) to write.", show_default="none"),
    ] = None,
) -> None:
    """Show the devices of a fleet: tables of its groups and, with --out, a picture.

    NAME is a fleet with a name (levels, testbed, cell, lossy …), FILE a file (TOML) with [fleet].
    KEY=VALUE changes it, such as fleet.devices=100 for a fleet with that parameter.
    """
    with importing():
        from anyfleet.cli.fleet import Look, show_fleet

    look = Look(devices, seed, out)
    show_fleet(name, overrides or [], allow=allow or [], look=look)


@fleet.command()
def profile(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A run file (TOML) whose model is measured; without one, three usual networks.",
            show_default=False,
        ),
    ] = None,
    *,
    name: Annotated[str, typer.Option(help="Name of the group of devices.")] = "this machine",
    batch: Annotated[int, typer.Option(min=1, help="Samples in a local step.")] = 16,
    allow: Allow = None,
    out: Annotated[
        Path | None, typer.Option(help="A fleet file (TOML) to which the row is appended.")
    ] = None,
) -> None:
    """Measure this machine on real sub-models: speed, overhead and memory, as a row of a fleet.

    FILE is a run file (TOML) whose model is measured; without one, three usual networks are.
    """
    with importing():
        from anyfleet.cli.fleet import profile_machine

    profile_machine(out, file=file, allow=allow or [], batch=batch, name=name)


device = typer.Typer(help="Join a real fleet with this machine.", no_args_is_help=True)
app.add_typer(device, name="device")

DeviceDir = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="This device's copy of the folder device/ of the fleet.",
        show_default=False,
    ),
]
DeviceData = Annotated[
    str,
    typer.Option(
        metavar="MODULE:FACTORY|FILE.npz",
        help="Where its data are: a function without arguments that makes them, or a file with "
        "arrays x, y and perhaps test_x, test_y. They never leave the device.",
        show_default=False,
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="BYTES",
        help="Memory that orders may take beside the program and its data.",
        show_default="what is free",
    ),
]
Nice = Annotated[
    int, typer.Option(min=0, max=19, help="Niceness: the higher, the more others come first.")
]
GivenConditions = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A JSON file with conditions to report instead of measured ones.",
        show_default="they are measured",
    ),
]
Level = Annotated[int, typer.Option(min=0, max=255, help="Capability class, 0 the strongest.")]
BitRate = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="Bits per second of the link to use at most, each way.",
        show_default="all it has",
    ),
]
ColumnWidth = Annotated[
    float,
    typer.Option(
        min=0.004, max=1.0, help="Models cross its link in columns of this width; 1: in one piece."
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Leave when a run has ended.")]
DeviceJson = Annotated[bool, typer.Option("--json", help="Write the log as lines of JSON.")]


@device.command()
def join(
    directory: DeviceDir,
    *,
    data: DeviceData,
    allow: Allow = None,
    threads: Threads = 1,
    memory: DeviceMemory = None,
    nice: Nice = 0,
    given_conditions: GivenConditions = None,
    level: Level = 0,
    column_width: ColumnWidth = 1.0,
    bit_rate: BitRate = None,
    once: Once = False,
    json: DeviceJson = False,
) -> None:
    """Make this machine a device of a fleet that trains on its own data, and stay.

    DIR is a copy of the folder device/ that the server made. The key of the device is made there;
    the server must be given its public half, device.pub. The log says in four words what the device
    does: work, wait, retry, done. Ctrl-C or SIGTERM ends it; whatever it was at, it goes on when it
    is started again.
    """
    from anyfleet.cli.device import Joining, join_fleet

    packages = tuple(allow or ())
    joining = Joining(directory, data, packages, threads, memory, nice, given_conditions)
    joining = replace(joining, level=level, column_width=column_width, bit_rate=bit_rate)
    joining = replace(joining, once=once, json=json)
    try:
        join_fleet(joining)
    except Terminated:  # a service that is stopped has not failed
        raise typer.Exit(0) from None


@device.command()
def unit(
    directory: DeviceDir,
    *,
    data: DeviceData,
    allow: Allow = None,
    threads: Threads = 1,
    memory: DeviceMemory = None,
    nice: Nice = 0,
    given_conditions: GivenConditions = None,
    level: Level = 0,
    column_width: ColumnWidth = 1.0,
    bit_rate: BitRate = None,
) -> None:
    """Print a systemd unit that runs `anyfleet device join` with these options, always.

    A module that --data names is looked for in the present working directory.
    """
    from anyfleet.cli.device import Joining, unit_text

    packages = tuple(allow or ())
    joining = Joining(directory, data, packages, threads, memory, nice, given_conditions)
    joining = replace(joining, level=level, column_width=column_width, bit_rate=bit_rate)
    program = (sys.executable, "-m", "anyfleet.cli")
    typer.echo(unit_text(joining, program, Path.cwd()), nl=False)


cache = typer.Typer(help="Show what is kept to start faster, or clear it.")
app.add_typer(cache, name="cache")


@cache.callback(invoke_without_command=True)
def kept(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what is kept to start faster, or clear it.

    The variable ANYFLEET_CACHE names another folder; with ANYFLEET_CACHE=off nothing is kept.
    """
    from anyfleet.cli.cache import show_cache

    if context.invoked_subcommand is None:
        show_cache(as_json=as_json)


@cache.command()
def clear(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="What to remove: engines, images, networks or prices; all without it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Remove what is kept: all of it, or one KIND."""
    from anyfleet.cli.cache import clear_cache

    clear_cache(kind)


def main() -> None:
    """Run the command line."""
    app()
