"""Tiny tokenizers and chat templates in the shape of those that Llama 3 and Qwen ship, made in code.

Ids: the 256 bytes in the order of the alphabet, then the merges, then the added tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from services.clock import ManualClock
from services.text.assets import TextAssets
from services.text.prompt import PromptEncoder
from services.text.template import ChatTemplate
from services.text.tokenizer import Tokenizer
from services.text.vocabulary import byte_alphabet

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("1", "2"), ("3", "4"), ("12", "34"), ("Ã", "©"))
WHOLE = "streaming"
"""A piece that no merge makes: found because Llama 3 looks a whole word up before it merges."""

LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single ids, but text: not special."""

LLAMA_TEMPLATE = """{{- bos_token }}
{%- if tools is not defined or tools is none %}{%- set tools = none %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0, asked=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.asked and message.role == 'user' and message.content is string %}
        {%- set ns.asked = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def llama3() -> TextAssets:
    """Numbers in groups of three; a post-processor that would put the first token before every text."""
    library = _library(r"\p{N}{1,3}", ignore_merges=True)
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA_TOKENS])
    first = library.token_to_id(LLAMA_TOKENS[0])
    once = processors.TemplateProcessing(single=f"{LLAMA_TOKENS[0]} $A", special_tokens=[(LLAMA_TOKENS[0], first)])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), once])
    roles = {"bos_token": LLAMA_TOKENS[0], "eos_token": LLAMA_TOKENS[3]}
    return TextAssets(library.to_str(), LLAMA_TEMPLATE, roles, frozenset({library.token_to_id(LLAMA_TOKENS[3])}))


def qwen() -> TextAssets:
    """Digits one by one, text normalised to NFC, tokens that are added but not special."""
    library = _library(r"\p{N}", ignore_merges=False)
    library.normalizer = normalizers.NFC()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_TOKENS])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_TEXT_TOKENS])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    return TextAssets(library.to_str(), QWEN_TEMPLATE, {"eos_token": QWEN_TOKENS[2]}, _ids(library, QWEN_TOKENS[:3:2]))


def prompts(assets: TextAssets) -> PromptEncoder:
    return PromptEncoder(Tokenizer(assets), ChatTemplate(assets, ManualClock()))


def _library(numbers: str, *, ignore_merges: bool) -> Library:
    pieces = [*byte_alphabet(), *(left + right for left, right in MERGES), WHOLE]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab, list(MERGES), ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(_WORDS + numbers + _REST), behavior="isolated", invert=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    return library


def _ids(library: Library, tokens: Sequence[str]) -> frozenset[int]:
    return frozenset(library.token_to_id(token) for token in tokens)
