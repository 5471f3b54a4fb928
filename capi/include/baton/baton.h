// Baton from C, and from whatever can call C: an agent that moves registered memory between
// processes and machines by lists of descriptors. The calls and what they mean are those of Agent
// in kvtransfer/agent.h; this page says what is different in C.
//
//   baton_agent_options options;
//   baton_agent_options_init(&options, sizeof options);
//   options.name = "decode-0";
//   baton_error error = BATON_ERROR_INIT;
//   baton_agent* agent;
//   if (baton_agent_create(&options, &agent, &error) != BATON_OK) puts(error.text);
//
// Results: every call that can fail returns a baton_result: 0, or a negative number as NIXL numbers
// them. `error` may be NULL; else its text says what happened, to what, and what to do about it. It
// belongs to the caller: fill it with BATON_ERROR_INIT once, and read it until the next call with
// it.
//
// Handles: an agent is a pointer, valid until baton_agent_destroy(). Lists and transfers are
// numbers that are never used again: a stale one, or another agent's, is BATON_ERR_NOT_FOUND. KV
// layouts and plans are pointers, valid until their ..._destroy(), of which each has one; no other
// handle needs them.
//
// Structs, but for the rows of arrays, begin with their size, which the caller sets
// (BATON_..._INIT, or the ..._init() functions): a program that was compiled with an older header
// goes on working with a newer library. Numbers of this header never change their meaning while the
// library's name ends in .so.0.
//
// Ownership: text and memory that are passed in are copied or, if registered, stay the caller's.
// Bytes that come out belong to the caller: baton_bytes_free().
//
// Threads: every call may come from any thread, but for the ..._destroy() of a handle, which must
// be the last one with it, and baton_kv_layout_add_...(), which must be the only one meanwhile. A
// forked child makes agents of its own: its parent's are refused there (BATON_ERR_INVALID_PARAM),
// and baton_agent_destroy() leaves them alone.
#ifndef BATON_BATON_H
#define BATON_BATON_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BATON_ABI_VERSION 0

typedef enum baton_result {
  BATON_OK = 0,
  BATON_IN_PROGRESS = 1,  // of a transfer's state only
  BATON_ERR_NOT_POSTED = -1,
  BATON_ERR_INVALID_PARAM = -2,
  BATON_ERR_BACKEND = -3,  // no room, no memory, or the machine said no
  BATON_ERR_NOT_FOUND = -4,
  BATON_ERR_MISMATCH = -5,  // metadata: damaged, another version, another cluster
  BATON_ERR_NOT_ALLOWED = -6,
  BATON_ERR_REPOST_ACTIVE = -7,
  BATON_ERR_UNKNOWN = -8,
  BATON_ERR_NOT_SUPPORTED = -9,
  BATON_ERR_REMOTE_DISCONNECT = -10,
  BATON_ERR_CANCELED = -11,
  BATON_ERR_TIMEOUT = -64  // of a call with a timeout: what it waited for goes on
} baton_result;

typedef struct baton_error {
  size_t size;     // sizeof(baton_error)
  int32_t result;  // a baton_result
  char text[1012];
} baton_error;
#define BATON_ERROR_INIT          \
  {                               \
    sizeof(baton_error), 0, { 0 } \
  }

typedef struct baton_bytes {
  char* data;  // ends with a zero that `size` does not count; NULL: nothing
  size_t size;
} baton_bytes;
void baton_bytes_free(baton_bytes* bytes);

const char* baton_version(void);                // "0.1.0"
const char* baton_result_name(int32_t result);  // "BATON_ERR_NOT_FOUND"

// --- agents -----------------------------------------------------------------------------------

typedef struct baton_agent baton_agent;

