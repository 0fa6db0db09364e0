"""Make a folder of wheels for `make gpu` on a machine that reaches no package index: what its `handoff` needs.

    python3 tests/gpu/carried_wheels.py FOLDER [--python 3.12] [--cuda 13]

The folder gets NIXL, psutil and xxhash. NIXL's wheel is repacked: UCX is the one plugin that pages move by, and what
only the others need is left out. There, `pip install --no-index --no-deps --target SITE FOLDER/*.whl` unpacks them, and
PYTHONPATH names SITE. Prints what each takes, packed and unpacked.
"""

import argparse
import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINNED = ("constraints.txt", "deploy/images/constraints-cuda.txt")  # which versions
GLIBC = (28, 27, 17, 12, 5)  # of the platforms that pip may take wheels for, the newest first
MIB = 1 << 20


def main() -> None:
    """Download and repack; CalledProcessError where pip finds no wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--cuda", default="13", choices=("12", "13"), help="which its torch is for")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    download([f"nixl-cu{arguments.cuda}", "psutil", "xxhash"], arguments.folder, arguments.python)
    (nixl,) = arguments.folder.glob("nixl_cu*.whl")
    repack(nixl)
    packed = 0
    for wheel in sorted(arguments.folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            unpacked = sum(each.file_size for each in files.infolist())
        packed += wheel.stat().st_size
        sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / MIB:.1f} MiB, unpacked {unpacked / MIB:.1f} MiB\n")
    sys.stdout.write(f"together {packed / MIB:.1f} MiB\n")


def download(names: list[str], folder: Path, python: str) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    pinned = [f"--constraint={ROOT / path}" for path in PINNED]
    subprocess.run([*command, *pinned, f"--dest={folder}", *names], check=True)


def repack(wheel: Path) -> None:
    """Leave out of NIXL's wheel what its bindings and UCX do not need."""
    with zipfile.ZipFile(wheel) as files:
        contents = {name: files.read(name) for name in files.namelist()}
    kept = needed(contents)
    (record,) = (name for name in kept if name.endswith(".dist-info/RECORD"))
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as files:
        for name in sorted(kept - {record}):
            files.writestr(name, contents[name])
        files.writestr(record, _record(record, {name: contents[name] for name in kept - {record}}))
    partial.replace(wheel)


def needed(contents: Mapping[str, bytes]) -> set[str]:
    """Return the files to keep: the package, its metadata, UCX, and every library that one of these names.

    A library names another one by its file's name, which auditwheel has made unlike any other.
    """
    libraries = {name.rpartition("/")[2]: name for name in contents if ".so" in name}
    kept = {name for name in contents if _is_root(name)}
    waiting = [name for name in kept if ".so" in name]
    while waiting:
        content = contents[waiting.pop()]
        for base, name in libraries.items():
            if name not in kept and base.encode() + b"\0" in content:
                kept.add(name)
                waiting.append(name)
    return kept


def _is_root(name: str) -> bool:
    folder, _, base = name.rpartition("/")
    is_package = folder.startswith("nixl_cu") and folder.partition("/")[0].removeprefix("nixl_cu").isdigit()
    is_ucx = (folder.endswith(".libs/ucx") and "perftest" not in base) or base == "libplugin_UCX.so"
    return is_package or is_ucx or folder.endswith(".dist-info")


def _record(path: str, contents: Mapping[str, bytes]) -> str:
    """Return the wheel's list of files: each with its digest and size, the list itself without."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((path, "", ""))
    return text.getvalue()


if __name__ == "__main__":
    main()
