"""The gate: all of a fleet's server that the network sees.

Flower's SuperLink serves devices, runs and administrators on one port, the last without any
authentication. The gate takes connections from devices (TLS), passes on what is for the Fleet API
and nothing else, and refuses what is too large or too much for one device, and replies that name
another sender than the request. Who a device is, and whether it is enrolled, the SuperLink decides,
by the key that has signed each request.

A device that asks for messages when there are none gets its answer late: when the server has sent
some, or after some seconds. So it learns of them at once, and need not ask all the time. Whether
one is for this device only its next request shows: no message is ever on the way to a device that
has gone silent meanwhile.

It runs in a thread of the server's process and ends with it.
"""

import asyncio
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from anyfleet.deployment.fleet_folder import FleetFolder
from anyfleet.errors import LinkError, refuse
from anyfleet.runtime.flower.flower_api import names_another_sender

# The whole of a path: nothing that could be read as another one further on ("..", "%2e", "?").
_FLEET_PATH = re.compile(rb"/v1/fleet/[a-z-]{1,64}")
_REPLIES = b"/v1/fleet/push-messages"  # on which the SuperLink believes who the sender is
_MOST_REPLIES = 4 << 20  # bytes of such a request: what replies hold follows in others
_KEY_HEADER = b"flwr-public-key"
_PASSED_ON = {b"content-type", b"content-length", b"content-encoding"}
_ASKED = _PASSED_ON | {b"accept", b"accept-encoding"}
_ANSWERED = _PASSED_ON | {b"date"}  # by which a device with another clock signs
_OTHERS = (b"flwr-task-token", b"flwr-superexec-")  # of the SuperLink's other users
_POLL = b"/v1/fleet/pull-messages"
_NOTHING = 48  # bytes at most of an answer without a message: the id of one is longer
_HOLD = 10.0  # seconds that such an answer is held back; devices wait at least 20
_MEBIBYTE = 1 << 20
_PATIENCE = 60.0  # seconds for the next piece of a body
_REST = 5.0  # seconds for the next piece of one that is refused
_GREETING = 10.0  # seconds until a new connection must have sent the head of a request
_IDLE = 75  # seconds that a connection is kept between two requests
_MOST_DEVICES = 1 << 16  # whose rates are remembered
_BURST = 10.0  # seconds' worth of requests or bytes that may come at once


@dataclass(frozen=True)
class GateLimits:
    """How much the gate lets through. A device is an address and the key that it shows.

    Keys are not checked here, so that one address, which may be that of many devices behind one
    router, is limited too: to as much as `devices_of_address` devices may have.
    """

    body: int = 64 * _MEBIBYTE  # bytes of a request
    request_rate: float = 200.0  # a second, of a device
    byte_rate: float = 128.0 * _MEBIBYTE  # a second, of a device, up and down together
    at_once: int = 16  # requests of a device
    devices_of_address: int = 256
    connections: int = 4096

    def __post_init__(self) -> None:
        names = (
            "body",
            "request_rate",
            "byte_rate",
            "at_once",
            "devices_of_address",
            "connections",
        )
        refuse(
            f"GateLimits.{name} must be above 0, got {getattr(self, name)}."
            for name in names
            if not getattr(self, name) > 0
        )

    @classmethod
    def for_message(cls, size: int) -> "GateLimits":
        """Return limits for a fleet whose messages have at most so many bytes."""
        body = size + _MEBIBYTE  # with what Flower puts around it
        return cls(body=body, byte_rate=max(cls.byte_rate, float(body)))


