"""Every import of Flower, and its protocol as plain calls.

Flower's internals are used, which change with every version: one version is pinned, no other
module imports `flwr`, and a contract test compares all that is used here with what is installed.
Calls raise LinkError or a subclass, whatever Flower or its HTTP client raise; none is repeated.
"""

import hashlib
import io
import os
import ssl
import zipfile
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from anyfleet.errors import LinkBusy, LinkDown, LinkError, NotEnrolled, RunGone

try:
    import flwr
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("real devices need Flower: install anyfleet[fleet]") from missing

from flwr.app import DEFAULT_TTL, ConfigRecord, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import (
    HEARTBEAT_MIN_INTERVAL,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    SubStatus,
)
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NodeStatus,
    TaskType,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.client import (
    ProtobufCall,
    ProtobufClientInterceptor,
    ProtobufRequestContext,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.fleet_http_client import FleetHttpClient

VERSION = flwr.__version__
HEARTBEAT_SECONDS = float(HEARTBEAT_MIN_INTERVAL)  # a node is offline after two of these
_SESSIONS = 0.1  # seconds by which intervals of heartbeats differ, one for each start of a device
KEPT_SECONDS = float(DEFAULT_TTL)  # so long a message waits for its node, and for its reply

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_CALL = httpx.Timeout(20.0, connect=10.0)
# An upload may still lie in the buffers of a slow link when the wait for its response begins.
_UPLOAD = httpx.Timeout(120.0, connect=10.0)
# A SuperLink that starts or whose database is busy, or the gate before it.
_AWAY = {429, 500, 502, 503, 504}


# --- messages and objects -------------------------------------------------------------------------


class Heading(NamedTuple):
    """Who writes to whom, and what is said on the outside of a message."""

    run: int
    sender: int
    receiver: int
    replies_to: str  # id of a message, or ""
    written: float  # Unix time
    kept: float  # seconds
    note: str  # any text


class Sealed(NamedTuple):
    """A message that is ready to send: its id, and what Flower needs beside its objects."""

    id: str
    message: ProtoMessage
    tree: ObjectTree
    root: bytes  # the object of the message itself


class Opened(NamedTuple):
    """A message as it was pulled: its outside, and the ids of its objects."""

    id: str
    heading: Heading
    error: str  # Flower's own error in place of a message, or ""
    objects: frozenset[str]


class Unsent(NamedTuple):
    """What the SuperLink still wants of a message: ids of objects, and the session to send them."""

    objects: frozenset[str]
    session: str


class Missing(NamedTuple):
    """Why an object cannot be had: its sender has not sent it yet, or it is gone for good."""

    gone: bool


def seal(heading: Heading, objects: Sequence[str]) -> Sealed:
    """Return a message whose objects have these ids."""
    made = make_message(
        metadata=Metadata(
            run_id=heading.run,
            message_id="",
            src_node_id=heading.sender,
            dst_node_id=heading.receiver,
            reply_to_message_id=heading.replies_to,
            group_id=heading.note,
            created_at=heading.written,
            ttl=heading.kept,
            message_type="query",
        ),
        content=RecordDict(),
    )
    root = made.deflate()
    name = get_object_id(root)
    message = message_to_proto(made)
    message.metadata.message_id = name
    tree = ObjectTree(object_id=name, children=[ObjectTree(object_id=each) for each in objects])
    return Sealed(name, message, tree, root)


def _open(message: ProtoMessage, tree: ObjectTree) -> Opened:
    about = message.metadata
    heading = Heading(
        run=about.run_id,
        sender=about.src_node_id,
        receiver=about.dst_node_id,
        replies_to=about.reply_to_message_id,
        written=about.created_at,
        kept=about.ttl,
        note=about.group_id,
    )
    error = ""
    if message.HasField("error"):
        error = message.error.reason or f"Flower's error {message.error.code}"
    return Opened(
        about.message_id, heading, error, frozenset(each.object_id for each in tree.children)
    )


def make_object(values: Mapping[str, int | str | bytes]) -> tuple[str, bytes]:
    """Return values as an object of Flower: its id, which is a hash of its content, and that."""
    content = ConfigRecord(dict(values)).deflate()
    return get_object_id(content), content


def read_object(content: bytes) -> dict[str, object]:
    """Return the values of an object; raise ValueError for bytes that are none."""
    try:
        return dict(ConfigRecord.inflate(content))
    except Exception as error:  # a parser of Flower reads what anybody may have sent
        raise ValueError(f"not an object of Flower: {type(error).__name__}") from error


def _bundle() -> Fab:
    """Return the app that a run must name: an empty one, nobody loads it."""
    project = b"""[project]
name = "anyfleet"
version = "1.0.0"
[tool.flwr.app]
publisher = "anyfleet"
[tool.flwr.app.components]
serverapp = "anyfleet:none"
clientapp = "anyfleet:none"
"""
    manifest = f"pyproject.toml,{hashlib.sha256(project).hexdigest()},{len(project) * 8}"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (("pyproject.toml", project), (".info/CONTENT", manifest.encode())):
            archive.writestr(zipfile.ZipInfo(name), content)
    content = buffer.getvalue()
    return Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)


