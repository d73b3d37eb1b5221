"""LlamaIndex as a client, in an environment of its own (`test_llama_index.py`): asks an edge, prints what it got as JSON.

`OpenAILike`: LlamaIndex' `OpenAI` knows OpenAI's own models only.
"""

from __future__ import annotations

import json
import sys

from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found, unused-ignore]
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found, unused-ignore]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found, unused-ignore]


def weather(city: str) -> str:
    """Of a city."""
    return "rain"


def main(base: str, model: str) -> None:
    chat = OpenAILike(
        model=model, api_base=base, api_key="unused", is_chat_model=True, is_function_calling_model=True, max_retries=0
    )
    raw = OpenAILike(model=model, api_base=base, api_key="unused", is_chat_model=False, max_tokens=20, max_retries=0)
    question = [ChatMessage(role="user", content="hi")]
    called = chat.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="Does it rain in Paris?")
    calls = chat.get_tool_calls_from_response(called)
    print(
        json.dumps(
            {
                "chat": chat.chat(question).message.content,
                "streamed": "".join(chunk.delta or "" for chunk in chat.stream_chat(question)),
                "completion": raw.complete("hi").text,
                "calls": [[call.tool_name, call.tool_kwargs] for call in calls],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
