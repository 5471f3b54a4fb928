"""Finds libbaton.so.0 and declares what it has, by ctypes: nothing is compiled, and the interpreter's lock is
free during every call."""
from __future__ import annotations

import ctypes
import pathlib
from typing import TYPE_CHECKING, Any
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

from .errors import error_of


class Error(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("result", c_int32), ("text", ctypes.c_char * 1012)]


class Bytes(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]


class Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("providers", c_char_p), ("require", c_char_p),
                ("key_file", c_char_p), ("listen_host", c_char_p), ("listen_port", c_uint16),
                ("progress_thread", c_uint8), ("serve_metadata", c_uint8), ("max_transfers", c_uint32),
                ("settings", c_char_p), ("metadata_store", c_char_p), ("metadata_lease_ms", c_uint32),
                ("reserved", c_uint64), ("advertise", c_char_p)]


class Stats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_uint64) for name in (
        "lists", "transfers", "running", "remotes", "registered", "bytes_moved", "transfers_ended",
        "registrations", "peers_up", "peers_lost", "messages_lost")]


class Telemetry(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("start_ns", c_int64), ("post_ns", c_int64), ("transfer_ns", c_int64),
                ("bytes", c_uint64), ("descriptors", c_uint64)]


class KvModel(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("weights", c_char_p), ("dtype", c_char_p), ("rope", c_char_p), ("format", c_char_p)]


class KvGroup(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("layers", POINTER(c_uint32)), ("layer_count", c_size_t), ("blocks", c_uint32),
                ("block_tokens", c_uint32), ("window", c_uint32), ("total_heads", c_uint32), ("first_head", c_uint32),
                ("heads", c_uint32)]


class KvPaged(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("head_size", c_uint32), ("dtype", c_int32), ("order", c_int32), ("pair", c_int32),
                ("one_tensor", c_uint8)]


class KvField(ctypes.Structure):
    _fields_ = [("role", c_int32), ("dtype", c_int32), ("width", c_uint32), ("per_block", c_uint32)] + [
        (name, c_uint64) for name in ("block_stride", "token_stride", "head_stride", "element_stride")] + [
        ("addresses", c_void_p)]


class KvShare(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("ranks", c_uint32), ("rank", c_uint32), ("turn", c_uint64)]


class KvPlanInfo(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("bytes_per_token", c_uint64), ("layers", c_uint32), ("complete", c_uint32),
                ("reserved", c_uint32)]


class KvBlocks(ctypes.Structure):
    _fields_ = [("blocks", c_void_p), ("count", c_size_t), ("first_block", c_uint64)]


class KvRequest(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("first_token", c_uint64), ("end_token", c_uint64), ("length", c_uint64),
                ("first_layer", c_uint32), ("end_layer", c_uint32), ("local", POINTER(KvBlocks)),
                ("local_groups", c_size_t), ("remote", POINTER(KvBlocks)), ("remote_groups", c_size_t)]


class KvConnectorOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("providers", c_char_p), ("require", c_char_p),
                ("key_file", c_char_p), ("listen_host", c_char_p), ("settings", c_char_p), ("max_transfers", c_uint32),
                ("listen_port", c_uint16), ("allow_pull", c_uint8), ("serialized", c_uint8), ("max_lease", c_int64),
                ("advertise", c_char_p)]


class KvConnectorStats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_uint64) for name in (
        "bytes_sent", "bytes_loaded", "loads_failed", "jobs_failed")]


class KvLoad(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("id", c_uint64), ("prefill", c_char_p), ("shards", POINTER(c_char_p)),
                ("shard_count", c_size_t), ("key", c_char_p), ("tokens", c_void_p), ("token_count", c_size_t),
                ("blocks", c_void_p), ("block_count", c_size_t), ("first_token", c_uint32), ("loads_of_key", c_uint32),
                ("timeout", c_int64), ("silence", c_int64), ("lease", c_int64), ("pull", c_uint32)]


