"""The default engine: Llama-family models in pure torch, float32 on the CPU, over a paged pool.

Only a worker imports this package, and only when it starts its engine: it loads torch. The OpenMP settings must be in the
environment before torch is: threads that spin while they wait make two engines on one machine many times slower.
"""

from __future__ import annotations

import os

for _name, _value in {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}.items():
    os.environ.setdefault(_name, _value)
