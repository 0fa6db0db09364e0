"""Messages of gRPC streams, found in the bytes of their connection (RFC 9113, and gRPC over HTTP/2)."""

from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what who dials begins with
FRAME_HEADER_BYTES, MESSAGE_HEADER_BYTES = 9, 5
DATA, PADDED = 0, 8


class Messages:
    """Finds messages in one direction of a connection. Bytes that are no HTTP/2 have none."""

    def __init__(self) -> None:
        self._bytes = b""  # of a frame that has not ended
        self._begun = False
        self._streams: dict[bytes, bytes] = {}  # by id: what came of a message that has not ended

    def take(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return each message that ends in these bytes, with the place in them where its frame ends."""
        start = -len(self._bytes)
        found: list[tuple[int, bytes]] = []
        self._bytes += data
        if not self._begun and len(self._bytes) >= len(PREFACE):
            self._begun = True
            if self._bytes.startswith(PREFACE):
                start += len(PREFACE)
                self._bytes = self._bytes[len(PREFACE) :]
        while self._begun and len(self._bytes) >= FRAME_HEADER_BYTES:
            size = FRAME_HEADER_BYTES + int.from_bytes(self._bytes[:3])
            if len(self._bytes) < size:
                break
            frame, self._bytes = self._bytes[:size], self._bytes[size:]
            start += size
            found += [(start, message) for message in self._messages(frame)]
        return found

    def _messages(self, frame: bytes) -> Iterator[bytes]:
        kind, flags, stream, payload = frame[3], frame[4], frame[5:9], frame[FRAME_HEADER_BYTES:]
        if kind != DATA:
            return
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        payload = self._streams.pop(stream, b"") + payload
        while len(payload) >= MESSAGE_HEADER_BYTES:
            end = MESSAGE_HEADER_BYTES + int.from_bytes(payload[1:MESSAGE_HEADER_BYTES])
            if len(payload) < end:
                break
            yield payload[MESSAGE_HEADER_BYTES:end]
            payload = payload[end:]
        if payload:
            self._streams[stream] = payload
