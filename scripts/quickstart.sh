#!/usr/bin/env bash
# Installs zft, fetches a 135M model, fine-tunes every weight on the sample conversations, shows answers before and after.
#
#     bash scripts/quickstart.sh [KEY=VALUE ...]      further keys go to `zft run`
#
# ZFT_VENV: folder of the virtual environment (default .venv-quickstart). PYTHON: what it is made with (default python3).
# ZFT_OUT: folder of the run (default runs/quickstart-TIME).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

say() { printf '\n\033[1m[%3d s] %s\033[0m\n' "$SECONDS" "$*"; }

venv="${ZFT_VENV:-.venv-quickstart}"
prompts=("What is the capital of France?" "Explain what a black hole is." "How do I remove a coffee stain from a shirt?")

say "1/5 installing into $venv (a minute or more)"
prepare_venv "$venv" "${PYTHON:-python3}"
install_zft .
installed=$SECONDS

say "2/5 obtaining SmolLM2-135M-Instruct"
model="$("$python" scripts/quickstart_model.py)"
echo "$model"

say "3/5 answers before"
"$python" scripts/answers.py "$model" "${prompts[@]}"

out="${ZFT_OUT:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}"
say "4/5 fine-tuning all weights on zft/data/samples/in_short.jsonl"
data=zft/data/samples/in_short.jsonl
command=("$venv/bin/zft" run sft experiment=smollm2_135m "model=$model" "data=$data" "out=$out" samples=2 "$@")
printf '%s ' "${command[@]}"; echo
"${command[@]}"

say "5/5 answers after"
"$python" scripts/answers.py "$out/export" "${prompts[@]}"

say "done, $((SECONDS - installed)) s after installation"
echo "The fine-tuned model lies in $out/export; AutoModelForCausalLM.from_pretrained loads it."
echo "Talk to it: $venv/bin/zft chat $out/export"
