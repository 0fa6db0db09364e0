"""Hand-off streams in virtual time: the machines of `kvtransfer.client` and `server`, over simulated streams."""

from collections.abc import Callable

from faultsim.network import End, Network
from faultsim.world import Process, ViolationError
from pdserve.errors import ProtocolError
from pdserve.kvtransfer import dialling, roster, wire
from pdserve.kvtransfer.dialling import AttachMover, Dial, DialId, Dialling
from pdserve.kvtransfer.doors import Forget, IncomingEvent, OutgoingEvent
from pdserve.kvtransfer.greeting import Hello, HelloAck, Introduction
from pdserve.kvtransfer.roster import Roster, StreamId
from pdserve.kvtransfer.session import FromReceiver, HandoffKey, Peer
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

    def handle(self, event: dialling.Event) -> None:
        for command in self._dialling.handle(event):
            match command:
                case Dial():
                    self._dial(command)
                case AttachMover(dial):
                    self.handle(dialling.CanWrite(dial))
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
        self._owner.world.after(dial.timeout_s, self._owner, self.handle, dialling.TimedOut(dial.dial))
        self._network.dial(
            self._owner,
            dial.address,
            lambda end: self._opened(dial, end),
            lambda reason: self.handle(dialling.Ended(dial.dial, reason)),
        )

    def _opened(self, dial: Dial, end: End) -> None:
        if dial.dial not in self._ends:
            end.close("not wanted any more")
            return
        self._ends[dial.dial] = end
        end.receive = lambda message: self._receive(dial.dial, message)
        end.lost = lambda reason: self.handle(dialling.Ended(dial.dial, reason))
        age_s = self._owner.world.now - self._owner.started_s
        hello = Hello(self._introduction, MOVER, dial.peer.incarnation, age_s)
        self._write(dial.dial, wire.hello_to_proto(hello))

    def _receive(self, dial: DialId, content: object) -> None:
        message = Response.FromString(_bytes(content))
        try:
            if message.HasField("hello_ack"):
                event: dialling.Event = dialling.Answered(dial, wire.ack_from_proto(message))
            else:
                event = dialling.Received(dial, *wire.to_sender(message))
        except ProtocolError as error:
            raise _refused(self._owner, message, error) from error
        self.handle(event)


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

    def send(self, peer: Peer, key: HandoffKey, command: FromReceiver) -> None:
        stream = self._roster.stream_of(peer)
        if stream is not None:
            self._write(stream, wire.from_receiver(key, command))

    def forget(self, forget: Forget) -> None:
        self._handle(forget)

    def _receive(self, stream: StreamId, content: object) -> None:
        message = Request.FromString(_bytes(content))
        try:
            match message.WhichOneof("message"):
                case "hello":
                    event: roster.Event = roster.Greeted(stream, wire.hello_from_proto(message))
                case "alive":
                    event = roster.Alive(stream)
                case _:
                    event = roster.Received(stream, *wire.to_receiver(message))
        except ProtocolError as error:
            raise _refused(self._owner, message, error) from error
        self._handle(event)

    def _ended(self, stream: StreamId, reason: str) -> None:
        del self._ends[stream]
        self._handle(roster.Ended(stream, reason))

    def _write(self, stream: StreamId, message: Response) -> None:
        self._ends[stream].send(message.SerializeToString())

    def _handle(self, event: roster.Event) -> None:
        for command in self._roster.handle(event, self._owner.world.now):
            match command:
                case roster.Welcome(stream):
                    self._write(stream, self._ack)
                case roster.Refuse(stream, error):
                    self._ends.pop(stream).close(str(error))
                case roster.Close(stream, reason):
                    self._ends.pop(stream).close(reason)
                case report:
                    self._report(report)


def _refused(process: Process, message: object, error: ProtocolError) -> ViolationError:
    return ViolationError("I7", f"{process.name} refused an honest {message}: {error}")


def _bytes(content: object) -> bytes:
    assert isinstance(content, bytes)
    return content
