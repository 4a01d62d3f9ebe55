#!/usr/bin/env bash
# A whole OpenRL on a kind cluster with the DRA example driver, on this machine. Its devices are names alone, so workers
# compute on the CPU; claims, pods and the scheduler's calls are those of a cluster with GPUs.
# Needs docker, kind 0.30 or newer, kubectl and helm 3.8 or newer, 12 GB of memory and the network.
# Again on the same cluster: it brings it up to date. `kind delete cluster --name openrl` removes it all.
set -euo pipefail
cd "$(dirname "$0")/../.."

for tool in docker kind kubectl helm; do
    command -v "$tool" >/dev/null || { echo "$tool is needed and not there" >&2; exit 2; }
done
node=${KIND_NODE_IMAGE:-kindest/node:v1.34.0}
driver=${DRA_EXAMPLE_DRIVER:-0.4.0}
tag=${TAG:-0.1.0}
context=kind-openrl
kubectl=(kubectl --context "$context")

if ! kind get clusters | grep -qx openrl; then
    kind create cluster --config k8s/kind/cluster.yaml --image "$node" --wait 2m
fi

helm upgrade --install dra-example-driver oci://registry.k8s.io/dra-example-driver/charts/dra-example-driver \
    --version "$driver" --kube-context "$context" --namespace dra-example-driver --create-namespace --wait

DOCKER_FLAGS="${DOCKER_FLAGS:---build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu}" k8s/images/build.sh "$tag"
for part in api scheduler trainer sampler; do
    kind load docker-image "openrl-$part:$tag" --name openrl
done

"${kubectl[@]}" apply --server-side -k k8s/crds
"${kubectl[@]}" wait --for condition=established crd/workloads.openrl.io crd/claimledgers.openrl.io --timeout 60s
"${kubectl[@]}" apply --server-side -k k8s/overlays/kind
"${kubectl[@]}" -n openrl rollout status statefulset/openrl-redis --timeout 5m
"${kubectl[@]}" -n openrl rollout status deployment/openrl-scheduler --timeout 10m
"${kubectl[@]}" -n openrl rollout status deployment/openrl-api --timeout 5m

cat <<'END'
OpenRL runs on kind. From here:
  kubectl --context kind-openrl -n openrl port-forward svc/openrl-api 8000:80
  export TINKER_BASE_URL=http://127.0.0.1:8000
  export TINKER_API_KEY=$(kubectl --context kind-openrl -n openrl get secret openrl-admin-key -o jsonpath='{.data.key}' | base64 -d)
  kubectl --context kind-openrl get openrl,resourceclaims,pods -n openrl
END