typedef struct baton_agent_options {
  size_t size;
  const char* name;         // 1 to 64 bytes; unique among the agents that meet
  const char* providers;    // "shm,tcp"; NULL: all there are
  const char* require;      // only this provider may be used; NULL: any
  const char* key_file;     // the cluster key; NULL or "": the user's ($BATON_KEY_FILE)
  const char* listen_host;  // NULL: loopback only; "0.0.0.0": every interface
  uint16_t listen_port;     // 0: any
  uint8_t progress_thread;  // 1: a thread moves the bytes; 0: they move inside calls
  uint8_t serve_metadata;   // 1: a thread answers baton_agent_fetch_metadata() of others
  uint32_t max_transfers;   // 0: the default
  const char* settings;     // "tcp.sockets=4,shm.x=y": docs/settings.md; NULL: the defaults
  // Where agents leave metadata for each other: "etcd://HOST:PORT/PREFIX", "http://HOST:PORT/PATH",
  // "file:///FOLDER"; NULL: nowhere.
  const char* metadata_store;
  uint32_t metadata_lease_ms;  // what is there is gone so long after its agent; 0: the default
} baton_agent_options;
// Fills in the defaults. `size`: sizeof(baton_agent_options).
void baton_agent_options_init(baton_agent_options* options, size_t size);

int32_t baton_agent_create(const baton_agent_options* options, baton_agent** agent,
                           baton_error* error);
void baton_agent_destroy(baton_agent* agent);  // NULL: nothing
const char* baton_agent_name(const baton_agent* agent);
uint16_t baton_agent_port(const baton_agent* agent);
// Readable when something happened; read 8 bytes to clear it.
int baton_agent_event_fd(const baton_agent* agent);
// 1 if anything happened.
int baton_agent_progress(baton_agent* agent);

typedef struct baton_agent_stats {
  size_t size;
  uint64_t lists, transfers, running, remotes, registered;
  uint64_t bytes_moved, transfers_ended, registrations, peers_up, peers_lost;
  uint64_t messages_lost;
} baton_agent_stats;
int32_t baton_agent_get_stats(const baton_agent* agent, baton_agent_stats* stats,
                              baton_error* error);

// --- memory -----------------------------------------------------------------------------------

typedef enum baton_memory {
  BATON_DRAM = 0,
  BATON_VRAM = 1,
  BATON_BLOCK = 2,
  BATON_OBJECT = 3,
  BATON_FILE = 4
} baton_memory;  // BATON_DRAM, BATON_VRAM and BATON_FILE can be registered

// BATON_OK where this process can register memory of that kind, else BATON_ERR_NOT_SUPPORTED: of
// BATON_VRAM where there is no CUDA driver or no device that it may use; the text says why. Loads
// the driver to find out.
int32_t baton_memory_supported(int32_t memory, baton_error* error);

// Of memory of a CUDA device (BATON_VRAM): the number that CUDA has for it in the owner's process.
// The kind is part of what a range is: what was registered as one is not found as another.
// Of a file: its offset, and a file descriptor as the device. Files are the remote side of a
// transfer with oneself, whose local side is BATON_DRAM.
typedef struct baton_descriptor {
  uint64_t address, bytes, device;
} baton_descriptor;
typedef struct baton_strided {
  uint64_t address, bytes, device, stride, count;
} baton_strided;

int32_t baton_agent_register(baton_agent* agent, int32_t memory, const baton_descriptor* ranges,
                             size_t count, baton_error* error);
int32_t baton_agent_deregister(baton_agent* agent, int32_t memory, const baton_descriptor* ranges,
                               size_t count, baton_error* error);
// Memory that is mapped, shared, from `offset` on of a memfd that cannot shrink (F_SEAL_SHRINK):
// agents of this machine reach it with one copy and no system call for each page.
// The descriptor stays open until the range is deregistered.
int32_t baton_agent_register_mapped(baton_agent* agent, const baton_descriptor* range, int fd,
                                    uint64_t offset, baton_error* error);

// --- agents that know each other --------------------------------------------------------------

int32_t baton_agent_metadata(const baton_agent* agent, baton_bytes* out, baton_error* error);
int32_t baton_agent_partial_metadata(const baton_agent* agent, int32_t memory,
                                     const baton_descriptor* ranges, size_t count, int with_address,
                                     baton_bytes* out, baton_error* error);
// `name`, unless NULL, gets the other agent's.
int32_t baton_agent_add_remote(baton_agent* agent, const void* metadata, size_t size,
                               baton_bytes* name, baton_error* error);
// Returns at once. Transfers with it that run end as failed when no byte of them moves any more,
// there too: baton_transfer_release() waits for that.
int32_t baton_agent_remove_remote(baton_agent* agent, const char* remote, baton_error* error);
// 1: known, and has these ranges (count may be 0); 0: not.
int baton_agent_has_remote(baton_agent* agent, const char* remote, int32_t memory,
                           const baton_descriptor* ranges, size_t count);
