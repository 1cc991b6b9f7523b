"""How many parallel blocks share the KV cache: from registers and SM count to P, as the host code computes it.

`launch_fattn` (ggml-cuda/fattn-common.cuh) asks the CUDA runtime how many blocks of the kernel fit on an SM and searches upward
from there for a P that fills its last wave well. The one-query and the many-query vector kernel have other register counts, so
the same cache can be cut into another number of parts. These are pure functions: registers in, P out.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

CHUNK = 128  # cells one block takes at a time; equals the threads of the vector kernel
PADDING = 256  # llama.cpp attends over the used cells rounded up to a multiple of this
THREADS = 128  # threads of a block of the vector kernel


@dataclass(frozen=True)
class Gpu:
    """What decides occupancy: streaming multiprocessors, and what one of them can hold."""

    sms: int
    registers: int = 65536
    warps: int = 48
    blocks: int = 24


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model: query heads and KV heads."""

    query: int = 32
    kv: int = 8


def padded(cells: int, padding: int = PADDING) -> int:
    """Cells attended over when ``cells`` are in use: rounded up to a multiple of ``padding``."""
    if cells < 1:
        raise ValueError(f"at least one cell is in use, not {cells}")
    return -(-cells // padding) * padding


def blocks_per_sm(registers: int, gpu: Gpu, threads: int = THREADS) -> int:
    """Blocks of a kernel that fit on one SM when registers are what runs out (no dynamic shared memory here).

    Registers are handed out per warp in units of 256, and each of an SM's four partitions holds a quarter of them, so warps come
    in whole numbers per partition (CUDA occupancy calculator, compute capability 7.0 to 12.0).
    """
    if not 1 <= registers <= 255:
        raise ValueError(f"a thread has 1 to 255 registers, not {registers}")
    per_warp = -(-registers * 32 // 256) * 256
    warps = min(4 * ((gpu.registers // 4) // per_warp), gpu.warps)
    return min(warps // (threads // 32), gpu.blocks)


def tiles(queries: int, heads: Heads, columns: int) -> int:
    """Output tiles of a launch: query tiles of ``columns`` times query heads (the vector kernel has one head a block)."""
    return -(-queries // columns) * heads.query


def parallel_blocks(fit: int, sms: int, n_tiles: int, cells: int, chunk: int = CHUNK) -> int:
    """P for a launch: the search of `launch_fattn` without stream-k, step by step.

    ``fit`` blocks fit on an SM, ``n_tiles`` output tiles, ``cells`` the padded KV range.
    """
    if fit < 1:
        raise ValueError("no block of this kernel fits on an SM")
    most = -(-cells // chunk)
    best = min(fit, most)
    wave = sms * fit
    best_waves = best_percent = 0
    for p in range(best, most + 1):
        total = n_tiles * p
        waves = -(-total // wave)
        percent = 100 * total // (waves * wave)
        if best_percent >= 95 and waves > best_waves:
            break
        if percent > best_percent:
            best_waves, best_percent, best = waves, percent, p
    return best


@dataclass(frozen=True)
class VectorAttention:
    """The vector attention kernels on one GPU: registers of the one-query and of the many-query (2 columns) kernel."""

    gpu: Gpu
    registers_one: int = 162
    registers_many: int = 193
    heads: Heads = Heads()

    def p(self, queries: int, cells: int, *, pinned: bool = False) -> int:
        """P of a launch for ``queries`` tokens over a padded range of ``cells``; ``pinned`` takes the one-query launch's P."""
        if queries == 1 or pinned:
            return parallel_blocks(
                blocks_per_sm(self.registers_one, self.gpu), self.gpu.sms, tiles(1, self.heads, 1), cells
            )
        return parallel_blocks(
            blocks_per_sm(self.registers_many, self.gpu), self.gpu.sms, tiles(queries, self.heads, 2), cells
        )

    def table(self, queries: int, last: int = 2048) -> pd.DataFrame:
        """P of a lone query and of ``queries`` in one launch, for every padded range up to ``last`` cells."""
        ranges = range(PADDING, last + 1, PADDING)
        return pd.DataFrame(
            {
                "cells": list(ranges),
                "chunks": [n // CHUNK for n in ranges],
                "P alone": [self.p(1, n) for n in ranges],
                f"P for {queries}": [self.p(queries, n) for n in ranges],
            }
        ).set_index("cells")

    def first_differing_position(self, queries: int, last: int = 4096) -> int | None:
        """The first position (cells before it) whose real chunks are grouped otherwise among ``queries`` than alone; guarded."""
        for position in range(last):
            cells = padded(position + 1)
            if not same_grouping(position, self.p(1, cells), self.p(queries, cells)):
                return position
        return None

    def first_guard_boundary(self, last: int = 4096) -> int | None:
        """The first multiple of 256 at which the padding alone regroups a token's chunks, P pinned and the guard off."""
        for boundary in range(PADDING, last, PADDING):
            before, after = self.p(1, boundary), self.p(1, boundary + PADDING)
            if not same_grouping(boundary - 1, before, after):
                return boundary
        return None


def chunk_owners(cells: int, p: int, chunk: int = CHUNK) -> list[int]:
    """Which block sums which chunk: block y takes chunks y, y + P, y + 2P, ..."""
    if p < 1 or cells < 1:
        raise ValueError(f"need cells and blocks, got {cells} and {p}")
    return [c % p for c in range(-(-cells // chunk))]


def same_grouping(position: int, p: int, q: int, chunk: int = CHUNK) -> bool:
    """Whether a query at ``position`` has its real chunks summed in the same groups under P = p and P = q.

    Chunks past the query are masked and add exact zeros wherever they land, so only those with a cell up to ``position`` count.
    """
    real = position // chunk + 1
    return [c % p for c in range(real)] == [c % q for c in range(real)]
