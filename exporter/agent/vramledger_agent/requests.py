"""Accept requests that come over the agent's socket, check their sender, and find their handler.

The exporter only forwards. With the request comes the client's own connection. The kernel says who is at its
other end, and the response goes over it. Root and our own user are obeyed in what this process consented to
when it was started. Everything else is refused.
"""

from __future__ import annotations

import _thread
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping

from vramledger_agent import transport
from vramledger_agent.program_errors import belongs_to_program, start_thread
from vramledger_agent.protocol.messages import make_failure, make_success

HANDLERS: dict[str, tuple[str, str]] = {
    "reclaim": ("vramledger_agent.torch.memory_history", "reclaim"),
    "snapshot": ("vramledger_agent.torch.memory_history", "record_snapshot"),
}
"""The module and function that handle a request, by its name, which is also the consent that it needs.

The module is imported with the framework. Later an import could fail or block, for example while the
program ends.
"""

SEND_TIMEOUT_SECONDS = 5.0


def agent_version() -> object:
    """Return our version, which the package above this one has."""
    return getattr(sys.modules.get("vramledger_agent"), "__version__", None)


class Request:
    """One request; its sender is root or our own user, and the program has consented to it."""

    __slots__ = ("arguments", "descriptors", "name", "uid")

    def __init__(self, name: str, arguments: Mapping[str, object], descriptors: list[int], uid: int) -> None:
        self.name = name  # what is requested, as ``snapshot``
        self.arguments = arguments  # the message, parsed; it is a JSON object; nothing in it was checked
        # files that the client sent behind it; they are closed after the response
        self.descriptors = descriptors
        self.uid = uid  # of the client, from the kernel

    def number(self, name: str, default: float, maximum: float) -> float:
        """Return a numeric argument, or the default. Raises ValueError if it is wrong or out of bounds."""
        value = self.arguments.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
            raise ValueError(f"{name} must be a number above 0 and at most {maximum:g}")
        return value


Handler = Callable[[Request], "dict[str, object]"]
"""Handle the request and return the response without its ``ok``; runs on its own thread, one at a time. What
must run between two training steps goes through ``step_boundary.run``."""


def load_handlers(consents: frozenset[str]) -> dict[str, Handler]:
    """Import the handlers of what this process consents to; leave out one that cannot be imported."""
    found: dict[str, Handler] = {}
    for name, (module, function) in HANDLERS.items():
        if name in consents:
            try:
                found[name] = getattr(__import__(module, fromlist=[function]), function)
            except Exception as error:
                if belongs_to_program(error):
                    raise
                continue
    return found


class RequestHandler:
    """Handle one request after the other, while the agent continues to report."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers
        self._busy = _thread.allocate_lock()

    def accept(self, message: bytes, descriptors: list[int]) -> None:
        """Handle a forwarded request on a thread of its own, or refuse it; never raises."""
        client = None
        try:
            if not descriptors:
                return
            client = socket.socket(fileno=descriptors.pop(0))
            client.settimeout(SEND_TIMEOUT_SECONDS)
            _, uid = transport.peer_credentials(client)
            arguments = json.loads(message)
            if not isinstance(arguments, dict):
                return
            refusal = self._claim(arguments.get("ask"), uid)
            if refusal is None:
                request = Request(str(arguments["ask"]), arguments, [], uid)
                try:
                    start_thread(self._respond, (client, request))
                except RuntimeError:  # no thread is available, and we must not stay busy for that
                    self._busy.release()
                    refusal = "the process cannot start a thread now; ask again later"
                else:
                    client = None  # the thread closes it by now
            if client is not None:
                send_response(client, make_failure(refusal))
        except Exception:
            pass
        finally:
            if client is not None:
                client.close()
            close_descriptors(descriptors)

    def _claim(self, name: object, uid: int) -> str | None:
        """Return why a request is refused; None when it is accepted, and the handler is now busy with it."""
        if uid not in {0, os.geteuid()}:
            return "only root and the user who owns the process may request that"
        if not isinstance(name, str) or name not in HANDLERS:
            return f"the agent, of version {agent_version()}, does not know this request"
        if name not in self.handlers:
            return (
                f"this process does not consent to that; start it with 'vramledger-agent run --allow-{name}'"
            )
        if not self._busy.acquire(blocking=False):
            return "the process is busy with another request; ask again later"
        return None

    def _respond(self, client: socket.socket, request: Request) -> None:
        try:
            try:
                if request.arguments.get("file") is True:
                    _, request.descriptors = transport.receive(client)
                response = make_success(**self.handlers[request.name](request))
            except BaseException as error:
                response = make_failure(f"{type(error).__name__}: {error}"[:1000])
            send_response(client, response)
        finally:
            client.close()
            close_descriptors(request.descriptors)
            self._busy.release()


def send_response(client: socket.socket, response: dict[str, object]) -> None:
    """Send a response; a client that has gone does not get it."""
    try:
        client.send(json.dumps(response).encode(), socket.MSG_NOSIGNAL)
    except (OSError, ValueError, TypeError):
        pass


def close_descriptors(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            pass