int32_t baton_agent_fetch_metadata(baton_agent* agent, const char* remote, const char* host_port,
                                   baton_error* error);
// `metadata` NULL: all of it.
int32_t baton_agent_send_metadata(baton_agent* agent, const char* host_port, const void* metadata,
                                  size_t size, baton_error* error);
int32_t baton_agent_invalidate_metadata(baton_agent* agent, const char* host_port,
                                        baton_error* error);
// By metadata_store; BATON_ERR_NOT_ALLOWED without one. All return at once:
// baton_agent_metadata_state() says how things stand, of this agent and of others. `metadata` NULL:
// all of it; `label` NULL: none.
int32_t baton_agent_publish_metadata(baton_agent* agent, const void* metadata, size_t size,
                                     const char* label, baton_error* error);
int32_t baton_agent_follow_metadata(baton_agent* agent, const char* remote, const char* label,
                                    baton_error* error);
int32_t baton_agent_withdraw_metadata(baton_agent* agent, baton_error* error);
// BATON_ERR_NOT_ALLOWED also for a name that another agent has, and for what was taken back.
int32_t baton_agent_metadata_state(const baton_agent* agent, const char* name, baton_error* error);
int32_t baton_agent_connect(baton_agent* agent, const char* remote, baton_error* error);
// For people: the route.
int32_t baton_agent_explain(const baton_agent* agent, const char* remote, baton_bytes* out,
                            baton_error* error);

// --- lists: of this agent's memory where `remote` is NULL, else of that agent's -----------------

typedef uint64_t baton_list;  // 0: none

int32_t baton_list_prepare(baton_agent* agent, const char* remote, int32_t memory,
                           const baton_descriptor* list, size_t count, baton_list* out,
                           baton_error* error);
int32_t baton_list_prepare_strided(baton_agent* agent, const char* remote, int32_t memory,
                                   const baton_strided* rows, size_t count, baton_list* out,
                                   baton_error* error);
int32_t baton_list_release(baton_agent* agent, baton_list list, baton_error* error);

// --- transfers --------------------------------------------------------------------------------

typedef uint64_t baton_transfer;  // 0: none
typedef enum baton_op { BATON_WRITE = 0, BATON_READ = 1 } baton_op;
#define BATON_FOREVER ((int64_t)-1)  // as a timeout, which are in nanoseconds

// Pairs local[local_indices[i]] with remote[remote_indices[i]].
int32_t baton_transfer_make(baton_agent* agent, int32_t op, baton_list local,
                            const int64_t* local_indices, size_t local_count, baton_list remote,
                            const int64_t* remote_indices, size_t remote_count, const void* message,
                            size_t message_size, baton_transfer* out, baton_error* error);
// `memory`: of the remote side; the local one is BATON_DRAM.
int32_t baton_transfer_make_direct(baton_agent* agent, int32_t op, int32_t memory,
                                   const baton_descriptor* local, size_t local_count,
                                   const baton_descriptor* remote, size_t remote_count,
                                   const char* remote_agent, const void* message,
                                   size_t message_size, baton_transfer* out, baton_error* error);
// The same, with a kind of memory for each side.
int32_t baton_transfer_make_between(baton_agent* agent, int32_t op, int32_t local_memory,
                                    const baton_descriptor* local, size_t local_count,
                                    int32_t remote_memory, const baton_descriptor* remote,
                                    size_t remote_count, const char* remote_agent,
                                    const void* message, size_t message_size, baton_transfer* out,
                                    baton_error* error);
// `message` NULL: the one it was made with.
int32_t baton_transfer_post(baton_agent* agent, baton_transfer transfer, const void* message,
                            size_t message_size, baton_error* error);
// BATON_OK: done; BATON_IN_PROGRESS; or how it ended.
int32_t baton_transfer_state(baton_agent* agent, baton_transfer transfer, baton_error* error);
// The same, once it has ended; BATON_ERR_TIMEOUT when `timeout` ran out first.
int32_t baton_transfer_wait(baton_agent* agent, baton_transfer transfer, int64_t timeout,
                            baton_error* error);
