// Collectives from C: all_reduce and its relatives, and point to point, among the ranks of a group.
// The calls and what they promise are those of Communicator in collectives/communicator.h; this
// page says what is different in C. Results, errors, structs, ownership and forks: baton/baton.h.
//
//   baton_place place = BATON_PLACE_INIT;
//   baton_bytes where;
//   baton_place_from_environment(&place, &where, &error);  // torchrun, mpirun, baton launch ...
//   baton_comm* comm;
//   baton_comm_meet(NULL, &place, NULL, &comm, &error);      // blocks until all ranks are there
//   baton_call call = BATON_CALL_INIT;
//   call.kind = BATON_ALL_REDUCE, call.type = BATON_F32, call.op = BATON_SUM;
//   call.in = call.out = gradients, call.count = count;
//   baton_work work;
//   if (baton_comm_start(comm, &call, &work, &error) != BATON_OK) puts(error.text);
//   ... compute ...
//   if (baton_work_wait(comm, work, BATON_FOREVER, &error) != BATON_OK) puts(error.text);
//   baton_comm_destroy(comm);
//
// All ranks of a communicator make the same calls in the same order; sends and receives are matched
// between two ranks alone. Nothing advances by itself, unless the endpoint has a background thread:
// baton_work_wait(), baton_work_test() and baton_endpoint_progress() do.
//
// Endpoints and communicators are pointers, valid until their ..._close() or ..._destroy(), which
// must be the last call with them; every other call may come from any thread. Works are numbers
// that are never used again.
//
// When a call fails: a rank that died or does not answer is BATON_ERR_REMOTE_DISCONNECT; a call
// that was aborted, or whose time ran out, BATON_ERR_CANCELED (BATON_ERR_TIMEOUT is the end of a
// wait: the call goes on); ranks that called different things, BATON_ERR_INVALID_PARAM. The text
// names the rank, the call and its sequence number. Afterwards the communicator is broken: every
// call fails as that one did, until baton_comm_reconfigure(). A call that is refused for its
// arguments breaks nothing.
#ifndef BATON_COLLECTIVES_H
#define BATON_COLLECTIVES_H

#include "baton.h"  // beside this file, whichever folder the include path names

