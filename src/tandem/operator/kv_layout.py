"""What tells whether KV of one pod can be read by another: a label of model pods.

While an endpoint changes, pods of before and after are there side by side. Those whose KV means the same are
used together, whatever else has changed; the router pairs engines by this label.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tandem.api import Role
from tandem.engine.args import POSITIONALS, settings
from tandem.engine.roles import served_model_names
from tandem.operator import engines
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool, disaggregated
from tandem.operator.weights import has_claim
from tandem.operator.wishes import section

FLAGS = frozenset(
    {
        # The weights, and how they are computed with
        "--model",
        "--revision",
        "--code-revision",
        "--hf-config-path",
        "--hf-overrides",
        "--config-format",
        "--load-format",
        "--dtype",
        "--quantization",
        "--quantization-config",
        "--model-impl",
        "--disable-sliding-window",
        "--speculative-config",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        # What requests can name: a leg that its engine knows no model for fails
        "--enable-lora",
        "--lora-modules",
        "--lora-dtype",
        "--lora-target-modules",
        "--max-lora-rank",
        # The cache
        "--block-size",
        "--kv-cache-dtype",
        "--kv-cache-dtype-skip-layers",
        "--attention-backend",
        "--attention-config",
        "--disable-hybrid-kv-cache-manager",
        "--mamba-block-size",
        "--mamba-cache-dtype",
        "--mamba-cache-mode",
        "--mamba-ssm-cache-dtype",
        # How it is spread over ranks
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--decode-context-parallel-size",
        "--prefill-context-parallel-size",
        "--dcp-kv-cache-interleave-size",
        "--cp-kv-cache-interleave-size",
    }
)
"""Flags of vLLM that shape KV or what it is computed from."""

VARIABLES = frozenset(
    {
        "PYTHONHASHSEED",  # LMCache's keys
        "VLLM_ATTENTION_BACKEND",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_MLA_DISABLE",
        "VLLM_SSM_CONV_STATE_LAYOUT",
    }
)
"""Variables that do."""


def kv_layout(plan: Plan) -> str:
    """A short hash, the same for both roles' pods: a role may differ from the other (in its ranks, say), so
    what it is meant to be used with belongs to it. A change of one role's KV makes the other's pods new, too.
    """
    of_both = {
        "source": _source(plan),
        "served": served_model_names(disaggregated(plan.endpoint), Role.DECODE),
        "connector": plan.connector.name,
        "pools": [_of_pool(plan, pool) for pool in plan.pools],
    }
    text = json.dumps(of_both, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _source(plan: Plan) -> dict[str, Any]:
    """The weights: what the kind of source in use says of them, less what only gives access to them."""
    source = plan.spec.model_source_config
    kind = source.model_source_type
    volume = plan.spec.worker.model_volume_mount.name
    sections = {"s3": source.s3_storage, "fsx": source.fsx_storage, "huggingface": source.hugging_face_model}
    storage = section(sections.get(kind))
    return {
        "type": kind,
        "location": source.model_location if has_claim(plan) else None,
        "storage": {name: value for name, value in storage.items() if name != "tokenSecretRef"},
        "volume": [
            v.model_dump(by_alias=True, exclude_unset=True)
            for v in (plan.spec.kubernetes.volumes if plan.spec.kubernetes else ())
            if v.name == volume
        ],
    }


def _of_pool(plan: Plan, pool: Pool) -> dict[str, Any]:
    flags: dict[str, list[Any]] = {}
    for setting in settings(pool.args):
        if setting.flag in FLAGS or setting.flag == POSITIONALS:
            flags.setdefault(setting.flag, []).append((setting.path, setting.values, setting.negated))
    variables = {v.name: v.model_dump(exclude_unset=True) for v in pool.env if v.name in VARIABLES}
    return {
        "image": pool.image,
        "flags": flags,
        "variables": variables,
        "transfer": json.loads(engines.transfer_config(plan, pool)),
    }