int32_t baton_transfer_abort(baton_agent* agent, baton_transfer transfer, baton_error* error);
// BATON_OK: its local memory may be used for something else, for it has ended, or it was aborted
// and waits for the other agent's word alone. BATON_IN_PROGRESS: not yet.
int32_t baton_transfer_local_free(baton_agent* agent, baton_transfer transfer, baton_error* error);
// Fences: BATON_OK when no byte of it moves any more. BATON_ERR_REMOTE_DISCONNECT: it is released,
// but the other agent was given up; bytes that were on their way may land there until it hears of
// that.
int32_t baton_transfer_release(baton_agent* agent, baton_transfer transfer, int64_t timeout,
                               baton_error* error);
// Aborts and forgets; does not wait.
void baton_transfer_abandon(baton_agent* agent, baton_transfer transfer);

typedef struct baton_telemetry {
  size_t size;
  int64_t start_ns, post_ns, transfer_ns;  // start: on the clock CLOCK_MONOTONIC
  uint64_t bytes, descriptors;
} baton_telemetry;
int32_t baton_transfer_telemetry(const baton_agent* agent, baton_transfer transfer,
                                 baton_telemetry* out, baton_error* error);

// --- messages ---------------------------------------------------------------------------------

int32_t baton_notify(baton_agent* agent, const char* remote, const void* message, size_t size,
                     baton_error* error);
// The oldest message that came: BATON_OK; BATON_ERR_NOT_FOUND when there is none. `from` and
// `message` are the caller's to free.
int32_t baton_next_message(baton_agent* agent, baton_bytes* from, baton_bytes* message,
                           baton_error* error);
// The oldest message of baton_notify() that was lost, with its agent, after the call returned
// BATON_OK: nobody confirmed it, though it may have come. NULL for what is not wanted; `why` is
// text. BATON_ERR_NOT_FOUND when there is none; only the newest 1,024 are kept.
int32_t baton_next_lost_message(baton_agent* agent, baton_bytes* to, baton_bytes* message,
                                baton_bytes* why, baton_error* error);

// --- KV caches ----------------------------------------------------------------------------------
//
// Engines that lay out their paged KV caches differently move blocks between them by a plan. Each
// describes its own cache, registered with its agent, in a layout; the layout's bytes go to the
// other engine beside the agent's metadata. A plan is made once for two layouts. It then makes a
// transfer, which is posted and released as every other one, out of the blocks of a sequence:
//
//   baton_kv_layout* mine;
//   baton_kv_layout_create(&model, &mine, &error);
//   baton_kv_layout_add_paged(mine, BATON_DRAM, tensors, 2 * layers, &group, &paged, &error);
//   baton_kv_layout_encode(mine, &bytes, &error);  // to the other engine; from there:
//   baton_kv_layout_decode(their_bytes, their_size, &theirs, &error);
//   baton_kv_plan_create(agent, BATON_READ, mine, "prefill", theirs, NULL, &plan, &error);
//   baton_kv_request request = BATON_KV_REQUEST_INIT;
//   request.local = &blocks_here, request.remote = &blocks_there;
//   request.local_groups = request.remote_groups = 1;
//   baton_kv_plan_make_transfer(agent, plan, &request, "request 5", 9, &transfer, &error);
//
// Tensor-parallel degrees, block sizes, the order of dimensions, and how K and V lie may differ.
// What must be equal: the model, the number of its KV heads, which fields there are, and the type
// and width of each. Layers and heads that both hold move; kvtransfer/kv_layout.h and kv_plan.h
// say how. A layout and a plan touch no memory; they may be used in a forked child.

typedef struct baton_kv_layout baton_kv_layout;
typedef struct baton_kv_plan baton_kv_plan;

// What computes the KV. Layouts whose models differ in anything never make a plan. Texts have up to
// 128 bytes.
typedef struct baton_kv_model {
  size_t size;          // sizeof(baton_kv_model)
  const char* weights;  // a hash over weights and config, or a name that stands for them; not empty
  const char* dtype;  // in which K and V are computed, where `weights` does not say so; may be NULL
  const char* rope;   // likewise: base, scaling
  const char* format;  // likewise: what the bytes mean beyond roles and types
} baton_kv_model;

