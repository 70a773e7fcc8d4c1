"""The log of a device: four words that say what it does, and why.

`work`: an order is carried out. `wait`: there is nothing to do. `retry`: the server cannot be
reached, or does not know the device; it says when the next try is. `done`: the run has ended.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TextIO

Word = Literal["work", "wait", "retry", "done"]


@dataclass
class Log:
    """Lines on a stream, one each time the word or its reason changes; JSON lines if asked for."""

    out: TextIO
    as_json: bool = False
    _last: tuple[str, str] = field(default=("", ""), init=False)

    def say(self, word: Word, reason: str) -> None:
        """Write what the device does now, unless that is what was written last."""
        if (word, reason) != self._last:
            self._last = word, reason
            self._line(word, reason)

    def note(self, text: str) -> None:
        """Write what the owner of the device should know, such as a traceback."""
        for line in text.splitlines():
            self._line("note", line)

    def _line(self, word: str, reason: str) -> None:
        when = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        if self.as_json:
            line = json.dumps({"time": when, "word": word, "reason": reason})
        else:
            # What a server sent must not control the terminal.
            shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
            line = f"{when} {word:5} {shown}".rstrip()
        self.out.write(f"{line}\n")
        self.out.flush()
