"""Messages of handoff.proto as the two halves of a hand-off know them, and back.

What a peer sends is checked here: ProtocolError names the field.
"""

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import PROTOCOL_VERSION, AttemptKey, Generation, Incarnation, PageId
from pdserve.kvtransfer import session
from pdserve.kvtransfer.region import MAX_DESCRIPTION_BYTES
from pdserve.kvtransfer.session import Hello, HelloAck, Introduction
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.protocol.inference import logprobs_from_proto, logprobs_to_proto
from pdserve.protocol.link import key_from_proto, layout_from_proto, layout_to_proto, peer_from_proto
from pdserve.protocol.sampling import SampledToken

Request = handoff.HandoffServiceAttachRequest
Response = handoff.HandoffServiceAttachResponse

MAX_REASON_CHARS = 512
MAX_PAGES = 1 << 20  # in one hand-off
MAX_CONTINUATIONS = 64
MAX_TAIL_TOKENS = 1 << 16  # of one continuation
MAX_REPORTED = 1 << 48  # bytes, or microseconds, of a hand-off: what is above it is reported as this


def hello_to_proto(hello: Hello) -> Request:
    return Request(
        hello=handoff.Hello(
            worker_id=hello.me.peer.worker_id,
            incarnation=hello.me.peer.incarnation,
            protocol_version=PROTOCOL_VERSION,
            layout=layout_to_proto(hello.me.layout),
            mover=hello.mover,
            decode_incarnation=hello.decode_incarnation,
            age_ms=round(1000 * hello.age_s),
        )
    )


def hello_from_proto(message: Request) -> Hello:
    """Return the first message of who dials; its version is checked before what may depend on it."""
    if message.WhichOneof("message") != "hello":
        raise ProtocolError(f"message: {message.WhichOneof('message')} before hello")
    hello = message.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol_version: {hello.protocol_version} there, {PROTOCOL_VERSION} here", PeerFault.VERSION
        )
    return Hello(_introduction(hello, "hello"), hello.mover, Incarnation(hello.decode_incarnation), hello.age_ms / 1000)


def ack_to_proto(ack: HelloAck) -> Response:
    return Response(
        hello_ack=handoff.HelloAck(
            worker_id=ack.me.peer.worker_id,
            incarnation=ack.me.peer.incarnation,
            layout=layout_to_proto(ack.me.layout),
            mover_metadata=ack.mover_metadata,
        )
    )


def ack_from_proto(message: Response) -> HelloAck:
    """Return the first message of who was dialled."""
    if message.WhichOneof("message") != "hello_ack":
        raise ProtocolError(f"message: {message.WhichOneof('message')} before hello_ack")
    ack = message.hello_ack
    if len(ack.mover_metadata) > MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"mover_metadata: {len(ack.mover_metadata)} bytes are over {MAX_DESCRIPTION_BYTES}")
    return HelloAck(_introduction(ack, "hello_ack"), ack.mover_metadata)


ALIVE = Request(alive=handoff.Alive())


def to_receiver(message: Request) -> tuple[AttemptKey, session.FromSender]:
    match message.WhichOneof("message"):
        case "commit":
            return key_from_proto(message.commit.handoff), _commit(message.commit)
        case "quiesced":
            reason = message.quiesced.reason[:MAX_REASON_CHARS]
            return key_from_proto(message.quiesced.handoff), session.Quiesced(reason)
        case "landed":
            return key_from_proto(message.landed.handoff), session.PagesLanded(_digests(message.landed))
        case other:
            raise ProtocolError(f"message: {other} in an attached stream")


def to_sender(message: Response) -> tuple[AttemptKey, session.FromReceiver]:
    match message.WhichOneof("message"):
        case "grant":
            return key_from_proto(message.grant.handoff), _grant(message.grant)
        case "taken":
            return key_from_proto(message.taken.handoff), session.Taken()
        case "withdrawn":
            reason = message.withdrawn.reason[:MAX_REASON_CHARS]
            return key_from_proto(message.withdrawn.handoff), session.Withdrawn(reason)
        case other:
            raise ProtocolError(f"message: {other} in an attached stream")


def from_receiver(key: AttemptKey, message: session.FromReceiver) -> Response:
    name = _id(key)
    match message:
        case session.Grant() as grant:
            return Response(
                grant=handoff.Grant(
                    handoff=name,
                    first_page=grant.first_page,
                    pages=grant.pages,
                    generations=grant.generations,
                    capability=grant.capability,
                    lease_ms=round(grant.lease_s * 1e3),
                )
            )
        case session.Taken():
            return Response(taken=handoff.Taken(handoff=name))
        case session.Withdrawn(reason):
            withdrawn = handoff.Withdrawn(handoff=name, reason=reason[:MAX_REASON_CHARS])
            return Response(withdrawn=withdrawn)