#ifdef __cplusplus
extern "C" {
#endif

// --- endpoints --------------------------------------------------------------------------------

// All communicators of a process share an endpoint: connections, memory that peers reach, a thread.
typedef struct baton_endpoint baton_endpoint;

typedef struct baton_endpoint_options {
  size_t size;            // sizeof(baton_endpoint_options)
  const char* providers;  // these seven as for an agent
  const char* require;
  const char* key_file;
  const char* listen_host;  // ranks on other machines need "*" or an address
  const char* settings;
  const char* advertise;
  uint16_t listen_port;
  uint8_t background;   // 1: a thread advances calls while the caller computes
  uint64_t pool_bytes;  // of memory that peers reach; 0: the default
} baton_endpoint_options;
// Fills in the defaults. `size`: sizeof(baton_endpoint_options).
void baton_endpoint_options_init(baton_endpoint_options* options, size_t size);

// `options` NULL: the defaults. Errors as for baton_agent_create().
int32_t baton_endpoint_open(const baton_endpoint_options* options, baton_endpoint** out,
                            baton_error* error);
// Its communicators go on: they keep what they need of it until they are destroyed. NULL: nothing.
void baton_endpoint_close(baton_endpoint* endpoint);

// The identity and address of a process, for others to make communicators with: 96 bytes without a
// pointer or a secret in them, to be passed on by any means.
typedef struct baton_handle {
  uint8_t bytes[96];
} baton_handle;
int32_t baton_endpoint_handle(const baton_endpoint* endpoint, baton_handle* out,
                              baton_error* error);

// Advances all its communicators by a bounded amount; 1 if anything happened. For callers with a
// loop of their own, without a background thread, who may sleep on the event descriptor once it has
// returned 0, some milliseconds at most: deadlines pass without an event.
int baton_endpoint_progress(baton_endpoint* endpoint);
// Readable when there is something to do, until the next baton_endpoint_progress(); for poll() or
// epoll, and not to be read. -1: the endpoint is NULL or a parent's.
int baton_endpoint_event_fd(const baton_endpoint* endpoint);

// Any memory works in any call. This memory needs no copy on its way. Zeroed, aligned to 64 bytes.
int32_t baton_endpoint_allocate(baton_endpoint* endpoint, uint64_t bytes, void** out,
                                baton_error* error);
// `data`: what baton_endpoint_allocate() gave, in no call any more, else BATON_ERR_NOT_FOUND.
int32_t baton_endpoint_free(baton_endpoint* endpoint, void* data, baton_error* error);

// --- where ranks meet -------------------------------------------------------------------------

// A rendezvous server on a thread of its own. The launcher, or one of the ranks, opens it and
// passes its address to the others.
typedef struct baton_rendezvous baton_rendezvous;
// `listen`: "host:port"; NULL: a free port of loopback, "*": one of every interface. `ranks`: how
// many come; 0: as many as the first one says. `address` gets what goes into
// baton_place.rendezvous.
int32_t baton_rendezvous_open(const char* listen, uint32_t ranks, const char* key_file,
                              baton_rendezvous** out, baton_bytes* address, baton_error* error);
// Once all ranks have met, or no more will. NULL: nothing.
void baton_rendezvous_close(baton_rendezvous* rendezvous);

// This process's rank and the size of its group.
typedef struct baton_place {
  size_t size;             // sizeof(baton_place)
  const char* rendezvous;  // "host:port" where the ranks meet; NULL: there is one rank
  int32_t rank, ranks;
  int32_t local_rank, local_ranks;  // among those of this machine; only told, never asked for
  uint64_t generation;              // higher for a group that replaces a broken one there
  uint8_t serves;                   // 1: this rank serves the rendezvous, while it is a member
} baton_place;
#define BATON_PLACE_INIT \
  { sizeof(baton_place), 0, 0, 1, 0, 1, 0, 0 }

// Reads the place from the launcher's variables: BATON_RANK, BATON_RANKS and BATON_RENDEZVOUS, or
// those of torchrun, Open MPI, MPICH, Intel MPI or Slurm (collectives/launch.h). Set `out->size`
// before the call. `rendezvous` holds the text that `out` points to; the caller frees it.
// BATON_ERR_NOT_FOUND: no launcher started this process. BATON_ERR_INVALID_PARAM names the variable
// whose value is invalid.
int32_t baton_place_from_environment(baton_place* out, baton_bytes* rendezvous, baton_error* error);

// --- communicators ----------------------------------------------------------------------------

typedef struct baton_comm baton_comm;
typedef uint64_t baton_work;  // a call in flight; 0: none

typedef struct baton_comm_options {
  size_t size;       // sizeof(baton_comm_options)
  const char* name;  // for messages and timelines; NULL: "world"
  uint64_t uuid;     // of the group, the same at every rank, never used before; of create alone
  int64_t start_timeout;  // until all ranks are there; 0: the default, 30 s
  int64_t timeout;        // of each call, from its start; 0: the default, 60 s; -1: none
  uint8_t ordered;        // 1: sums have the same bits whatever algorithm, chunk, provider
  uint8_t tune;           // 1: the first calls of each size try what is fastest
} baton_comm_options;
// Fills in the defaults. `size`: sizeof(baton_comm_options).
void baton_comm_options_init(baton_comm_options* options, size_t size);

// Below, `options` may be NULL: the defaults.

// Meets the other ranks at place->rendezvous and blocks until all are there. `endpoint` NULL: one
// of this communicator alone, which listens on loopback where the rendezvous is a loopback address,
// else on every interface. BATON_ERR_TIMEOUT names the ranks that did not
// come, BATON_ERR_INVALID_PARAM a rank that came twice or expects another number of ranks; another
// cluster key is BATON_ERR_MISMATCH; a generation that is over, BATON_ERR_NOT_ALLOWED.
int32_t baton_comm_meet(baton_endpoint* endpoint, const baton_place* place,
                        const baton_comm_options* options, baton_comm** out, baton_error* error);
// The group of the processes that have these handles, in the order of ranks, one of which is
// `endpoint`'s. Returns at once; calls may be started, and wait until the ranks that they need are
// there. BATON_ERR_NOT_ALLOWED: this endpoint has used that uuid; BATON_ERR_INVALID_PARAM: a handle
// that is damaged, there twice, or missing. Members that disagree break the group at both.
int32_t baton_comm_create(baton_endpoint* endpoint, const baton_handle* handles, size_t count,
                          const baton_comm_options* options, baton_comm** out, baton_error* error);
// Another handle of its endpoint, for the caller to close.
int32_t baton_comm_endpoint(const baton_comm* comm, baton_endpoint** out, baton_error* error);
// The handles of its ranks, in their order. Writes at most `room` to `out`; `count`: how many there
// are.
int32_t baton_comm_handles(const baton_comm* comm, baton_handle* out, size_t room, size_t* count,
                           baton_error* error);
// BATON_OK: all ranks are there; BATON_IN_PROGRESS: not yet; or what broke the communicator.
int32_t baton_comm_state(const baton_comm* comm, baton_error* error);
// The same, once it is not BATON_IN_PROGRESS any more; BATON_ERR_TIMEOUT: it still is.
int32_t baton_comm_wait_ready(baton_comm* comm, int64_t timeout, baton_error* error);

// A call of all ranks: those with the same color make a group of their own, ordered by key and then
// by rank. color < 0: this rank is in no group, and `*out` is NULL. Connections are shared.
int32_t baton_comm_split(baton_comm* comm, int32_t color, int32_t key,
                         const baton_comm_options* options, baton_comm** out, baton_error* error);
// The group of `ranks`, in this order; a call of its members alone.
int32_t baton_comm_subgroup(baton_comm* comm, const int32_t* ranks, size_t count,
                            const baton_comm_options* options, baton_comm** out,
                            baton_error* error);
// Other members in place of the present ones, in the order of ranks, also after a failure or
// baton_comm_abort(): fewer, more, or all new. The work ends when all are there; rank and ranks are
// those of the new group then.
int32_t baton_comm_reconfigure(baton_comm* comm, const baton_handle* handles, size_t count,
                               uint64_t uuid, int64_t timeout, baton_work* work,
                               baton_error* error);

// A new communicator of the ranks that still answer, in their order. A call of all survivors of a
// communicator that is broken, which it stays; they agree on who is left.
int32_t baton_comm_shrink(baton_comm* comm, baton_comm** out, baton_error* error);

// Ends every call here with BATON_ERR_CANCELED and `why`, and breaks the communicator. From any
// thread; waits for no other rank. The others are told: their calls end and name this one.
int32_t baton_comm_abort(baton_comm* comm, const char* why, baton_error* error);

// -1: comm is NULL or a parent's.
int32_t baton_comm_rank(const baton_comm* comm);
int32_t baton_comm_ranks(const baton_comm* comm);
// The ranks known to be dead or stopped. At most `room` go to `out`; `count`: how many there are.
int32_t baton_comm_lost(const baton_comm* comm, int32_t* out, size_t room, size_t* count,
                        baton_error* error);

// For people: how a call of this kind and size would run and what the alternatives would take; how
// each other rank is reached; the last few thousand events.
int32_t baton_comm_explain(const baton_comm* comm, int32_t kind, uint64_t bytes, baton_bytes* out,
                           baton_error* error);
int32_t baton_comm_routes(const baton_comm* comm, baton_bytes* out, baton_error* error);
int32_t baton_comm_flight_record(const baton_comm* comm, baton_bytes* out, baton_error* error);

typedef struct baton_comm_stats {
  size_t size;  // sizeof(baton_comm_stats)
  uint64_t calls, messages, bytes_sent;
  uint64_t direct_bytes;  // received without a copy of its own: read in a peer's memory, or written
                          // to its place
  uint64_t sleeps;        // times that a waiting rank went to sleep
  uint64_t staged_calls, staged_bytes;  // on memory of devices
  uint64_t link_bytes;  // of memory that links other than shared memory hold for messages now
} baton_comm_stats;
int32_t baton_comm_get_stats(const baton_comm* comm, baton_comm_stats* out, baton_error* error);

// Calls in flight end here with BATON_ERR_CANCELED, their on_end is called before this returns, and
// the other ranks hear that this one left. Nothing touches their buffers afterwards. NULL: nothing.
void baton_comm_destroy(baton_comm* comm);

// --- calls ------------------------------------------------------------------------------------

// The sizes of `in` and `out` in elements, with n = ranks. The two are equal (in place), or do not
// overlap. If one is n times the other, in place means that the smaller one is the rank's own part
// of the larger one.
typedef enum baton_call_kind {  //        in                   out
  BATON_ALL_REDUCE = 0,         //        count                count
  BATON_REDUCE_SCATTER = 1,     //        n * count            count
  BATON_ALL_GATHER = 2,         //        count                n * count
  BATON_BROADCAST = 3,          // peer:  count        all:    count
  BATON_REDUCE = 4,             //        count        peer:   count
  BATON_ALL_TO_ALL = 5,         //        n * count            n * count, never in place
  BATON_BARRIER = 6,            //        nothing
  BATON_SEND = 7,               //        count, to peer
  BATON_RECEIVE = 8,            //                             count, from peer
  BATON_ALL_TO_ALL_V = 9,       //        in_counts            out_counts
  BATON_SCATTER = 10,           // peer:  n * count            count
  BATON_GATHER = 11,            //        count        peer:   n * count
  BATON_ALL_GATHER_V = 12,      //        out_counts[rank]     out_counts
  BATON_REDUCE_SCATTER_V = 13   //        in_counts            in_counts[rank]
} baton_call_kind;

typedef enum baton_type {
  BATON_F32 = 0,
  BATON_F16 = 1,
  BATON_BF16 = 2,
  BATON_F64 = 3,
  BATON_I8 = 4,
  BATON_U8 = 5,
  BATON_I32 = 6,
  BATON_I64 = 7,
  BATON_F8E4M3 = 8,  // OCP E4M3: no infinities; torch's float8_e4m3fn
  BATON_F8E5M2 = 9,
  BATON_U32 = 10,
  BATON_U64 = 11,
  BATON_BOOL = 12  // a byte; any but 0 counts as true
} baton_type;

typedef enum baton_reduction {
  BATON_SUM = 0,
  BATON_PROD = 1,
  BATON_MIN = 2,
  BATON_MAX = 3,
  BATON_AVG = 4,         // the sum divided by the number of ranks; integers round towards zero
  BATON_PREMUL_SUM = 5,  // the sum of what each rank multiplied by its own `factor`
  BATON_AND = 6,         // of bits, not of floats; as the next two
  BATON_OR = 7,
  BATON_XOR = 8
} baton_reduction;

typedef enum baton_call_flag {
  BATON_CALL_ORDERED = 1,    // as baton_comm_options.ordered, for this call
  BATON_CALL_UNORDERED = 2,  // likewise not
  BATON_CALL_DETACHED = 4    // nothing waits for it: its number is gone when it ends
} baton_call_flag;

#define BATON_ANY_RANK ((int32_t)-1)  // as the peer of a BATON_RECEIVE

// How a call ended: BATON_OK or an error's number, and an error's text, valid during the call. On
// the thread that finds that out: one that waits for any call of this endpoint, tests, starts,
// aborts or makes progress, or the endpoint's own. baton_work_wait() and baton_work_test() tell the
// end when it has returned. It may start other calls; it must not wait for one, nor destroy
// anything.
typedef void (*baton_on_end)(void* context, baton_work work, int32_t result, const char* text);

// A stream of a CUDA device (CUstream or cudaStream_t; NULL: the device's legacy stream).
typedef struct baton_stream {
  int32_t device;
  void* handle;
} baton_stream;

typedef struct baton_call {
  size_t size;     // sizeof(baton_call)
  int32_t kind;    // a baton_call_kind
  int32_t type;    // a baton_type
  int32_t op;      // a baton_reduction
  int32_t peer;    // the root; of a send or receive the other rank
  const void* in;  // aligned to their elements; untouched until the call has ended
  void* out;
  size_t count;             // elements
  const size_t* in_counts;  // one for each rank, copied; NULL: not of this kind
  const size_t* in_offsets;
  const size_t* out_counts;
  const size_t* out_offsets;
  int64_t timeout;      // of the call; 0: the communicator's; -1: none
  const void* factor;   // of BATON_PREMUL_SUM: one element, copied
  int32_t tag;          // of a send or receive: a receive takes a message of its own tag only
  uint32_t flags;       // baton_call_flags
  baton_on_end on_end;  // NULL: none
  void* context;        // its first argument
  baton_work group;     // what baton_comm_group_begin() gave; 0: none
  // Order with streams, for memory of devices or of the host: no thread waits. NULL: none.
  const baton_stream* after;    // the call reads and writes nothing before all on it now has run
  const baton_stream* release;  // as baton_work_hold(), from the call's beginning on
} baton_call;
#define BATON_CALL_INIT \
  { sizeof(baton_call), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

// `*work` is valid until its end was told, once, by baton_work_wait() or baton_work_test(); 256 of
// calls that all ranks make may be so at a time, and 4,096 in all. BATON_ERR_INVALID_PARAM: an
// argument makes no sense, and the call did not begin. NULL for `work`: only with
// BATON_CALL_DETACHED.
int32_t baton_comm_start(baton_comm* comm, const baton_call* call, baton_work* work,
                         baton_error* error);
// Several calls that are waited for as one: pass `*group` to each as baton_call.group, and then to
// baton_comm_group_end(). From then on it is a work that ends when all of them have, with the first
// error; until then baton_work_wait() and baton_work_test() give BATON_ERR_NOT_ALLOWED. The calls
// begin at once, and their own numbers are good for baton_work_source() alone.
int32_t baton_comm_group_begin(baton_comm* comm, baton_work* group, baton_error* error);
int32_t baton_comm_group_end(baton_comm* comm, baton_work group, baton_error* error);
// Work put on the stream from now on runs when the call, or all of a group, has ended, well or not,
// or at its timeout. If the call has ended already the stream does not wait, and this returns how
// it ended. The thread that drives the endpoint ends the stream's wait: on that thread call nothing
// that waits for the stream.
int32_t baton_work_hold(baton_comm* comm, baton_work work, const baton_stream* stream,
                        baton_error* error);
// How the call ended; BATON_ERR_TIMEOUT: it goes on. BATON_ERR_NOT_FOUND: its end was told already,
// or the number is of another communicator.
int32_t baton_work_wait(baton_comm* comm, baton_work work, int64_t timeout, baton_error* error);
// The same without waiting: BATON_IN_PROGRESS while it runs.
int32_t baton_work_test(baton_comm* comm, baton_work work, baton_error* error);
// The rank that sent what a BATON_RECEIVE took: from when its good end was told until 1,024 more
// calls have begun. BATON_ERR_NOT_FOUND: of anything else.
int32_t baton_work_source(const baton_comm* comm, baton_work work, int32_t* rank,
                          baton_error* error);

// --- windows ----------------------------------------------------------------------------------

// Memory of each rank that the others write and read without its help, and signals that are seen
// behind what was written: as Window in collectives/window.h, which has the rules.
typedef struct baton_window baton_window;

// A call of all ranks, which blocks. Each brings as many bytes as it likes, also none; `data` NULL,
// and `bytes` not 0: memory of Baton's, zeroed, which ranks of this machine can map. `signals`: how
// many counters each rank has at each other one, 1 to 64, equal at all. `timeout`: until all are
// there; 0: the communicator's; -1: none. BATON_ERR_INVALID_PARAM: some rank's memory is of no use,
// and the communicator goes on. Destroy a window before its communicator.
int32_t baton_window_create(baton_comm* comm, void* data, uint64_t bytes, uint32_t signals,
                            int64_t timeout, baton_window** out, baton_error* error);
// Destroys this rank's window: not collective. Its works end with BATON_ERR_CANCELED, accesses by
// other ranks fail from then on, and no peer touches its memory when this returns. NULL: nothing.
void baton_window_destroy(baton_window* window);

typedef enum baton_access_kind {
  BATON_PUT = 0,     // `data` to `offset` at `rank`; then adds `value`, if not 0, to the signal
  BATON_GET = 1,     // `data` from `offset` at `rank`
  BATON_SIGNAL = 2,  // adds `value`, at least 1, to this rank's signal `slot` at `rank`
  BATON_WAIT_SIGNAL = 3,  // ends when the signal `slot` of `rank` here is at least `value`
  BATON_FLUSH = 4  // ends when all earlier accesses to `rank` (BATON_ANY_RANK: all) have, and how
} baton_access_kind;

typedef struct baton_access {
  size_t size;      // sizeof(baton_access)
  int32_t kind;     // a baton_access_kind
  int32_t rank;     // the other one
  void* data;       // of a put or get; untouched until the work has ended
  uint64_t bytes;   // of it
  uint64_t offset;  // in the memory of that rank
  uint64_t value;
  uint32_t slot;
  uint32_t flags;       // BATON_CALL_DETACHED
  int64_t timeout;      // 0: the communicator's; -1: none. When it is over, this work alone ends
  baton_on_end on_end;  // NULL: none
  void* context;        // its first argument
} baton_access;
#define BATON_ACCESS_INIT \
  { sizeof(baton_access), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

// `*work` as baton_comm_start() gives it, for baton_work_wait() and baton_work_test() with the
// window's communicator.
int32_t baton_window_start(baton_window* window, const baton_access* access, baton_work* work,
                           baton_error* error);
// The value here of signal `slot` of rank `from`. Does not make progress.
int32_t baton_window_signal_value(const baton_window* window, int32_t from, uint32_t slot,
                                  uint64_t* value, baton_error* error);
int32_t baton_window_bytes(const baton_window* window, int32_t rank, uint64_t* bytes,
                           baton_error* error);
// A view of that rank's memory, valid until the window is destroyed; another rank's memory is
// read-only. BATON_ERR_NOT_SUPPORTED: it cannot be mapped (the error has the reason): use
// BATON_GET.
int32_t baton_window_view(baton_window* window, int32_t rank, const void** data, uint64_t* bytes,
                          baton_error* error);

#ifdef __cplusplus
}
#endif

#endif
