"""Connections of this process with itself."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends: who sends, and who reads."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as reader,
    ):
        reader.setblocking(True)
        yield sender, reader


@contextmanager
def unread() -> Iterator[socket.socket]:
    """Yield the end of a connection at which four bytes wait: `late`."""
    with connection() as (sender, reader):
        sender.sendall(b"late")
        reader.recv(1, socket.MSG_PEEK)  # they have arrived
        yield reader
