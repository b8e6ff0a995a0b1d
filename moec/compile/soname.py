"""A second name for a loaded shared library, in this process only: nothing on disk, no environment variable.

TensorRT-RTX's ONNX parser calls dlopen("libtensorrt_rtx.so"), but its wheel ships (and has loaded) only
libtensorrt_rtx.so.1; the failure is an uncaught C++ exception that aborts the process. glibc resolves a
slash-less dlopen name against the DT_SONAME of every loaded object before it searches any path. So we load
a 450-byte ELF object from a memfd whose SONAME is the missing name and whose only content is a dependency
on the loaded library. dlopen returns that stub, and dlsym on it also searches its dependencies.
"""

from __future__ import annotations

import ctypes
import os
import struct

from moec.errors import MoecError

_MACHINES = {"x86_64": 62, "aarch64": 183}
_EHDR, _PHDR, _DYN, _SYM = 64, 56, 16, 24
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NULL, _DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = (
    0,
    1,
    4,
    5,
    6,
    10,
    11,
    14,
)
# Not executable. Writable, because ld.so relocates .dynamic in place.
_READ_WRITE = 6


def stub(soname: str, needed: str, machine: str) -> bytes:
    """A shared object (ELF64, little endian) with one dependency and nothing else.

    Args:
        soname: Its DT_SONAME.
        needed: Its DT_NEEDED.
        machine: x86_64 or aarch64.
    """
    strings = b"\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    headers, entries = 3, 8
    dynamic_at = _EHDR + _PHDR * headers
    symbols_at = dynamic_at + _DYN * entries
    strings_at = symbols_at + _SYM
    hash_at = (strings_at + len(strings) + 7) & ~7
    size = hash_at + 16
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 3, _MACHINES[machine], 1, 0, _EHDR, 0, 0, _EHDR, _PHDR, headers, 64, 0, 0
    )
    segments = _segment(_PT_LOAD, 0, size, 0x10000)
    segments += _segment(_PT_DYNAMIC, dynamic_at, _DYN * entries, 8)
    # Without PT_GNU_STACK ld.so would make every stack executable (and newer ones refuse to).
    segments += _segment(_PT_GNU_STACK, 0, 0, 16)
    dynamic = [
        (_DT_NEEDED, 2 + len(soname)),
        (_DT_SONAME, 1),
        (_DT_HASH, hash_at),
        (_DT_STRTAB, strings_at),
        (_DT_SYMTAB, symbols_at),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMENT, _SYM),
        (_DT_NULL, 0),
    ]
    body = (
        header + segments + b"".join(struct.pack("<QQ", *entry) for entry in dynamic) + bytes(_SYM) + strings
    )
    return body.ljust(hash_at, b"\0") + struct.pack("<IIII", 1, 1, 0, 0)


def _segment(kind: int, offset: int, size: int, align: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, _READ_WRITE, offset, offset, offset, size, size, align)


def alias(soname: str, needed: str) -> None:
    """Make dlopen(soname) return the loaded library `needed`, for the life of the process.

    Does nothing where `soname` resolves already.

    Raises:
        MoecError: neither a Linux machine of a known kind, nor a loaded library `needed`.
    """
    if _resolves(soname):
        return
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise MoecError(f"cannot give {needed} the name {soname} on a {machine} machine")
    if not _resolves(needed):
        raise MoecError(f"{needed} is not loaded")
    descriptor = os.memfd_create(soname)
    try:
        os.write(descriptor, stub(soname, needed, machine))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if not _resolves(soname):
        raise MoecError(f"the loader did not take {soname} as a name of {needed}")


def _resolves(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
