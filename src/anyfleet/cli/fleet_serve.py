"""`anyfleet fleet serve` and `status`: a run on real devices, and what it is doing."""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import typer

from anyfleet import config
from anyfleet.analysis.units import quantity
from anyfleet.cli.run import Run, folder_for, perform, resumption, why_finished
from anyfleet.cli.screen import REAL, PlainTable, console, duration, errors, show
from anyfleet.core.seam import Runtime
from anyfleet.deployment.fleet_folder import FleetFolder, open_fleet
from anyfleet.deployment.serving import (
    Served,
    Service,
    Work,
    fitting_bundle,
    keep,
    kept,
    serving,
)
from anyfleet.deployment.status import STALE, Status, read_status
from anyfleet.errors import ConfigError, Problem, StoreError
from anyfleet.experiment import (
    Experiment,
    Prepared,
    RoundResult,
    State,
    for_real_devices,
    from_source,
    prepare,
)
from anyfleet.runtime import Sequential
from anyfleet.store import Origin, Recording, Reopened, Terms, finished, reopen
from anyfleet.wire import misfits

_STALE_CODE = 3  # exit code of a status that nobody writes any more


@dataclass(frozen=True, eq=False)
class Deployed(Prepared):
    """An experiment that is played on a fleet that is served."""

    served: Served

    def play(
        self, resume: State | None = None, runtime: Runtime | None = None
    ) -> Iterator[RoundResult]:
        """Yield the result of every round, and keep in which order replies came in."""
        for result in super().play(resume, runtime or self.served.fleet):
            self.served.keep_arrivals(result.record.round_index)
            yield result


@dataclass(frozen=True, eq=False)
class Deployment:
    """A run that is about to be played on a fleet, or to be resumed from a state."""

    folder: FleetFolder
    service: Service
    prepared: Prepared
    run: Path  # its folder
    name: str
    allow: Sequence[str] = ()
    state: State | None = None
    resumed: bool = False  # then a device that stays away is not waited for without end


def serve_fleet(
    path: Path,
    file: Path,
    overrides: Sequence[str],
    *,
    allow: Sequence[str],
    out: Path | None,
    service: Service,
) -> None:
    """Play a run file on the devices of a fleet; everything is checked before anything begins."""
    folder = open_fleet(path)
    folder.check()
    source = config.read(file, overrides, allow)
    with for_real_devices():
        prepared = prepare(_deployable(from_source(source), source.allow))
    fitting_bundle(folder, prepared.task)
    run = folder_for(out, file.stem)
    origin = Origin(prepared.task, file.resolve().parent)
    named = msgspec.structs.replace(service, fleet=str(path.resolve()), run=secrets.token_hex(16))

    def begun() -> Recording:
        # A checkpoint every round: what one has settled, devices forget.
        made = Recording(run, prepared.experiment, source.allow, origin=origin, every=1)
        keep(run, named)
        return made

    deployment = Deployment(folder, named, prepared, run, file.stem, source.allow)
    _play(deployment, begun)


def resume_fleet(run: Path, terms: Terms) -> None:
    """Take over the run of a server that is gone: stop it, and go on after its last round."""
    service = kept(run)
    if service is None:
        raise StoreError(f"{run} is not the folder of a run on a real fleet.")
    if finished(run, terms):
        show(console(), why_finished(run))
        return
    folder = open_fleet(Path(service.fleet))
    folder.check()
    with for_real_devices():
        found: Reopened = reopen(run, terms)
    screen = console()
    for remark in found.remarks:
        show(screen, remark)
    state = found.past.state
    prepared = prepare(found.experiment, found.task, world=found.world, resume=state)

    def reopened() -> Recording:
        origin = Origin(found.task)
        return Recording(
            run, found.experiment, terms.allow, origin=origin, past=found.past, every=1
        )

    name = run.resolve().name
    allow = terms.allow
    deployment = Deployment(folder, service, prepared, run, name, allow, state, resumed=True)
    try:
        _play(deployment, reopened)
    finally:
        found.past.lock.release()


