"""What users of disaggregated serving complain about, and the test that makes each impossible here.

One entry for each complaint that concerns a router. `tests` name test functions as `path::function`, without
the folder `tests/`; `later` says why there is none yet. docs/complaints.md is made of this.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Complaint:
    numbers: tuple[int, ...]
    """In the collection of field complaints that this project keeps."""
    source: str
    symptom: str
    tests: tuple[str, ...] = ()
    later: str = ""


def _c(numbers: tuple[int, ...], source: str, symptom: str, *tests: str, later: str = "") -> Complaint:
    return Complaint(numbers, source, symptom, tests, later)


COMPLAINTS: tuple[Complaint, ...] = (
    _c(
        (1,),
        "production-stack #747, #797",
        "a request without max_tokens is refused",
        "router/test_flow.py::test_a_long_prompt_is_prefilled_and_its_kv_parameters_reach_the_decoder",
        "router/test_nixl.py::test_the_prefill_leg_asks_for_one_token_and_a_hand_off",
        "router/test_nixl.py::test_the_decode_leg_is_the_clients_body_plus_the_parameters_verbatim",
    ),
    _c(
        (2, 16),
        "production-stack #777, router #113, #114",
        "the stream is buffered",
        "router/test_streams.py::test_chunks_of_a_stream_arrive_as_the_decoder_sends_them",
    ),
    _c(
        (2,),
        "production-stack #777",
        "200 first, then a JSON error in the body",
        "router/test_streams.py::test_an_error_status_of_a_stream_request_is_an_answer_of_its_own",
        "router/test_failures.py::test_an_error_that_comes_with_status_200_is_not_an_answer",
    ),
    _c(
        (3, 49, 63),
        "production-stack #619, InferenceX #2255, dynamo #6957, #7379",
        "traffic goes to engines that cannot answer yet",
        "router/test_canary.py::test_engines_are_used_once_a_canary_has_gone_through_each_path",
        "router/test_app.py::test_ready_says_what_is_missing",
    ),
    _c(
        (4,),
        "production-stack #471, #586",
        "stale addresses after a restart",
        "router/test_canary.py::test_another_engine_at_the_same_address_is_proved_as_a_new_one",
        "router/test_canary.py::test_an_engine_that_discovery_takes_away_is_used_and_looked_at_no_more",
    ),
    _c(
        (5,),
        "production-stack #228, #999",
        "the Kubernetes watch hangs on an old resource version",
        "kube/test_reflector.py::test_after_a_version_that_is_gone_only_what_differs_is_told",
        "kube/test_client.py::test_a_copy_outlives_the_api_server_and_misses_no_change",
        "router/test_discovery_kubernetes.py::test_another_list_takes_no_engine_away_that_is_still_there",
    ),
    _c(
        (6,),
        "production-stack #1003, #1004",
        "a model without engines is answered 404",
        "router/test_failures.py::test_an_endpoint_without_a_decoder_says_so_and_when_to_come_back",
    ),
    _c(
        (7,),
        "production-stack #382",
        "no retry at the router",
        "router/test_failures.py::test_a_failing_prefiller_is_replaced_by_another",
        "router/test_failures.py::test_a_failing_decoder_is_replaced_with_a_new_prefill",
        "router/test_streams.py::test_a_stream_that_breaks_off_never_looks_whole",
    ),
    _c(
        (8,),
        "production-stack #1045",
        "kvaware ignores chats",
        later="kvaware cannot be configured yet; chats are tokenized already",
    ),
    _c(
        (9,),
        "production-stack #502, #884, #1035",
        "kvaware overloads one engine",
        later="kvaware cannot be configured yet",
    ),
    _c(
        (10,),
        "production-stack #711",
        "the prefix trie grows until memory is full",
        "router/strategies/test_sent_index.py::test_all_engines_together_are_bounded",
        "router/strategies/test_sent_index.py::test_it_is_bounded_however_many_engines_come_and_go",
        "router/strategies/test_cacheaware.py::test_a_hot_prefix_does_not_overload_one_engine",
    ),
    _c(
        (11, 17),
        "production-stack #1072, router #146",
        "counters of requests in flight leak",
        "router/test_engines.py::test_a_request_is_in_flight_until_its_block_ends_in_whatever_way",
        "sim/test_soak.py::test_requests_in_trouble_end_and_leave_nothing",
    ),
    _c(
        (12,),
        "production-stack #1042",
        "nobody can tell prefixaware from kvaware",
        later="kvaware cannot be configured yet; docs/configuration.md says what each strategy reads",
    ),
    _c(
        (13, 24),
        "router #193, llm-d #2896, #2897, #1964",
        "cached_tokens are those of the transfer",
        later="clients get the decoder's count; putting the prefiller's in comes with the metrics",
    ),
    _c(
        (14,),
        "router #2",
        "stream_options on a leg that does not stream",
        "router/test_nixl.py::test_the_prefill_leg_asks_for_one_token_and_a_hand_off",
    ),
    _c(
        (15, 51),
        "router #46, #47, dynamo #10631",
        "options that do something else than they say, or nothing",
        "docs/test_docs.py::test_the_router_flags_are_all_described",
        "router/test_timeouts.py::test_prefill_timeout_limits_the_wait_for_the_prefill_legs_answer",
    ),
    _c(
        (17,),
        "router #146",
        "a hung stream holds its place for ever",
        "router/test_timeouts.py::test_stream_idle_timeout_limits_a_silence_in_the_middle_of_an_answer",
    ),
    _c(
        (18,),
        "router #148",
        "requests at fault open the circuit breaker",
        "router/test_suspicion.py::test_prompts_that_no_engine_can_serve_cost_a_canary_and_nobody_else_a_request",
    ),
    _c(
        (19, 60),
        "llm-d-router #2427, aibrix #2289, #2746",
        "falling back, or failing, goes unseen",
        "router/test_failures.py::test_without_a_hand_off_the_decoder_computes_the_prompt",
        "router/test_metrics.py::test_failed_legs_are_counted_by_role_and_cause",
    ),
    _c(
        (20,),
        "llm-d-router #1206",
        "retries make an overload worse",
        "router/test_retries.py::test_however_much_fails_retries_are_a_share_of_the_requests_and_a_few",
        "router/test_failures.py::test_long_prompts_on_decoders_are_capped",
    ),
    _c(
        (21,),
        "llm-d-router #242",
        "a client makes the router or an engine call any host",
        "router/test_flow.py::test_hand_off_fields_of_a_client_are_refused",
        "router/test_flow.py::test_internal_headers_of_a_client_are_refused",
    ),
    _c(
        (22,),
        "llm-d #403, #411, #2085",
        "the prefill leg runs to its full length",
        "router/test_nixl.py::test_a_chat_that_names_its_length_in_the_newer_way_is_cut_too",
    ),
    _c(
        (23,),
        "llm-d #871, #691",
        "threshold 0 is read as never",
        "router/test_flow.py::test_threshold_zero_disaggregates_everything_without_counting",
    ),
    _c(
        (25,),
        "llm-d-router #701",
        "the first token waits for the decoder",
        later="not done: the prefiller's token would have to pass the decoder's tool and reasoning parsers",
    ),
    _c(
        (28,),
        "vLLM #41269",
        "KV stranded on the prefiller when the decoder rejects the request",
        "router/test_flow.py::test_a_prompt_over_the_context_is_not_prefilled",
        "router/test_plausible.py::test_a_doubtful_request_costs_no_prefill_and_the_decoders_own_words_reach_the_client",
    ),
    _c(
        (30, 53),
        "vLLM #50425, #50754, sglang #24159, #9726, #29482",
        "a leg that never answers",
        "router/test_timeouts.py::test_first_token_timeout_limits_the_wait_for_an_answer_to_begin",
        "router/test_deadlines.py::test_a_leg_may_take_longer_for_a_longer_prompt",
    ),
    _c(
        (31, 32),
        "vLLM #38900, #39647, #43509, #27449, #50792, vllm-ascend #13363, #13366",
        "n > 1, prompt_logprobs or echo break a hand-off",
        "router/test_flow.py::test_what_a_hand_off_cannot_carry_goes_to_a_decoder_alone",
    ),
    _c(
        (33,),
        "vLLM #38911",
        "a forced tool call on one token",
        "router/test_nixl.py::test_a_forced_tool_call_is_not_forced_on_one_token_and_the_tools_stay",
    ),
    _c(
        (34,),
        "vLLM #46008",
        "the prefill leg ends by a stop token",
        "router/test_nixl.py::test_its_one_token_ends_by_length_whatever_the_client_set",
    ),
    _c(
        (36,),
        "vLLM #49238, #50047, #58063, nixl #1986, #795, SGLang #13657",
        "decoders keep stale data of a prefiller that was restarted",
        "router/test_canary.py::test_a_prefiller_that_dies_and_comes_back_is_proved_anew_before_it_gets_traffic",
    ),
    _c(
        (37,),
        "vLLM #52617, LMCache #4614",
        "the first token after a hand-off is wrong",
        "engines/test_equality.py::test_disaggregated_equals_alone",
    ),
    _c(
        (38,),
        "vLLM #37422",
        "the Responses API cannot hand over",
        later="/v1/responses is not routed",
    ),
    _c(
        (39,),
        "vLLM #42703",
        "nothing was handed over and nobody noticed",
        "engines/test_endpoint.py::test_the_demo_proves_the_endpoint",
        "router/test_nixl.py::test_an_answer_without_a_hand_off_is_told_by_its_reason",
    ),
    _c(
        (40,),
        "vllm-ascend #15250",
        "the caller's Authorization is replaced",
        "router/test_headers.py::test_end_to_end_headers_reach_the_engine_with_the_legs_own_id",
    ),
    _c(
        (41,),
        "LMCache #1350",
        "decode begins before the KV is there",
        "router/test_handover.py::test_the_decode_leg_waits_for_the_notification_of_every_rank",
        "engines/test_lmcache_faults.py::test_a_notification_that_is_late",
    ),
    _c(
        (42,),
        "LMCache #1258, #2510, #2080, #1337, #1339, #1990, #2365",
        "a full receive buffer stalls everything",
        "router/test_handover_room.py::test_more_prompts_than_a_buffer_holds_are_served_in_order_of_arrival",
        "engines/test_lmcache_faults.py::test_a_full_receiver_keeps_prompts_waiting_and_no_engine",
    ),
    _c(
        (43,),
        "LMCache #2847",
        "chunks leak in the receive buffer",
        "router/test_handover.py::test_whatever_a_failing_prefiller_has_written_is_freed",
        "router/test_handover.py::test_a_decode_leg_that_fails_is_repaired_and_its_kv_freed",
        "engines/test_lmcache_faults.py::test_nothing_of_a_client_that_left_stays_in_the_buffer",
    ),
    _c(
        (45,),
        "LMCache #1511",
        "no chats",
        "router/test_handover.py::test_a_chat_is_handed_over_too",
    ),
    _c(
        (46,),
        "LMCache #636",
        "one prefiller and one decoder only",
        "engines/test_lifetime.py::test_two_prefillers_and_two_decoders_share_the_work",
        "sim/test_fault_matrix.py::test_a_fault_comes_to_what_the_policy_says",
        "sim/test_soak.py::test_requests_in_trouble_end_and_leave_nothing",
    ),
    _c(
        (47,),
        "dynamo #14507",
        "the client leaves and the prefill goes on",
        "router/test_flow.py::test_the_clients_leaving_ends_the_running_leg",
    ),
    _c(
        (48,),
        "dynamo #13559",
        "scaling down breaks running requests",
        "router/test_timeouts.py::test_a_running_answer_is_finished_before_the_router_ends",
        "router/test_canary.py::test_an_engine_that_discovery_takes_away_is_used_and_looked_at_no_more",
    ),
    _c(
        (50,),
        "dynamo #13238",
        "a prefiller serves as a normal engine",
        "router/test_app.py::test_models_are_those_of_the_decoders",
        "router/test_engines.py::test_a_prefiller_serves_only_decoders_that_have_read_its_kv",
    ),
    _c(
        (54,),
        "sglang #9926",
        "the first request after a pause fails",
        "http/test_client_pool.py::test_idle_connections_are_closed_before_the_origin_would",
        "http/test_client_pool.py::test_a_kept_connection_that_dies_is_replaced_once",
    ),
    _c(
        (55,),
        "sglang #12355",
        "every breaker is open under load",
        "router/test_suspicion.py::test_with_every_engine_suspect_requests_are_tried_and_one_that_works_clears_its_engine",
    ),
    _c(
        (56,),
        "sglang #9803",
        "a long prefill runs into a fixed time-out",
        "router/test_deadlines.py::test_prompts_that_a_prefiller_has_before_it_are_waited_for_too",
    ),
    _c(
        (57, 59),
        "sglang #33507, smg #2382",
        "an abort or an error looks like a whole answer",
        "router/test_relay.py::test_a_whole_answer_with_status_200_may_be_none",
        "router/test_streams.py::test_a_stream_that_breaks_off_never_looks_whole",
    ),
    _c(
        (58,),
        "smg #1622",
        "fields that the router does not know are lost",
        "router/test_body.py::test_values_that_nobody_edits_stay_byte_for_byte",
    ),
    _c(
        (61,),
        "aibrix #1377, kthena #1710, #1711",
        "time-outs do not hold for disaggregated requests",
        "router/test_timeouts.py::test_prefill_timeout_limits_the_wait_for_the_prefill_legs_answer",
    ),
    _c(
        (62,),
        "aibrix #1443, #1407, #1429",
        "a prefiller and a decoder that cannot talk are paired",
        "router/test_flow.py::test_a_decoder_that_no_prefiller_can_reach_gets_no_long_prompt_while_another_can",
    ),
    _c(
        (64,),
        "uvicorn #2097, aiohttp #9138, vllm-router",
        "large bodies are refused or break a kept connection",
        "http/test_server.py::test_a_client_that_is_still_sending_sees_why_its_body_is_refused",
        "http/test_client_pool.py::test_an_answer_before_the_request_is_read_does_not_leave_a_half_sent_request_in_the_pool",
    ),
)

ELSEWHERE: dict[int, str] = {
    26: "a table of what is supported, checked at admission: the operator",
    27: "a leak inside the decoder: the engine's version",
    29: "the lease of a prefiller's blocks: 30 s, set where engines are started",
    35: "a failed handshake that kills an engine: supervision restarts it",
    44: "different hash seeds in both roles: set where engines are started",
    52: "replicas set by hand: scaling",
}
"""Those that are not a router's, and whose they are."""


def table() -> str:
    """docs/complaints.md's table."""
    rows = ["| no. | reported as | what happens there | here impossible by |", "|---|---|---|---|"]
    for c in COMPLAINTS:
        by = "<br>".join(f"`{test}`" for test in c.tests) or f"open: {c.later}"
        rows.append(f"| {', '.join(map(str, c.numbers))} | {c.source} | {c.symptom} | {by} |")
    rows += [f"| {number} | | | not a router's: {whose} |" for number, whose in ELSEWHERE.items()]
    return "\n".join(rows)
