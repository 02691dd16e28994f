#!/usr/bin/env bash
# The deployment test on real containers: images built, linted, an operator and two hospitals on separate networks.
# Exit status 77: no container engine can be had here; the reason was printed.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)

if engine=$("$HERE/engine.sh" up); then
  :
else
  status=$?
  [ "$status" = 77 ] && echo "containers: SKIPPED, no engine here"
  exit "$status"
fi
set -a
eval "$engine"
set +a
trap '"$HERE/engine.sh" down' EXIT
PATH=$TOOLS:$PATH
# `docker` below, and in perennial itself, is this engine's client
shim=$(mktemp -d)
ln -s "$(command -v "$DOCKER")" "$shim/docker"
export PATH=$shim:$PATH
# today's default; the distribution's engine would build every stage, CUDA too
export DOCKER_BUILDKIT=1
cd "$ROOT"

echo "== lint"
hadolint --failure-threshold error docker/Dockerfile
echo "== build"
for target in site operator; do
  docker build --quiet --file docker/Dockerfile --target "$target" --tag "perennial-$target:test" . ||
    { echo "containers: FAILED to build $target"; exit 1; }
done
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep perennial
echo "== operator and two hospitals; docs/deploy.md as it is written"
.venv/bin/python -m pytest tests/containers/check_containers.py tests/containers/check_documented.py \
  -p no:cacheprovider --timeout 1200 -s "$@"
echo "containers: passed in $SECONDS s, engine and images included"
