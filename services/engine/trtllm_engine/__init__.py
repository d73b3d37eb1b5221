"""TensorRT-LLM 1.2.1 behind our engine protocols.

Nobody else imports `tensorrt_llm`, and here only `api.load` does, when a worker starts. What of this was checked, and how, is in
docs/tensorrt_llm.md.
"""
