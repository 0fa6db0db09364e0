"""A client that measures how long it waits, in a process of its own; beside each request, how busy the machine was.

`waiting_client.py HOST:PORT PID NUMBER` asks a router's HTTP port so often, and writes an object for each request, a
line each: its `ledger`, the milliseconds until its first token (`ttft_ms`), for how many of them the router's thread
waited for a processor (`delay_ms`), and what the live page has of it (`page`).
"""

import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from looking import until

MAX_ASKED_LATER = 100  # requests whose timelines are asked for at once: the page keeps no more than a few hundred
WITHIN_S = 10.0  # in which the page has what has ended
SO_TIMESTAMPNS, TIMESPEC = 35, struct.Struct("qq")  # Linux' own: Python has no names for them


class Connection:
    """One connection, kept open."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._host = host

    def wait(self, data: bytes, end: bytes) -> tuple[float, bytes]:
        """Send; return the milliseconds until the answer's first bytes came, and the answer, which ends with `end`.

        They came when the kernel had them, however long it took until this process ran again.
        """
        began_ns = time.time_ns()
        self._socket.sendall(data)
        answer, ((_, _, came),), _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(TIMESPEC.size))
        seconds, ns = TIMESPEC.unpack(came)
        waited_ms = (seconds * 10**9 + ns - began_ns) / 1e6
        while not answer.endswith(end):
            answer += self._socket.recv(65536)
        return waited_ms, answer

    def ask(self, number: int) -> tuple[float, Any]:
        """Ask for a few tokens; return the milliseconds until the first one, and the ledger."""
        asked = {"prompt": f"prompt {number}", "max_tokens": 4, "stream": True, "return_token_ids": True}
        body = json.dumps(asked | {"ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\n\r\n"
        waited_ms, answer = self.wait(head.encode() + body, b"data: [DONE]\n\n\r\n0\r\n\r\n")
        events = [line for line in answer.splitlines() if line.startswith(b"data: {")]
        return waited_ms, json.loads(events[-1].removeprefix(b"data: "))["pdserve"]

    def timeline(self, ledger: Any) -> Any:  # noqa: ANN401
        """Return what the live page has of a request, once it has all that the request's ledger has."""
        head = f"GET /page/requests/{ledger['request_id']} HTTP/1.1\r\nhost: {self._host}\r\n\r\n"

        def whole() -> Any:  # noqa: ANN401
            page = json.loads(self.wait(head.encode(), b"}")[1].partition(b"\r\n\r\n")[2])
            steps = (page.get("ledger") or {}).get("steps", ())
            return page if {step["name"] for step in steps} >= ledger["timings_ms"].keys() else None

        return until(whole, WITHIN_S, lambda: f"the page has not {ledger}")


def delay_ms(pid: str) -> float:
    """Return for how long a process's first thread was ready to run, and another one ran."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e6


def requests(address: str, pid: str, count: int) -> Iterator[dict[str, Any]]:
    door = Connection(address)
    asked: list[dict[str, Any]] = []
    for number in range(count):
        before_ms = delay_ms(pid)
        ttft_ms, ledger = door.ask(number)
        asked.append({"ttft_ms": ttft_ms, "delay_ms": delay_ms(pid) - before_ms, "ledger": ledger})
        if len(asked) == MAX_ASKED_LATER or number == count - 1:
            for each in asked:
                yield each | {"page": door.timeline(each["ledger"])}
            asked.clear()


if __name__ == "__main__":
    for each in requests(sys.argv[1], sys.argv[2], int(sys.argv[3])):
        sys.stdout.write(json.dumps(each) + "\n")
