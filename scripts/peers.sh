#!/usr/bin/env bash
# Makes the environment of the benchmark's peers (DeepSpeed, TRL) in FOLDER: scripts/peers.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:?scripts/peers.sh FOLDER}"
if [ ! -f /usr/include/libaio.h ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq libaio-dev
fi
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip setuptools wheel ninja
"$venv/bin/pip" install --quiet -c constraints.txt torch transformers accelerate trl datasets psutil safetensors
# no compilation while it installs: what is used is compiled at its first use
DS_BUILD_OPS=0 "$venv/bin/pip" install --quiet -c constraints.txt --no-build-isolation deepspeed==0.19.8
