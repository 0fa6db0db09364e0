"""The wheels for a machine that reaches no package index: NIXL's own keeps what moves pages, and stays a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

from carried_wheels import needed, repack

CONTENTS = {
    "nixl_cu13/__init__.py": b"",
    "nixl_cu13/_bindings.so": b"\x7fELF libnixl.so\0",
    "nixl_cu13-1.5.1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    "nixl_cu13-1.5.1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: nixl-cu13\nVersion: 1.5.1\n",
    "nixl_cu13-1.5.1.dist-info/RECORD": b"",
    ".nixl_cu13.mesonpy.libs/libnixl.so": b"libgrpc-5efa.so.48\0",
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so": b"libucp-b39b.so.0\0",
    "nixl_cu13.libs/libgrpc-5efa.so.48": b"",
    "nixl_cu13.libs/libucp-b39b.so.0": b"",
    "nixl_cu13.libs/ucx/libuct_cuda.so.0": b"",
}
LEFT_OUT = {
    "nixl_ep_cu13/nixl_ep.so": b"libgone-1.so\0",
    "nixl_cu13.libs/libgone-1.so": b"libgrpc-5efa.so.48\0",
    "nixl_cu13.libs/ucx/libucx_perftest_cuda.so": b"",
    "nixl_cu13.libs/nixl/libplugin_OBJ.so": b"",
    "nixl_cu13-1.5.1.data/headers/asio.hpp": b"",
}


def test_what_the_bindings_and_ucx_name_is_kept_and_nothing_else() -> None:
    assert needed(CONTENTS | LEFT_OUT) == set(CONTENTS)


def test_a_repacked_wheel_can_be_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1.5.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name, content in (CONTENTS | LEFT_OUT).items():
            files.writestr(name, content)
    repack(wheel)
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    installed = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert set(CONTENTS) <= installed
    assert not installed & set(LEFT_OUT)