class KvJob(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("job", c_uint64), ("request", c_uint64), ("decode", c_char_p), ("key", c_char_p),
                ("tokens", POINTER(c_int32)), ("token_count", c_size_t), ("first_token", c_uint32),
                ("loads_of_key", c_uint32)]


class KvBinding(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("key", c_char_p), ("tokens", c_uint32), ("loads", c_uint32), ("lease", c_int64)]


class KvRun(ctypes.Structure):
    _fields_ = [("first_block", c_uint64), ("blocks", c_void_p), ("count", c_size_t), ("first_token", c_uint64),
                ("end_token", c_uint64)]


class KvOrder(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("id", c_uint64), ("transfer", c_char_p), ("agent", c_char_p), ("address", c_char_p),
                ("runs", POINTER(KvRun)), ("run_count", c_size_t), ("ranks", c_uint32), ("finished", c_uint32),
                ("timeout", c_int64), ("silence", c_int64)]


class KvLoaded(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("id", c_uint64), ("took", c_int64), ("reading", c_int64)]


class EndpointOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_char_p) for name in (
        "providers", "require", "key_file", "listen_host", "settings", "advertise")] + [
        ("listen_port", c_uint16), ("background", c_uint8), ("pool_bytes", c_uint64)]


class Place(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("rendezvous", c_char_p), ("rank", c_int32), ("ranks", c_int32),
                ("local_rank", c_int32), ("local_ranks", c_int32), ("generation", c_uint64), ("serves", c_uint8)]


class CommOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("name", c_char_p), ("uuid", c_uint64), ("start_timeout", c_int64),
                ("timeout", c_int64), ("ordered", c_uint8), ("tune", c_uint8)]


class CommStats(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_uint64) for name in (
        "calls", "messages", "bytes_sent", "direct_bytes", "sleeps", "staged_calls", "staged_bytes", "link_bytes")]


Clock = ctypes.CFUNCTYPE(c_int64, c_void_p)
OnEnd = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_int32, c_char_p)


class Stream(ctypes.Structure):
    _fields_ = [("device", c_int32), ("handle", c_void_p)]


class Call(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int32), ("type", c_int32), ("op", c_int32), ("peer", c_int32),
                ("in", c_void_p), ("out", c_void_p), ("count", c_size_t), ("in_counts", c_void_p),
                ("in_offsets", c_void_p), ("out_counts", c_void_p), ("out_offsets", c_void_p), ("timeout", c_int64),
                ("factor", c_void_p), ("tag", c_int32), ("flags", c_uint32), ("on_end", OnEnd), ("context", c_void_p),
                ("group", c_uint64), ("after", c_void_p), ("release", c_void_p)]


class Access(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int32), ("rank", c_int32), ("data", c_void_p), ("bytes", c_uint64),
                ("offset", c_uint64), ("value", c_uint64), ("slot", c_uint32), ("flags", c_uint32), ("timeout", c_int64),
                ("on_end", OnEnd), ("context", c_void_p)]


class ExpertsOptions(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("experts", c_int32), ("top_k", c_int32), ("hidden", c_int32), ("max_tokens", c_int32),
                ("type", c_int32), ("fp8", c_int32), ("capacity", c_int32), ("in_flight", c_int32), ("mode", c_int32),
                ("unused", c_int32), ("rank_timeout", c_int64)]


class ExpertGroup(ctypes.Structure):
    _fields_ = [("expert", c_int32), ("first", c_int32), ("count", c_int32)]


class ExpertRows(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("groups", POINTER(ExpertGroup)), ("group_count", c_uint64), ("row_of", c_void_p),
                ("slots", c_uint64), ("rows", c_void_p), ("row_stride", c_uint64), ("scales_offset", c_uint64),
                ("outputs", c_void_p), ("output_stride", c_uint64)]


