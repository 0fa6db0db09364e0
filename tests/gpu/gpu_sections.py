"""The sections of a run, in their order: what matters most comes first, in case the time runs out."""

import gpu_apart
import gpu_attention
import gpu_checks
import gpu_coded
import gpu_compile
import gpu_engine
import gpu_handoff
import gpu_memory
import gpu_pages
import gpu_ranks
import gpu_rows_bench
import gpu_sampler
import gpu_states
import gpu_steps
import gpu_throughput
import gpu_worker
from gpu_report import Section

# The weights are about the seconds that each takes on an H100.
_ALL = (
    Section("ceilings", 10, gpu_rows_bench.ceilings),
    Section("compile", 75, gpu_compile.cases),
    Section("engine", 50, gpu_engine.cases),
    Section("throughput", 20, gpu_throughput.small),
    Section("sanitizer", 70, gpu_apart.sanitizer),
    Section("memory", 25, gpu_memory.cases),
    Section("prefill", 50, gpu_attention.prefill),
    Section("decode", 40, gpu_attention.decode),
    Section("latents", 30, gpu_attention.latents),
    Section("sampler", 20, gpu_sampler.cases),
    Section("coded", 40, gpu_coded.cases),
    Section("states", 30, gpu_states.cases),
    Section("steps", 40, gpu_steps.cases),
    Section("end_to_end", 70, gpu_throughput.end_to_end),
    Section("handoff", 60, gpu_handoff.nixl),
    Section("handoff_gloo", 25, gpu_handoff.gloo),
    Section("ranks", 40, gpu_ranks.cases),
    Section("worker", 40, gpu_worker.cases),
    Section("start", 60, gpu_apart.starts),
    Section("checks", 40, gpu_checks.cases),
    Section("rows", 10, gpu_rows_bench.cases),
    Section("host_pages", 5, gpu_pages.cases),
    Section("tune", 120, gpu_attention.tune),
)
SECTIONS = {section.name: section for section in _ALL}
DEFAULT = tuple(name for name in SECTIONS if name != "tune")
