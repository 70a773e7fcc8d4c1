"""The roster of a fleet that is served: what changes in its file reaches the SuperLink at once."""

from pathlib import Path

from anyfleet.deployment.roster import Member, Roster, read_roster, record_node
from anyfleet.errors import ConfigError, LinkDown, LinkError, RunGone, StoreError
from anyfleet.runtime.flower.hosting import node_ids, register_node, unregister_node


class Enrolment:
    """The enrolled devices, as the file of the roster has them now (`runtime.flower.Roster`).

    A new row is registered as a node, and a revoked one is unregistered. While the file cannot be
    read, what was read last holds, and what cannot be done is tried again; `trouble` says why.
    """

    def __init__(self, file: Path, address: str, authority: bytes) -> None:
        self._file, self._address, self._authority = file, address, authority
        self._seen: tuple[int, int] | None = None  # the file, when it was read last
        self._roster = Roster()
        self._gone: set[int] = set()  # numbers that the SuperLink does not know any more
        # At the beginning: the database of the SuperLink may have been lost.
        self._known = node_ids(address, ca=authority)
        self.trouble = ""

    def enrolled(self) -> tuple[Member, ...]:
        """Return all devices that were ever enrolled, by number."""
        try:
            found = self._file.stat()
            if (found.st_mtime_ns, found.st_size) != self._seen:
                self._seen = found.st_mtime_ns, found.st_size
                self._roster = read_roster(self._file)
            self.trouble = ""
        except (OSError, ConfigError) as error:
            self.trouble = str(error)
        for member in self._roster.members:
            try:
                self._apply(member)
            except (LinkDown, RunGone):
                raise
            except (LinkError, StoreError, ConfigError) as error:  # of one device: a run goes on
                self.trouble = f"{member.name}: {error}"
        return self._roster.members

    def _apply(self, member: Member) -> None:
        """Let the SuperLink know of a row."""
        if member.revoked:
            if member.node in self._known and member.number not in self._gone:
                unregister_node(self._address, ca=self._authority, node=member.node)
            self._gone.add(member.number)
        elif member.node not in self._known:
            node = register_node(
                self._address, ca=self._authority, public_key=member.public_key, name=member.name
            )
            record_node(self._file, member.number, node)
            self._known |= {node}
            self._roster = self._roster.with_node(member.number, node)
            self._seen = None
