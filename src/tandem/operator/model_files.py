"""The tokenizer's files that proxies of model pods hand to the router: which, from where, and when not."""

from __future__ import annotations

import re

from tandem.api.conventions import LONGEST_PATH
from tandem.engine import flag_value
from tandem.engine.roles import model_argument
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.texts import shortened
from tandem.operator.weights import in_folder

PATH = "/tandem/model/"
"""Where they are served, for the router alone."""

CACHE = "/tmp/model-files"
"""Where the router keeps them: a container that starts again finds them there."""

NAMES = (
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model.v1",
    "tokenizer.model.v2",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "tokenizer.model.v7m1",
    "tokenizer_config.json",
)
"""What counting a prompt's tokens needs, or needs to know of; nothing of the weights."""

_AS_FILED = ("auto", "hf")  # modes of --tokenizer-mode


def folder(plan: Plan, pool: Pool) -> str | None:
    """The folder that a pool's pods serve them from; None where they serve none."""
    return _folder(plan, pool) if plan.routed and _why_not(plan, pool) is None else None


def why_not(plan: Plan) -> str | None:
    """Why the router cannot count with the engines' files, or None where it can."""
    return next((why for pool in plan.pools if (why := _why_not(plan, pool)) is not None), None)


def is_text(template: str) -> bool:
    """Whether `--chat-template` is the template itself, and no file of the model container."""
    return any(character in template for character in "{}\n")


def _folder(plan: Plan, pool: Pool) -> str:
    model = model_argument(pool.args) or plan.spec.worker.model_volume_mount.mount_path
    return model.rstrip("/")


def _why_not(plan: Plan, pool: Pool) -> str | None:
    tokenizer = flag_value(pool.args, "--tokenizer")
    template = flag_value(pool.args, "--chat-template")
    mode = flag_value(pool.args, "--tokenizer-mode")
    where = _folder(plan, pool)
    if tokenizer is not None and tokenizer.rstrip("/") != where:
        return f"--tokenizer {tokenizer}: is not the model's own folder"
    if mode is not None and mode not in _AS_FILED:
        return f"--tokenizer-mode {mode}: the router tokenizes by tokenizer.json"
    if template is not None and not is_text(template):
        return f"--chat-template {template}: is a file that the router has not; give the template's text"
    if not in_folder(plan, where):
        return "the model's files are not on the volume of spec.worker.modelVolumeMount before engines start"
    if len(where) > LONGEST_PATH or not re.fullmatch(r"/[A-Za-z0-9._/-]+", where):
        most = f"at most {LONGEST_PATH:,} letters, digits, . _ - and /"
        return f"{shortened(where, 100)}: nginx is given no paths but of {most}"
    return None
