"""`anyfleet cache`: what the cache holds, and how to clear it."""

import typer
from msgspec import json

from anyfleet import cache
from anyfleet.errors import ConfigError, Problem
from anyfleet.names import near

_UNITS = ("bytes", "kB", "MB", "GB")


def show_cache(*, as_json: bool) -> None:
    """Print the kinds of entries: how many there are, their size, and the folder."""
    home, found = cache.home(), cache.holdings()
    if as_json:
        kinds = [{**each._asdict(), "folder": str(each.folder)} for each in found]
        content = {"folder": None if home is None else str(home), "kinds": kinds}
        typer.echo(json.format(json.encode(content), indent=2).decode())
        return
    if home is None:
        typer.echo(f"There is no cache: the variable {cache.VARIABLE} says so.")
        return
    typer.echo(f"The cache is in {home}.")
    for kind, entries, size, _ in found:
        typer.echo(f"  {kind:<9} {entries:>6}  {_told(size):>9}  {cache.KINDS[kind]}")
    typer.echo("To remove it: anyfleet cache clear [KIND]. Only time is lost, except by `engines`:")
    typer.echo("an engine that is measured again may be another, with other last bits.")


def clear_cache(kind: str | None) -> None:
    """Remove all entries, or those of one kind, and say how many they were."""
    if kind is not None and kind not in cache.KINDS:
        known = ", ".join(cache.KINDS)
        told = near(kind, cache.KINDS) or "."
        raise ConfigError([Problem(kind, f"is no kind of entry ({known}){told}")])
    removed = cache.clear(kind)
    typer.echo(f"Removed entries: {removed.entries}, {_told(removed.size)}.")


def _told(size: float) -> str:
    """Return bytes as people write them."""
    unit = 0
    while size >= 1000 and unit + 1 < len(_UNITS):
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
