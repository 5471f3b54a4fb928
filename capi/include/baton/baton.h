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
// it. What was to come out of a call that failed is nothing then: NULL, 0, or bytes that are none.
// A list, text or message that is NULL and has a count or size, or is longer than memory, is
// BATON_ERR_INVALID_PARAM.
//
// Handles: an agent is a pointer, valid until baton_agent_destroy(). Lists and transfers are
// numbers that are never used again: a stale one, or another agent's, is BATON_ERR_NOT_FOUND. KV
// layouts and plans are pointers, valid until their ..._destroy(), of which each has one; no other
// handle needs them.
//
// Structs, but for the rows of arrays, begin with their size, which the caller sets
// (BATON_..._INIT, or the ..._init() functions): a program that was compiled with an older header
// goes on working with a newer library, which reads and writes no byte behind that size. Numbers of
// this header never change their meaning while the library's name ends in .so.0.
//
// Ownership: text and memory that are passed in are copied or, if registered, stay the caller's.
// Bytes that come out belong to the caller: baton_bytes_free().
//
// Threads: every call may come from any thread, but for the ..._destroy() of a handle, which must
// be the last one with it, and baton_kv_layout_add_...(), which must be the only one meanwhile. A
// forked child makes agents of its own: its parent's are refused there (BATON_ERR_INVALID_PARAM),
// and baton_agent_destroy() leaves them alone. Any thread may fork at any time: fork() waits, a
// second at most, while others make or destroy agents and connectors, and for the rounds in which
// these meet and move bytes, for a child would find locks of OpenSSL and UCX taken. It does not
// wait for what the program itself does with OpenSSL. A child of a process that has met a peer over
// UCX has no UCX.
//
// The process: a signal ends no call early, and none is taken by the threads that an agent or a
// connector is made with. Handlers of SIGSEGV and SIGBUS are put before the program's, for memory
// that is unmapped while it is copied, and pass on all else (BATON_CATCH_FAULTS=no: there are
// none); with them the library stays when it is unloaded. Nothing is written to the standard
// output; descriptors are closed when another program is executed. errno means nothing after a
// call.
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
  BATON_ERR_MISMATCH = -5,       // metadata: damaged, another version, another cluster
  BATON_ERR_NOT_ALLOWED = -6,    // not so, or not now: a name, a job or a load that is open already
  BATON_ERR_REPOST_ACTIVE = -7,  // the transfer runs
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
  const char* name;       // 1 to 64 bytes; unique among the agents that meet
  const char* providers;  // "shm,tcp"; NULL: all there are, but for ucx
  const char* require;    // only this provider may be used; NULL: any
  const char* key_file;   // the cluster key; NULL or "": the user's ($BATON_KEY_FILE)
  // NULL: loopback only; "*": every interface, by IPv4 and IPv6; or an address of this machine,
  // without a port. One that cannot be listened on is an error.
  const char* listen_host;
  uint16_t listen_port;     // 0: any
  uint8_t progress_thread;  // 1: a thread moves the bytes; 0: they move inside calls
  uint8_t serve_metadata;   // 1: a thread answers baton_agent_fetch_metadata() of others
  uint32_t max_transfers;   // 0: the default
  const char* settings;     // "tcp.sockets=4,shm.x=y": docs/settings.md; NULL: the defaults
  // The store through which agents exchange metadata: "etcd://HOST:PORT/PREFIX",
  // "http://HOST:PORT/PATH", "file:///FOLDER"; NULL: nowhere. A folder that is not there is
  // BATON_ERR_NOT_FOUND, one that cannot be written BATON_ERR_NOT_ALLOWED.
  const char* metadata_store;
  uint32_t metadata_lease_ms;  // entries expire this long after their agent ended; 0: the default
  uint64_t reserved;           // 0
  // "HOST" or "HOST:PORT", with commas between: where others reach this agent, if that is no
  // address of this machine (NAT, a published port); NULL: its interfaces' addresses.
  const char* advertise;
} baton_agent_options;
// Fills in the defaults. `size`: sizeof(baton_agent_options).
void baton_agent_options_init(baton_agent_options* options, size_t size);

