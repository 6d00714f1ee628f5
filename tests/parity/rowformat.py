# SPDX-License-Identifier: Apache-2.0
"""How a cached row is kept: two formats, as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from model import LATENT, ROPE, ROW

Array = Any


class Float32:
    """The numbers as they are."""

    name = "float32"
    row_bytes = 4 * ROW

    @staticmethod
    def encode(rows: Array) -> Array:
        return rows.astype("<f4").view(np.uint8).reshape(len(rows), Float32.row_bytes)

    @staticmethod
    def decode(data: Array) -> Array:
        data = np.ascontiguousarray(data)
        return data.view("<f4").reshape(len(data), ROW).astype(np.float64)


def _e4m3_values() -> Array:
    """The 127 numbers from 0 on of eight bits: 4 of exponent, 3 of fraction, no infinity."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    normal = 2.0 ** (exponent - 7) * (1 + fraction / 8)
    return np.where(exponent == 0, 2.0**-6 * fraction / 8, normal)


_E4M3 = _e4m3_values()
_MIDDLES = (_E4M3[1:] + _E4M3[:-1]) / 2
_TABLE = np.concatenate([_E4M3, [np.nan], -_E4M3, [np.nan]])  # by code


class Fp8:
    """Latents in 8 bits with a float32 scale for each tile, then rope as bfloat16.

    Shaped like the 656-byte rows of large models: 24 bytes, 3 scales, 8 times 2 bytes.
    """

    name = "fp8"
    tile = 8
    tiles = LATENT // tile
    row_bytes = LATENT + 4 * tiles + 2 * ROPE

    @staticmethod
    def encode(rows: Array) -> Array:
        n = len(rows)
        latent = rows[:, :LATENT].reshape(n, Fp8.tiles, Fp8.tile)
        largest = np.abs(latent).max(axis=2)
        scale = np.where(largest > 0, largest / _E4M3[-1], 1).astype("<f4")
        scaled = latent / scale[:, :, None].astype(np.float64)
        code = np.searchsorted(_MIDDLES, np.abs(scaled)) | np.where(scaled < 0, 128, 0)
        rope = rows[:, LATENT:].astype("<f4").view("<u4")
        rope = ((rope + 0x7FFF + (rope >> 16 & 1)) >> 16).astype("<u2")
        parts = [code.astype(np.uint8).reshape(n, -1), scale.view(np.uint8), rope.view(np.uint8)]
        return np.concatenate([part.reshape(n, -1) for part in parts], axis=1)

    @staticmethod
    def decode(data: Array) -> Array:
        n, at = len(data), LATENT + 4 * Fp8.tiles
        latent = _TABLE[data[:, :LATENT]].reshape(n, Fp8.tiles, Fp8.tile)
        scale = np.ascontiguousarray(data[:, LATENT:at]).view("<f4").astype(np.float64)
        rope = np.ascontiguousarray(data[:, at:]).view("<u2").astype("<u4") << 16
        return np.concatenate(
            [
                (latent * scale[:, :, None]).reshape(n, LATENT),
                rope.view("<f4").reshape(n, ROPE).astype(np.float64),
            ],
            axis=1,
        )


FORMATS = {cls.name: cls for cls in (Float32, Fp8)}