def _deployable(experiment: Experiment, allow: Sequence[str]) -> Experiment:
    """Return an experiment that real devices can play; raise ConfigError if they cannot."""
    found = misfits(experiment.method.job(), tuple(allow), experiment.limits)
    problems = [Problem(f"method.{path}".removesuffix("."), why) for path, why in found.items()]
    for each in experiment.details:
        if each != "classes":
            told = f'"{each}" needs the test data of the devices, which stay on them; leave it out.'
            problems.append(Problem("details", told))
    if problems:
        raise ConfigError(problems)
    return replace(experiment, engine=Sequential(), device="cpu")


def _play(deployment: Deployment, record: Callable[[], Recording]) -> None:
    """Serve the fleet, and play the run on it into its folder."""
    screen, prepared, state = console(), deployment.prepared, deployment.state
    experiment, folder, service = prepared.experiment, deployment.folder, deployment.service
    work = Work(
        prepared.task,
        experiment.limits,
        prepared.world.declared.counting,
        deployment.run,
        experiment.rounds,
        None if state is None else state.fleet,
        0 if state is None else state.record.round_index + 1,
    )
    show(screen, f"{deployment.name}: on the devices of {folder.path}")
    with serving(folder, service, work) as served:
        metrics = f"; metrics on http://127.0.0.1:{served.metrics}/metrics"
        where = folder.device_file().address
        show(screen, f"Devices reach it at {where}{metrics if served.metrics >= 0 else ''}")
        again = resumption(deployment.run, deployment.allow)
        recording = record()
        show(screen, f"Run folder: {deployment.run} (if it stops: {again})")
        # A run that had begun must not wait for ever for a device that is gone for good.
        _gather(served, service.wait_for, service.absence if deployment.resumed else math.inf)
        deployed = Deployed(experiment, prepared.task, prepared.world, prepared.execution, served)
        allow = tuple(deployment.allow)
        run = Run(deployed, recording, deployment.name, state, allow, clock=REAL)
        perform(run, screen)


def _gather(served: Served, count: int, patience: float) -> None:
    """Wait until enough devices have checked in; say whenever one more has."""
    before = -1
    for there in served.gather(count, patience):
        if there != before:
            show(errors(), served.doing)
        before = there


def show_status(path: Path, *, as_json: bool) -> int:
    """Print what the server of a fleet tells; return the exit code: 3 if it tells no more."""
    found = read_status(open_fleet(path).path)
    old = found.age > STALE
    if as_json:
        typer.echo(msgspec.json.encode({"stale": old, **msgspec.to_builtins(found)}).decode())
        return _STALE_CODE if old else 0
    screen = console()
    if old:
        show(screen, f"Not served now. This was {duration(found.age)} ago:")
    for line in _lines(found):
        show(screen, line)
    table = PlainTable()
    table.add_column("number", justify="right")
    for head in ("name", "state"):
        table.add_column(head, overflow="fold")
    for head in ("for", "samples"):
        table.add_column(head, justify="right")
    table.add_column("last trouble", overflow="fold")
    for each in found.devices:
        since = duration(max(0.0, found.now - each.since))
        row = str(each.number), each.name, each.state, since, str(each.samples), each.why
        table.add_row(*row)
    if found.devices:
        screen.print(table)
    return _STALE_CODE if old else 0


def _lines(found: Status) -> Iterator[str]:
    yield f"{found.run}: {found.doing}; {found.round_index} of {found.rounds} rounds are done"
    counted = ", ".join(f"{count} {state}" for state, count in found.counted().items())
    yield f"Devices: {counted or 'none is enrolled'}; orders under way: {found.under_way}"
    down, up = quantity(found.bytes_down, "B"), quantity(found.bytes_up, "B")
    yield f"Since this server began: {found.replies} replies, {down} down, {up} up"
    for reason, count in sorted(found.failures.items()):
        yield f"  failed: {count} × {reason}"
    for reason, count in sorted(found.sent_again.items()):
        yield f"  sent again: {count} × {reason}"
    if found.restarts:
        yield f"The SuperLink died and was started again: {found.restarts} ×"
