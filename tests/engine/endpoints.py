"""Endpoints for the engine tests: small manifests in the shapes that people deploy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from tandem.api import Endpoint, parse_endpoint

S3 = """
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: pd-s3}
spec:
  modelName: llama-3-3-70b
  modelSourceConfig:
    modelSourceType: s3
    modelLocation: Llama-3.3-70B-Instruct
    s3Storage: {bucketName: my-models, region: us-east-2}
  pdSpec:
    prefillSpec: {replicas: 2, args: ["--max-num-seqs", "16", "--enforce-eager"]}
    decodingSpec: {replicas: 1, args: ["--max-num-seqs", "32"]}
  worker:
    image: lmcache/vllm-openai:v0.4.3
    args: ["--model", "/opt/ml/model", "--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", "8",
           "--max-model-len", "16384", "--gpu-memory-utilization", "0.75"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    resources: {}
    environmentVariables:
      - {name: PD_BUFFER_SIZE, value: "8589934592"}
      - {name: PYTHONHASHSEED, value: "0"}
"""

NVME = """
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: pd-nvme}
spec:
  modelName: llama-3-3-70b
  modelSourceConfig: {modelSourceType: kubernetesVolume}
  kubernetes: {volumes: [{name: model-weights, hostPath: {path: /opt/dlami/nvme/Llama}}]}
  pdSpec: {routingThreshold: 0, prefillSpec: {}, decodingSpec: {}}
  worker:
    image: lmcache/vllm-openai:v0.4.3
    args: ["--model", "/opt/ml/model", "--port", "8000", "--tensor-parallel-size", "8",
           "--max-model-len", "16384", "--gpu-memory-utilization", "0.75"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights, mountPath: /opt/ml/model}
    resources: {limits: {nvidia.com/gpu: "8"}}
"""

HUGGING_FACE = """
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata: {name: pd-hf}
spec:
  modelName: llama-3-3-70b
  modelSourceConfig:
    modelSourceType: huggingface
    huggingFaceModel: {modelId: meta-llama/Llama-3.3-70B-Instruct}
  pdSpec: {prefillSpec: {}, decodingSpec: {}}
  worker:
    image: vllm:server-hyperpod-cuda-v1.1
    args: ["--model", "/opt/ml/model", "--port", "8000", "--tensor-parallel-size", "8",
           "--max-model-len", "16384", "--served-model-name", "llama-3-3-70b", "llama"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    resources: {}
"""

MANIFESTS = {"s3": S3, "nvme": NVME, "hugging face": HUGGING_FACE}


def manifest(text: str) -> Endpoint:
    return parse_endpoint(text, source="manifest.yaml")[0]


def endpoint(
    args: Sequence[str] = ("--model", "/opt/ml/model"),
    *,
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    prefillers: int = 1,
    decoders: int = 1,
    env: Sequence[dict[str, Any]] = (),
    command: Sequence[str] = (),
    annotations: dict[str, str] | None = None,
    image: str = "vllm/vllm-openai:v0.32.0",
    caches: dict[str, Any] | None = None,
) -> Endpoint:
    """A small endpoint with these flags."""
    document = yaml.safe_load(NVME)
    document["metadata"]["annotations"] = annotations or {}
    document["spec"]["modelName"] = "small"
    document["spec"]["kvCacheSpec"] = caches or {}
    document["spec"]["worker"]["image"] = image
    document["spec"]["pdSpec"] = {
        "prefillSpec": {"replicas": prefillers, "args": list(prefill_args)},
        "decodingSpec": {"replicas": decoders, "args": list(decode_args)},
    }
    document["spec"]["worker"] |= {
        "args": list(args),
        "command": list(command),
        "environmentVariables": list(env),
    }
    return manifest(json.dumps(document))