class Gate:
    """The gate of a fleet, from `start` to `close`. `superlink` is the SuperLink's address."""

    def __init__(
        self,
        folder: FleetFolder,
        superlink: str,
        *,
        limits: GateLimits | None = None,
        listen: tuple[str, int] | None = None,
    ) -> None:
        self._counts: Counter[str] = Counter()
        self._bell = _Bell()
        limits = limits or GateLimits()
        address = folder.device_file().address
        self._socket = _listening(*(listen or (address.listens, address.port)))
        authority = ssl.create_default_context(cafile=str(folder.authority))
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Proxy(superlink, authority, limits, self._counts, self._bell),
                http=_counted_connections(limits, self._counts),
                ws="none",
                loop="asyncio",
                lifespan="on",
                ssl_certfile=folder.certificate,
                ssl_keyfile=str(folder.key),
                log_config=None,
                log_level="critical",  # whoever can connect could fill a log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_IDLE,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    def counts(self) -> Mapping[str, int]:
        """Return how many requests were forwarded, or refused by reason, and bytes both ways."""
        return {name: self._counts[name] for name in COUNTS}

    def ring(self) -> None:
        """Let devices that wait for messages ask again: some were sent. Any thread may call this.

        A gate that nobody rings holds no answers back.
        """
        self._bell.ring()

    def start(self) -> "Gate":
        """Start to take connections; raise LinkError if that fails."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise LinkError(
                    "The gate could not start. Check it with `anyfleet fleet preflight`."
                )
            time.sleep(0.01)
        return self

    def close(self) -> None:
        """Close it; requests under way have two seconds."""
        self._server.should_exit = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Gate":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        with suppress(SystemExit):  # uvicorn leaves by it when it cannot start
            self._server.run(sockets=[self._socket])


COUNTS = (
    "forwarded",
    "not_found",  # anything but the Fleet API
    "too_large",
    "too_many",  # requests or bytes for a device, or for an address
    "crowded",  # connections
    "unreachable",  # the SuperLink
    "broken",  # off in the middle of a request
    "forged",  # a reply in the name of another device
    "bytes_up",
    "bytes_down",
)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise LinkError if somebody else has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, because asyncio sends at once (TCP_NODELAY) only where it is: otherwise
    # every answer would wait some 40 ms for an acknowledgement.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it means something else
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise LinkError(
            f"The gate cannot listen on {host}, port {port}: {error.strerror}. End the program "
            "that does, or make the fleet with another --address."
        ) from error
    return made


# --- connections ----------------------------------------------------------------------------------


def _counted_connections(limits: GateLimits, counts: Counter[str]) -> type[H11Protocol]:
    """Return a protocol that closes connections beyond the limits, and those that say nothing."""
    of_address: Counter[str] = Counter()
    most = min(limits.connections, 4 * limits.devices_of_address)

    class Counted(H11Protocol):
        address: str | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.address = self.client[0] if self.client else ""
            of_address[self.address] += 1
            if of_address[self.address] > most or len(self.connections) > limits.connections:
                counts["crowded"] += 1
                transport.abort()
            self.loop.call_later(_GREETING, self._close_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.address is not None:
                of_address[self.address] -= 1
                if not of_address[self.address]:
                    del of_address[self.address]
                self.address = None

        def _close_if_silent(self) -> None:
            request: object = self.cycle  # None until there is one
            if request is None and not self.transport.is_closing():
                self.transport.close()

    return Counted


# --- rates ----------------------------------------------------------------------------------------


class _Bucket:
    """An allowance that refills steadily, up to ten seconds' worth; it may be overdrawn once."""

    def __init__(self, rate: float, least: float = 0.0) -> None:
        self._rate, self._most = rate, max(_BURST * rate, least)
        self._level, self._at = self._most, time.monotonic()

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def seconds_to_wait(self) -> float:
        """Return after how many seconds there is something again; 0.0 if there is now."""
        self._refill()
        return max(0.0, -self._level / self._rate)

    def _refill(self) -> None:
        now = time.monotonic()
        self._level = min(self._most, self._level + self._rate * (now - self._at))
        self._at = now


class _Allowance:
    """What one device, or one address, may still do."""

    def __init__(self, limits: GateLimits, share: int) -> None:
        self._requests = _Bucket(share * limits.request_rate)
        self._bytes = _Bucket(share * limits.byte_rate, 4.0 * limits.body)
        self._most, self._under_way = share * limits.at_once, 0

    def seconds_to_wait(self) -> float:
        crowded = 1.0 if self._under_way >= self._most else 0.0
        return max(crowded, self._requests.seconds_to_wait(), self._bytes.seconds_to_wait())

    def begin(self) -> None:
        self._requests.take(1.0)
        self._under_way += 1

    def end(self) -> None:
        self._under_way -= 1

    def spend(self, count: int) -> None:
        self._bytes.take(count)


class _Allowances:
    """The allowances of those who came last; those forgotten begin anew."""

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._known: OrderedDict[Hashable, _Allowance] = OrderedDict()

    def of(self, address: str, key: bytes) -> tuple[_Allowance, _Allowance]:
        """Return the allowances of a device and of its address."""
        share = self._limits.devices_of_address
        return self._one((address, key), 1), self._one(address, share)

    def _one(self, who: Hashable, share: int) -> _Allowance:
        if who not in self._known:
            self._known[who] = _Allowance(self._limits, share)
            if len(self._known) > _MOST_DEVICES:
                self._known.popitem(last=False)
        self._known.move_to_end(who)
        return self._known[who]


# --- requests -------------------------------------------------------------------------------------


class _Bell:
    """What answers are held back for; it may be rung from any thread."""

    def __init__(self) -> None:
        self.times = 0  # that it was rung
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.times += 1
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        waited_for, self._event = self._event, asyncio.Event()
        waited_for.set()

    async def wait(self, heard: int, seconds: float) -> None:
        """Wait until it has been rung more often than was heard, at most so many seconds."""
        self._loop = asyncio.get_running_loop()
        if 0 < self.times <= heard:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), seconds)


class _TooLarge(Exception):
    """A body above the limit."""


class _Gone(Exception):
    """A device that went away in the middle of its request, or stopped sending."""


