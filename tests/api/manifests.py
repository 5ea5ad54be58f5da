"""Manifests in the shapes that people deploy."""

from __future__ import annotations

S3 = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata:
  name: pd-s3
  namespace: team-a
spec:
  endpointName: pd-s3
  modelName: llama-3-3-70b
  instanceType: ml.p5.48xlarge
  invocationEndpoint: v1/chat/completions
  modelSourceConfig:
    modelSourceType: s3
    modelLocation: Llama-3.3-70B-Instruct
    s3Storage: {bucketName: my-models, region: us-east-2}
  loadBalancer: {healthCheckPath: /health}
  metrics:
    enabled: true
    modelMetrics: {port: 8000}
  kvCacheSpec: {enableL1Cache: true}
  intelligentRoutingSpec: {enabled: true, routingStrategy: prefixaware}
  pdSpec:
    routingThreshold: 4096
    prefillSpec:
      replicas: 2
      args: ["--max-num-seqs", "16", "--enforce-eager"]
      nodeSelector: {pool: prefill}
      resources:
        requests: {nvidia.com/gpu: "8"}
        limits: {nvidia.com/gpu: "8"}
    decodingSpec:
      replicas: 1
      args: ["--max-num-seqs", "32"]
      resources:
        requests: {nvidia.com/gpu: "8"}
        limits: {nvidia.com/gpu: "8"}
    topologySpec: {sameAZ: true}
  worker:
    image: lmcache/vllm-openai:v0.4.3
    args: ["--model", "/opt/ml/model", "--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", "8"]
    modelInvocationPort: {name: http, containerPort: 8000}
    modelVolumeMount: {name: model-weights, mountPath: /opt/ml/model}
    resources:
      requests: {cpu: "96", memory: 1024Gi, nvidia.com/gpu: "8"}
      limits: {cpu: "96", memory: 1024Gi, nvidia.com/gpu: "8"}
    environmentVariables:
      - {name: PD_BUFFER_SIZE, value: "8589934592"}
      - {name: PYTHONHASHSEED, value: "0"}
"""

NVME = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata:
  name: pd-nvme
  namespace: team-a
spec:
  modelName: llama-3-3-70b
  instanceType: ml.p5.48xlarge
  invocationEndpoint: v1/chat/completions
  modelSourceConfig: {modelSourceType: kubernetesVolume}
  kubernetes:
    volumes:
      - name: model-weights
        hostPath: {path: /opt/dlami/nvme/Llama-3.3-70B-Instruct, type: Directory}
  loadBalancer: {healthCheckPath: /health}
  pdSpec:
    routingThreshold: 0
    prefillSpec: {resources: {requests: {nvidia.com/gpu: "8"}, limits: {nvidia.com/gpu: "8"}}}
    decodingSpec: {resources: {requests: {nvidia.com/gpu: "8"}, limits: {nvidia.com/gpu: "8"}}}
  worker:
    image: lmcache/vllm-openai:v0.4.3
    args: ["--model", "/opt/ml/model", "--port", "8000", "--tensor-parallel-size", "8"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights, mountPath: /opt/ml/model}
    resources: {limits: {nvidia.com/gpu: "8"}}
"""

HUGGING_FACE = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata:
  name: pd-hf
  namespace: team-a
spec:
  modelName: llama-3-3-70b
  instanceType: ml.p5en.48xlarge
  invocationEndpoint: v1/chat/completions
  modelSourceConfig:
    modelSourceType: huggingface
    prefetchEnabled: true
    huggingFaceModel:
      modelId: meta-llama/Llama-3.3-70B-Instruct
      tokenSecretRef: {name: hf-token-secret, key: token}
  loadBalancer: {healthCheckPath: /health}
  pdSpec:
    prefillSpec: {resources: {requests: {nvidia.com/gpu: "8"}, limits: {nvidia.com/gpu: "8"}}}
    decodingSpec: {resources: {requests: {nvidia.com/gpu: "8"}, limits: {nvidia.com/gpu: "8"}}}
  worker:
    image: vllm:server-hyperpod-cuda-v1.1
    args: ["--model", "/opt/ml/model", "--port", "8000", "--served-model-name", "llama-3-3-70b"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    resources: {limits: {nvidia.com/gpu: "8"}}
    environmentVariables:
      - {name: LMCACHE_SAVE_DECODE_CACHE, value: "False"}
"""

COLOCATED = """\
apiVersion: inference.sagemaker.aws.amazon.com/v1
kind: InferenceEndpointConfig
metadata:
  name: chat-8b
  namespace: team-a
spec:
  modelName: llama-3-1-8b
  instanceTypes: [ml.g6e.12xlarge, ml.g5.24xlarge]
  replicas: 2
  invocationEndpoint: v1/chat/completions
  modelSourceConfig:
    modelSourceType: fsx
    modelLocation: Llama-3.1-8B-Instruct
    fsxStorage: {fileSystemId: fs-1234abcd}
  intelligentRoutingSpec:
    enabled: true
    routingStrategy: prefixaware
    autoScalingSpec: {minReplicaCount: 1, maxReplicaCount: 3}
  kvCacheSpec:
    enableL1Cache: true
    enableL2Cache: true
    l2CacheSpec: {l2CacheBackend: redis, l2CacheLocalUrl: "redis://redis.team-a.svc.cluster.local:6379"}
  autoScalingSpec:
    minReplicaCount: 2
    maxReplicaCount: 6
    cloudWatchTrigger:
      namespace: AWS/SageMaker
      metricName: Invocations
      metricStat: Sum
      targetValue: 10
      dimensions: [{name: EndpointName, value: chat-8b}, {name: VariantName, value: AllTraffic}]
  metrics: {enabled: true, modelMetrics: {port: 8000}}
  loadBalancer: {healthCheckPath: /health}
  worker:
    image: lmcache/vllm-openai:v0.4.3
    args: ["--model", "/opt/ml/model", "--port", "8000", "--tensor-parallel-size", "4"]
    modelInvocationPort: {containerPort: 8000}
    modelVolumeMount: {name: model-weights}
    requestLimits: {maxConcurrentRequests: 64, maxQueueSize: 16, overflowStatusCode: 503}
    resources: {requests: {cpu: "30", memory: 100Gi, nvidia.com/gpu: "4"}, limits: {nvidia.com/gpu: "4"}}
    environmentVariables:
      - {name: PYTHONHASHSEED, value: "0"}
"""

MANIFESTS = {"s3": S3, "nvme": NVME, "hugging face": HUGGING_FACE, "colocated": COLOCATED}
