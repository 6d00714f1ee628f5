# SPDX-License-Identifier: Apache-2.0
"""A small transformer with latent attention (MLA), recurrent layers, and a draft layer.

Arithmetic is in float64, so that a different order of sums moves results by 1e-15 and not across
a rounding step of the cache. What is cached is rounded as an engine does it: see rowformat.py.

Layers alternate: MLA, recurrent, MLA, recurrent. The draft layer is one more MLA layer that sees
the last hidden state and predicts, too. Scores have a bias by distance, so that not only the set of
rows matters but which position each one is taken for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Tuple

import numpy as np

Array = Any

VOCAB, WIDTH, HEADS = 64, 48, 4
LATENT, ROPE = 24, 8
ROW = LATENT + ROPE  # numbers in a cached row
LAYERS = 4
DRAFT = LAYERS  # its layer id
KEYS = 6  # of a recurrent layer: its state is KEYS x KEYS, and TAPS inputs
TAPS = 3

MLA_LAYERS = [0, 2]
STATE_LAYERS = [1, 3]

# Needles: tokens that a question makes the model repeat. See needle_weights().
NEEDLES = list(range(48, 56))
QUESTION = 63


@dataclass
class Layer:
    """Weights of an MLA layer (and the draft's)."""

    down: Array  # hidden -> latent and rope
    query: Array  # [heads] hidden -> latent and rope, the up-projection of keys absorbed
    value: Array  # [heads] latent -> hidden, up-projection and output in one
    slopes: Array  # [heads] of the distance bias
    up: Array
    out: Array


@dataclass
class Recurrent:
    """Weights of a recurrent layer."""

    taps: Array  # [TAPS + 1, KEYS]
    inward: Array
    key: Array
    query: Array
    decay: Array
    outward: Array


@dataclass
class Weights:
    embed: Array
    unembed: Array
    mla: dict
    recurrent: dict
    draft_out: Array


class State(NamedTuple):
    """Of a recurrent layer: what the next token needs to know of all before."""

    matrix: Array  # [KEYS, KEYS]
    inputs: Array  # [TAPS, KEYS]

    @classmethod
    def zero(cls) -> "State":
        return cls(np.zeros((KEYS, KEYS)), np.zeros((TAPS, KEYS)))


def random_weights(seed: int = 1) -> Weights:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int, gain: float = 1.0) -> Array:
        return rng.standard_normal(shape) * gain / np.sqrt(shape[-2])

    def mla() -> Layer:
        return Layer(
            down=matrix(WIDTH, ROW),
            query=matrix(HEADS, WIDTH, ROW, gain=1.5),
            value=matrix(HEADS, LATENT, WIDTH),
            slopes=0.01 * 2.0 ** np.arange(HEADS),
            up=matrix(WIDTH, 2 * WIDTH),
            out=matrix(2 * WIDTH, WIDTH),
        )

    def recurrent() -> Recurrent:
        return Recurrent(
            taps=rng.standard_normal((TAPS + 1, KEYS)) / TAPS,
            inward=matrix(WIDTH, KEYS),
            key=matrix(KEYS, KEYS),
            query=matrix(WIDTH, KEYS),
            decay=0.9 + 0.09 * rng.random(KEYS),
            outward=matrix(KEYS, WIDTH),
        )

    return Weights(
        embed=rng.standard_normal((VOCAB, WIDTH)),
        unembed=matrix(WIDTH, VOCAB, gain=3.0),
        mla={layer: mla() for layer in MLA_LAYERS + [DRAFT]},
        recurrent={layer: recurrent() for layer in STATE_LAYERS},
        draft_out=matrix(WIDTH, VOCAB, gain=3.0),
    )


def needle_weights(seed: int = 2) -> Weights:
    """The same model, in which head 0 of layer 0 looks for needles when it sees the question.

    Channels 0 to 7 of the hidden state say which needle a token is, channel 8 that it is the
    question, channels 9 to 16 carry the answer. Latents 0 to 7 are channels 0 to 7.
    """
    weights = random_weights(seed)
    n = len(NEEDLES)
    weights.embed[:, : 2 * n + 1] = 0
    for layer in weights.mla.values():  # nothing else writes or reads these channels
        layer.value[:, :, : 2 * n + 1] = 0
        layer.out[:, : 2 * n + 1] = 0
    for recurrent in weights.recurrent.values():
        recurrent.outward[:, : 2 * n + 1] = 0
    for i, token in enumerate(NEEDLES):
        weights.embed[token, i] = 4
    weights.embed[QUESTION, n] = 4
    first = weights.mla[0]
    first.down[:, :n] = 0
    first.down[:n, :n] = np.eye(n)
    first.query[0] = 0
    first.query[0, n, :n] = 12
    first.slopes[0] = 0
    first.value[0] = 0
    first.value[0, :n, n + 1 : 2 * n + 1] = 4 * np.eye(n)
    weights.unembed[: 2 * n + 1] = 0
    weights.unembed[n + 1 : 2 * n + 1, NEEDLES] = 8 * np.eye(n)
    return weights


