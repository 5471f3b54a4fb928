// The layout of everything in the headers of C that a compiled program has inside it: the size of
// each struct, where each field is, what each number means. A program that was compiled with an
// older header, and Python's copy of the structs, rely on every line.
//
// What to do when a line fails, in a release that is still called libbaton.so.0:
// - a field or a number moved: put it back. New fields go to the end of their struct, whose size
//   then grows; new numbers are ones that nobody had.
// - a struct grew by a new last field: add the field's line and change the size. The library reads
//   and writes no more of a struct than its `size` says, so older programs go on working.
// - a row of an array (baton_descriptor, baton_strided, baton_kv_field, baton_kv_blocks,
// baton_handle)
//   has no size, and never changes: a new row and a new function beside the old ones.
// - anything else has to be different: raise BATON_ABI_VERSION and the library's SOVERSION, and
//   write this file anew.
#include <baton/baton.h>
#include <baton/collectives.h>
#include <baton/experts.h>

#include <stddef.h>
#include <stdint.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "the size of " #type)
#define FIELD(type, field, at, bytes)                                              \
  _Static_assert(offsetof(type, field) == (at), "the place of " #type "." #field); \
  _Static_assert(sizeof(((type*)0)->field) == (bytes), "the size of " #type "." #field)
#define NUMBER(name, number) _Static_assert((name) == (number), "the number of " #name)

NUMBER(BATON_ABI_VERSION, 0);
NUMBER(BATON_FOREVER, -1);
NUMBER(sizeof(BATON_FOREVER), 8);

NUMBER(BATON_OK, 0);
NUMBER(BATON_IN_PROGRESS, 1);
NUMBER(BATON_ERR_NOT_POSTED, -1);
NUMBER(BATON_ERR_INVALID_PARAM, -2);
NUMBER(BATON_ERR_BACKEND, -3);
NUMBER(BATON_ERR_NOT_FOUND, -4);
NUMBER(BATON_ERR_MISMATCH, -5);
NUMBER(BATON_ERR_NOT_ALLOWED, -6);
NUMBER(BATON_ERR_REPOST_ACTIVE, -7);
NUMBER(BATON_ERR_UNKNOWN, -8);
NUMBER(BATON_ERR_NOT_SUPPORTED, -9);
NUMBER(BATON_ERR_REMOTE_DISCONNECT, -10);
NUMBER(BATON_ERR_CANCELED, -11);
NUMBER(BATON_ERR_TIMEOUT, -64);
NUMBER(BATON_DRAM, 0);
NUMBER(BATON_VRAM, 1);
NUMBER(BATON_BLOCK, 2);
NUMBER(BATON_OBJECT, 3);
NUMBER(BATON_FILE, 4);
NUMBER(BATON_ALL_REDUCE, 0);
NUMBER(BATON_REDUCE_SCATTER, 1);
NUMBER(BATON_ALL_GATHER, 2);
NUMBER(BATON_BROADCAST, 3);
NUMBER(BATON_REDUCE, 4);
NUMBER(BATON_ALL_TO_ALL, 5);
NUMBER(BATON_BARRIER, 6);
NUMBER(BATON_SEND, 7);
NUMBER(BATON_RECEIVE, 8);
NUMBER(BATON_ALL_TO_ALL_V, 9);
NUMBER(BATON_SCATTER, 10);
NUMBER(BATON_GATHER, 11);
NUMBER(BATON_ALL_GATHER_V, 12);
NUMBER(BATON_REDUCE_SCATTER_V, 13);
NUMBER(BATON_F32, 0);
NUMBER(BATON_F16, 1);
NUMBER(BATON_BF16, 2);
NUMBER(BATON_F64, 3);
NUMBER(BATON_I8, 4);
NUMBER(BATON_U8, 5);
NUMBER(BATON_I32, 6);
NUMBER(BATON_I64, 7);
NUMBER(BATON_F8E4M3, 8);
NUMBER(BATON_F8E5M2, 9);
NUMBER(BATON_U32, 10);
NUMBER(BATON_U64, 11);
NUMBER(BATON_BOOL, 12);
NUMBER(BATON_SUM, 0);
NUMBER(BATON_PROD, 1);
NUMBER(BATON_MIN, 2);
NUMBER(BATON_MAX, 3);
NUMBER(BATON_AVG, 4);
NUMBER(BATON_PREMUL_SUM, 5);
NUMBER(BATON_AND, 6);
NUMBER(BATON_OR, 7);
NUMBER(BATON_XOR, 8);
NUMBER(BATON_CALL_ORDERED, 1);
NUMBER(BATON_CALL_UNORDERED, 2);
NUMBER(BATON_CALL_DETACHED, 4);
NUMBER(BATON_ANY_RANK, -1);
NUMBER(BATON_PUT, 0);
NUMBER(BATON_GET, 1);
NUMBER(BATON_SIGNAL, 2);
NUMBER(BATON_WAIT_SIGNAL, 3);
NUMBER(BATON_FLUSH, 4);
NUMBER(sizeof(BATON_ANY_RANK), 4);
NUMBER(BATON_WRITE, 0);
NUMBER(BATON_READ, 1);
NUMBER(BATON_KV_OPAQUE, 1);
NUMBER(BATON_KV_KEY, 2);
NUMBER(BATON_KV_VALUE, 3);
NUMBER(BATON_KV_LATENT, 4);
NUMBER(BATON_KV_ROPE_KEY, 5);
NUMBER(BATON_KV_KEY_SCALE, 6);
NUMBER(BATON_KV_VALUE_SCALE, 7);
NUMBER(BATON_KV_LATENT_SCALE, 8);
NUMBER(BATON_KV_BYTE, 1);
NUMBER(BATON_KV_INT8, 2);
NUMBER(BATON_KV_FLOAT8_E4M3, 3);
NUMBER(BATON_KV_FLOAT8_E5M2, 4);
NUMBER(BATON_KV_FLOAT16, 5);
NUMBER(BATON_KV_BFLOAT16, 6);
NUMBER(BATON_KV_FLOAT32, 7);
NUMBER(BATON_KV_NHD, 0);
NUMBER(BATON_KV_HND, 1);
NUMBER(BATON_KV_SPLIT, 0);
NUMBER(BATON_KV_STACKED, 1);
NUMBER(BATON_KV_IN_BLOCK, 2);
NUMBER(BATON_KV_JOINED, 3);

SIZE(baton_list, 8);
SIZE(baton_transfer, 8);

#if UINTPTR_MAX == UINT64_MAX  // where pointers are of 64 bits

SIZE(baton_error, 1024);
FIELD(baton_error, size, 0, 8);
FIELD(baton_error, result, 8, 4);
FIELD(baton_error, text, 12, 1012);

SIZE(baton_bytes, 16);
FIELD(baton_bytes, data, 0, 8);
FIELD(baton_bytes, size, 8, 8);

SIZE(baton_agent_options, 96);
FIELD(baton_agent_options, size, 0, 8);
FIELD(baton_agent_options, name, 8, 8);
FIELD(baton_agent_options, providers, 16, 8);
FIELD(baton_agent_options, require, 24, 8);
FIELD(baton_agent_options, key_file, 32, 8);
FIELD(baton_agent_options, listen_host, 40, 8);
FIELD(baton_agent_options, listen_port, 48, 2);
FIELD(baton_agent_options, progress_thread, 50, 1);
FIELD(baton_agent_options, serve_metadata, 51, 1);
FIELD(baton_agent_options, max_transfers, 52, 4);
FIELD(baton_agent_options, settings, 56, 8);
FIELD(baton_agent_options, metadata_store, 64, 8);
FIELD(baton_agent_options, metadata_lease_ms, 72, 4);
FIELD(baton_agent_options, reserved, 80, 8);
FIELD(baton_agent_options, advertise, 88, 8);

SIZE(baton_agent_stats, 96);
FIELD(baton_agent_stats, size, 0, 8);
FIELD(baton_agent_stats, lists, 8, 8);
FIELD(baton_agent_stats, transfers, 16, 8);
FIELD(baton_agent_stats, running, 24, 8);
FIELD(baton_agent_stats, remotes, 32, 8);
FIELD(baton_agent_stats, registered, 40, 8);
FIELD(baton_agent_stats, bytes_moved, 48, 8);
FIELD(baton_agent_stats, transfers_ended, 56, 8);
FIELD(baton_agent_stats, registrations, 64, 8);
FIELD(baton_agent_stats, peers_up, 72, 8);
FIELD(baton_agent_stats, peers_lost, 80, 8);
FIELD(baton_agent_stats, messages_lost, 88, 8);

SIZE(baton_descriptor, 24);
FIELD(baton_descriptor, address, 0, 8);
FIELD(baton_descriptor, bytes, 8, 8);
FIELD(baton_descriptor, device, 16, 8);

SIZE(baton_strided, 40);
FIELD(baton_strided, address, 0, 8);
FIELD(baton_strided, bytes, 8, 8);
FIELD(baton_strided, device, 16, 8);
FIELD(baton_strided, stride, 24, 8);
FIELD(baton_strided, count, 32, 8);

SIZE(baton_telemetry, 48);
FIELD(baton_telemetry, size, 0, 8);
FIELD(baton_telemetry, start_ns, 8, 8);
FIELD(baton_telemetry, post_ns, 16, 8);
FIELD(baton_telemetry, transfer_ns, 24, 8);
FIELD(baton_telemetry, bytes, 32, 8);
FIELD(baton_telemetry, descriptors, 40, 8);

SIZE(baton_kv_model, 40);
FIELD(baton_kv_model, size, 0, 8);
FIELD(baton_kv_model, weights, 8, 8);
FIELD(baton_kv_model, dtype, 16, 8);
FIELD(baton_kv_model, rope, 24, 8);
FIELD(baton_kv_model, format, 32, 8);

SIZE(baton_kv_group, 48);
FIELD(baton_kv_group, size, 0, 8);
FIELD(baton_kv_group, layers, 8, 8);
FIELD(baton_kv_group, layer_count, 16, 8);
FIELD(baton_kv_group, blocks, 24, 4);
FIELD(baton_kv_group, block_tokens, 28, 4);
FIELD(baton_kv_group, window, 32, 4);
FIELD(baton_kv_group, total_heads, 36, 4);
FIELD(baton_kv_group, first_head, 40, 4);
FIELD(baton_kv_group, heads, 44, 4);

SIZE(baton_kv_paged, 32);
FIELD(baton_kv_paged, size, 0, 8);
FIELD(baton_kv_paged, head_size, 8, 4);
FIELD(baton_kv_paged, dtype, 12, 4);
FIELD(baton_kv_paged, order, 16, 4);
FIELD(baton_kv_paged, pair, 20, 4);
FIELD(baton_kv_paged, one_tensor, 24, 1);

SIZE(baton_kv_field, 56);
FIELD(baton_kv_field, role, 0, 4);
FIELD(baton_kv_field, dtype, 4, 4);
FIELD(baton_kv_field, width, 8, 4);
FIELD(baton_kv_field, per_block, 12, 4);
FIELD(baton_kv_field, block_stride, 16, 8);
FIELD(baton_kv_field, token_stride, 24, 8);
FIELD(baton_kv_field, head_stride, 32, 8);
FIELD(baton_kv_field, element_stride, 40, 8);
FIELD(baton_kv_field, addresses, 48, 8);

SIZE(baton_kv_share, 24);
FIELD(baton_kv_share, size, 0, 8);
FIELD(baton_kv_share, ranks, 8, 4);
FIELD(baton_kv_share, rank, 12, 4);
FIELD(baton_kv_share, turn, 16, 8);

SIZE(baton_kv_plan_info, 32);
FIELD(baton_kv_plan_info, size, 0, 8);
FIELD(baton_kv_plan_info, bytes_per_token, 8, 8);
FIELD(baton_kv_plan_info, layers, 16, 4);
FIELD(baton_kv_plan_info, complete, 20, 4);
FIELD(baton_kv_plan_info, reserved, 24, 4);
SIZE(baton_kv_checksums_info, 24);
FIELD(baton_kv_checksums_info, size, 0, 8);
FIELD(baton_kv_checksums_info, run_bytes, 8, 8);
FIELD(baton_kv_checksums_info, unit, 16, 4);

SIZE(baton_kv_blocks, 24);
FIELD(baton_kv_blocks, blocks, 0, 8);
FIELD(baton_kv_blocks, count, 8, 8);
FIELD(baton_kv_blocks, first_block, 16, 8);

SIZE(baton_kv_request, 72);
FIELD(baton_kv_request, size, 0, 8);
FIELD(baton_kv_request, first_token, 8, 8);
FIELD(baton_kv_request, end_token, 16, 8);
FIELD(baton_kv_request, length, 24, 8);
FIELD(baton_kv_request, first_layer, 32, 4);
FIELD(baton_kv_request, end_layer, 36, 4);
FIELD(baton_kv_request, local, 40, 8);
FIELD(baton_kv_request, local_groups, 48, 8);
FIELD(baton_kv_request, remote, 56, 8);
FIELD(baton_kv_request, remote_groups, 64, 8);

SIZE(baton_kv_connector_options, 80);
FIELD(baton_kv_connector_options, size, 0, 8);
FIELD(baton_kv_connector_options, name, 8, 8);
FIELD(baton_kv_connector_options, providers, 16, 8);
FIELD(baton_kv_connector_options, require, 24, 8);
FIELD(baton_kv_connector_options, key_file, 32, 8);
FIELD(baton_kv_connector_options, listen_host, 40, 8);
FIELD(baton_kv_connector_options, settings, 48, 8);
FIELD(baton_kv_connector_options, max_transfers, 56, 4);
FIELD(baton_kv_connector_options, listen_port, 60, 2);
FIELD(baton_kv_connector_options, allow_pull, 62, 1);
FIELD(baton_kv_connector_options, serialized, 63, 1);
FIELD(baton_kv_connector_options, max_lease, 64, 8);
FIELD(baton_kv_connector_options, advertise, 72, 8);

SIZE(baton_kv_connector_stats, 40);
FIELD(baton_kv_connector_stats, size, 0, 8);
FIELD(baton_kv_connector_stats, bytes_sent, 8, 8);
FIELD(baton_kv_connector_stats, bytes_loaded, 16, 8);
FIELD(baton_kv_connector_stats, loads_failed, 24, 8);
FIELD(baton_kv_connector_stats, jobs_failed, 32, 8);

SIZE(baton_kv_load, 120);
FIELD(baton_kv_load, size, 0, 8);
FIELD(baton_kv_load, id, 8, 8);
FIELD(baton_kv_load, prefill, 16, 8);
FIELD(baton_kv_load, shards, 24, 8);
FIELD(baton_kv_load, shard_count, 32, 8);
FIELD(baton_kv_load, key, 40, 8);
FIELD(baton_kv_load, tokens, 48, 8);
FIELD(baton_kv_load, token_count, 56, 8);
FIELD(baton_kv_load, blocks, 64, 8);
FIELD(baton_kv_load, block_count, 72, 8);
FIELD(baton_kv_load, first_token, 80, 4);
FIELD(baton_kv_load, loads_of_key, 84, 4);
FIELD(baton_kv_load, timeout, 88, 8);
FIELD(baton_kv_load, silence, 96, 8);
FIELD(baton_kv_load, lease, 104, 8);
FIELD(baton_kv_load, pull, 112, 4);

SIZE(baton_kv_job, 64);
FIELD(baton_kv_job, size, 0, 8);
FIELD(baton_kv_job, job, 8, 8);
FIELD(baton_kv_job, request, 16, 8);
FIELD(baton_kv_job, decode, 24, 8);
FIELD(baton_kv_job, key, 32, 8);
FIELD(baton_kv_job, tokens, 40, 8);
FIELD(baton_kv_job, token_count, 48, 8);
FIELD(baton_kv_job, first_token, 56, 4);
FIELD(baton_kv_job, loads_of_key, 60, 4);

SIZE(baton_kv_binding, 32);
FIELD(baton_kv_binding, size, 0, 8);
FIELD(baton_kv_binding, key, 8, 8);
FIELD(baton_kv_binding, tokens, 16, 4);
FIELD(baton_kv_binding, loads, 20, 4);
FIELD(baton_kv_binding, lease, 24, 8);

SIZE(baton_kv_run, 40);
FIELD(baton_kv_run, first_block, 0, 8);
FIELD(baton_kv_run, blocks, 8, 8);
FIELD(baton_kv_run, count, 16, 8);
FIELD(baton_kv_run, first_token, 24, 8);
FIELD(baton_kv_run, end_token, 32, 8);

SIZE(baton_kv_session_order, 80);
FIELD(baton_kv_session_order, size, 0, 8);
FIELD(baton_kv_session_order, id, 8, 8);
FIELD(baton_kv_session_order, transfer, 16, 8);
FIELD(baton_kv_session_order, agent, 24, 8);
FIELD(baton_kv_session_order, address, 32, 8);
FIELD(baton_kv_session_order, runs, 40, 8);
FIELD(baton_kv_session_order, run_count, 48, 8);
FIELD(baton_kv_session_order, ranks, 56, 4);
FIELD(baton_kv_session_order, finished, 60, 4);
FIELD(baton_kv_session_order, timeout, 64, 8);
FIELD(baton_kv_session_order, silence, 72, 8);

SIZE(baton_kv_loaded, 32);
FIELD(baton_kv_loaded, size, 0, 8);
FIELD(baton_kv_loaded, id, 8, 8);
FIELD(baton_kv_loaded, took, 16, 8);
FIELD(baton_kv_loaded, reading, 24, 8);

SIZE(baton_endpoint_options, 72);
FIELD(baton_endpoint_options, size, 0, 8);
FIELD(baton_endpoint_options, providers, 8, 8);
FIELD(baton_endpoint_options, require, 16, 8);
FIELD(baton_endpoint_options, key_file, 24, 8);
FIELD(baton_endpoint_options, listen_host, 32, 8);
FIELD(baton_endpoint_options, settings, 40, 8);
FIELD(baton_endpoint_options, advertise, 48, 8);
FIELD(baton_endpoint_options, listen_port, 56, 2);
FIELD(baton_endpoint_options, background, 58, 1);
FIELD(baton_endpoint_options, pool_bytes, 64, 8);

SIZE(baton_handle, 96);
FIELD(baton_handle, bytes, 0, 96);

SIZE(baton_place, 48);
FIELD(baton_place, size, 0, 8);
FIELD(baton_place, rendezvous, 8, 8);
FIELD(baton_place, rank, 16, 4);
FIELD(baton_place, ranks, 20, 4);
FIELD(baton_place, local_rank, 24, 4);
FIELD(baton_place, local_ranks, 28, 4);
FIELD(baton_place, generation, 32, 8);
FIELD(baton_place, serves, 40, 1);

SIZE(baton_comm_options, 48);
FIELD(baton_comm_options, size, 0, 8);
FIELD(baton_comm_options, name, 8, 8);
FIELD(baton_comm_options, uuid, 16, 8);
FIELD(baton_comm_options, start_timeout, 24, 8);
FIELD(baton_comm_options, timeout, 32, 8);
FIELD(baton_comm_options, ordered, 40, 1);
FIELD(baton_comm_options, tune, 41, 1);

SIZE(baton_comm_stats, 72);
FIELD(baton_comm_stats, size, 0, 8);
FIELD(baton_comm_stats, calls, 8, 8);
FIELD(baton_comm_stats, messages, 16, 8);
FIELD(baton_comm_stats, bytes_sent, 24, 8);
FIELD(baton_comm_stats, direct_bytes, 32, 8);
FIELD(baton_comm_stats, sleeps, 40, 8);
FIELD(baton_comm_stats, staged_calls, 48, 8);
FIELD(baton_comm_stats, staged_bytes, 56, 8);
FIELD(baton_comm_stats, link_bytes, 64, 8);

SIZE(baton_stream, 16);
FIELD(baton_stream, device, 0, 4);
FIELD(baton_stream, handle, 8, 8);

SIZE(baton_call, 144);
FIELD(baton_call, size, 0, 8);
FIELD(baton_call, kind, 8, 4);
FIELD(baton_call, type, 12, 4);
FIELD(baton_call, op, 16, 4);
FIELD(baton_call, peer, 20, 4);
FIELD(baton_call, in, 24, 8);
FIELD(baton_call, out, 32, 8);
FIELD(baton_call, count, 40, 8);
FIELD(baton_call, in_counts, 48, 8);
FIELD(baton_call, in_offsets, 56, 8);
FIELD(baton_call, out_counts, 64, 8);
FIELD(baton_call, out_offsets, 72, 8);
FIELD(baton_call, timeout, 80, 8);
FIELD(baton_call, factor, 88, 8);
FIELD(baton_call, tag, 96, 4);
FIELD(baton_call, flags, 100, 4);
FIELD(baton_call, on_end, 104, 8);
FIELD(baton_call, context, 112, 8);
FIELD(baton_call, group, 120, 8);
FIELD(baton_call, after, 128, 8);
FIELD(baton_call, release, 136, 8);

SIZE(baton_access, 80);
FIELD(baton_access, size, 0, 8);
FIELD(baton_access, kind, 8, 4);
FIELD(baton_access, rank, 12, 4);
FIELD(baton_access, data, 16, 8);
FIELD(baton_access, bytes, 24, 8);
FIELD(baton_access, offset, 32, 8);
FIELD(baton_access, value, 40, 8);
FIELD(baton_access, slot, 48, 4);
FIELD(baton_access, flags, 52, 4);
FIELD(baton_access, timeout, 56, 8);
FIELD(baton_access, on_end, 64, 8);
FIELD(baton_access, context, 72, 8);

SIZE(baton_experts_options, 56);
FIELD(baton_experts_options, size, 0, 8);
FIELD(baton_experts_options, experts, 8, 4);
FIELD(baton_experts_options, top_k, 12, 4);
FIELD(baton_experts_options, hidden, 16, 4);
FIELD(baton_experts_options, max_tokens, 20, 4);
FIELD(baton_experts_options, type, 24, 4);
FIELD(baton_experts_options, fp8, 28, 4);
FIELD(baton_experts_options, capacity, 32, 4);
FIELD(baton_experts_options, in_flight, 36, 4);
FIELD(baton_experts_options, mode, 40, 4);
FIELD(baton_experts_options, unused, 44, 4);
FIELD(baton_experts_options, rank_timeout, 48, 8);
SIZE(baton_expert_group, 12);
FIELD(baton_expert_group, expert, 0, 4);
FIELD(baton_expert_group, first, 4, 4);
FIELD(baton_expert_group, count, 8, 4);
SIZE(baton_expert_rows, 80);
FIELD(baton_expert_rows, size, 0, 8);
FIELD(baton_expert_rows, groups, 8, 8);
FIELD(baton_expert_rows, group_count, 16, 8);
FIELD(baton_expert_rows, row_of, 24, 8);
FIELD(baton_expert_rows, slots, 32, 8);
FIELD(baton_expert_rows, rows, 40, 8);
FIELD(baton_expert_rows, row_stride, 48, 8);
FIELD(baton_expert_rows, scales_offset, 56, 8);
FIELD(baton_expert_rows, outputs, 64, 8);
FIELD(baton_expert_rows, output_stride, 72, 8);
NUMBER(BATON_EXPERTS_AUTO, 0);
NUMBER(BATON_EXPERTS_LOW_LATENCY, 1);
NUMBER(BATON_EXPERTS_THROUGHPUT, 2);

#endif

// Promise(agents): A C program compiled with an older header finds every field where it was |
//   sizes, offsets and numbers are listed
int main(void) { return 0; }
