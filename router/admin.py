"""The admin endpoint: AdminService."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import grpc

from pdserve.base.errors import echo
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.net.rpc import AnyContext, abort
from pdserve.perfmodel.wire import costs_to_proto
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceServicer
from pdserve.protocol.admin import demand_to_proto
from pdserve.protocol.link import ROLES
from pdserve.router.placement.routing import Workers
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import DrainAsked, LinkId, MovesAsked, ProcessEnded, RoleAsked
from pdserve.router.requests.recent import Kind
from pdserve.router.shell import Shell, WorkerStream

MIN_INTERVAL_S = 0.1
ASKED_TIMEOUT_S = 5.0  # a decode worker may have to wait for what it has granted


class AdminEndpoint(AdminServiceServicer):
    """Shows the state of the cluster, drains workers for operators, and takes launchers' proofs of processes' ends."""

    def __init__(self, shell: Shell, router_id: str, model: str) -> None:
        self._shell = shell
        self._router_id = router_id
        self._model = model
        self.metrics_address = ""  # host:port; empty: nowhere
        self.frontends: list[admin.FrontendStatus] = []  # attached

    async def GetStatus(self, request: admin.GetStatusRequest, context: object) -> admin.GetStatusResponse:
        return admin.GetStatusResponse(status=self.status(), unix_time_ms=time.time_ns() // 1_000_000)

    async def WatchStatus(  # type: ignore[override]
        self, request: admin.WatchStatusRequest, context: AnyContext
    ) -> None:
        shell, placements = self._shell, self._shell.core.placements
        more_s = max(0.0, request.min_interval_ms / 1e3 - MIN_INTERVAL_S)
        while True:
            num_changes, workers_s = shell.num_changes, placements.workers_changed_s
            await context.write(admin.WatchStatusResponse(status=self.status()))
            await asyncio.sleep(MIN_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(more_s):
                    await shell.until(lambda at_s=workers_s: placements.workers_changed_s != at_s)  # type: ignore[misc]
            await shell.until(lambda num=num_changes: shell.num_changes != num)  # type: ignore[misc]

    async def ReportDecisions(
        self, request: admin.ReportDecisionsRequest, context: object
    ) -> admin.ReportDecisionsResponse:
        recent = self._shell.core.placements.recent
        recent.now_s = self._shell.clock.now_s()  # it is no event of the core's
        for text in request.decisions:
            recent.note(Kind.SCALING, "", text)
        return admin.ReportDecisionsResponse()

    async def ReportProcessGone(
        self, request: admin.ReportProcessGoneRequest, context: object
    ) -> admin.ReportProcessGoneResponse:
        gone = request.process
        ended = ProcessEnded(Peer(WorkerId(gone.worker_id), Incarnation(gone.incarnation)), request.from_outside)
        self._shell.post(ended)
        return admin.ReportProcessGoneResponse()

    async def DrainWorker(self, request: admin.DrainWorkerRequest, context: AnyContext) -> admin.DrainWorkerResponse:
        worker = await self._attached(request.worker_id, "worker_id", context)
        self._shell.post(DrainAsked(worker.link, request.cancel))
        if request.cancel:
            try:
                async with asyncio.timeout(ASKED_TIMEOUT_S):
                    await self._shell.until(lambda: not worker.draining or self._has_left(worker))
            except TimeoutError:
                if not worker.registration.ready:
                    text = f"{worker.name} still loads its model: it takes requests again once it has"
                    await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)
                text = f"{worker.name} goes on to drain: a signal or the worker itself began it"
                await abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)
            if self._has_left(worker):
                await abort(context, grpc.StatusCode.UNAVAILABLE, f"{worker.name} is no longer attached")
        return admin.DrainWorkerResponse()

    async def SetWorkerRole(
        self, request: admin.SetWorkerRoleRequest, context: AnyContext
    ) -> admin.SetWorkerRoleResponse:
        worker, role = await self._attached(request.worker_id, "worker_id", context), ROLES.get(request.role)
        if role is None:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"role: {request.role} is unknown")
        if worker.coming_role is worker.role is role:
            return admin.SetWorkerRoleResponse(epoch=worker.registration.role_epoch)
        if why := self._shell.core.workers.role_refusal(worker, role, force=request.force):
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        epoch = max(worker.registration.role_epoch, worker.asked[1]) + 1
        self._shell.post(RoleAsked(worker.link, role, epoch))
        try:
            async with asyncio.timeout(ASKED_TIMEOUT_S):
                await self._shell.until(lambda: worker.registration.role_epoch >= epoch or self._has_left(worker))
        except TimeoutError:
            text = f"{worker.name} has not become a {role} worker within {ASKED_TIMEOUT_S:g} s; it may yet"
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)
        known = worker.registration
        if known.role_epoch < epoch:
            await abort(context, grpc.StatusCode.UNAVAILABLE, f"{worker.name} is no longer attached")
        if known.role is not role:
            text = f"{worker.name} was given another role at the same time: {known.role}, epoch {known.role_epoch}"
            await abort(context, grpc.StatusCode.ABORTED, text)
        return admin.SetWorkerRoleResponse(epoch=known.role_epoch)

    async def MoveSequences(
        self, request: admin.MoveSequencesRequest, context: AnyContext
    ) -> admin.MoveSequencesResponse:
        core, target = self._shell.core, None
        source = await self._attached(request.worker_id, "worker_id", context)
        if request.target_worker_id:
            target = await self._attached(request.target_worker_id, "target_worker_id", context)
            if why := _all_leave(source) or _unfit(core.workers, source, target) or core.workers.refusal(target):
                await abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"target_worker_id: {why}")
        num_movable = core.moving.num_movable(source)
        num_sequences = min(num_movable, request.max_sequences or num_movable)
        self._shell.post(MovesAsked(source.link, None if target is None else target.link, request.max_sequences))
        return admin.MoveSequencesResponse(num_sequences=num_sequences)

    async def _attached(self, worker_id: str, field: str, context: AnyContext) -> WorkerView:
        """Return a worker by its name; end the call where none of that name is attached."""
        worker = self._shell.core.workers.named(worker_id)
        if worker is None:
            await abort(context, grpc.StatusCode.NOT_FOUND, f"{field}: {echo(worker_id, repr)} is not attached")
        return worker

    def _has_left(self, worker: WorkerView) -> bool:
        return self._shell.core.workers.get(worker.link) is not worker

    def status(self) -> admin.ClusterStatus:
        core = self._shell.core
        names, unroutable = {worker.name for worker in core.workers}, core.membership.unroutable()
        return admin.ClusterStatus(
            router_id=self._router_id,
            model=self._model,
            workers=[self._worker(stream, names, unroutable) for stream in self._shell.streams.values()],
            num_active=core.num_active,
            num_held=core.num_held,
            ended=core.placements.ended,
            moves=core.placements.shadows.ended,
            num_replaced=core.placements.num_replaced,
            refused={refusal.value: count for refusal, count in self._shell.refused.items()},
            costs=[costs_to_proto(*kind, costs) for kind, costs in core.predictor.costs.kinds()],
            refused_because={cause.value: count for cause, count in core.placements.refused_because.items()},
            demand=demand_to_proto(core.placements.demand.counted()),
            metrics_address=self.metrics_address,
            num_without_handoff=core.placements.num_without_handoff,
            without_handoff_because=core.placements.without_handoff_because,
            frontends=self.frontends,
        )

    def _worker(self, stream: WorkerStream, names: set[str], unroutable: Mapping[LinkId, str]) -> admin.WorkerStatus:
        worker = self._shell.core.workers.get(stream.link_id)
        if worker is None:
            return admin.WorkerStatus(registration=stream.registration, unroutable="it has yet to register")
        silent_s = self._shell.clock.now_s() - worker.last_heard_s
        return admin.WorkerStatus(
            registration=stream.registration,
            load=stream.load,
            num_assigned=len(worker.shares),
            silent_ms=round(silent_s * 1e3),
            unroutable=unroutable[worker.link],
            step_ms=worker.step_s * 1e3,
            pairs=[pair for name, pair in stream.pairs.items() if name in names],
        )


def _all_leave(source: WorkerView) -> str:
    """Return why nobody can choose where a worker's continuations move; empty when somebody can."""
    if source.draining:
        return f"{source.name} is draining: all that it decodes moves to wherever there is room"
    if not source.role.is_in(Role.DECODE):
        return f"{source.name} is a prefill worker: all that it decodes moves to wherever there is room"
    return ""


def _unfit(workers: Workers, source: WorkerView, target: WorkerView) -> str:
    """Return why continuations of one worker cannot move to another; empty when they can."""
    if target is source:
        return f"{source.name} has them already"
    if not target.role.is_in(Role.DECODE):
        return f"{target.name} is a prefill worker"
    if target.kind != source.kind:
        return f"{target.name} does not fit {source.name}: {workers.difference(source, target)}"
    return ""