# --- the protocol ---------------------------------------------------------------------------------


class _VersionHeaders:
    """States the version of Flower. Flower's own interceptor ends the process when it differs."""

    def __init__(self, component: str) -> None:
        self._headers = dict(RuntimeVersionMetadata.from_local_component(component).as_metadata())

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the headers and make the call."""
        context.request.headers.update(self._headers)
        return call_next(context)


class _Signature:
    """Signs calls with a device's key, at the time that the server's clock shows.

    Flower's own interceptor signs the time of the device, whose clock may be wrong: small boards
    have none that goes on while they are off. The SuperLink refuses a time that is seconds ahead.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = b64encode(public_bytes(key.public_key())).decode("ascii")
        self._ahead = timedelta()  # how far the server's clock is ahead of this one

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the headers and make the call, once more if the clocks are found to differ."""
        response = self._signed(context, call_next)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            with suppress(KeyError, TypeError, ValueError):
                ahead = parsedate_to_datetime(response.headers["date"]) - now()
                if abs(ahead - self._ahead) > timedelta(seconds=2):
                    self._ahead = ahead
                    return self._signed(context, call_next)
        return response

    def _signed(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        stamp = (now() + self._ahead).isoformat()
        signature = sign_message(self._key, stamp.encode("ascii"))
        context.request.headers.update(
            {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: stamp,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            }
        )
        return call_next(context)


@contextmanager
def _calling(address: str, refused: type[LinkError]) -> Iterator[None]:
    """Raise what goes wrong in a call as a LinkError; `refused` stands for status 401."""
    try:
        yield
    except httpx.TransportError as error:
        raise LinkDown(
            f"{address} cannot be reached: {str(error) or type(error).__name__}"
        ) from error
    except httpx.HTTPStatusError as error:
        raise _status_error(address, error.response, refused) from error
    except ValueError as error:
        raise LinkError(f"{address} does not answer as a SuperLink does: {error}") from error


def _status_error(address: str, response: httpx.Response, refused: type[LinkError]) -> LinkError:
    status, said = response.status_code, FlowerError.from_json(response.text)
    if status in _AWAY:
        return LinkBusy(f"{address} is not ready (status {status})")
    if status == httpx.codes.UNAUTHORIZED:
        if refused is NotEnrolled:
            return NotEnrolled(f"{address} refuses this device's key: it is unknown or revoked")
        if refused is RunGone:
            return RunGone(f"{address} says that the run has ended")
        return LinkError(f"{address} refuses the secret of this server")
    if said is not None and said.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return NotEnrolled(
            f"{address} does not admit this device: its key is unknown or revoked, "
            f"or was in use less than {2 * HEARTBEAT_SECONDS:.0f} seconds ago"
        )
    if status == httpx.codes.FORBIDDEN:
        return RunGone("the run of this message has ended")
    return LinkError(f"{address} answers with status {status}: {said.message if said else ''}")


def _context(ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca.decode("ascii"))
    return context


def _object(response: PullObjectResponse) -> bytes | Missing:
    if response.object_found and response.object_available:
        return bytes(response.object_content)
    return Missing(gone=not response.object_found)


class FleetApi:
    """What a device may ask of the SuperLink."""

    def __init__(self, address: str, *, ca: bytes, key: ec.EllipticCurvePrivateKey) -> None:
        self._address = address
        self._public = key.public_key()
        # The server sees this number, which is of no use to the SuperLink in its last digits: by a
        # new one it knows that the device was started again, and may have lost what it was given.
        self._interval = HEARTBEAT_SECONDS + int.from_bytes(os.urandom(4)) / 2**32 * _SESSIONS
        marks: list[ProtobufClientInterceptor] = [
            _VersionHeaders("SuperNode"),
            _Signature(key),
        ]
        trust = _context(ca)
        self._calls, self._uploads = (
            FleetHttpClient(
                f"https://{address}",
                interceptors=marks,
                verify=trust,
                timeout=limit,  # type: ignore[arg-type]  # passed on to httpx, which takes it
            )
            for limit in (_CALL, _UPLOAD)
        )

    def activate(self) -> int:
        """Return the id of this device's node, which is online from now on."""
        request = ActivateNodeRequest(
            public_key=public_bytes(self._public), heartbeat_interval=self._interval
        )
        with _calling(self._address, NotEnrolled):
            return int(self._calls.ActivateNode(request).node_id)

    def beat(self, node: int) -> bool:
        """Say that the node is alive; a node that was offline is online again."""
        request = SendNodeHeartbeatRequest(
            node=Node(node_id=node), heartbeat_interval=self._interval
        )
        with _calling(self._address, NotEnrolled):
            return bool(self._calls.SendNodeHeartbeat(request).success)

    def deactivate(self, node: int) -> None:
        """Say that the node leaves; orders without a reply fail at once."""
        with _calling(self._address, NotEnrolled):
            self._calls.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def pull_message(self, node: int) -> bytes:
        """Take the next message for the node, as bytes for `open_pulled`; b"": there is none."""
        with _calling(self._address, NotEnrolled):
            got = self._calls.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
        return bytes(got.SerializeToString()) if got.messages_list else b""

    def push_message(self, node: int, message: Sealed) -> Unsent:
        """Send the outside of a reply; no wanted objects: refused, or nothing is missing."""
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message.message],
            message_object_trees=[message.tree],
            clientapp_runtime_list=[0.0],
        )
        with _calling(self._address, NotEnrolled):
            got = self._calls.PushMessages(request)
        return Unsent(frozenset(got.objects_to_push), got.session_id)

    def pull_object(self, node: int, run: int, name: str) -> bytes | Missing:
        """Return the content of an object, or why it cannot be had."""
        request = PullObjectRequest(node=Node(node_id=node), run_id=run, object_id=name)
        with _calling(self._address, NotEnrolled):
            return _object(self._calls.PullObject(request))

    def push_object(self, node: int, run: int, *, session: str, name: str, content: bytes) -> bool:
        """Send an object; False: the SuperLink does not want it (any longer).

        Without a session the SuperLink finds the one that waits for the object.
        """
        request = PushObjectRequest(
            node=Node(node_id=node),
            run_id=run,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        with _calling(self._address, NotEnrolled):
            return bool(self._uploads.PushObject(request).stored)

    def confirm(self, node: int, run: int, message: str) -> None:
        """Remove a message's objects from the SuperLink."""
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=node), run_id=run, message_object_id=message
        )
        with _calling(self._address, NotEnrolled):
            self._calls.ConfirmMessageReceived(request)

    def close(self) -> None:
        """Close the sockets."""
        self._calls.close()
        self._uploads.close()