def norm(x: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: Array, positions: Array) -> Array:
    """Rotary embedding of the last ROPE numbers, by the token's own position."""
    half = ROPE // 2
    angles = np.multiply.outer(positions, 0.5 ** np.arange(half))
    sin, cos = np.sin(angles), np.cos(angles)
    a, b = x[..., LATENT : LATENT + half], x[..., LATENT + half :]
    return np.concatenate([x[..., :LATENT], a * cos - b * sin, a * sin + b * cos], axis=-1)


def log_softmax(x: Array) -> Array:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# ---- pieces of a layer ---------------------------------------------------------------------------


def new_rows(layer: Layer, hidden: Array, positions: Array) -> Array:
    """[tokens, ROW]: what is cached of each token."""
    return rotate(norm(hidden) @ layer.down, positions)


def queries(layer: Layer, hidden: Array, positions: Array) -> Array:
    """[heads, tokens, ROW]"""
    return rotate(np.einsum("td,hdr->htr", norm(hidden), layer.query), positions)


def scores(layer: Layer, query: Array, at: Array, rows: Array, positions: Array) -> Array:
    """[heads, tokens, rows]; rows of later tokens are hidden."""
    distance = at[:, None] - positions[None, :]
    score = np.einsum("htr,nr->htn", query, rows) / np.sqrt(ROW)
    score = score - layer.slopes[:, None, None] * distance
    return np.where(distance >= 0, score, -np.inf)


def add_attended(layer: Layer, hidden: Array, latents: Array) -> Array:
    """The rest of the layer, from [heads, tokens, LATENT] on."""
    hidden = hidden + np.einsum("htl,hld->td", latents, layer.value)
    return hidden + np.tanh(norm(hidden) @ layer.up) @ layer.out


def attend(layer: Layer, query: Array, at: Array, rows: Array, positions: Array) -> Array:
    """Plain softmax attention: [heads, tokens, LATENT]."""
    weight = np.exp(log_softmax(scores(layer, query, at, rows, positions)))
    return np.einsum("htn,nl->htl", weight, rows[:, :LATENT])


class Partial(NamedTuple):
    """Attention over some of the rows, to be merged: log of the sum, and the mean under it."""

    log_sum: Array  # [heads, tokens]; -inf without rows
    mean: Array  # [heads, tokens, LATENT]


def attend_partly(layer: Layer, query: Array, at: Array, rows: Array, positions: Array) -> Partial:
    if len(rows) == 0:
        shape = query.shape[:2]
        return Partial(np.full(shape, -np.inf), np.zeros(shape + (LATENT,)))
    score = scores(layer, query, at, rows, positions)
    top = score.max(axis=-1)
    weight = np.exp(score - top[..., None])
    total = weight.sum(axis=-1)
    mean = np.einsum("htn,nl->htl", weight, rows[:, :LATENT]) / total[..., None]
    return Partial(top + np.log(total), mean)


def merge(partials: List[Partial]) -> Array:
    """What attention over all rows gives: means weighted by their sums."""
    logs = np.stack([partial.log_sum for partial in partials])
    weight = np.exp(logs - logs.max(axis=0))
    weight = weight / weight.sum(axis=0)
    return sum(w[..., None] * partial.mean for w, partial in zip(weight, partials))


def recur(layer: Recurrent, hidden: Array, state: State) -> Tuple[Array, State]:
    """A recurrent layer over some tokens, from a state on."""
    matrix, inputs = state.matrix.copy(), state.inputs
    inward, query = norm(hidden) @ layer.inward, norm(hidden) @ layer.query
    read = np.empty((len(hidden), KEYS))
    for t in range(len(hidden)):
        window = np.vstack([inputs, inward[t]])
        value = np.tanh((layer.taps * window).sum(axis=0))
        key = value @ layer.key
        matrix = layer.decay[:, None] * matrix + np.outer(key, value)
        read[t] = query[t] @ matrix
        inputs = window[1:]
    return hidden + norm(read) @ layer.outward, State(matrix, inputs)


def logits(weights: Weights, hidden: Array) -> Array:
    return log_softmax(norm(hidden) @ weights.unembed)


def draft_input(weights: Weights, hidden: Array, tokens: Array) -> Array:
    return norm(hidden) + weights.embed[tokens]


def draft_logits(weights: Weights, hidden: Array) -> Array:
    return log_softmax(norm(hidden) @ weights.draft_out)
