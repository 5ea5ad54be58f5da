"""The configuration of the reverse proxy in a model pod.

It lets only the paths of inference through, under the names that it writes itself; holds requestLimits' hard
cap; passes streams on as they come; and hands the tokenizer's files to the router.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tandem.api import Role
from tandem.operator import model_files, names
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.wishes import invocation_path

LARGEST_BODY = "10m"

MOST_REQUESTS = 65535
"""nginx takes no higher limit, and has no room for so many connections."""
_OVER = 429
"""By this nginx knows for itself that the limit is reached: it would not take each status that clients may
get."""

_GENERATION = (
    "/invocations",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
_QUESTIONS = ("/detokenize", "/tokenize", "/v1/models", "/version")


def nginx_conf(plan: Plan, pool: Pool) -> str:
    """nginx.conf, whole. Everything that nginx writes is below /tmp."""
    server = "\n".join(f"    {line}" if line else "" for line in _server(plan, pool))
    silence = plan.times.longest_silence
    return f"""\
# The reverse proxy of the {pool.component} pods of {plan.names.namespace}/{plan.names.name}.
worker_processes 2;
worker_rlimit_nofile 65536;
pid /tmp/nginx.pid;
error_log /dev/stderr warn;

events {{
  worker_connections 16384;
}}

http {{
  access_log off;
  server_tokens off;
  default_type application/json;
  client_body_temp_path /tmp/client_body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;

  # Prompts of up to 10 MB; they are passed on while they come, and so are answers.
  client_max_body_size {LARGEST_BODY};
  underscores_in_headers on;
  proxy_http_version 1.1;
  proxy_request_buffering off;
  proxy_buffering off;
  gzip off;
  tcp_nodelay on;

  # Longer than the {silence} s for which an answer may be silent: the router decides when to give up.
  proxy_connect_timeout 5s;
  proxy_read_timeout {silence + 30}s;
  proxy_send_timeout {silence + 30}s;
  send_timeout {silence + 30}s;
  # Longer than the 4 s for which the router keeps an idle connection.
  keepalive_timeout 75s;
  keepalive_requests 1000000;

  # One connection for each request: a kept one that the engine closes would fail a request now and then.
  proxy_set_header Connection close;
  proxy_set_header Host $http_host;

  upstream engine {{
    server 127.0.0.1:{plan.port};
  }}

  # The constant makes it one count for the whole pod.
  limit_conn_zone $server_port zone=requests:64k;

  server {{
{server}
  }}

{_metrics_server()}}}
"""


def _server(plan: Plan, pool: Pool) -> Iterator[str]:
    yield f"listen {names.PROXY_PORT} default_server;"
    yield ""
    yield from _error_pages()
    yield from _answer("@too_large", 413, _error(413, f"The body is larger than {LARGEST_BODY.upper()}B."))
    no_engine = _error(503, "The engine is not up, or has just ended.")
    yield from _answer("@no_engine", 503, no_engine, retry_after=5)
    too_slow = _error(504, f"No answer for {plan.times.longest_silence} seconds.")
    yield from _answer("@too_slow", 504, too_slow)
    cap = _cap(plan, pool)
    if cap is not None:
        yield from _answer("@overflow", cap[1], cap[2], retry_after=1)
    generation = dict.fromkeys((invocation_path(plan.spec), *_GENERATION))
    for path in generation:
        yield f"location = {path} {{"
        if cap is not None:
            yield f"  limit_conn requests {cap[0]};"
            yield f"  limit_conn_status {_OVER};"
            yield f"  error_page {_OVER} = @overflow;"
            yield from (f"  {line}" for line in _error_pages())
        yield f"  proxy_pass http://engine{path};"
        yield "}"
    health = plan.balancer.health_path
    others = {path: f"engine{path}" for path in (*_QUESTIONS, "/health", health)}
    others["/ping"] = f"engine{health}"
    others["/metrics"] = f"127.0.0.1:{plan.metrics.port}{plan.metrics.path}"
    for path, target in others.items():
        if path not in generation:
            yield f"location = {path} {{"
            yield f"  proxy_pass http://{target};"
            yield "}"
    yield from _model_files(plan, pool)
    yield "location / {"
    yield f"  return 404 '{_error(404, 'There is no such path here.')}';"
    yield "}"


def _cap(plan: Plan, pool: Pool) -> tuple[int, int, str] | None:
    """The most requests that a pod holds, running and waiting, with the status and body for those beyond.

    None for prefillers: the router admits by what decoders take, however many prefillers there are."""
    limits = plan.spec.worker.request_limits
    if limits is None or limits.max_concurrent_requests is None or pool.role is Role.PREFILL:
        return None
    running, waiting = limits.max_concurrent_requests, limits.max_queue_size or 0
    body = {
        "error": "Too many concurrent requests",
        "max_concurrent": running,
        "max_queue_size": waiting,
        "current": running,
    }
    return (
        min(running + waiting, MOST_REQUESTS),
        limits.overflow_status_code,
        json.dumps(body, separators=(",", ":")),
    )


def _error_pages() -> Iterator[str]:
    """nginx's own errors; what the engine answers is passed on as it is."""
    pages = {413: "@too_large", 502: "@no_engine", 504: "@too_slow"}
    yield from (f"error_page {status} = {page};" for status, page in pages.items())


def _answer(location: str, status: int, body: str, *, retry_after: int | None = None) -> Iterator[str]:
    yield f"location {location} {{"
    if retry_after is not None:
        yield f"  add_header Retry-After {retry_after} always;"
    yield f"  return {status} '{body}';"
    yield "}"


def _model_files(plan: Plan, pool: Pool) -> Iterator[str]:
    folder = model_files.folder(plan, pool)
    if folder is None:
        return
    files = "|".join(name.replace(".", r"\.") for name in model_files.NAMES)
    yield "# For the router, which counts tokens with them: closed to others by the NetworkPolicy."
    yield f"location ~ ^{model_files.PATH}({files})$ {{"
    yield "  limit_except GET {"
    yield "    deny all;"
    yield "  }"
    yield f"  alias {folder}/$1;"
    yield "}"


def _error(code: int, message: str) -> str:
    """The body of an error as OpenAI's API has it; it may hold no single quote, as nginx.conf has them."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "code": code}}
    return json.dumps(body, separators=(",", ":"))


def _metrics_server() -> str:
    """What stock nginx can tell of itself, under the names of its Prometheus exporter."""
    figures = {
        "nginx_connections_accepted": ("counter", "connection"),
        "nginx_connections_active": ("gauge", "connections_active"),
        "nginx_connections_reading": ("gauge", "connections_reading"),
        "nginx_connections_writing": ("gauge", "connections_writing"),
        "nginx_connections_waiting": ("gauge", "connections_waiting"),
    }
    page = "".join(f"# TYPE {name} {kind}\\n{name} ${v}\\n" for name, (kind, v) in figures.items())
    return f"""\
  server {{
    listen {names.PROXY_METRICS_PORT};
    # The number of a connection is the count of those before; on a kept one it would stand still.
    keepalive_timeout 0;
    location = /metrics {{
      default_type "text/plain; version=0.0.4";
      return 200 "{page}";
    }}
    # Whether the proxy itself is up, whatever the engine does.
    location = /healthz {{
      return 200 '{{"status":"ok"}}';
    }}
    location / {{
      return 404;
    }}
  }}
"""
