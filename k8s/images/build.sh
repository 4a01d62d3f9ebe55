#!/usr/bin/env bash
# Builds the four images: k8s/images/build.sh [TAG] [REGISTRY]. CONTAINER_TOOL, default docker. DOCKER_FLAGS are passed on,
# such as --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu or --push.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=${1:-0.1.0}
registry=${2:-}
read -ra flags <<<"${DOCKER_FLAGS:-}"
for part in api scheduler trainer sampler; do
    "${CONTAINER_TOOL:-docker}" build "${flags[@]}" -f "k8s/images/$part/Dockerfile" \
        -t "${registry:+${registry%/}/}openrl-$part:$tag" .
done
