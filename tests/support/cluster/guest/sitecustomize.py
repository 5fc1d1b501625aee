"""Simulate the network of a pod for its processes. Python runs this file when it starts.

All pods share the network of this machine. A process that binds a port on all addresses binds it on
the address of its pod. Port 0 is an exception, because it collides with no other port. Names of
services are resolved with a file that the kubelet writes.
"""

import json
import os
import pathlib
import socket

_ADDRESS = os.environ.get("SIMULATED_ADDRESS", "")
_SERVICES = os.environ.get("SIMULATED_SERVICES", "")
_bind, _getaddrinfo = socket.socket.bind, socket.getaddrinfo


def _bind_here(self, address):
    if isinstance(address, tuple) and address[0] in ("", "0.0.0.0") and address[1]:
        address = (_ADDRESS, *address[1:])
    return _bind(self, address)


def _resolve(host, port, *args, **more):
    name = host.decode() if isinstance(host, bytes) else host
    if isinstance(name, str) and name.endswith((".svc", ".svc.cluster.local")):
        key = ".".join(name.split(".")[:2])
        found = json.loads(pathlib.Path(_SERVICES).read_text()).get(key)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host = found
    return _getaddrinfo(host, port, *args, **more)


if _ADDRESS:
    socket.socket.bind = _bind_here
if _SERVICES:
    socket.getaddrinfo = _resolve
