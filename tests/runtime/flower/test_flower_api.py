"""The contract with Flower: an upgrade that changes what is used fails here, and loudly."""

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path

import flwr
import pytest
from flwr.app import Metadata
from flwr.app.message import make_message
from flwr.proto import control_pb2, fleet_pb2, message_pb2, runtime_pb2
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient

from anyfleet.runtime.flower import flower_api

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "anyfleet"
API = SOURCE / "runtime" / "flower" / "flower_api.py"


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Every module that a file imports, with the name taken from it, or ""."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def of_flower(file: Path) -> list[tuple[str, str]]:
    return [each for each in imports(file) if each[0].split(".")[0] == "flwr"]


def test_the_version_is_the_pinned_one() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["fleet"]
    assert f"flwr=={flower_api.VERSION}" in extra
    assert flwr.__version__ == "1.41.0"


def test_one_file_alone_imports_flower() -> None:
    assert [file for file in sorted(SOURCE.rglob("*.py")) if of_flower(file)] == [API]


@pytest.mark.parametrize(("module", "name"), of_flower(API))
def test_every_name_exists(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name)


@pytest.mark.parametrize(
    ("called", "names"),
    [
        (ProtobufClient.__init__, "base_url interceptors verify timeout"),
        (sign_message, "private_key message"),
        (SuperExecAuthHttpInterceptor.__init__, "master_secret protected_methods"),
        (RuntimeTokenHttpInterceptor.__init__, "token"),
        (make_message, "metadata content"),
        (
            Metadata.__init__,
            (
                "run_id message_id src_node_id dst_node_id reply_to_message_id group_id created_at "
                "ttl message_type"
            ),
        ),
    ],
    ids=lambda each: getattr(each, "__qualname__", ""),
)
def test_signatures_have_the_parameters_that_are_used(called: object, names: str) -> None:
    assert callable(called)
    assert set(names.split()) <= set(inspect.signature(called).parameters)


@pytest.mark.parametrize(
    ("client", "methods"),
    [
        (
            FleetHttpClient,
            (
                "ActivateNode DeactivateNode SendNodeHeartbeat PullMessages PushMessages "
                "PullObject PushObject ConfirmMessageReceived close"
            ),
        ),
        (
            ControlHttpClient,
            "StartRun StopRun ListRuns ListNodes RegisterNode UnregisterNode close",
        ),
        (
            RuntimeHttpClient,
            (
                "AcquireTask PullTaskInput PushTaskOutput SendTaskHeartbeat PushMessages "
                "PullMessages PullObject PushObject ConfirmMessageReceived close"
            ),
        ),
    ],
)
def test_clients_have_the_calls_that_are_used(client: type, methods: str) -> None:
    for method in methods.split():
        parameters = list(inspect.signature(getattr(client, method)).parameters)
        assert parameters in (["self", "request"], ["self"])


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (fleet_pb2.ActivateNodeRequest, "public_key heartbeat_interval"),
        (fleet_pb2.DeactivateNodeRequest, "node_id"),
        (fleet_pb2.PullMessagesResponse, "messages_list message_object_trees"),
        (fleet_pb2.PushMessagesRequest, "node messages_list message_object_trees"),
        (fleet_pb2.PushMessagesResponse, "objects_to_push session_id"),
        (SendNodeHeartbeatRequest, "node heartbeat_interval"),
        (message_pb2.Message, "metadata error"),
        (message_pb2.Metadata, "run_id message_id src_node_id dst_node_id reply_to_message_id"),
        (message_pb2.Metadata, "group_id ttl created_at"),
        (message_pb2.ObjectTree, "object_id children"),
        (message_pb2.PullObjectRequest, "node run_id object_id"),
        (message_pb2.PullObjectResponse, "object_found object_available object_content"),
        (message_pb2.PushObjectRequest, "node run_id object_id object_content session_id"),
        (message_pb2.PushObjectResponse, "stored"),
        (message_pb2.ConfirmMessageReceivedRequest, "node run_id message_object_id"),
        (runtime_pb2.AcquireTaskRequest, "supported_task_types"),
        (runtime_pb2.AcquireTaskResponse, "token"),
        (runtime_pb2.PullTaskInputResponse, "run"),
        (runtime_pb2.PushTaskOutputRequest, "sub_status details"),
        (runtime_pb2.SendTaskHeartbeatResponse, "success"),
        (runtime_pb2.PushAppMessagesRequest, "messages_list message_object_trees"),
        (runtime_pb2.PushAppMessagesResponse, "message_ids objects_to_push session_id"),
        (runtime_pb2.PullAppMessagesRequest, "message_ids"),
        (runtime_pb2.PullAppMessagesResponse, "messages_list message_object_trees"),
        (control_pb2.StartRunRequest, "fab"),
        (control_pb2.StartRunResponse, "run_id"),
        (control_pb2.StopRunRequest, "run_id"),
        (control_pb2.ListNodesResponse, "nodes_info"),
        (control_pb2.ListRunsResponse, "run_dict"),
        (control_pb2.RegisterNodeRequest, "public_key name"),
        (control_pb2.RegisterNodeResponse, "node_id"),
        (control_pb2.UnregisterNodeRequest, "node_id"),
    ],
)
def test_messages_have_the_fields_that_are_used(message: type, fields: str) -> None:
    known = {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert set(fields.split()) <= known


def test_bytes_that_are_no_pulled_message_are_refused() -> None:
    for data in (b"", b"junk", b"\x0a\xff"):
        with pytest.raises(ValueError, match="not a pulled message"):
            flower_api.open_pulled(data)


@pytest.mark.parametrize(("senders", "refused"), [([], False), ([7], False), ([7, 8], True)])
def test_a_reply_in_the_name_of_another_node_is_seen(senders: list[int], refused: bool) -> None:
    request = fleet_pb2.PushMessagesRequest()
    request.node.node_id = 7
    for sender in senders:
        request.messages_list.add().metadata.src_node_id = sender
    body = request.SerializeToString()
    assert flower_api.names_another_sender(body) is refused
    assert flower_api.names_another_sender(b"\x0a\xff" + body)
