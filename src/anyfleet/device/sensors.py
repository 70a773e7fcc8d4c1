"""What the system tells about this machine: battery, temperature, power, frequencies, load.

Linux tells it in files below /sys; an NVIDIA Jetson also by its program `tegrastats`. What is not
told is None.
"""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PER_WATT_HOUR = 3600.0  # joules
_TEGRA_SECONDS = 3.0  # that tegrastats may take for its first line
_TEGRA_POWER = re.compile(r"\b(?:VDD_IN|POM_5V_IN)\s+(\d+)(?:mW)?/")
_TEGRA_HEAT = re.compile(r"@(-?\d+(?:\.\d+)?)C\b")


@dataclass(frozen=True)
class Sensors:
    """Readings of this machine at one moment; None: nobody tells."""

    battery: float | None = None  # joules left
    temperature: float | None = None  # degrees Celsius, the hottest place
    power: float | None = None  # watts that the whole machine takes
    slowest: float | None = None  # lowest frequency, cycles per second
    fastest: float | None = None  # highest frequency, cycles per second


def read_sensors(root: Path = Path("/sys"), program: str = "tegrastats") -> Sensors:
    """Return what the files below `root`, and the program where there is one, tell now."""
    line = _tegra_line(program)
    heats = [*_temperatures(root), *map(float, _TEGRA_HEAT.findall(line))]
    watts = [float(found) / 1e3 for found in _TEGRA_POWER.findall(line)] or list(_powers(root))
    lowest = [*_frequencies(root, "cpuinfo_min_freq")]
    highest = [*_frequencies(root, "cpuinfo_max_freq")]
    return Sensors(
        battery=_battery(root),
        temperature=max(heats, default=None),
        power=max(watts, default=None),
        slowest=max(lowest, default=None),
        fastest=max(highest, default=None),
    )


def load_factor() -> float:
    """Return how many times longer everything takes because more programs run than have cores."""
    with suppress(OSError, AttributeError):  # Windows does not tell
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return 1.0


def _battery(root: Path) -> float | None:
    """Return the joules in all batteries of the machine; None without one."""
    found = [joules for each in _batteries(root) if (joules := _joules(each)) is not None]
    return sum(found) if found else None


def _batteries(root: Path) -> Iterator[Path]:
    for each in sorted((root / "class/power_supply").glob("*")):
        # Mice and headsets have a battery of their own, whose scope is a device.
        if _text(each / "type") == "Battery" and _text(each / "scope") != "Device":
            yield each


def _joules(battery: Path) -> float | None:
    energy = _number(battery / "energy_now")  # microwatt-hours
    if energy is not None:
        return energy * 1e-6 * _PER_WATT_HOUR
    charge, volts = _number(battery / "charge_now"), _number(battery / "voltage_now")
    if charge is None or volts is None:
        return None
    return charge * 1e-6 * volts * 1e-6 * _PER_WATT_HOUR


def _temperatures(root: Path) -> Iterator[float]:
    places = (root / "class/thermal").glob("thermal_zone*/temp")
    others = (root / "class/hwmon").glob("hwmon*/temp*_input")
    for file in (*places, *others):
        if (value := _number(file)) is not None:
            yield value / 1e3


def _powers(root: Path) -> Iterator[float]:
    """Yield the watts that batteries give and that meters on the board show."""
    for file in (root / "class/hwmon").glob("hwmon*/power*_*"):
        if file.name.endswith(("_input", "_average")) and (value := _number(file)) is not None:
            yield value * 1e-6
    for each in _batteries(root):
        if _text(each / "status") == "Discharging":
            power = _number(each / "power_now")
            if power is not None:
                yield power * 1e-6


def _frequencies(root: Path, name: str) -> Iterator[float]:
    for file in (root / "devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}"):
        if (value := _number(file)) is not None:
            yield value * 1e3


def _tegra_line(program: str) -> str:
    """Return the first line of tegrastats; "" where there is no such program."""
    path = shutil.which(program)
    if path is None:
        return ""
    asked = [path, "--interval", "100"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:  # noqa: S603 - a program of the system
        watch = threading.Timer(_TEGRA_SECONDS, running.kill)
        watch.start()
        out = running.stdout.readline() if running.stdout is not None else b""
        running.kill()  # it would go on for ever
        watch.cancel()
    return out.decode(errors="replace")


def _number(file: Path) -> float | None:
    text = _text(file)
    with suppress(ValueError):
        return float(text)
    return None


def _text(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8").strip()
    return ""
