"""A wall clock that can be set back, for single processes and without being root.

It needs Linux and a C compiler.

A small library is loaded into a process before the C library. Whoever asks for the wall clock (so
Python, OpenSSL, SQLite) gets the time of the system plus the seconds that stand in a file. The
monotonic clock is as it is: nobody can set it.
"""

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    char text[32];
    const char *name = getenv("FLEET_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    return atol(text);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += ahead();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def compiler() -> str | None:
    """Return the path of the C compiler; None without one."""
    return shutil.which("cc")


def set_clock(file: Path, ahead: int) -> None:
    """Set the clock so many seconds ahead; at no moment does it show another time."""
    draft = file.with_name("clock.new")
    draft.write_text(str(ahead))
    draft.replace(file)


def clock(folder: Path, file: Path) -> dict[str, str]:
    """Return the environment of processes whose clock a file sets; empty without a compiler."""
    found = compiler()
    if found is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    words = [found, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(words, check=True)  # noqa: S603 - our own command
    set_clock(file, 0)
    return {"LD_PRELOAD": str(library), "FLEET_CLOCK": str(file)}