def from_sender(key: AttemptKey, message: session.FromSender) -> Request:
    name = _id(key)
    match message:
        case session.PagesLanded(digests):
            landed = handoff.Landed(handoff=name, digests=digests)
            return Request(landed=landed)
        case session.Commit() as commit:
            return Request(
                commit=handoff.Commit(
                    handoff=name,
                    capability=commit.capability,
                    capsule=_capsule_to_proto(commit.capsule),
                    handoff_us=round(commit.handoff_s * 1e6),
                )
            )
        case session.Quiesced(reason):
            quiesced = handoff.Quiesced(handoff=name, reason=reason[:MAX_REASON_CHARS])
            return Request(quiesced=quiesced)


def _introduction(message: handoff.Hello | handoff.HelloAck, field: str) -> Introduction:
    return Introduction(peer_from_proto(message, field), layout_from_proto(message.layout))


def _id(key: AttemptKey) -> handoff.HandoffId:
    return handoff.HandoffId(request_id=key.request_id, attempt=key.attempt)


def _grant(message: handoff.Grant) -> session.Grant:
    num_pages = len(message.pages)
    if not 1 <= num_pages <= MAX_PAGES:
        raise ProtocolError(f"pages: {num_pages} named, 1 to {MAX_PAGES} are allowed")
    if len(message.generations) != num_pages:
        raise ProtocolError(f"generations: {len(message.generations)} for {num_pages} pages")
    if len(set(message.pages)) != num_pages:
        raise ProtocolError("pages: one is granted twice")
    if message.first_page > MAX_PAGES:
        raise ProtocolError(f"first_page: {message.first_page} is over {MAX_PAGES}")
    if message.lease_ms < session.MIN_LEASE_S * 1e3:
        raise ProtocolError(f"lease_ms: {message.lease_ms} is under {session.MIN_LEASE_S * 1e3:.0f}")
    return session.Grant(
        first_page=message.first_page,
        pages=tuple(map(PageId, message.pages)),
        generations=tuple(map(Generation, message.generations)),
        capability=_capability(message.capability),
        lease_s=message.lease_ms / 1e3,
    )


def _digests(message: handoff.Landed) -> tuple[int, ...]:
    if not 1 <= len(message.digests) <= MAX_PAGES:
        raise ProtocolError(f"digests: {len(message.digests)} pages have landed, 1 to {MAX_PAGES} are allowed")
    return tuple(message.digests)


def _commit(message: handoff.Commit) -> session.Commit:
    handoff_s = min(message.handoff_us, MAX_REPORTED) / 1e6
    return session.Commit(_capability(message.capability), _capsule(message.capsule), handoff_s)


def _capsule(message: handoff.Capsule) -> session.Capsule:
    num_tails = len(message.tails)
    if message.num_tokens == 0:
        raise ProtocolError("capsule.num_tokens: 0")
    if num_tails > MAX_CONTINUATIONS:
        raise ProtocolError(f"capsule.tails: {num_tails} are over {MAX_CONTINUATIONS}")
    if len({tail.index for tail in message.tails}) != num_tails:
        raise ProtocolError("capsule.tails: two are of one continuation")
    return session.Capsule(message.num_tokens, tuple(_tail(tail) for tail in message.tails))


def _tail(message: handoff.Tail) -> session.Tail:
    num_tokens, num_logprobs = len(message.token_ids), len(message.logprobs)
    if not 1 <= num_tokens <= MAX_TAIL_TOKENS:
        raise ProtocolError(f"capsule.tails.token_ids: {num_tokens} tokens, 1 to {MAX_TAIL_TOKENS} are allowed")
    if not num_logprobs:
        return session.Tail(message.index, tuple(SampledToken(token_id) for token_id in message.token_ids))
    if num_logprobs != num_tokens:
        raise ProtocolError(f"capsule.tails.logprobs: {num_logprobs} for {num_tokens} tokens")
    logprobs = map(logprobs_from_proto, message.logprobs)
    return session.Tail(message.index, tuple(map(SampledToken, message.token_ids, logprobs)))


def _capsule_to_proto(capsule: session.Capsule) -> handoff.Capsule:
    message = handoff.Capsule(num_tokens=capsule.num_tokens)
    for tail in capsule.tails:
        logprobs = [logprobs_to_proto(token.logprobs) for token in tail.tokens if token.logprobs is not None]
        token_ids = [token.token_id for token in tail.tokens]
        message.tails.add(index=tail.index, token_ids=token_ids, logprobs=logprobs)
    return message


def _capability(value: bytes) -> bytes:
    if len(value) != session.CAPABILITY_BYTES:
        raise ProtocolError(f"capability: {len(value)} bytes, {session.CAPABILITY_BYTES} are needed")
    return value
