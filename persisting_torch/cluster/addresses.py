"""Addresses: what users give, and what sockets make of them."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from persisting_torch.errors import PersistingError

PROBE_SECONDS = 1.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""How HTTP/2 begins (RFC 9113, 3.4). Who expects TLS says at once that this is none."""


@dataclass(frozen=True)
class Address:
    """The address of a machine, and a port of it; 0 for any that is free."""

    ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def host(self) -> str:
        return str(self.ip) if self.ip.version == 4 else f"[{self.ip}]"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse(text: str, what: str) -> Address:
    """The address in "host:port". Raises ValueError if it is none, or the host is not known."""
    host, _, port = text.rpartition(":")
    try:
        number = int(port)
        if not host or not 0 <= number < 1 << 16:
            raise ValueError(text)
    except ValueError:
        raise ValueError(f"{what} must be host:port, as '10.0.0.7:7000'; got {text!r}.") from None
    try:
        return Address(ipaddress.ip_address(host.strip("[]")), number)
    except ValueError:
        return Address(ipaddress.ip_address(look_up(host, what)), number)


def listed(addresses: Iterable[Address]) -> str:
    """Addresses, as messages name them."""
    return ", ".join(map(str, addresses))


def look_up(host: str, what: str) -> str:
    """The IP address of a host's name. Raises ValueError if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{what}: the host {host!r} is not known here: {error}") from None


def own_address(text: str, secret: str | None, insecure: bool) -> Address:
    """The address to listen on. Raises ValueError if it is of no use, or open to everybody."""
    address = parse(text, "addr")
    if address.ip.is_unspecified:
        raise ValueError(
            f"addr {text!r} is not one that others can reach. Give the address of this machine on"
            " the network that the cluster uses."
        )
    if not address.ip.is_loopback and secret is None and not insecure:
        raise ValueError(
            f"addr {text!r} can be reached from other machines, and without a passphrase whoever"
            " reaches it can run code here. Give a passphrase, the same to every process; or"
            " insecure=True where nobody else is on that network."
        )
    return address


def towards(ip: str) -> str:
    """This machine's address on the way to another."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))  # sends nothing
        except OSError as error:
            raise PersistingError(f"there is no way from here to {ip}: {error}") from error
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


def answers(address: Address) -> bool | None:
    """Whether a process there says anything at all; None where nobody listens.

    One that is halted says nothing, though its machine still accepts connections for it.
    """
    try:
        probe = socket.create_connection((str(address.ip), address.port), PROBE_SECONDS)
    except OSError:
        return None
    with probe:
        try:
            probe.sendall(HELLO)
            probe.recv(1)  # or the end: it has read that and wants no more
        except TimeoutError:
            return False
        except OSError:
            return True
    return True


def send_at_once(port: int) -> None:
    """Let replies from a port of this process leave at once: TCP_NODELAY, for 33 ms less a call.

    The sockets that it accepts inherit this. Pulsing keeps its own to itself, so that the socket is
    looked for among the process's files; where there is no /proc, replies are just later.
    """
    if not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile, as is the one that listed them
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with found:
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and found.type == socket.SOCK_STREAM
                and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and found.getsockname()[1] == port
            ):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
