#!/bin/bash
# The load program with few of everything: what must be so, no timing.
UCX_LOG_LEVEL=error exec "$KVP_BIN/tests/load" --small
