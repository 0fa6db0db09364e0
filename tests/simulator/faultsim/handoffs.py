"""Hand-off streams in virtual time: the machines of `kvtransfer.client` and `server`, over simulated streams."""

from collections.abc import Callable, Iterable

from faultsim.network import End, Network
from faultsim.world import Process, ViolationError
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import dialling, roster, wire
from pdserve.kvtransfer.dialling import CONNECT_TIMEOUT_S, Dial, DialId, Dialling
from pdserve.kvtransfer.doors import IncomingEvent, OutgoingEvent, ReceiverMessage, SenderAlive, SenderMessage
from pdserve.kvtransfer.roster import Roster, StreamId
from pdserve.kvtransfer.session import FromReceiver, FromSender, Hello, HelloAck, Introduction
from pdserve.kvtransfer.wire import Request, Response

MOVER = "simulated"


class SenderStreams:
    """`kvtransfer.client.HandoffClient` in virtual time."""

    def __init__(
        self,
        owner: Process,
        introduction: Introduction,
        network: Network,
        report: Callable[[OutgoingEvent], object],
    ) -> None:
        self._owner = owner
        self._introduction = introduction
        self._network = network
        self._report = report
        self._dialling = Dialling(introduction)
        self._ends: dict[DialId, End | None] = {}  # None: being dialled

    def beat(self) -> None:
        for dial in self._dialling.attached:
            self._write(dial, wire.ALIVE)

    def connect(self, peer: Peer, address: str) -> None:
        self._perform(self._dialling.connect(peer, address))

    def send(self, peer: Peer, key: AttemptKey, message: FromSender) -> None:
        self._perform(self._dialling.send(peer, key, message))

    def forget(self, peer: Peer) -> None:
        self._perform(self._dialling.forget(peer))

    def _perform(self, commands: Iterable[dialling.Command]) -> None:
        for command in commands:
            match command:
                case Dial():
                    self._dial(command)
                case dialling.Send(dial, key, message):
                    self._write(dial, wire.from_sender(key, message))
                case dialling.Close(dial):
                    end = self._ends.pop(dial)
                    if end is not None:
                        end.close("closed by the process that dialled")
                case dialling.Finish():
                    raise AssertionError("a simulated process ends all its streams at once")
                case report:
                    self._report(report)

    def _write(self, dial: DialId, message: Request) -> None:
        end = self._ends.get(dial)
        if end is not None:
            end.send(message.SerializeToString())

    def _dial(self, dial: Dial) -> None:
        self._ends[dial.dial] = None
        self._owner.world.after(CONNECT_TIMEOUT_S, self._owner, self._time_out, dial.dial)
        self._network.dial(
            self._owner,
            dial.address,
            lambda end: self._opened(dial, end),
            lambda reason: self._end(dial.dial, reason),
        )

    def _time_out(self, dial: DialId) -> None:
        self._perform(self._dialling.time_out(dial))

    def _end(self, dial: DialId, reason: str) -> None:
        self._perform(self._dialling.end(dial, reason))

    def _opened(self, dial: Dial, end: End) -> None:
        if dial.dial not in self._ends:
            end.close("not wanted any more")
            return
        self._ends[dial.dial] = end
        end.receive = lambda message: self._receive(dial, message)
        end.lost = lambda reason: self._end(dial.dial, reason)
        age_s = self._owner.world.now - self._owner.started_s
        hello = Hello(self._introduction, MOVER, dial.peer.incarnation, age_s)
        self._write(dial.dial, wire.hello_to_proto(hello))

    def _receive(self, dial: Dial, content: object) -> None:
        if dial.dial not in self._ends:
            return
        message = Response.FromString(_bytes(content))
        try:
            ack = wire.ack_from_proto(message) if message.HasField("hello_ack") else None
            said = None if ack is not None else ReceiverMessage(dial.peer, *wire.to_sender(message))
        except ProtocolError as error:
            raise _refused(self._owner, message, error) from error
        if said is not None:
            self._report(said)
        if ack is not None:
            self._attach(dial, ack)

    def _attach(self, dial: Dial, ack: HelloAck) -> None:
        try:
            self._dialling.answer(dial.dial, ack)
        except ProtocolError as error:
            self._end(dial.dial, str(error))
            return
        self._perform(self._dialling.attach(dial.dial))


class ReceiverStreams:
    """`kvtransfer.server.HandoffServicer` in virtual time."""

    def __init__(self, owner: Process, introduction: Introduction, report: Callable[[IncomingEvent], object]) -> None:
        self._owner = owner
        self._ack = wire.ack_to_proto(HelloAck(introduction, b""))
        self._report = report
        self._roster = Roster(introduction, MOVER)
        self._ends: dict[StreamId, End] = {}
        self._last_stream = 0

    def accept(self, end: End) -> None:
        self._last_stream += 1
        stream = StreamId(self._last_stream)
        self._ends[stream] = end
        end.receive = lambda message: self._receive(stream, message)
        end.lost = lambda reason: self._ended(stream, reason)

    def send(self, peer: Peer, key: AttemptKey, command: FromReceiver) -> None:
        stream = self._roster.stream_of(peer)
        if stream is not None:
            self._ends[stream].send(wire.from_receiver(key, command).SerializeToString())

    def forget(self, peer: Peer) -> None:
        self._perform(self._roster.forget(peer))

    def _receive(self, stream: StreamId, content: object) -> None:
        message = Request.FromString(_bytes(content))
        try:
            if message.HasField("hello"):
                self._greet(stream, wire.hello_from_proto(message))
                return
            peer = self._roster.receive(stream, self._owner.world.now)
            if peer is not None:
                alive = message.HasField("alive")
                self._report(SenderAlive(peer) if alive else SenderMessage(peer, *wire.to_receiver(message)))
        except ProtocolError as error:
            raise _refused(self._owner, message, error) from error

    def _greet(self, stream: StreamId, hello: Hello) -> None:
        try:
            commands = self._roster.attach(stream, hello, self._owner.world.now)
        except ProtocolError as error:
            self._ends.pop(stream).close(str(error))
            return
        self._ends[stream].send(self._ack.SerializeToString())
        self._perform(commands)

    def _ended(self, stream: StreamId, reason: str) -> None:
        del self._ends[stream]
        self._perform(self._roster.end(stream, reason))

    def _perform(self, commands: Iterable[roster.Command]) -> None:
        for command in commands:
            match command:
                case roster.Close(stream, reason):
                    self._ends.pop(stream).close(reason)
                case report:
                    self._report(report)


def _refused(process: Process, message: object, error: ProtocolError) -> ViolationError:
    return ViolationError("I7", f"{process.name} refused an honest {message}: {error}")


def _bytes(content: object) -> bytes:
    assert isinstance(content, bytes)
    return content