// With the defaults.
int32_t baton_agent_open(const char* name, baton_agent** agent, baton_error* error);
// BATON_ERR_BACKEND: something that it needs cannot be had now: the port is another process's, or
// there is no memory, thread or descriptor for it.
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

// `device`, for memory of a CUDA device (BATON_VRAM): its CUDA ordinal in the owner's process.
// The kind is part of what a range is: what was registered as one is not found as another.
// For a file: its offset, and a file descriptor as the device. Files are the remote side of a
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
// Such a memfd, of `bytes` zeros, for the caller to map and to close. BATON_ERR_BACKEND where the
// machine or a memory cgroup has not so much left: the kernel would end a process that touched it.
// *fd is -1 where this process may have no such file (`ulimit -f`, a sandbox): take anonymous
// memory, and baton_agent_register() it.
int32_t baton_memory_file(uint64_t bytes, int* fd, baton_error* error);

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
// Waits until it is so. BATON_ERR_TIMEOUT: `timeout` ran out first; the text says what is known of
// why.
int32_t baton_agent_wait_remote(baton_agent* agent, const char* remote, int32_t memory,
                                const baton_descriptor* ranges, size_t count, int64_t timeout,
                                baton_error* error);
int32_t baton_agent_fetch_metadata(baton_agent* agent, const char* remote, const char* host_port,
                                   baton_error* error);
