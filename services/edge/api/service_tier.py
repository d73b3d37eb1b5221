"""`service_tier` of an answer: the caller's tier, in OpenAI's words. It is the key's, whatever a request asks for."""

from __future__ import annotations

from schemas.job import Tier

_SPOKEN = {Tier.ENTERPRISE: "priority", Tier.PAID: "default", Tier.FREE: "flex"}


def service_tier(tier: Tier) -> str:
    """Which of OpenAI's it is."""
    return _SPOKEN[tier]
