"""The kubelet's pod-resources API v1 as protobuf itself writes it, and a gRPC server that speaks it.

The field numbers are those of Kubernetes' ``podresources/v1/api.proto``, here with what DRA added in 1.27.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "v1.PodResourcesLister"

_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_FIELDS: dict[str, list[tuple[int, str, Any, bool]]] = {
    # message: (number, name, type or the message's name, whether it is repeated)
    "ListPodResourcesResponse": [(1, "pod_resources", "PodResources", True)],
    "AllocatableResourcesResponse": [(1, "devices", "ContainerDevices", True), (2, "cpu_ids", _INT64, True)],
    "PodResources": [
        (1, "name", _TEXT, False), (2, "namespace", _TEXT, False),
        (3, "containers", "ContainerResources", True),
    ],
    "ContainerResources": [
        (1, "name", _TEXT, False), (2, "devices", "ContainerDevices", True), (3, "cpu_ids", _INT64, True),
        (5, "dynamic_resources", "DynamicResource", True),
    ],
    "ContainerDevices": [
        (1, "resource_name", _TEXT, False), (2, "device_ids", _TEXT, True),
        (3, "topology", "NUMATopology", False),
    ],
    "NUMATopology": [(1, "nodes", "NUMANode", True)],
    "NUMANode": [(1, "ID", _INT64, False)],
    "DynamicResource": [
        (2, "claim_name", _TEXT, False), (3, "claim_namespace", _TEXT, False),
        (4, "claim_resources", "ClaimResource", True),
    ],
    "ClaimResource": [
        (1, "cdi_devices", "CDIDevice", True), (2, "driver_name", _TEXT, False),
        (3, "pool_name", _TEXT, False), (4, "device_name", _TEXT, False),
    ],
    "CDIDevice": [(1, "name", _TEXT, False)],
}  # fmt: skip


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            one = descriptor_pb2.FieldDescriptorProto
            added = message.field.add(name=field, number=number)
            added.label = one.LABEL_REPEATED if repeated else one.LABEL_OPTIONAL
            if isinstance(kind, str):
                added.type, added.type_name = one.TYPE_MESSAGE, f".v1.{kind}"
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in _FIELDS
    }


MESSAGES = _messages()
"""The messages' classes by name; all of their fields are keyword arguments."""


def devices(resource: str, *ids: str) -> Any:  # noqa: ANN401 made at run time
    """Make a ``ContainerDevices`` like a device plugin's, with the NUMA node of the first."""
    node = MESSAGES["NUMANode"](ID=1)
    topology = MESSAGES["NUMATopology"](nodes=[node])
    return MESSAGES["ContainerDevices"](resource_name=resource, device_ids=ids, topology=topology)


def claim(driver: str, name: str, *cdi: str) -> Any:  # noqa: ANN401 made at run time
    """Make a ``DynamicResource`` with one device."""
    ids = [MESSAGES["CDIDevice"](name=each) for each in cdi]
    found = MESSAGES["ClaimResource"](
        cdi_devices=ids, driver_name=driver, pool_name="node-1", device_name=name
    )
    return MESSAGES["DynamicResource"](claim_name="c", claim_namespace="ml", claim_resources=[found])


def pod(name: str, *resources: Any, namespace: str = "ml") -> Any:  # noqa: ANN401 made at run time
    """Make a ``PodResources`` of one container that has these devices and claims."""
    plain = [each for each in resources if each.DESCRIPTOR.name == "ContainerDevices"]
    claims = [each for each in resources if each.DESCRIPTOR.name == "DynamicResource"]
    container = MESSAGES["ContainerResources"](
        name="main", devices=plain, cpu_ids=[1, 2, 300], dynamic_resources=claims
    )
    return MESSAGES["PodResources"](name=name, namespace=namespace, containers=[container])


def listed(*pods: Any) -> bytes:  # noqa: ANN401 made at run time
    return bytes(MESSAGES["ListPodResourcesResponse"](pod_resources=pods).SerializeToString())


def allocatable(*offered: Any) -> bytes:  # noqa: ANN401 made at run time
    message = MESSAGES["AllocatableResourcesResponse"](devices=offered, cpu_ids=range(200))
    return bytes(message.SerializeToString())


@contextmanager
def kubelet(socket: Path, **methods: Callable[[Any], bytes]) -> Iterator[None]:
    """Serve methods of the pod-resources API on a Unix socket, by gRPC's own server."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(lambda _, context, answer=answer: answer(context))
        for name, answer in methods.items()
    }
    socket.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield
        finally:
            server.stop(grace=None).wait()
