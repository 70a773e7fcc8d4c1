"""Metrics of a fleet for Prometheus, on this machine's loopback alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from anyfleet.deployment.status import Status
from anyfleet.errors import AnyfleetError

LOOPBACK = "127.0.0.1"
_BYTES = "bytes_"  # counts of the gate that are no requests


class Source(Protocol):
    """What knows the status of a fleet."""

    def status(self) -> Status:
        """Return the status now."""


class _Collected(Collector):
    """The metrics of a status, made when somebody asks for them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        found = self._source.status()
        devices = GaugeMetricFamily("anyfleet_devices", "Devices by state.", labels=["state"])
        for state, count in found.counted().items():
            devices.add_metric([state], count)
        yield devices
        yield GaugeMetricFamily("anyfleet_rounds", "Rounds that are done.", value=found.round_index)
        yield GaugeMetricFamily(
            "anyfleet_orders_under_way", "Orders that wait for a reply.", value=found.under_way
        )
        yield CounterMetricFamily("anyfleet_replies", "Replies that came in.", value=found.replies)
        for name, text, label, counts in (
            ("anyfleet_failures", "Orders that failed, by reason.", "reason", found.failures),
            (
                "anyfleet_order_seconds",
                "Seconds of orders with a reply, by phase; upload: all that no device measured.",
                "phase",
                found.seconds,
            ),
            (
                "anyfleet_bytes",
                "Bytes of messages, as the methods count them, by direction.",
                "direction",
                {"down": found.bytes_down, "up": found.bytes_up},
            ),
            (
                "anyfleet_gate",
                "Requests at the gate, by what became of them.",
                "what",
                {what: n for what, n in found.gate.items() if not what.startswith(_BYTES)},
            ),
            (
                "anyfleet_gate_bytes",
                "Bytes of the bodies that passed the gate, by direction.",
                "direction",
                {w.removeprefix(_BYTES): n for w, n in found.gate.items() if w.startswith(_BYTES)},
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for key, value in counts.items():
                family.add_metric([key], value)
            yield family


@contextmanager
def served(source: Source, port: int) -> Iterator[int]:
    """Serve the metrics of a fleet on loopback; yield the port, which the system picks for 0."""
    registry = CollectorRegistry()
    registry.register(_Collected(source))
    try:
        server, thread = start_http_server(port, LOOPBACK, registry=registry)
    except OSError as error:
        raise AnyfleetError(
            f"metrics cannot be served on {LOOPBACK}:{port}: {error.strerror}. Choose another port "
            "with --metrics, or none with --metrics -1."
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
