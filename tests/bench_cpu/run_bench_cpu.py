"""Compares a cluster on this machine with another engine, turn and turn about, and prints a table.

The other engine is suspended while the cluster has its turn; a cluster that waits takes under 1 % of a core.

Usage: run_bench_cpu.py --peer DIR [--engine NAME] [--rounds N] [--workloads 1x32x128 ...] [--samplings greedy]
       [--json FILE] [--num-threads N] [--quantized-inputs 8] [--model DIR]
DIR/venv has the other engine, and DIR its model: see ENGINES. `--model` names one that both load. Beside wall clock
stands the CPU time of all processes of each engine: with one thread it compares them on a machine that others keep
busy.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median

import httpx
import psutil

from pdserve.checkpoint.fetch import resolve_model
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.client import GREEDY, Sampling, requests_of
from pdserve.measure.live import LiveCluster, live_cluster
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import fixed_lengths, random_prompts

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
WORKLOADS = ("1x32x128", "16x32x128", "32x128x128", "8x1024x1", "1x2048x1")
POOLED = ("256x32x0", "64x128x0", "16x512x0", "4x2048x0")
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=1.0, top_p=0.95)}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to compare with."""

    name: str
    script: str
    model: str  # in its folder; empty: the catalog's 4-bit file
    quantization: str  # of our weights
    workloads: Sequence[str] = WORKLOADS
    pools: bool = False  # it makes vectors of prompts: workloads have no output


