"""Which numbers a message may hold, as types: the codec refuses every other one while it decodes.

The ranges are wide, and keep no truth: what is in them can be computed with. Sums, products and quotients of a few are finite, so
no NaN comes of them, and a number of tokens fits wherever a job may put it. What a process makes itself is not checked.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""How many of something, or which in a row. A float holds it exactly."""
Whole = Annotated[int, Meta(ge=-(2**53), le=2**53)]
"""The same where its reader has an answer to less than nothing."""
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A token's id."""
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""How many of one job. A column of a database holds it."""
ChoiceIndex = Annotated[int, Meta(ge=-1, le=127)]
"""One of a job's answers; -1 is its prompt."""
Hop = Annotated[int, Meta(ge=0, le=2)]
"""How far a run has come: 0 router, 1 prefill, 2 decode."""
Random64 = Annotated[int, Meta(ge=0)]
"""64 random bits; MessagePack knows no larger number."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e10)]
"""How long something takes, or after which time."""
Span = Annotated[float, Meta(ge=-1e10, le=1e10)]
"""Seconds until something, or since."""
UnixTime = Annotated[float, Meta(ge=0.0, le=1e11)]
"""Seconds since 1970, by the sender's clock."""
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
"""So many of something a second."""
Real = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""Anything else that was computed of such numbers."""
