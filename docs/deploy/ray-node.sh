#!/bin/sh
# Starts one node of a Ray cluster for vLLM's multi-node executor. On the first machine:
#     ray-node.sh head
# on each other one:
#     ray-node.sh FIRST_MACHINE:6379
# The variable must be there before Ray is: vLLM hands on no variables of ours to its workers.
set -eu
export MAMBA_RETIRE="${MAMBA_RETIRE:-require}"

# This node's own environment; ends here if its vLLM would leak.
vllm-mamba-retire status

case "${1:?head, or the address of the head}" in
    head) exec ray start --head --port=6379 --block ;;
    *) exec ray start --address="$1" --block ;;
esac