_ERROR = POINTER(Error)
_AGENT = c_void_p
_LAYOUT = c_void_p
_PLAN = c_void_p
_CONNECTOR = c_void_p
_SESSION = c_void_p
_ENDPOINT = c_void_p
_EXPERTS = c_void_p
_RENDEZVOUS = c_void_p
_COMM = c_void_p
_WINDOW = c_void_p
_PROTOTYPES = {
    "bytes_free": (None, [POINTER(Bytes)]),
    "version": (c_char_p, []),
    "result_name": (c_char_p, [c_int32]),
    "memory_supported": (c_int32, [c_int32, _ERROR]),
    "agent_options_init": (None, [POINTER(Options), c_size_t]),
    "agent_create": (c_int32, [POINTER(Options), POINTER(_AGENT), _ERROR]),
    "agent_open": (c_int32, [c_char_p, POINTER(_AGENT), _ERROR]),
    "agent_destroy": (None, [_AGENT]),
    "agent_name": (c_char_p, [_AGENT]),
    "agent_port": (c_uint16, [_AGENT]),
    "agent_event_fd": (c_int, [_AGENT]),
    "agent_progress": (c_int, [_AGENT]),
    "agent_get_stats": (c_int32, [_AGENT, POINTER(Stats), _ERROR]),
    "agent_register": (c_int32, [_AGENT, c_int32, c_void_p, c_size_t, _ERROR]),
    "agent_deregister": (c_int32, [_AGENT, c_int32, c_void_p, c_size_t, _ERROR]),
    "agent_register_mapped": (c_int32, [_AGENT, c_void_p, c_int, c_uint64, _ERROR]),
    "memory_file": (c_int32, [c_uint64, POINTER(c_int), _ERROR]),
    "agent_metadata": (c_int32, [_AGENT, POINTER(Bytes), _ERROR]),
    "agent_partial_metadata": (c_int32, [_AGENT, c_int32, c_void_p, c_size_t, c_int, POINTER(Bytes), _ERROR]),
    "agent_add_remote": (c_int32, [_AGENT, c_char_p, c_size_t, POINTER(Bytes), _ERROR]),
    "agent_remove_remote": (c_int32, [_AGENT, c_char_p, _ERROR]),
    "agent_has_remote": (c_int, [_AGENT, c_char_p, c_int32, c_void_p, c_size_t]),
    "agent_wait_remote": (c_int32, [_AGENT, c_char_p, c_int32, c_void_p, c_size_t, c_int64, _ERROR]),
    "agent_fetch_metadata": (c_int32, [_AGENT, c_char_p, c_char_p, _ERROR]),
    "agent_ask_metadata": (c_int32, [_AGENT, c_char_p, c_char_p, _ERROR]),
    "agent_send_metadata": (c_int32, [_AGENT, c_char_p, c_char_p, c_size_t, _ERROR]),
    "agent_invalidate_metadata": (c_int32, [_AGENT, c_char_p, _ERROR]),
    "agent_publish_metadata": (c_int32, [_AGENT, c_char_p, c_size_t, c_char_p, _ERROR]),
    "agent_follow_metadata": (c_int32, [_AGENT, c_char_p, c_char_p, _ERROR]),
    "agent_withdraw_metadata": (c_int32, [_AGENT, _ERROR]),
    "agent_metadata_state": (c_int32, [_AGENT, c_char_p, _ERROR]),
    "agent_connect": (c_int32, [_AGENT, c_char_p, _ERROR]),
    "agent_explain": (c_int32, [_AGENT, c_char_p, POINTER(Bytes), _ERROR]),
    "list_prepare": (c_int32, [_AGENT, c_char_p, c_int32, c_void_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "list_prepare_strided": (c_int32, [_AGENT, c_char_p, c_int32, c_void_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "list_register": (c_int32, [_AGENT, c_int32, c_void_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "list_release": (c_int32, [_AGENT, c_uint64, _ERROR]),
    "transfer_make": (c_int32, [_AGENT, c_int32, c_uint64, c_void_p, c_size_t, c_uint64, c_void_p, c_size_t,
                                c_char_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "transfer_make_direct": (c_int32, [_AGENT, c_int32, c_int32, c_void_p, c_size_t, c_void_p, c_size_t, c_char_p,
                                       c_char_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "transfer_make_between": (c_int32, [_AGENT, c_int32, c_int32, c_void_p, c_size_t, c_int32, c_void_p, c_size_t,
                                        c_char_p, c_char_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "transfer_post": (c_int32, [_AGENT, c_uint64, c_char_p, c_size_t, _ERROR]),
    "transfer_state": (c_int32, [_AGENT, c_uint64, _ERROR]),
    "transfer_wait": (c_int32, [_AGENT, c_uint64, c_int64, _ERROR]),
    "transfer_run": (c_int32, [_AGENT, c_uint64, c_int64, _ERROR]),
    "transfer_abort": (c_int32, [_AGENT, c_uint64, _ERROR]),
    "transfer_local_free": (c_int32, [_AGENT, c_uint64, _ERROR]),
    "transfer_release": (c_int32, [_AGENT, c_uint64, c_int64, _ERROR]),
    "transfer_abandon": (None, [_AGENT, c_uint64]),
    "transfer_telemetry": (c_int32, [_AGENT, c_uint64, POINTER(Telemetry), _ERROR]),
    "notify": (c_int32, [_AGENT, c_char_p, c_char_p, c_size_t, _ERROR]),
    "next_message": (c_int32, [_AGENT, POINTER(Bytes), POINTER(Bytes), _ERROR]),
    "wait_message": (c_int32, [_AGENT, c_int64, POINTER(Bytes), POINTER(Bytes), _ERROR]),
    "next_lost_message": (c_int32, [_AGENT, POINTER(Bytes), POINTER(Bytes), POINTER(Bytes), _ERROR]),
    "kv_layout_create": (c_int32, [POINTER(KvModel), POINTER(_LAYOUT), _ERROR]),
    "kv_layout_destroy": (None, [_LAYOUT]),
    "kv_layout_add_paged": (c_int32, [_LAYOUT, c_int32, c_void_p, c_size_t, POINTER(KvGroup), POINTER(KvPaged), _ERROR]),
    "kv_layout_add_latent": (c_int32, [_LAYOUT, c_int32, c_void_p, c_size_t, POINTER(KvGroup), c_uint32, c_int32, _ERROR]),
    "kv_layout_add_fields": (c_int32, [_LAYOUT, c_int32, c_void_p, c_size_t, POINTER(KvGroup), POINTER(KvField), c_size_t,
                                       _ERROR]),
    "kv_layout_add_packed": (c_int32, [_LAYOUT, c_int32, c_void_p, c_size_t, POINTER(KvGroup), c_char_p, c_uint64, _ERROR]),
    "kv_find_packing": (c_int32, [c_void_p, c_size_t, c_uint32, c_uint32, c_uint32, POINTER(Bytes), _ERROR]),
    "kv_shard_heads": (c_int32, [c_uint32, c_uint32, c_uint32, POINTER(c_uint32), POINTER(c_uint32), _ERROR]),
    "kv_ranks_heard": (c_int32, [c_uint32, c_uint32, c_uint32, c_uint32, POINTER(c_uint32), c_size_t, POINTER(c_size_t),
                                 _ERROR]),
    "kv_layout_get_group": (c_int32, [_LAYOUT, c_size_t, POINTER(KvGroup), _ERROR]),
    "kv_layout_encode": (c_int32, [_LAYOUT, POINTER(Bytes), _ERROR]),
    "kv_layout_decode": (c_int32, [c_char_p, c_size_t, POINTER(_LAYOUT), _ERROR]),
    "kv_plan_create": (c_int32, [_AGENT, c_int32, _LAYOUT, c_char_p, _LAYOUT, POINTER(KvShare), POINTER(_PLAN), _ERROR]),
    "kv_plan_destroy": (None, [_PLAN]),
    "kv_plan_get_info": (c_int32, [_PLAN, POINTER(KvPlanInfo), _ERROR]),
    "kv_plan_make_transfer": (c_int32, [_AGENT, _PLAN, POINTER(KvRequest), c_char_p, c_size_t, POINTER(c_uint64), _ERROR]),
    "kv_connector_options_init": (None, [POINTER(KvConnectorOptions), c_size_t]),
    "kv_connector_create": (c_int32, [POINTER(KvConnectorOptions), POINTER(_CONNECTOR), _ERROR]),
    "kv_connector_destroy": (None, [_CONNECTOR]),
    "kv_connector_register_cache": (c_int32, [_CONNECTOR, _LAYOUT, _ERROR]),
    "kv_connector_address": (c_int32, [_CONNECTOR, POINTER(Bytes), _ERROR]),
    "kv_connector_event_fd": (c_int, [_CONNECTOR]),
    "kv_connector_wait": (c_int32, [_CONNECTOR, c_int64, _ERROR]),
    "kv_connector_get_stats": (c_int32, [_CONNECTOR, POINTER(KvConnectorStats), POINTER(Bytes), _ERROR]),
    "kv_load_start": (c_int32, [_CONNECTOR, POINTER(KvLoad), _ERROR]),
    "kv_load_state": (c_int32, [_CONNECTOR, c_uint64, POINTER(c_uint32), _ERROR]),
    "kv_load_wait": (c_int32, [_CONNECTOR, c_uint64, c_uint32, c_int64, _ERROR]),
    "kv_load_renew": (c_int32, [_CONNECTOR, c_uint64, c_int64, _ERROR]),
    "kv_load_payload": (c_int32, [_CONNECTOR, c_uint64, POINTER(Bytes), _ERROR]),
    "kv_load_failed_blocks": (c_int32, [_CONNECTOR, c_uint64, POINTER(c_uint32), c_size_t, POINTER(c_size_t), _ERROR]),
    "kv_load_end": (c_int32, [_CONNECTOR, c_uint64, _ERROR]),
    "kv_job_next": (c_int32, [_CONNECTOR, POINTER(KvJob), _ERROR]),
    "kv_job_bind": (c_int32, [_CONNECTOR, POINTER(KvBinding), POINTER(c_uint64), _ERROR]),
    "kv_job_renew": (c_int32, [_CONNECTOR, c_uint64, c_int64, _ERROR]),
    "kv_job_is_wanted": (c_int, [_CONNECTOR, c_uint64]),
    "kv_job_save_layer": (c_int32, [_CONNECTOR, c_uint64, c_uint32, c_uint32, c_void_p, c_size_t, _ERROR]),
    "kv_job_give_payload": (c_int32, [_CONNECTOR, c_uint64, c_char_p, c_size_t, _ERROR]),
    "kv_job_finish": (c_int32, [_CONNECTOR, c_uint64, c_int32, c_char_p, _ERROR]),
    "kv_job_state": (c_int32, [_CONNECTOR, c_uint64, _ERROR]),
    "endpoint_options_init": (None, [POINTER(EndpointOptions), c_size_t]),
    "endpoint_open": (c_int32, [POINTER(EndpointOptions), POINTER(_ENDPOINT), _ERROR]),
    "endpoint_close": (None, [_ENDPOINT]),
    "endpoint_handle": (c_int32, [_ENDPOINT, c_void_p, _ERROR]),
    "endpoint_progress": (c_int, [_ENDPOINT]),
    "endpoint_event_fd": (c_int, [_ENDPOINT]),
    "endpoint_allocate": (c_int32, [_ENDPOINT, c_uint64, POINTER(c_void_p), _ERROR]),
    "endpoint_free": (c_int32, [_ENDPOINT, c_void_p, _ERROR]),
    "rendezvous_open": (c_int32, [c_char_p, c_uint32, c_char_p, POINTER(_RENDEZVOUS), POINTER(Bytes), _ERROR]),
    "rendezvous_close": (None, [_RENDEZVOUS]),
    "place_from_environment": (c_int32, [POINTER(Place), POINTER(Bytes), _ERROR]),
    "comm_options_init": (None, [POINTER(CommOptions), c_size_t]),
    "comm_meet": (c_int32, [_ENDPOINT, POINTER(Place), POINTER(CommOptions), POINTER(_COMM), _ERROR]),
    "comm_create": (c_int32, [_ENDPOINT, c_void_p, c_size_t, POINTER(CommOptions), POINTER(_COMM), _ERROR]),
    "comm_split": (c_int32, [_COMM, c_int32, c_int32, POINTER(CommOptions), POINTER(_COMM), _ERROR]),
    "comm_subgroup": (c_int32, [_COMM, c_void_p, c_size_t, POINTER(CommOptions), POINTER(_COMM), _ERROR]),
    "comm_reconfigure": (c_int32, [_COMM, c_void_p, c_size_t, c_uint64, c_int64, POINTER(c_uint64), _ERROR]),
    "comm_endpoint": (c_int32, [_COMM, POINTER(_ENDPOINT), _ERROR]),
    "comm_handles": (c_int32, [_COMM, c_void_p, c_size_t, POINTER(c_size_t), _ERROR]),
    "comm_wait_ready": (c_int32, [_COMM, c_int64, _ERROR]),
    "comm_state": (c_int32, [_COMM, _ERROR]),
    "comm_shrink": (c_int32, [_COMM, POINTER(_COMM), _ERROR]),
    "comm_abort": (c_int32, [_COMM, c_char_p, _ERROR]),
    "comm_rank": (c_int32, [_COMM]),
    "comm_ranks": (c_int32, [_COMM]),
    "comm_lost": (c_int32, [_COMM, POINTER(c_int32), c_size_t, POINTER(c_size_t), _ERROR]),
    "comm_explain": (c_int32, [_COMM, c_int32, c_uint64, POINTER(Bytes), _ERROR]),
    "comm_routes": (c_int32, [_COMM, POINTER(Bytes), _ERROR]),
    "comm_flight_record": (c_int32, [_COMM, POINTER(Bytes), _ERROR]),
    "comm_get_stats": (c_int32, [_COMM, POINTER(CommStats), _ERROR]),
    "comm_destroy": (None, [_COMM]),
    "comm_start": (c_int32, [_COMM, POINTER(Call), POINTER(c_uint64), _ERROR]),
    "comm_group_begin": (c_int32, [_COMM, POINTER(c_uint64), _ERROR]),
    "comm_group_end": (c_int32, [_COMM, c_uint64, _ERROR]),
    "work_hold": (c_int32, [_COMM, c_uint64, POINTER(Stream), _ERROR]),
    "work_wait": (c_int32, [_COMM, c_uint64, c_int64, _ERROR]),
    "work_test": (c_int32, [_COMM, c_uint64, _ERROR]),
    "work_source": (c_int32, [_COMM, c_uint64, POINTER(c_int32), _ERROR]),
    "experts_create": (c_int32, [_COMM, POINTER(ExpertsOptions), POINTER(_EXPERTS), _ERROR]),
    "experts_destroy": (None, [_EXPERTS]),
    "experts_dispatch": (c_int32, [_EXPERTS, c_void_p, c_int32, c_void_p, c_uint64, POINTER(c_uint64), _ERROR]),
    "experts_received": (c_int32, [_EXPERTS, c_uint64, POINTER(ExpertRows), _ERROR]),
    "experts_combine": (c_int32, [_EXPERTS, c_uint64, c_void_p, c_uint64, c_void_p, c_uint64, POINTER(c_uint64), _ERROR]),
    "experts_wait": (c_int32, [_EXPERTS, c_uint64, c_int64, _ERROR]),
    "experts_test": (c_int32, [_EXPERTS, c_uint64, _ERROR]),
    "experts_missing": (c_int32, [_EXPERTS, c_uint64, POINTER(c_int32), c_size_t, POINTER(c_size_t), _ERROR]),
    "experts_dequantise": (None, [c_void_p, c_void_p, c_uint64, c_void_p]),
    "kv_session_create": (c_int32, [_AGENT, c_char_p, Clock, c_void_p, POINTER(_SESSION), _ERROR]),
    "kv_session_destroy": (None, [_SESSION]),
    "kv_session_turn": (c_int, [_SESSION]),
    "kv_session_open": (c_int32, [_SESSION, c_char_p, POINTER(c_uint64), _ERROR]),
    "kv_session_save": (c_int32, [_SESSION, c_uint64, c_uint32, c_uint64, c_void_p, c_size_t, _ERROR]),
    "kv_session_hold": (c_int32, [_SESSION, c_uint64, _ERROR]),
    "kv_session_drop": (c_int32, [_SESSION, c_uint64, _ERROR]),
    "kv_session_next_released": (c_int32, [_SESSION, POINTER(c_uint64), _ERROR]),
    "kv_session_load": (c_int32, [_SESSION, POINTER(KvOrder), _ERROR]),
    "kv_session_next_loaded": (c_int32, [_SESSION, c_int64, POINTER(KvLoaded), _ERROR]),
    "window_create": (c_int32, [_COMM, c_void_p, c_uint64, c_uint32, c_int64, POINTER(_WINDOW), _ERROR]),
    "window_destroy": (None, [_WINDOW]),
    "window_start": (c_int32, [_WINDOW, POINTER(Access), POINTER(c_uint64), _ERROR]),
    "window_signal_value": (c_int32, [_WINDOW, c_int32, c_uint32, POINTER(c_uint64), _ERROR]),
    "window_bytes": (c_int32, [_WINDOW, c_int32, POINTER(c_uint64), _ERROR]),
    "window_view": (c_int32, [_WINDOW, c_int32, POINTER(c_void_p), POINTER(c_uint64), _ERROR]),
}


def _load() -> ctypes.CDLL:
    """The library beside this file, as a wheel has it; else the system's, as LD_LIBRARY_PATH finds it."""
    inside = pathlib.Path(__file__).parent / "lib"
    order = inside / "order.txt"  # what it needs comes before it
    try:
        if not order.exists():
            return ctypes.CDLL("libbaton.so.0")
        return [ctypes.CDLL(str(inside / name)) for name in order.read_text().split()][-1]
    except OSError as why:
        raise ImportError(f"libbaton.so.0 cannot be loaded: {why}. Install the wheel (./run wheel makes it), "
                          "or set LD_LIBRARY_PATH to the folder of libbaton.so.0") from why


class _Functions:
    """The functions of the library, without their prefix."""

    def __init__(self) -> None:
        library = _load()
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, "baton_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:  # what there is, the table says
        def __getattr__(self, name: str) -> Any: ...


lib = _Functions()
IN_PROGRESS, NOT_FOUND, TIMEOUT = 1, -4, -64


def call(function: Any, *arguments: Any) -> int:
    """Calls a function that takes an error last; raises what it says. Returns 0 or 1."""
    error = Error(ctypes.sizeof(Error))
    result = function(*arguments, ctypes.byref(error))
    if result < 0:
        raise error_of(result, error.text.decode(errors="replace"))
    return result


def defaults(kind: Any, init: Any) -> Any:
    """Options of this kind as the library fills them in."""
    out = kind()
    init(ctypes.byref(out), ctypes.sizeof(out))
    return out


def take(out: Bytes) -> bytes:
    """The bytes that the library returned; frees them."""
    taken = ctypes.string_at(out.data, out.size) if out.data else b""
    lib.bytes_free(ctypes.byref(out))
    return taken