ENGINES = {
    "vllm": Engine("vLLM", "peer_vllm.py", "smollm2", "none"),
    "vllm-pooling": Engine("vLLM", "peer_vllm.py", "smollm2", "none", POOLED, pools=True),
    "llama.cpp": Engine("llama.cpp", "peer_llama.py", "", "gguf"),
    "llama.cpp-q4_0": Engine("llama.cpp", "peer_llama.py", "q4_0.gguf", "gguf"),
    "ik_llama.cpp": Engine("ik_llama.cpp", "peer_llama.py", "q4_0.gguf", "gguf"),
    "openvino": Engine("OpenVINO", "peer_openvino.py", "openvino", "none"),
    "openvino-int4": Engine("OpenVINO", "peer_openvino.py", "openvino-int4", "gguf"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A workload, and the seconds that each round of each engine took."""

    workload: str
    sampling: str
    peer_s: list[float]
    pdserve_s: list[float]
    peer_cpu_s: list[float]
    pdserve_cpu_s: list[float]

    @property
    def ratio(self) -> float:
        """Return our throughput over the peer's."""
        return median(self.peer_s) / median(self.pdserve_s)

    @property
    def cpu_ratio(self) -> float:
        """Return the peer's CPU time over ours."""
        return median(self.peer_cpu_s) / median(self.pdserve_cpu_s)


class Peer:
    """The other engine, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def started(cls, folder: Path, engine: Engine, model: Path | None, num_threads: int | None) -> "Peer":
        """Start it with this model or its own, and wait until that is loaded."""
        model = model or (folder / engine.model if engine.model else resolve_model(MODEL))
        command = (folder / "venv/bin/python", HERE / engine.script, model)
        pipe = asyncio.subprocess.PIPE
        threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        environment = {**os.environ, **threads, **({"PEER_RUNNER": "pooling"} if engine.pools else {})}
        process = await asyncio.create_subprocess_exec(*map(str, command), stdin=pipe, stdout=pipe, env=environment)
        peer = cls(process)
        await peer._answer()
        return peer

    async def seconds(self, shape: tuple[int, int, int], sampling: Sampling) -> float:
        """Return how long it takes for a workload."""
        num_requests, prompt_tokens, output_tokens = shape
        asked = {
            "num_requests": num_requests,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return float((await self._answer())["seconds"])

    def pids(self) -> list[int]:
        """Return its processes."""
        return [each.pid for each in self._processes()]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep it off the processor: vLLM's processes poll while they have nothing to do."""
        processes = self._processes()
        for each in processes:
            each.suspend()
        try:
            yield
        finally:
            for each in processes:
                each.resume()

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    async def stop(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended")
        answer: dict[str, float] = json.loads(line)
        return answer


async def our_seconds(cluster: LiveCluster, shape: tuple[int, int, int], sampling: Sampling, seed: int) -> float:
    """Return how long the cluster takes for a workload, from the first request to the last token."""
    if not shape[2]:
        return await our_vectors_s(cluster.state.http, cluster.vocab_size, shape, seed)
    workload = fixed_lengths("", *shape)
    prompts = random_prompts(workload.arrivals, cluster.vocab_size, seed)
    outcomes = await cluster.client.run(requests_of(workload.arrivals, prompts, ANY, sampling))
    if not all(outcome.is_good for outcome in outcomes):
        raise SystemExit(f"requests failed: {[outcome.detail for outcome in outcomes if not outcome.is_good][:3]}")
    return max(outcome.ended_s for outcome in outcomes) - min(outcome.sent_s for outcome in outcomes)


async def our_vectors_s(url: str, vocab_size: int, shape: tuple[int, int, int], seed: int) -> float:
    """Return how long the cluster takes for vectors of prompts that come in one call."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, vocab_size) for _ in range(shape[1])] for _ in range(shape[0])]
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        began_s = time.perf_counter()
        answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": prompts, "encoding_format": "base64"})
        took_s = time.perf_counter() - began_s
    if answer.status_code != 200 or len(answer.json()["data"]) != shape[0]:
        raise SystemExit(f"vectors failed: {answer.text[:300]}")
    return took_s


def report(text: str) -> None:
    """Show progress."""
    sys.stderr.write(f"{text}\n")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that processes have taken."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def pids_of(cluster: LiveCluster) -> dict[str, int]:
    """Return the processes of a cluster by name."""
    return {each.name: each.pid for each in cluster.state.processes if each.pid is not None}


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process had resident."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


async def compared(peer: Peer, cluster: LiveCluster, lines: list[Line], rounds: int) -> None:
    """Run all workloads on both, round after round; a first round only warms up."""
    seed = 0
    for turn in range(rounds + 1):
        for line in lines:
            num_requests, prompt_tokens, output_tokens = map(int, line.workload.split("x"))
            shape, sampling = (num_requests, prompt_tokens, output_tokens), SAMPLINGS[line.sampling]
            seed += 1
            peer_pids, our_pids = peer.pids(), pids_of(cluster).values()
            begun_s = cpu_seconds(peer_pids)
            theirs = await peer.seconds(shape, sampling)
            their_cpu_s = cpu_seconds(peer_pids) - begun_s
            with peer.suspended():
                begun_s = cpu_seconds(our_pids)  # without what waiting took in the other's turn
                ours = await our_seconds(cluster, shape, sampling, seed)
                our_cpu_s = cpu_seconds(our_pids) - begun_s
            report(f"round {turn}: {line.workload} {line.sampling}: {theirs:.2f} / {ours:.2f} s")
            if turn:
                line.peer_s.append(theirs)
                line.pdserve_s.append(ours)
                line.peer_cpu_s.append(their_cpu_s)
                line.pdserve_cpu_s.append(our_cpu_s)


def table(lines: list[Line], name: str) -> str:
    """Return the lines as a Markdown table."""
    rows = [f"| requests x in x out | tokens | {name}, s | pdserve, s | throughput : {name} | CPU time, s | ratio |"]
    rows.append("|---|---|---|---|---|---|---|")
    for line in lines:
        both = (f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (line.peer_s, line.pdserve_s))
        cpu = f"{median(line.peer_cpu_s):.2f}, {median(line.pdserve_cpu_s):.2f} | {line.cpu_ratio:.2f}"
        rows.append(f"| {line.workload} | {line.sampling} | {' | '.join(both)} | {line.ratio:.2f} | {cpu} |")
    for sampling in dict.fromkeys(line.sampling for line in lines):
        those = [line for line in lines if line.sampling == sampling]
        mean, cpu_mean = (geometric_mean(each) for each in zip(*[(x.ratio, x.cpu_ratio) for x in those], strict=True))
        rows.append(f"| geometric mean | {sampling} | | | {mean:.2f} | | {cpu_mean:.2f} |")
    return "\n".join(rows)


async def main() -> None:
    """Measure, print the table and the peaks of memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", help="by default the engine's; NxINx0: vectors")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=tuple(SAMPLINGS))
    parser.add_argument("--num-threads", type=int, help="of each engine; by default one for each core")
    parser.add_argument("--quantized-inputs", type=int, choices=(8, 16), default=16, help="bits; ours")
    parser.add_argument("--model", type=Path, help="of both; by default SmolLM2-135M, in the engine's form")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = ENGINES[arguments.engine]
    samplings = ("greedy",) if engine.pools else arguments.samplings
    workloads = arguments.workloads or engine.workloads
    lines = [Line(each, name, [], [], [], []) for each in workloads for name in samplings]
    peer = await Peer.started(arguments.peer, engine, arguments.model, arguments.num_threads)
    flags = {"dtype": "bfloat16", "quantization": engine.quantization, "num_threads": arguments.num_threads}
    flags |= {"quantized_inputs": arguments.quantized_inputs}
    spec = ClusterSpec(str(arguments.model or resolve_model(MODEL)), MODEL, name="bench-cpu", worker_flags=flags)
    async with live_cluster(spec, report) as cluster:
        await compared(peer, cluster, lines, arguments.rounds)
        pids = {f"peer {index}": pid for index, pid in enumerate(peer.pids())} | pids_of(cluster)
        peaks = {name: peak_bytes(pid) for name, pid in pids.items()}
    await peer.stop()
    sys.stdout.write(table(lines, engine.name) + "\n")
    sys.stdout.write(
        "peak memory: " + ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in peaks.items()) + "\n"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"lines": [asdict(line) for line in lines], "peak_bytes": peaks}, indent=1)
        )


if __name__ == "__main__":
    asyncio.run(main())
