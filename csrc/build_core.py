"""Builds csrc/ into the extension txnkv._core (cffi, API mode).

The headers listed here are used three times: as they stand by the implementation and by the
C tests, and, without their preprocessor lines, as cffi's declarations. So a declaration and
its function cannot differ: the compiler sees both.
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parent
ROOT = CSRC.parent

HEADERS = [
    "common/status.h",
    "common/bitmap.h",
    "common/pages.h",
    "common/shared.h",
    "codec/crc32c.h",
    "codec/hash.h",
    "codec/keys.h",
    "codec/key.h",
    "codec/row.h",
    "codec/value.h",
    "codec/json.h",
    "codec/json_lines.h",
    "rowset/packed.h",
    "rowset/block.h",
    "rowset/encode.h",
    "rowset/unpack.h",
    "rowset/access.h",
    "rowset/bloom.h",
    "rowset/delta.h",
    "rowset/match.h",
    "rowset/merge.h",
    "rowset/partition.h",
    "rowset/search.h",
    "rowset/sort.h",
    "rowset/visible.h",
    "rowset/zone.h",
    "memory/key_owners.h",
    "memory/mem_row_set.h",
    "memory/mem_entries.h",
    "memory/mem_section.h",
    "log/batch.h",
    "log/headers.h",
    "log/messages.h",
    "log/committed.h",
    "log/last_keys.h",
    "log/kafka.h",
    "tablet/gone.h",
    "tablet/layers.h",
]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("common", "codec", "rowset", "memory", "log", "tablet")
    for path in (CSRC / folder).glob("*.c")
)


def declarations(header: str) -> str:
    """The text of a header without its preprocessor lines."""
    lines = (CSRC / header).read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef("\n".join(declarations(header) for header in HEADERS))
ffibuilder.set_source(
    "txnkv._core",
    "\n".join(f'#include "{header}"' for header in HEADERS),
    sources=SOURCES,
    depends=[path.relative_to(ROOT).as_posix() for path in sorted(CSRC.glob("*/*.h"))],
    include_dirs=["csrc"],
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
