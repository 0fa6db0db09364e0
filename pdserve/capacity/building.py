"""Builds simulated workers: as large as their profile says, and as they register with routers."""

from collections.abc import Callable, Mapping

from pdserve.capacity.leaping import LeapingScheduler
from pdserve.capacity.shape import Shape
from pdserve.capacity.worker import SimWorker
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits as EngineLimits
from pdserve.ids import PROTOCOL_VERSION, Incarnation, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.session import DigestPolicy, Peer
from pdserve.measure.workload import Workload
from pdserve.perfmodel.profile import Profile
from pdserve.prefix_hash import PrefixHasher
from pdserve.roles import Role
from pdserve.router.events import LinkId, Registration
from pdserve.token_ids import ALL_IDS
from pdserve.virtual_time import VirtualClock
from pdserve.worker.admission import Rules
from pdserve.worker.core import WorkerCore

MODEL = "simulated"
MAX_TASKS = 100_000
_MOST_PAGE_TOKENS = 64


class Builder:
    """Builds all workers of one cluster, of one profile, for one workload."""

    def __init__(self, profile: Profile, shape: Shape, workload: Workload) -> None:
        self._profile = profile
        self._shape = shape
        self._longest = max(each.prompt_tokens + workload.max_tokens(each) for each in workload.arrivals) + 1
        self.page_size = min(workload.block_tokens, _MOST_PAGE_TOKENS) if workload.block_tokens else _MOST_PAGE_TOKENS
        self.page_bytes = self.page_size * profile.kv_bytes_per_token
        self.hasher = PrefixHasher(b"simulated", MODEL, self.page_size)
        self.costs = {role: profile.configuration(shape.tp_of(role)).costs() for role in (Role.PREFILL, Role.DECODE)}
        self._cache_hasher = self.hasher if workload.block_tokens else None

    def num_pages(self, role: Role) -> int:
        """Return how many KV pages a worker of a role has."""
        configuration = self._profile.configuration(self._shape.tp_of(role))
        return int(configuration.kv_tokens * self._shape.kv_share) // self.page_size

    @property
    def step_tokens(self) -> Mapping[Role, int]:
        """Return how many tokens a worker's step computes at most, in each role."""
        shape = self._shape
        return {Role.PREFILL: shape.prefill_chunk, Role.DECODE: max(shape.decode_chunk, shape.max_num_seqs)}

    def build(
        self, clock: VirtualClock, name: str, link: LinkId, role: Role, output_length: Callable[[bytes], int]
    ) -> tuple[SimWorker, Registration]:
        """Return a worker, and what it registers with."""
        num_pages, step_tokens = self.num_pages(role), self.step_tokens
        limits = EngineLimits(
            max_num_seqs=self._shape.max_num_seqs,
            max_num_batched_tokens=max(step_tokens.values()),
            max_model_len=min(self._longest, num_pages * self.page_size),
            eos_token_ids=frozenset(),
        )
        cache = KvCache(num_pages, self.page_size, self._cache_hasher)
        scheduler = LeapingScheduler(cache, limits, output_length)
        # Nobody is lost, or falls silent.
        rules = Rules(MAX_TASKS, DigestPolicy.OFF, 1.0, lease_s=3600.0, role=role, step_tokens=step_tokens)
        core = WorkerCore(scheduler, ALL_IDS, self.page_bytes, b"simulated", rules)
        peer = Peer(WorkerId(name), Incarnation(link))
        scheduler.cache.take_changes()  # from now on they are noted
        worker = SimWorker(clock, (peer, link), core, scheduler, self.costs[role])
        return worker, self._registration(peer, link, role, limits)

    def _registration(self, peer: Peer, link: LinkId, role: Role, limits: EngineLimits) -> Registration:
        # One head whose width makes a page as large as the profile says.
        layout = KvLayout("simulated", 1, 1, self._profile.kv_bytes_per_token // 4, self.page_size, "bfloat16")
        return Registration(
            link=link,
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            ready=True,
            model=MODEL,
            layout=layout,
            num_pages=self.num_pages(role),
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            handoff_address=peer.worker_id,
            max_num_batched_tokens=self.step_tokens[role],
        )
