#!/usr/bin/env bash
# The study of docs/sources.md: about an hour on two CPU cores. Before it: make setup .venv-vllm/.dev
set -euo pipefail
cd "$(dirname "$0")/../../.."
.venv/bin/hacrl study docs/results/sources/two.yaml
.venv/bin/python docs/results/sources/stored.py runs/study-sources-two

VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port 8011 \
  --model src/hacrl/agents/zoo/models/llama-large --served-model-name large --dtype float32 --max-model-len 256 \
  --generation-config vllm > runs/study-sources-two/server.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl -sf http://127.0.0.1:8011/health > /dev/null; do
  kill -0 $server || { tail runs/study-sources-two/server.log; exit 1; }
  sleep 2
done
.venv/bin/hacrl study docs/results/sources/one.yaml
.venv/bin/python docs/results/sources/table.py runs/study-sources-two runs/study-sources-one