typedef enum baton_kv_role {
  BATON_KV_OPAQUE = 1,  // whatever a head of a block holds; both sides then need one block size
  BATON_KV_KEY = 2,
  BATON_KV_VALUE = 3,
  BATON_KV_LATENT = 4,    // MLA: K and V compressed, one head, the same at every rank
  BATON_KV_ROPE_KEY = 5,  // MLA: the rotated part of K, where it lies apart
  BATON_KV_KEY_SCALE = 6,
  BATON_KV_VALUE_SCALE = 7,
  BATON_KV_LATENT_SCALE = 8
} baton_kv_role;

typedef enum baton_kv_dtype {
  BATON_KV_BYTE = 1,
  BATON_KV_INT8 = 2,
  BATON_KV_FLOAT8_E4M3 = 3,
  BATON_KV_FLOAT8_E5M2 = 4,
  BATON_KV_FLOAT16 = 5,
  BATON_KV_BFLOAT16 = 6,
  BATON_KV_FLOAT32 = 7
} baton_kv_dtype;

// In a block: [token][head] or [head][token].
typedef enum baton_kv_order { BATON_KV_NHD = 0, BATON_KV_HND = 1 } baton_kv_order;
typedef enum baton_kv_pair {
  BATON_KV_SPLIT = 0,     // a tensor for K, then one for V
  BATON_KV_STACKED = 1,   // one tensor, [K or V][block]...
  BATON_KV_IN_BLOCK = 2,  // one tensor, [block][K or V]...
  BATON_KV_JOINED = 3     // one tensor, each row is K and then V
} baton_kv_pair;

// Layers that share block tables. Most models have one group; those with layers of different
// windows have several.
typedef struct baton_kv_group {
  size_t size;             // sizeof(baton_kv_group)
  const uint32_t* layers;  // the model's numbers for them, ascending; NULL: 0, 1, ...
  size_t layer_count;
  uint32_t blocks;        // of the cache
  uint32_t block_tokens;  // tokens in a block
  uint32_t window;        // only the last `window` tokens are kept; 0: all
  uint32_t total_heads;   // KV heads of the model
  uint32_t first_head;    // this engine's: heads [first_head, first_head + heads)
  uint32_t heads;
} baton_kv_group;

// K and V as vLLM, SGLang and their like keep them.
typedef struct baton_kv_paged {
  size_t size;         // sizeof(baton_kv_paged)
  uint32_t head_size;  // elements of K, and of V, for a token and head
  int32_t dtype;       // a baton_kv_dtype
  int32_t order;       // a baton_kv_order
  int32_t pair;        // a baton_kv_pair
  uint8_t one_tensor;  // 1: one buffer has all layers (BATON_KV_SPLIT: one K's, one V's); 0: each
                       // layer has its own (BATON_KV_SPLIT: 2 i has layer i's K, 2 i + 1 its V)
} baton_kv_paged;

// An array [block][token][head][element] with any strides, in bytes, in each layer.
typedef struct baton_kv_field {
  int32_t role;        // a baton_kv_role; each once in a group
  int32_t dtype;       // a baton_kv_dtype
  uint32_t width;      // elements of one token and head; of a block and head if per_block
  uint32_t per_block;  // 1: a row for each block instead of each token (scales, opaque heads)
  uint64_t block_stride, token_stride, head_stride, element_stride;
  const uint64_t* addresses;  // layer_count of them: of the first element in each layer
} baton_kv_field;

// A layout of no layers.
int32_t baton_kv_layout_create(const baton_kv_model* model, baton_kv_layout** out,
                               baton_error* error);
void baton_kv_layout_destroy(baton_kv_layout* layout);  // NULL: nothing
// Each adds a group, of layers that the layout does not have yet. `buffers`: the memory that holds
// the group, BATON_DRAM or BATON_VRAM; each must be within one range that is registered when a plan
// is made. Memory may hold several groups. BATON_ERR_INVALID_PARAM, and the layout is as it was:
// buffers too few or too small, heads outside the model's, fields that overlap, counts of zero.
int32_t baton_kv_layout_add_paged(baton_kv_layout* layout, int32_t memory,
                                  const baton_descriptor* buffers, size_t buffer_count,
                                  const baton_kv_group* group, const baton_kv_paged* paged,
                                  baton_error* error);
