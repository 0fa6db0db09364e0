"""The threads that a worker computes with, and how workers of one machine share its processors.

All workers map one file, in which each has a seat; `kernels/cpu/src/seats.c` says what they write there. A seat is its
worker's for as long as the worker holds a lock on it, which ends with the process. Workers that may use other
processors, or have another folder of weights, have another file. It lies in memory: threads that compute write to it.
"""

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.files import make_own_folder

logger = logging.getLogger(__name__)

SPIN_COUNT = "20000"  # fractions of a millisecond
PLACING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}  # by which users bind threads themselves
NUM_SEATS = 16  # as src/seats.c has it
SEAT_BYTES = 64
FILES = Path("/dev/shm")
TOPOLOGY = Path("/sys/devices/system/cpu")

_CHOSEN: set[str] = set()  # variables that `thread_defaults` has set
_IN_USE: list[object] = []  # memory that threads use until the process ends


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's seat among those of the machine."""

    index: int
    processors: tuple[int, ...]  # that all of these workers may use, as `in_cores` orders them
    memory: mmap.mmap  # of all seats

    @property
    def order(self) -> tuple[int, ...]:
        """Return the processors in the order in which threads are to be bound to them."""
        first = first_processor(self.index, len(self.processors))
        return self.processors[first:] + self.processors[:first]

    def use(self, loaded: ctypes.CDLL) -> None:
        """Let the library's threads see whether others compute, and show others that they do.

        To be called in the thread that computes; a warning says so if that is not bound to this seat's first processor.
        """
        count, take = len(self.processors), loaded.pdserve_take_seat
        memory = (ctypes.c_char * (NUM_SEATS * SEAT_BYTES)).from_buffer(self.memory)
        _IN_USE.append(memory)
        take.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        take.restype = ctypes.c_int64
        if take(memory, self.index, count, first_processor(self.index, count)):
            logger.info("beside other workers it computes from processor %d on", self.order[0])
        else:
            logger.warning("processors are not shared out between workers: OpenMP binds no thread to %d", self.order[0])


def first_processor(index: int, num_processors: int) -> int:
    """Return where a seat begins: two seats a half apart, four a quarter, and so on."""
    backwards = sum(1 << bit for bit in range(4) if index & NUM_SEATS >> 1 >> bit)
    return backwards * num_processors // NUM_SEATS


def in_cores(processors: Iterable[int]) -> tuple[int, ...]:
    """Return the processors in an order in which those of one core (hyperthreads), and of one package, are adjacent."""

    def core(processor: int) -> tuple[int, ...]:
        try:
            files = (TOPOLOGY / f"cpu{processor}/topology/{name}" for name in ("physical_package_id", "core_id"))
            return (*(int(file.read_text()) for file in files), processor)
        except (OSError, ValueError):
            return (0, processor, processor)

    return tuple(sorted(processors, key=core))


def take_seat(weights: Path, processors: Iterable[int]) -> Seat | None:
    """Take the first free seat among workers of one folder of weights; a warning says why where there is none."""
    ordered = in_cores(processors)
    name = hashlib.sha256(repr((str(weights.resolve()), ordered)).encode()).hexdigest()[:16]
    try:
        folder = FILES.resolve(strict=True) / f"pdserve-{os.geteuid()}"
        make_own_folder(folder)
        return _taken(folder / f"{name}.seats", ordered)
    except OSError as error:
        logger.warning("processors are not shared out between workers: %s", error)
        return None


def _taken(path: Path, processors: tuple[int, ...]) -> Seat:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # until the process ends: the lock is the file's
    try:
        os.posix_fallocate(file, 0, NUM_SEATS * SEAT_BYTES)
        for index in range(NUM_SEATS):
            try:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(index))
            except BlockingIOError:
                continue
            return Seat(index, processors, mmap.mmap(file, NUM_SEATS * SEAT_BYTES))
        raise OSError(f"{path}: all of {NUM_SEATS} seats are taken")
    except OSError:
        os.close(file)
        raise


def _lock(index: int) -> bytes:
    """Return `struct flock` for one byte. Such a lock of the open file outlives other descriptors of it, as mmap's."""
    return struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)


@contextmanager
def thread_defaults(
    environment: MutableMapping[str, str],
    num_threads: int | None,
    weights: Path | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Seat | None]:
    """Choose how OpenMP's threads share the machine, for the block that loads torch; what the user set stays.

    Prefill and decode workers rarely compute at the same moment under light load, so each may use all cores. Threads
    spin between the many short loops of a step, or waking them would double the time of a decode step; they soon
    stop, so that an idle worker leaves the cores to the other one. Each keeps to a core of its own, if there is one for
    each: two that met on one core, because others kept the next one busy, would wait for each other in every loop.
    Workers with a common folder of weights begin at different cores. Ranks of one worker share out its cores.
    """
    cores, seat, before = os.sched_getaffinity(0), None, set(environment)
    if num_threads is not None or "OMP_NUM_THREADS" in environment:
        pass
    elif num_ranks > 1:
        environment.update(_of_rank(environment, in_cores(cores), rank, num_ranks))
    else:
        if weights is not None and len(cores) > 1 and not PLACING & environment.keys():
            seat = take_seat(weights, cores)
        if seat is not None:
            environment["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in seat.order)
        environment.setdefault("OMP_PROC_BIND", "true")
        environment["OMP_NUM_THREADS"] = str(len(cores))
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment.setdefault("KMP_BLOCKTIME", "1")
    _CHOSEN.update(set(environment) - before)
    yield seat
    os.sched_setaffinity(0, cores)  # OpenMP has bound this thread, and threads that it starts would inherit that


def _of_rank(environment: Mapping[str, str], cores: tuple[int, ...], rank: int, num_ranks: int) -> dict[str, str]:
    """Return the variables with which a rank computes on its share of the cores; none that bind if the user does so.

    All have as many: sums of other numbers of threads differ in their last bits, and so ranks could choose different
    experts for a token.
    """
    count = len(cores) // num_ranks
    own = cores[rank * count : (rank + 1) * count]
    chosen = {"OMP_NUM_THREADS": str(max(1, len(own)))}
    if own and not PLACING & environment.keys():
        chosen |= {"OMP_PLACES": ",".join(f"{{{core}}}" for core in own), "OMP_PROC_BIND": "true"}
    return chosen


def rank_threads(num_threads: int | None, num_ranks: int) -> int | None:
    """Return how many of a worker's threads each of its ranks computes with; None: as its environment says."""
    return None if num_threads is None else max(1, num_threads // num_ranks)


def given_environment() -> dict[str, str]:
    """Return this process's environment without what `thread_defaults` has set."""
    return {name: value for name, value in os.environ.items() if name not in _CHOSEN}
