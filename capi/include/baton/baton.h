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
// numbers that are never used again: a stale one, or another agent's, is BATON_ERR_NOT_FOUND.
//
// Structs begin with their size, which the caller sets (BATON_..._INIT, or the ..._init()
// functions): a program that was compiled with an older header goes on working with a newer
// library. Numbers of this header never change their meaning while the library's name ends in
// .so.0.
//
// Ownership: text and memory that are passed in are copied or, if registered, stay the caller's.
// Bytes that come out belong to the caller: baton_bytes_free().
//
// Threads: every call may come from any thread, but for baton_agent_destroy(), which must be the
// last one. A forked child makes agents of its own: its parent's are refused there
// (BATON_ERR_INVALID_PARAM), and baton_agent_destroy() leaves them alone.
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

#ifdef __cplusplus
}
#endif

#endif
