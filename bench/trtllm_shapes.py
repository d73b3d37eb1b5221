"""TensorRT-LLM's statistics and KV events against the contract, and through the adapter's own readers.

Pure. A key that the adapter reads and does not find is wrong; any other difference from what was recorded is only told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from services.engine.trtllm_engine.contract import fact
from services.engine.trtllm_engine.mirror import Mirror
from services.kv.hashing import block_hashes

_READ = {
    "top": ("iterLatencyMS", "numQueuedRequests", "kvCacheStats", "inflightBatchingStats"),
    "kvCacheStats": ("usedNumBlocks", "maxNumBlocks", "tokensPerBlock"),
    "inflightBatchingStats": ("numPausedRequests", "numCtxTokens"),
}
_ROOT = b"shapes"


def of_statistics(items: Sequence[Any]) -> tuple[bool, str]:
    """Whether the adapter finds what it reads, and how the newest item differs from the contract."""
    if not items:
        return False, "there are none"
    newest, recorded = _table(items[-1]), fact("iteration stats json")
    tables = {"top": newest, **{name: newest.get(name) or {} for name in _READ if name != "top"}}
    lacking = [f"{name}.{key}" for name, keys in _READ.items() for key in keys if key not in tables[name]]
    absent = [f"{name}.{key}" for name in _READ for key in recorded[name] if key not in tables[name]]
    more = [f"{name}.{key}" for name in _READ for key in tables[name] if key not in recorded[name]]
    return not lacking, f"{len(items)} items; lacking {lacking}, recorded and absent {absent}, unrecorded {more}"


def of_events(items: Iterable[Any], prompt: Sequence[int], block_tokens: int) -> tuple[bool, str]:
    """Whether the adapter's mirror makes `prompt`'s full blocks of them, none of which was lost."""
    events, mirror = [_table(item) for item in items], Mirror(block_tokens)
    mirror.expect(_ROOT, prompt)
    try:
        for event in events:
            mirror.on_event(event)
    except ValueError as error:
        return False, str(error)
    wanted = block_hashes(prompt, block_tokens, _ROOT)
    found = len(mirror.match(wanted))
    kinds = sorted({event["data"]["type"] for event in events})
    more = sorted({key for event in events for key in event} - {"event_id", "data", "window_size", "attention_dp_rank"})
    value = f"{len(events)} events {kinds}: {found} of {len(wanted)} blocks known, {mirror.epoch} gaps, unrecorded {more}"
    return found == len(wanted) and not mirror.epoch, value


def _table(item: Any) -> dict[str, Any]:
    """An item is an object or its JSON."""
    table: dict[str, Any] = json.loads(item) if isinstance(item, str | bytes) else item
    return table
