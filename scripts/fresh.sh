#!/usr/bin/env bash
# Runs the README's commands as printed, in a fresh environment of each Python named:
#   scripts/fresh.sh python3.11 python3.12
set -euo pipefail
cd "$(dirname "$0")/.."

commands=$(sed -n '/^```bash$/,/^```$/p' README.md | grep -v '^```')
for python in "$@"; do
    environment=$(mktemp -d)
    "$python" -m venv "$environment"
    . "$environment/bin/activate"
    python --version
    while read -r command; do
        echo "+ $command"
        # Commands must not read the loop's input.
        (time eval "$command") </dev/null
    done <<<"$commands"
    deactivate
    rm -rf "$environment"
done
