#!/bin/bash
# Compiles the CPU kernels for aarch64 processors and runs their tests with emulated ones, in build/arm.
# PROCESSORS names them as GCC does; arguments name other tests. It downloads some 140 MB the first time and installs nothing.
set -euo pipefail

TORCH=2.9.1  # PyPI's wheels of later ones hold CUDA
PROCESSORS=${PROCESSORS:-cortex-a72 neoverse-n1 neoverse-v1}  # plain; dot products of bytes; bfloat16, i8mm and SVE too
NEEDED=(qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
WHEELS=(
    "torch==$TORCH" filelock fsspec jinja2 markupsafe mpmath networkx numpy sympy typing-extensions
    iniconfig packaging pluggy pygments pytest pytest-asyncio pytest-timeout
)

top=$(cd "$(dirname "$0")/../.." && pwd)
build=$top/build/arm
if ! command -v qemu-aarch64 aarch64-linux-gnu-gcc apt-get dpkg > /dev/null || [ ! -e /usr/aarch64-linux-gnu/lib/libc.so ]; then
    echo "Debian's packages are needed: apt-get install --no-install-recommends ${NEEDED[*]}" >&2
    exit 1
fi

# Debian's Python for arm64, unpacked, with apt's lists and packages in folders of its own.
fetch_python() {
    mkdir -p "$build"/apt/{lists,cache/archives/partial} "$build/root"
    touch "$build/apt/status"
    local apt=(
        apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User="$(id -un)"
        -o Dir::State::Lists="$build/apt/lists" -o Dir::State::status="$build/apt/status" -o Dir::Cache="$build/apt/cache"
        -o Debug::NoLocking=true
    )
    "${apt[@]}" update
    "${apt[@]}" install --yes --no-install-recommends --download-only libpython3.11-stdlib libstdc++6 python3.11-minimal
    for package in "$build"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$build/root"
    done
}

fetch_wheels() {
    grep -v '^torch==' "$top/constraints.txt" > "$build/constraints.txt"
    "$top/.venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$build/site" --upgrade \
        --only-binary=:all: --implementation cp --python-version 3.11 --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 -c "$build/constraints.txt" "${WHEELS[@]}"
}

# A compiler and a Python that the tests can start by their names.
write_programs() {
    mkdir -p "$build/bin"
    cat > "$build/bin/gcc" << EOF
#!/bin/bash
exec aarch64-linux-gnu-gcc "\${@/-mcpu=native/-mcpu=\$PROCESSOR}"
EOF
    cat > "$build/bin/python" << EOF
#!/bin/bash
export PYTHONHOME=$build/root/usr PYTHONPATH=$build/site:$top
exec qemu-aarch64 -L $build/root -0 $build/bin/python $build/root/usr/bin/python3.11 "\$@"
EOF
    chmod +x "$build"/bin/*
}

if [ ! -e "$build/.complete" ]; then
    fetch_python
    fetch_wheels
    write_programs
    touch "$build/.complete"
fi

cd "$top"
export PATH="$build/bin:$PATH"
for processor in $PROCESSORS; do
    echo "== $processor"
    # Of newer processors than the emulator knows, it has all instructions.
    emulated=$(qemu-aarch64 -cpu help | grep -qx " *$processor" && echo "$processor" || echo max)
    PROCESSOR=$processor QEMU_CPU=$emulated XDG_CACHE_HOME="$build/cache/$processor" \
        python -m pytest -q -p no:cacheprovider --timeout 1200 -m "not long" "${@:-tests/cpu_kernels}"
done