def open_pulled(data: bytes) -> Opened:
    """Return the message in what `FleetApi.pull_message` returned."""
    got = PullMessagesResponse()
    try:
        got.ParseFromString(data)
        return _open(got.messages_list[0], got.message_object_trees[0])
    except Exception as error:  # protobuf's own, for bytes from a file that may be spoiled
        raise ValueError(f"not a pulled message: {type(error).__name__}") from error


def names_another_sender(pushed: bytes) -> bool:
    """Return whether a body for /v1/fleet/push-messages holds a reply in another node's name.

    The SuperLink compares the key with the node of the request, but not with the sender that its
    messages state. Whatever stands before it must refuse these, and bodies that cannot be read.
    """
    request = PushMessagesRequest()
    try:
        request.ParseFromString(pushed)
    except Exception:  # noqa: BLE001 - protobuf's own, for bytes that anybody may have sent
        return True
    return any(each.metadata.src_node_id != request.node.node_id for each in request.messages_list)


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in the form that Flower compares: PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class NodeState(NamedTuple):
    """A node as the SuperLink sees it."""

    id: int
    name: str
    key: bytes
    online: bool
    session: float  # another one after every start of the device


class ControlApi:
    """What whoever operates the SuperLink may ask of it: runs and nodes."""

    def __init__(self, address: str, *, ca: bytes) -> None:
        self._address = address
        self._client = ControlHttpClient(
            f"https://{address}", interceptors=[_VersionHeaders("flwr-cli")], verify=_context(ca)
        )

    def start_run(self) -> int:
        """Return the id of a new run, which waits for somebody to claim it."""
        with _calling(self._address, LinkError):
            run = int(self._client.StartRun(StartRunRequest(fab=_bundle())).run_id)
        if not run:
            raise LinkError(f"{self._address} has not started a run; see its log")
        return run

    def stop_run(self, run: int) -> bool:
        """Cancel a run and remove its messages; return whether it was running."""
        try:
            with _calling(self._address, LinkError):
                return bool(self._client.StopRun(StopRunRequest(run_id=run)).success)
        except LinkDown:
            raise
        except LinkError:
            return False

    def open_runs(self) -> list[int]:
        """Return the ids of runs that have not ended."""
        with _calling(self._address, LinkError):
            found = self._client.ListRuns(ListRunsRequest()).run_dict
        return [run for run, each in found.items() if not each.finished_at]

    def nodes(self) -> list[NodeState]:
        """Return all nodes that are enrolled."""
        with _calling(self._address, LinkError):
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [
            NodeState(
                each.node_id,
                each.name,
                each.public_key,
                each.status == NodeStatus.ONLINE,
                each.heartbeat_interval,
            )
            for each in found
            if each.status != NodeStatus.UNREGISTERED
        ]

    def register(self, key: bytes, name: str) -> int:
        """Add a public key (PEM) to those enrolled, and return the id of its node."""
        with _calling(self._address, LinkError):
            return int(
                self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id
            )

    def unregister(self, node: int) -> None:
        """Refuse this node's key from now on; it may be refused already."""
        with _calling(self._address, LinkError):
            try:
                self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()


