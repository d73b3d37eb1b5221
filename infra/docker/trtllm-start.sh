#!/bin/sh
# Nothing is served by a TensorRT-LLM that is not the one the adapter was written for: its source is compared first.
set -eu
headrace verify trtllm
exec headrace "$@"