class _Body:
    """The body of a request, piece by piece."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.complete = False

    async def next(self, seconds: float) -> bytes:
        """Return the next piece; raise _Gone if none comes in so many seconds."""
        try:
            message = await asyncio.wait_for(self._receive(), seconds)
        except TimeoutError:
            raise _Gone from None
        if message["type"] == "http.disconnect":
            raise _Gone
        self.complete = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece


class _Proxy:
    """An ASGI application that passes requests of the Fleet API on to the SuperLink."""

    def __init__(
        self,
        superlink: str,
        authority: ssl.SSLContext,
        limits: GateLimits,
        counts: Counter[str],
        bell: _Bell,
    ) -> None:
        self._base, self._limits, self._counts = f"https://{superlink}", limits, counts
        self._bell = bell
        self._allowances = _Allowances(limits)
        self._client = httpx.AsyncClient(
            verify=authority,
            timeout=httpx.Timeout(30.0, read=_PATIENCE),
            limits=httpx.Limits(max_connections=limits.connections, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path, body = scope.get("raw_path") or b"", _Body(receive)
        if scope["method"] != "POST" or not _FLEET_PATH.fullmatch(path) or scope["query_string"]:
            await self._refuse(404, "not_found", body, send)
            return
        headers = dict(scope["headers"])
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > self._limits.body:
            await self._refuse(413, "too_large", body, send)
            return
        address = scope["client"][0] if scope["client"] else ""
        both = self._allowances.of(address, headers.get(_KEY_HEADER, b"")[:1024])
        wait = max(each.seconds_to_wait() for each in both)
        if wait > 0:
            await self._refuse(429, "too_many", body, send, wait=wait)
            return
        for each in both:
            each.begin()
        try:
            await self._forward(both, scope, body, send)
        finally:
            for each in both:
                each.end()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Begin and end with the server: close what is open to the SuperLink."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(
        self, payers: Iterable[_Allowance], scope: Scope, body: _Body, send: Send
    ) -> None:
        asked = [pair for pair in scope["headers"] if _is_passed_on(pair[0], _ASKED)]
        content: AsyncIterator[bytes] | bytes = self._pieces(body, payers, self._limits.body)
        heard = self._bell.times if scope["raw_path"] == _POLL else None
        try:
            if scope["raw_path"] == _REPLIES:
                parts = self._pieces(body, payers, _MOST_REPLIES)
                content = b"".join([piece async for piece in parts])
                if names_another_sender(content):
                    await self._refuse(403, "forged", body, send)
                    return
            request = self._client.build_request(
                "POST",
                self._base + scope["raw_path"].decode("ascii"),
                headers=asked,
                content=content,
            )
            response = await self._client.send(request, stream=True)
        except _TooLarge:
            await self._refuse(413, "too_large", body, send)
        except _Gone:
            self._counts["broken"] += 1
        except httpx.HTTPError:
            await self._refuse(503, "unreachable", body, send, wait=1.0)
        else:
            self._counts["forwarded"] += 1
            await self._answer(response, payers, send, heard)

    async def _pieces(
        self, body: _Body, payers: Iterable[_Allowance], most: int
    ) -> AsyncIterator[bytes]:
        total = 0
        while not body.complete:
            piece = await body.next(_PATIENCE)
            total += len(piece)
            if total > most:
                raise _TooLarge
            self._spend("bytes_up", len(piece), payers)
            if piece:
                yield piece

    async def _answer(
        self,
        response: httpx.Response,
        payers: Iterable[_Allowance],
        send: Send,
        heard: int | None,
    ) -> None:
        """Send a response on; one without messages waits for the bell, unless `heard` is None."""
        found = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if _is_passed_on(name.lower(), _ANSWERED)
        ]
        start = {"type": "http.response.start", "status": response.status_code, "headers": found}
        chunks: AsyncIterator[bytes] = response.aiter_raw()
        try:
            if heard is not None and _is_empty(response):
                chunks = _again([chunk async for chunk in chunks])
                await response.aclose()
                await self._bell.wait(heard, _HOLD)
            await send(start)
            async for chunk in chunks:
                self._spend("bytes_down", len(chunk), payers)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError:  # the device sees an answer that ends too early, and asks again
            self._counts["broken"] += 1
        finally:
            await response.aclose()

    def _spend(self, name: str, count: int, payers: Iterable[_Allowance]) -> None:
        self._counts[name] += count
        for each in payers:
            each.spend(count)

    async def _refuse(
        self, status: int, why: str, body: _Body, send: Send, *, wait: float = 0.0
    ) -> None:
        """Send a refusal, and close the connection if its body is not soon read to its end."""
        self._counts[why] += 1
        headers = [(b"content-length", b"0")]
        if wait:
            headers.append((b"retry-after", str(1 + int(wait)).encode()))
        # A connection that is closed with bytes unread may lose the answer, too.
        read = 0
        with suppress(_Gone):
            while not body.complete and read <= _MEBIBYTE:
                read += len(await body.next(_REST))
        if not body.complete:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _again(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _is_empty(response: httpx.Response) -> bool:
    size = response.headers.get("content-length", "")
    return response.is_success and size.isdigit() and int(size) <= _NOTHING


def _is_passed_on(name: bytes, plain: set[bytes]) -> bool:
    return name in plain or (name.startswith(b"flwr-") and not name.startswith(_OTHERS))
