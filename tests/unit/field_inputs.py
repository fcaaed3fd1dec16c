"""A log, /metrics and files with a command in them, as people have them."""

from __future__ import annotations

COMPOSE_SCRIPT = """\
services:
  server:
    image: vllm/vllm-openai:v0.27.1
    environment: [VLLM_USE_V2_MODEL_RUNNER=1, BUDGET=8192]
    entrypoint: [/usr/bin/bash, -c]
    command:
      - |
        # vllm serve old/model --max-num-batched-tokens 16
        echo starting; ls -l /models
        vllm serve org/model --max-num-batched-tokens $BUDGET \\
          --max-model-len 128k --enable-prefix-caching   # as measured
        sleep infinity
"""
DOCKERFILE = """\
FROM vllm/vllm-openai:v0.27.1 AS base
ARG BUDGET=8192
ENV VLLM_USE_V2_MODEL_RUNNER=1 \\
    LENGTH=128k
FROM base
RUN pip install something
ENTRYPOINT ["vllm", "serve"]
CMD ["org/model", "--max-num-batched-tokens", "$BUDGET", \\
     "--max-model-len", "${LENGTH}", "--enable-prefix-caching"]
"""
SCRIPT = """\
#!/usr/bin/env bash
set -e
export MODEL=org/model VLLM_USE_V2_MODEL_RUNNER=1
# vllm serve $MODEL --max-num-batched-tokens 16
exec vllm serve "$MODEL" --max-num-batched-tokens 8192 \\
  --max-model-len 128k --enable-prefix-caching --api-key "$KEY" 2>&1 | tee log
vllm bench serve --model $MODEL --max-model-len 7
"""
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="1568",enable_prefix_caching="True",mamba_cache_mode="align",\
num_gpu_blocks="325",kv_cache_memory_bytes="None",engine="0"} 1.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 4.0
vllm:num_preemptions_total{engine="1"} 3.0
"""
LOG = """\
(APIServer pid=1) INFO 09-02 13:09:06 [api_utils.py:273] non-default args: {'model_tag': 'm', \
'max_model_len': 262144, 'max_num_batched_tokens': 8192, 'speculative_config': \
{'method': 'mtp', 'num_speculative_tokens': 3}, 'long_prefill_token_threshold': 4096}
(APIServer pid=1) INFO 09-02 13:09:07 [model.py:601] Resolved architecture: Qwen3NextForCausalLM
(APIServer pid=1) INFO 09-02 13:09:07 [model.py:1788] Using max model len 262144
(APIServer pid=1) INFO 09-02 13:09:07 [scheduler.py:252] Chunked prefill is enabled with \
max_num_batched_tokens=8192.
(APIServer pid=1) INFO 09-02 13:09:07 [vllm.py:1109] Asynchronous scheduling is enabled.
(EngineCore pid=9) INFO 09-02 13:09:39 [core.py:121] Initializing a V1 LLM engine (v0.27.1) with \
config: model='m', speculative_config=SpeculativeConfig(method='mtp', model='m', \
num_spec_tokens=3), max_seq_len=262144, pipeline_parallel_size=1, enable_prefix_caching=True, \
enable_chunked_prefill=True, compilation_config={'mode': <CompilationMode.NONE: 0>}
(EngineCore pid=9) INFO 09-02 13:09:40 [interface.py:906] Setting attention block size to 1600 \
tokens to ensure that attention page size is >= mamba page size.
(EngineCore pid=9) INFO 09-02 13:10:02 [gpu_worker.py:561] Available KV cache memory: 9.17 GiB
(EngineCore pid=9) INFO 09-02 13:10:03 [kv_cache_utils.py:2179] Maximum concurrency for 262,144 \
tokens per request: 1.00x
"""