// The same without waiting for DNS. If `host_port` has a host name, repeat the call, a few times a
// second, until baton_agent_has_remote() succeeds; if the look-up fails, one of these calls returns
// the error.
int32_t baton_agent_ask_metadata(baton_agent* agent, const char* remote, const char* host_port,
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
// Registers what each row covers, from its first byte to its last, and prepares the rows as a list
// of this agent (`out` NULL: no list): an engine's cache in one call. All or nothing.
// baton_agent_deregister() names a row as one range.
int32_t baton_list_register(baton_agent* agent, int32_t memory, const baton_strided* rows,
                            size_t count, baton_list* out, baton_error* error);
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
// Posts it, waits, and releases it: how it ended. No byte of it moves then and the number is gone,
// whatever came of it; what ran out of time was aborted (BATON_ERR_TIMEOUT).
// BATON_ERR_REPOST_ACTIVE, and nothing else happens: it runs already.
int32_t baton_transfer_run(baton_agent* agent, baton_transfer transfer, int64_t timeout,
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

// BATON_ERR_REMOTE_DISCONNECT: the agent is known to be gone, and did not answer now.
int32_t baton_notify(baton_agent* agent, const char* remote, const void* message, size_t size,
                     baton_error* error);
// Takes the oldest message that has arrived. BATON_ERR_NOT_FOUND: there is none. The caller frees
// `from` and `message`.
int32_t baton_next_message(baton_agent* agent, baton_bytes* from, baton_bytes* message,
                           baton_error* error);
// The same, but waits for one; BATON_ERR_TIMEOUT when `timeout` ran out first.
int32_t baton_wait_message(baton_agent* agent, int64_t timeout, baton_bytes* from,
                           baton_bytes* message, baton_error* error);
// Takes the oldest message that baton_notify() accepted and that was lost because its agent was
// lost. The agent did not confirm it, but may have received it. Pass NULL for results that you do
// not need; `why` is text. BATON_ERR_NOT_FOUND: there is none. Only the newest 1,024 are kept.
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
// and width of each. Layers and heads that both hold move; kvtransfer/kv_layout.h and kv_plan.h say
// how. A layout and a plan touch no memory; they may be used in a forked child.

typedef struct baton_kv_layout baton_kv_layout;
typedef struct baton_kv_plan baton_kv_plan;

// The model that computes the KV. A plan needs two layouts whose models are equal in every field.
// Texts have up to 128 bytes.
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
// Blocks as kernels pack them, tiles too. `packing`: kvtransfer/kv_packing.h says the form, which
// baton_kv_find_packing() makes. `buffers`: of each layer, from its first block to its last one;
// `block_stride`: from block to block, 0: without gaps. Of the group its layers, blocks and window
// are read.
int32_t baton_kv_layout_add_packed(baton_kv_layout* layout, int32_t memory,
                                   const baton_descriptor* buffers, size_t buffer_count,
                                   const baton_kv_group* group, const char* packing,
                                   uint64_t block_stride, baton_error* error);
// How a kernel has packed K and V into a block of `count` places, as a text without its end's zero:
// {"key": ..., "value": ...}. block[i] is n + 1 where number n of K, [token][head][element], lies;
// -(n + 1) where that of V does; 0 elsewhere. BATON_ERR_INVALID_PARAM: numbers are missing, or lie
// where no such form says.
int32_t baton_kv_find_packing(const int64_t* block, size_t count, uint32_t tokens, uint32_t heads,
                              uint32_t elements, baton_bytes* out, baton_error* error);
// Group number `number`, in the order they were added; BATON_ERR_NOT_FOUND behind the last.
// `layers` points into the layout.
int32_t baton_kv_layout_get_group(const baton_kv_layout* layout, size_t number, baton_kv_group* out,
                                  baton_error* error);
// For the other engine: the model, what lies where, and no access to it.
int32_t baton_kv_layout_encode(const baton_kv_layout* layout, baton_bytes* out, baton_error* error);
// BATON_ERR_MISMATCH: damaged, or of another version.
int32_t baton_kv_layout_decode(const void* bytes, size_t size, baton_kv_layout** out,
                               baton_error* error);

// Selects the sender if several engines hold the same heads: the plan's source is number `rank` of
// `ranks` that split the heads in the usual way. Among the holders of one head `turn` (a request's
// number, for example) picks one.
typedef struct baton_kv_share {
  size_t size;  // sizeof(baton_kv_share)
  uint32_t ranks, rank;
  uint64_t turn;
} baton_kv_share;

// The heads that number `rank` of `ranks` holds, as vLLM and Baton split them. With more ranks than
// heads, several hold the same.
int32_t baton_kv_shard_heads(uint32_t total_heads, uint32_t ranks, uint32_t rank,
                             uint32_t* first_head, uint32_t* heads, baton_error* error);
// The ranks of a source that number `rank` of `targets` hears: those that send it heads, with its
// rank as the share's turn; and of those that no rank needs some, so that each hears when its
// blocks are free. At most `room` go to `out`; `count`: how many there are. Up to 512 ranks.
int32_t baton_kv_ranks_heard(uint32_t total_heads, uint32_t sources, uint32_t targets,
                             uint32_t rank, uint32_t* out, size_t room, size_t* count,
                             baton_error* error);

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
  uint64_t bytes_per_token;  // that travel, in all layers
  uint32_t layers;           // that move
  uint32_t complete;  // 1: the source has every layer of the target, and every head of its share
  uint32_t reserved;  // 0
} baton_kv_plan_info;
int32_t baton_kv_plan_get_info(const baton_kv_plan* plan, baton_kv_plan_info* out,
                               baton_error* error);

// The blocks of a sequence in one group, on one side: blocks[i] is the block of its cache that
// holds the sequence's block first_block + i, in blocks of that side's size.
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

// --- KV sessions --------------------------------------------------------------------------------
//
// KV of requests that goes from the engine that computes a prompt (prefill) to the one that goes on
// with it (decode) by the name of a transfer, as baton.vllm and `baton serve` do it. Decode reads
// prefill's blocks under a lease, and checks them; the two caches may be laid out differently, as
// for plans. What every call means and promises: kvtransfer/kv_session.h.
//
// Threads: calls may come from any thread. BATON_ERR_REMOTE_DISCONNECT: the session's agent is
// gone.

typedef struct baton_kv_session baton_kv_session;
typedef int64_t (*baton_clock)(void* context);  // nanoseconds, never less than before

// Makes the session of an agent, which must have serve_metadata and a name that ends in "/" and the
// worker's number. An agent has one session (BATON_ERR_NOT_ALLOWED), to which its messages go.
// `clock`: NULL, and a thread serves the session; for tests, a clock in place of that thread, and
// baton_kv_session_turn(). `cache` is JSON, and its memory BATON_DRAM that is registered with the
// agent:
//
//   {"identity": "...", "ranks": 2, "rows": [[address, bytes, device, stride, blocks], ...],
//    "kinds": [packing, ...], "layers": [0, 0, 1, ...]}
//
// `rows`: for each layer, where its blocks begin and how long each is; `layers`: which of the kinds
// packs each (as for baton_kv_layout_add_packed()); `identity`: at most 128 bytes, equal where
// caches hold the same numbers. Other keys are told to peers as they are, but for "groups" (for
// each layer the number of its run in an order), "rank", "stage" and "heads" (this worker's), and
// "lease" (seconds, 60 by default).
int32_t baton_kv_session_create(baton_agent* agent, const char* cache, baton_clock clock,
                                void* context, baton_kv_session** out, baton_error* error);
// Ends what is under way: nothing touches the cache afterwards. So does the end of the agent, as
// whose last session this one is still destroyed. NULL: nothing.
void baton_kv_session_destroy(baton_kv_session* session);
// Moves everything on. 1: something is under way.
int baton_kv_session_turn(baton_kv_session* session);

// Prefill: a request whose KV is for another engine, by the name of its transfer; its number here.
// 0: another request has this name, and neither's KV is handed over.
int32_t baton_kv_session_open(baton_kv_session* session, const char* transfer, uint64_t* send,
                              baton_error* error);
// The request's blocks from number `first_block` on, as far as they are computed in a layer. They
// stay as they are until the request is released or dropped.
int32_t baton_kv_session_save(baton_kv_session* session, uint64_t send, uint32_t layer,
                              uint64_t first_block, const uint32_t* blocks, size_t count,
                              baton_error* error);
// The request has ended: its blocks stay until it is released.
int32_t baton_kv_session_hold(baton_kv_session* session, uint64_t send, baton_error* error);
// It has ended otherwise: decode is told to compute the prompt.
int32_t baton_kv_session_drop(baton_kv_session* session, uint64_t send, baton_error* error);
// Returns a held request whose blocks are free again. BATON_ERR_NOT_FOUND: there is none now.
int32_t baton_kv_session_next_released(baton_kv_session* session, uint64_t* send,
                                       baton_error* error);

// blocks[i] is number first_block + i of the sequence, in one group of layers; of these, tokens
// [first_token, end_token) are wanted.
typedef struct baton_kv_run {
  uint64_t first_block;
  const uint32_t* blocks;
  size_t count;
  uint64_t first_token, end_token;
} baton_kv_run;

typedef struct baton_kv_session_order {
  size_t size;           // sizeof(baton_kv_session_order)
  uint64_t id;           // of no load that is open; not 0
  const char* transfer;  // the name, and where prefill is: worker k is agent/k, at the port + k
  const char* agent;
  const char* address;
  const baton_kv_run* runs;  // one for each group; none: prefill may have its blocks back
  size_t run_count;
  uint32_t ranks;     // prefill's tensor-parallel degree
  uint32_t finished;  // 1: prefill has computed the prompt, so that it must know of the transfer
  int64_t timeout;    // of the load, in nanoseconds
  int64_t silence;    // prefill may say nothing for so long; 0: for any time
} baton_kv_session_order;
#define BATON_KV_SESSION_ORDER_INIT \
  { sizeof(baton_kv_session_order), 0, 0, 0, 0, 0, 0, 1, 0, 60000000000, 1000000000 }
// Decode: blocks that are named stay as they are until the load is over.
int32_t baton_kv_session_load(baton_kv_session* session, const baton_kv_session_order* order,
                              baton_error* error);

typedef struct baton_kv_loaded {
  size_t size;      // sizeof(baton_kv_loaded)
  uint64_t id;      // 0: no load is over
  int64_t took;     // nanoseconds since it was ordered
  int64_t reading;  // those of them in which blocks were read and checked
} baton_kv_loaded;
// Takes a load that has ended; no byte of it moves any more. BATON_OK: all KV has arrived. An
// error: compute the prompt. BATON_IN_PROGRESS: no load ended within `timeout` nanoseconds.
int32_t baton_kv_session_next_loaded(baton_kv_session* session, int64_t timeout,
                                     baton_kv_loaded* out, baton_error* error);

// --- KV connectors ------------------------------------------------------------------------------
//
// The hand-over of requests from a worker that computes their prompts (prefill) to the one that
// goes on with them (decode), with the calls that Baton's own engine makes. Where an agent moves
// what it is told to, a connector knows what a request is: who asks for it, which of its layers and
// blocks are computed, which have arrived, who has died, and when blocks are free again. What every
// call means and promises: kvtransfer/kv_connector.h.
//
//   decode                                         prefill
//   baton_kv_connector_create(&options, ...)       baton_kv_connector_create(&options, ...)
//   baton_kv_connector_register_cache(c, layout)   baton_kv_connector_register_cache(c, layout)
//   baton_kv_load load = BATON_KV_LOAD_INIT;       baton_kv_connector_address(c, &address)
//   load.prefill = address; ...
//   baton_kv_load_start(c, &load)      -- asks ->  baton_kv_job_next(c, &job)
//                                                  for each layer, and each run of blocks in it:
//   baton_kv_load_wait(c, id, layer)   <- pages -    baton_kv_job_save_layer(c, job, layer, ...)
//   baton_kv_load_payload(c, id, &b)               baton_kv_job_give_payload(c, job, token, ...)
//   baton_kv_load_end(c, id)                       baton_kv_job_finish(c, job, BATON_OK, NULL)
//                                                  baton_kv_job_state(c, job): BATON_OK, the
//                                                  blocks are free again
//
// Prefill may be first: baton_kv_job_bind() opens the job of a request's key, which loads name.
// Loads with `pull` read prefill's blocks under a lease instead of having their own written. One
// connector may be both sides. The two caches may be laid out differently, as for plans; types are
// equal.
//
// Threads: calls may come from any thread, and take turns; baton_kv_load_wait() and
// baton_kv_connector_wait() let others have theirs. A thread of the connector's moves bytes, renews
// leases, answers and ends what has run out, whatever the engine does meanwhile.
//
// Memory: blocks named in a call stay as they are, neither freed nor written, until
// baton_kv_load_end() or baton_kv_job_state() is BATON_OK. The cache is BATON_DRAM, is registered
// by the connector itself, and outlives it.
//
// Times are in nanoseconds. A load or job that is not known is BATON_ERR_NOT_FOUND, but BATON_OK
// for the calls that end one: it is over.

typedef struct baton_kv_connector baton_kv_connector;

typedef struct baton_kv_connector_options {
  size_t size;            // sizeof(baton_kv_connector_options)
  const char* name;       // 1 to 64 bytes, as workers tell each other
  const char* providers;  // these seven as for an agent
  const char* require;
  const char* key_file;
  const char* listen_host;
  const char* settings;
  uint32_t max_transfers;
  uint16_t listen_port;
  uint8_t allow_pull;     // prefill: 1: loads may pull, and decode workers can read the cache
  uint8_t serialized;     // prefill: 1: nothing leaves before baton_kv_job_finish(), to compare
  int64_t max_lease;      // prefill: the longest lease that it grants; 0: the default, 60 s
  const char* advertise;  // as for an agent
} baton_kv_connector_options;
// Fills in the defaults. `size`: sizeof(baton_kv_connector_options).
void baton_kv_connector_options_init(baton_kv_connector_options* options, size_t size);

int32_t baton_kv_connector_create(const baton_kv_connector_options* options,
                                  baton_kv_connector** out, baton_error* error);
// Ends what is under way: nothing touches the cache afterwards. NULL: nothing.
void baton_kv_connector_destroy(baton_kv_connector* connector);
// Once, before all else. The buffers that the layout was made with are registered; it may be
// destroyed afterwards. BATON_ERR_INVALID_PARAM: memory of another kind than the layout says.
int32_t baton_kv_connector_register_cache(baton_kv_connector* connector,
                                          const baton_kv_layout* layout, baton_error* error);
// Text that goes into baton_kv_load.prefill of others.
int32_t baton_kv_connector_address(baton_kv_connector* connector, baton_bytes* out,
                                   baton_error* error);
// Readable when a load, a job or a message may have got on; read 8 bytes to clear it. For one who
// sleeps on it; any number of others may be in ..._wait().
int baton_kv_connector_event_fd(const baton_kv_connector* connector);
// Until something may have got on since this call returned last. BATON_ERR_TIMEOUT: nothing has.
int32_t baton_kv_connector_wait(baton_kv_connector* connector, int64_t timeout, baton_error* error);

typedef struct baton_kv_connector_stats {
  size_t size;  // sizeof(baton_kv_connector_stats)
  uint64_t bytes_sent, bytes_loaded, loads_failed, jobs_failed;
} baton_kv_connector_stats;
// `route`, unless NULL: how the last peer is reached, for people.
int32_t baton_kv_connector_get_stats(baton_kv_connector* connector, baton_kv_connector_stats* out,
                                     baton_bytes* route, baton_error* error);

// Decode asks for the KV of tokens [first_token, token_count).
typedef struct baton_kv_load {
  size_t size;                // sizeof(baton_kv_load)
  uint64_t id;                // the caller's number for it, of none that is open
  const char* prefill;        // a connector's address, or its host:port
  const char* const* shards;  // instead: those of a tensor-parallel group, in the order of ranks
  size_t shard_count;
  const char* key;        // names the request at both ends, at most 256 bytes; NULL: none
  const int32_t* tokens;  // from the start of the sequence
  size_t token_count;
  const uint32_t* blocks;  // where the KV goes, in order; group after group
  size_t block_count;
  uint32_t first_token;   // KV before it is here already; a multiple of every block size
  uint32_t loads_of_key;  // how many loads with this key come to one prefill worker
  int64_t timeout;        // 0: the default, 60 s; -1, also of the next two: for ever
  int64_t silence;  // prefill may say nothing for so long, not even that it lives; 0: any time
  int64_t lease;    // with `pull`: how long prefill holds blocks without a word; 0: 10 s
  uint32_t pull;    // 1: read out of prefill's cache, where it allows that
} baton_kv_load;
#define BATON_KV_LOAD_INIT \
  { sizeof(baton_kv_load), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0 }

// Returns at once: a host's name is looked up meanwhile, and that there is none shows in
// baton_kv_load_state(). BATON_ERR_NOT_ALLOWED: that id is open.
int32_t baton_kv_load_start(baton_kv_connector* connector, const baton_kv_load* load,
                            baton_error* error);
// `layers`, unless NULL, gets how many layers are here, counted from 0. BATON_OK: all are;
// BATON_IN_PROGRESS; or why the KV will never come (BATON_ERR_CANCELED: its time has run out).
int32_t baton_kv_load_state(baton_kv_connector* connector, uint64_t id, uint32_t* layers,
                            baton_error* error);
// Until layer number `layer` is here. BATON_ERR_TIMEOUT: it is not, and the load goes on.
int32_t baton_kv_load_wait(baton_kv_connector* connector, uint64_t id, uint32_t layer,
                           int64_t timeout, baton_error* error);
// The load's deadline is `timeout` from now.
int32_t baton_kv_load_renew(baton_kv_connector* connector, uint64_t id, int64_t timeout,
                            baton_error* error);
// What prefill gave with the KV: the first token, sampling state. BATON_IN_PROGRESS: prefill has
// not finished. Before baton_kv_load_end(), which forgets the load.
int32_t baton_kv_load_payload(baton_kv_connector* connector, uint64_t id, baton_bytes* out,
                              baton_error* error);
// Which of its blocks do not hold all of their KV, as far as is known; of a load that failed, the
// others may be kept. `out` gets as many as `room`; `count` how many there are. Before
// baton_kv_load_end(), which forgets the load.
int32_t baton_kv_load_failed_blocks(baton_kv_connector* connector, uint64_t id, uint32_t* out,
                                    size_t room, size_t* count, baton_error* error);
// Ends a load, complete or not. BATON_OK: no byte can arrive any more, and its blocks are free.
// BATON_IN_PROGRESS: not yet, call it again.
int32_t baton_kv_load_end(baton_kv_connector* connector, uint64_t id, baton_error* error);

// A request as the prefill worker sees it. Pointers are valid until the next baton_kv_job_next().
typedef struct baton_kv_job {
  size_t size;         // sizeof(baton_kv_job)
  uint64_t job;        // this connector's number for it
  uint64_t request;    // decode's id
  const char* decode;  // the name of the decode worker
  const char* key;     // the load's; "": none
  const int32_t* tokens;
  size_t token_count;
  uint32_t first_token;  // send from here on
  uint32_t loads_of_key;
} baton_kv_job;

// The next request of a decode worker; BATON_ERR_NOT_FOUND: none now.
int32_t baton_kv_job_next(baton_kv_connector* connector, baton_kv_job* out, baton_error* error);

// Prefill starts before decode has asked.
typedef struct baton_kv_binding {
  size_t size;      // sizeof(baton_kv_binding)
  const char* key;  // that loads will name
  uint32_t tokens;  // of the sequence: loads ask for these or fewer
  uint32_t loads;   // that will come
  int64_t lease;    // for the last of them to come; 0: the default, 60 s
} baton_kv_binding;
// Opens a job, which baton_kv_job_next() does not give. BATON_ERR_NOT_ALLOWED: the key has one.
int32_t baton_kv_job_bind(baton_kv_connector* connector, const baton_kv_binding* binding,
                          uint64_t* job, baton_error* error);
// Its loads may come until `lease` from now.
int32_t baton_kv_job_renew(baton_kv_connector* connector, uint64_t job, int64_t lease,
                           baton_error* error);
// 1: decode wants it or may still come; 0: stop computing it.
int baton_kv_job_is_wanted(baton_kv_connector* connector, uint64_t job);
// Blocks [first_block, first_block + count) of the sequence are computed in layer number `layer`,
// and lie in these blocks of the cache: they are sent, or offered. BATON_ERR_CANCELED: no decode
// worker wants them.
int32_t baton_kv_job_save_layer(baton_kv_connector* connector, uint64_t job, uint32_t layer,
                                uint32_t first_block, const uint32_t* blocks, size_t count,
                                baton_error* error);
// Goes to decode when the job is finished; at most 4096 bytes.
int32_t baton_kv_job_give_payload(baton_kv_connector* connector, uint64_t job, const void* payload,
                                  size_t size, baton_error* error);
// All is saved (BATON_OK), or, with another result and the text of why, nothing more will come. For
// every job that came or was bound, wanted or not.
int32_t baton_kv_job_finish(baton_kv_connector* connector, uint64_t job, int32_t outcome,
                            const char* why, baton_error* error);
// After baton_kv_job_finish(): BATON_OK: its blocks are free, and the job is forgotten.
// BATON_IN_PROGRESS: not yet.
int32_t baton_kv_job_state(baton_kv_connector* connector, uint64_t job, baton_error* error);

#ifdef __cplusplus
}
#endif

#endif
