# SPDX-License-Identifier: Apache-2.0
"""The reference: the whole model in one process, one cache without pages, nothing moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import numpy as np

import model
from model import State

Array = Any


@dataclass
class Answer:
    """What a decode gives: tokens, and log-probabilities of model and draft for each step."""

    tokens: List[int]
    log_probs: Array  # [steps, VOCAB]
    draft_log_probs: Array


class Monolithic:
    def __init__(self, weights: model.Weights, fmt: Any) -> None:
        self.weights = weights
        self.fmt = fmt
        self.rows: Dict[int, Array] = {
            layer: np.zeros((0, fmt.row_bytes), np.uint8) for layer in weights.mla
        }
        self.states = {layer: State.zero() for layer in weights.recurrent}
        self.n = 0

    def _mla(self, layer_id: int, hidden: Array, at: Array) -> Array:
        layer = self.weights.mla[layer_id]
        fresh = self.fmt.encode(model.new_rows(layer, hidden, at))
        self.rows[layer_id] = np.concatenate([self.rows[layer_id], fresh])
        rows = self.fmt.decode(self.rows[layer_id])
        query = model.queries(layer, hidden, at)
        latents = model.attend(layer, query, at, rows, np.arange(len(rows)))
        return model.add_attended(layer, hidden, latents)

    def forward(self, tokens: Array) -> "tuple[Array, Array]":
        """Log-probabilities of model and draft behind the last of these tokens."""
        at = self.n + np.arange(len(tokens))
        self.n += len(tokens)
        hidden = self.weights.embed[tokens]
        for layer in range(model.LAYERS):
            if layer in self.weights.mla:
                hidden = self._mla(layer, hidden, at)
            else:
                weights, state = self.weights.recurrent[layer], self.states[layer]
                hidden, self.states[layer] = model.recur(weights, hidden, state)
        draft = self._mla(model.DRAFT, model.draft_input(self.weights, hidden, tokens), at)
        return (
            model.logits(self.weights, hidden[-1]),
            model.draft_logits(self.weights, draft[-1]),
        )

    def run(self, prompt: Array, steps: int, forced: Optional[int] = None) -> Answer:
        """forced: the token behind the prompt, instead of the one that the model would say."""
        log_probs, draft = [], []
        probs, _ = self.forward(prompt)
        token = int(probs.argmax()) if forced is None else forced
        tokens = [token]
        for _ in range(steps):
            probs, draft_probs = self.forward(np.array([token]))
            token = int(probs.argmax())
            tokens.append(token)
            log_probs.append(probs)
            draft.append(draft_probs)
        return Answer(tokens, np.stack(log_probs), np.stack(draft))