class RuntimeApi:
    """What the server of a run may ask of the SuperLink."""

    def __init__(self, address: str, *, ca: bytes, token: str) -> None:
        self._address = address
        self._client = RuntimeHttpClient(
            f"https://{address}",
            interceptors=[
                _VersionHeaders("flwr-serverapp"),
                RuntimeTokenHttpInterceptor(token=token),
            ],
            verify=_context(ca),
        )
        self._node = Node(node_id=SUPERLINK_NODE_ID)

    def begin(self) -> int:
        """Take the claimed run up and return its id."""
        with _calling(self._address, RunGone):
            return int(self._client.PullTaskInput(PullTaskInputRequest()).run.run_id)

    def finish(self, how: str) -> None:
        """Close the run: COMPLETED, FAILED or STOPPED."""
        request = PushTaskOutputRequest(sub_status=how, details="")
        with _calling(self._address, RunGone):
            self._client.PushTaskOutput(request)

    def beat(self) -> bool:
        """Say that the server is alive; False: its run has ended."""
        with _calling(self._address, RunGone):
            return bool(self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)

    def push_messages(self, messages: Sequence[Sealed]) -> tuple[list[bool], Unsent]:
        """Send the outsides of messages; return which are accepted, and the objects wanted."""
        request = PushAppMessagesRequest(
            messages_list=[each.message for each in messages],
            message_object_trees=[each.tree for each in messages],
        )
        with _calling(self._address, RunGone):
            got = self._client.PushMessages(request)
        unsent = Unsent(frozenset(got.objects_to_push), got.session_id)
        return [bool(name) for name in got.message_ids], unsent

    def pull_messages(self, wanted: Collection[str]) -> list[Opened]:
        """Take the outsides of replies to these messages; each can be had only once."""
        request = PullAppMessagesRequest(message_ids=sorted(wanted))
        with _calling(self._address, RunGone):
            got = self._client.PullMessages(request)
        return [
            _open(message, tree)
            for message, tree in zip(got.messages_list, got.message_object_trees, strict=True)
        ]

    def push_object(self, run: int, *, session: str, name: str, content: bytes) -> bool:
        """Send an object; False: the SuperLink does not want it (any longer)."""
        request = PushObjectRequest(
            node=self._node,
            run_id=run,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        with _calling(self._address, RunGone):
            return bool(self._client.PushObject(request).stored)

    def pull_object(self, run: int, name: str) -> bytes | Missing:
        """Return the content of an object, or why it cannot be had."""
        request = PullObjectRequest(node=self._node, run_id=run, object_id=name)
        with _calling(self._address, RunGone):
            return _object(self._client.PullObject(request))

    def confirm(self, run: int, message: str) -> None:
        """Remove a message's objects from the SuperLink."""
        request = ConfirmMessageReceivedRequest(
            node=self._node, run_id=run, message_object_id=message
        )
        with _calling(self._address, RunGone):
            self._client.ConfirmMessageReceived(request)

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()


COMPLETED, FAILED, STOPPED = SubStatus.COMPLETED, SubStatus.FAILED, SubStatus.STOPPED
SERVER_NODE = int(SUPERLINK_NODE_ID)


def claim_run(address: str, *, ca: bytes, secret: bytes) -> RuntimeApi | None:
    """Take the oldest run that waits for a server; return None if none waits."""
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE})
    client = RuntimeHttpClient(
        f"https://{address}",
        interceptors=[_VersionHeaders("flwr-serverapp"), signed],
        verify=_context(ca),
    )
    with client, _calling(address, LinkError):
        got = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    return RuntimeApi(address, ca=ca, token=got.token) if got.token else None