// MLA: [block][token]{width elements}, a buffer for each layer. The group's heads are not read.
int32_t baton_kv_layout_add_latent(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, uint32_t width, int32_t dtype,
                                   baton_error* error);
// Anything else.
int32_t baton_kv_layout_add_fields(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, const baton_kv_field* fields,
                                   size_t field_count, baton_error* error);
// Group number `number`, in the order they were added; BATON_ERR_NOT_FOUND behind the last.
// `layers` points into the layout.
int32_t baton_kv_layout_get_group(const baton_kv_layout* layout, size_t number, baton_kv_group* out,
                                  baton_error* error);
// For the other engine: the model, what lies where, and no access to it.
int32_t baton_kv_layout_encode(const baton_kv_layout* layout, baton_bytes* out, baton_error* error);
// BATON_ERR_MISMATCH: damaged, or of another version.
int32_t baton_kv_layout_decode(const void* bytes, size_t size, baton_kv_layout** out,
                               baton_error* error);

// Where several engines hold the same heads, which of them sends what: the plan's source is number
// `rank` of `ranks` that split the heads in the usual way. Of those that hold the same head, `turn`
// (a request's number, say) picks one.
typedef struct baton_kv_share {
  size_t size;  // sizeof(baton_kv_share)
  uint32_t ranks, rank;
  uint64_t turn;
} baton_kv_share;

// BATON_WRITE: from `local` to `remote`; BATON_READ: from there to here. `share` NULL: all that
// both hold moves. BATON_ERR_MISMATCH: another model, or caches that do not fit; the text says
// what differs, and what to do. BATON_ERR_NOT_FOUND: no such agent, or a buffer that is not
// registered.
int32_t baton_kv_plan_create(baton_agent* agent, int32_t op, const baton_kv_layout* local,
                             const char* remote, const baton_kv_layout* remote_layout,
                             const baton_kv_share* share, baton_kv_plan** out, baton_error* error);
void baton_kv_plan_destroy(baton_kv_plan* plan);  // NULL: nothing

typedef struct baton_kv_plan_info {
  size_t size;               // sizeof(baton_kv_plan_info)
  uint64_t bytes_per_token;  // that move, in all layers
  uint32_t layers;           // that move
  uint32_t complete;  // 1: the source has every layer of the target, and every head of its share
} baton_kv_plan_info;
int32_t baton_kv_plan_get_info(const baton_kv_plan* plan, baton_kv_plan_info* out,
                               baton_error* error);

// Where one side keeps a sequence, in one group: blocks[i] is the block of its cache that holds the
// sequence's block first_block + i, in blocks of that side's size.
typedef struct baton_kv_blocks {
  const int64_t* blocks;
  size_t count;
  uint64_t first_block;
} baton_kv_blocks;

typedef struct baton_kv_request {
  size_t size;  // sizeof(baton_kv_request)
  // Tokens [first_token, end_token) of the sequence; UINT64_MAX: up to where both sides have
  // blocks. Rounded outwards to what both block sizes can divide: blocks of equal size move whole.
  uint64_t first_token, end_token;
  // Tokens of the whole sequence, from whose end windows count; 0: end_token, or where that is
  // UINT64_MAX the end of the last block of the group that reaches furthest. So say one of the two
  // where a group has a window.
  uint64_t length;
  // The model's layers [first_layer, end_layer).
  uint32_t first_layer, end_layer;
  const baton_kv_blocks* local;  // one for each group of that layout
  size_t local_groups;
  const baton_kv_blocks* remote;
  size_t remote_groups;
} baton_kv_request;
#define BATON_KV_REQUEST_INIT \
  { sizeof(baton_kv_request), 0, UINT64_MAX, 0, 0, UINT32_MAX, 0, 0, 0, 0 }

// A transfer, not posted yet; the lists are copied. One of nothing is done as soon as it is posted.
// `agent`: with which the plan was made. BATON_ERR_INVALID_PARAM: a block that a cache does not
// have, fewer than the tokens need, lists too many or too few. BATON_ERR_NOT_FOUND: the other agent
// was removed, or another one has its name.
int32_t baton_kv_plan_make_transfer(baton_agent* agent, const baton_kv_plan* plan,
                                    const baton_kv_request* request, const void* message,
                                    size_t message_size, baton_transfer* out, baton_error* error);

#ifdef __cplusplus
}
#endif

#endif
