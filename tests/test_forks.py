"""Programs that a process of pdserve starts do start, whatever gRPC's threads are doing in it."""

import subprocess
import sys

# Servers with streams under way, on the event loop that pdserve runs on: the fork is uvloop's.
SERVES_AND_STARTS = """
import asyncio
import pdserve
import grpc
import uvloop

NUM_STARTS = 40

class Streams(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_stream_rpc_method_handler(self.write)

    async def write(self, request, context):
        while True:
            await context.write(b"x")
            await asyncio.sleep(0.001)

async def read(channel):
    async for _ in channel.unary_stream("/a/b")(b""):
        pass

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Streams(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        reading = [asyncio.create_task(read(channel)) for _ in range(4)]
        for _ in range(NUM_STARTS):
            started = await asyncio.create_subprocess_exec("/bin/true")
            assert await started.wait() == 0
        for task in reading:
            task.cancel()
    await server.stop(0)

uvloop.run(main())
"""


def test_programs_start_beside_grpc_s_threads_which_no_fork_stops() -> None:
    done = subprocess.run([sys.executable, "-c", SERVES_AND_STARTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr  # gRPC says there what its handlers could not do
