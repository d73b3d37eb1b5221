"""Request bodies for `bench/load.c`: one JSON object a line, every prompt distinct from its first word on."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place "
    "case week company system program question work government number night point home water room mother area money story fact "
    "month lot right study book eye job word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea kid body information back parent face others level office"
).split()


def write_bodies(path: Path, *, model: str, max_tokens: int, words: int, count: int, seed: int = 7) -> None:
    """`count` streamed greedy chats of `words` random words that run to `max_tokens` whatever the model says.

    Files of different `seed` share no prompt.
    """
    random = Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            prompt = " ".join([str(random.randrange(10**6)), *(random.choice(_WORDS) for _ in range(words))])
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
            file.write(json.dumps(body) + "\n")
