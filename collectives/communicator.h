// The communicator: collectives among `ranks` processes.
//
//   auto group = launch::from_environment();              // or code, or --ranks N
//   auto comm  = Communicator::create({.rank = r, .ranks = n, .rendezvous = "10.0.0.1:4711"});
//   auto grads = (*comm)->allocate(bytes);                // memory that peers reach without a copy
//   auto work  = (*comm)->all_reduce_async(grads->data, grads->data, count, DataType::kF32,
//                                          ReduceOp::kSum);
//   ... compute ...
//   absl::Status status = (*comm)->wait(*work);
//
// All ranks make the same calls in the same order. Calls may come from any thread; their order is
// the order in which they enter. Several may be in flight. Nothing advances by itself: wait(),
// test() and the blocking calls drive the executor, and so does a background thread if
// CommunicatorOptions::background is set.
//
// Nothing hangs silently. A rank that died, stopped, is late or called something else, and abort()
// from any thread, end every call at every survivor within the deadline with an error that names
// the rank, the call and its sequence number, the chunk and the link. Ranks that call something
// else (another root, count, type, operation) all hear of it in that call; one that only sends in
// it, as a broadcast's root does, may have ended it, and hears of it in one of its next. After an
// error the communicator only fails, until reconfigure() gives it other members, or the same ones
// anew; shrink() makes a new one of the survivors.
//
// Communicators of one process share an Endpoint (collectives/endpoint.h). The first create() below
// opens one and finds the others at a rendezvous; the second is for members that something else has
// brought together; split() and subgroup() make more of what is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/endpoint.h"
#include "collectives/types.h"
#include "transport/clock.h"
#include "transport/worker.h"

namespace baton {

struct CommunicatorOptions {
  int rank = 0;
  int ranks = 1;
  std::string rendezvous;      // "host:port" where rank 0 (or a launcher) serves; see rendezvous.h
  uint64_t generation = 0;     // of the group: higher for one that replaces a broken one
  std::string name = "world";  // for messages and timelines
  // Providers, key, shape, timeline: as for any worker. An empty listen_host means loopback where
  // the rendezvous is a loopback address ("127.0.0.1:4711", "localhost:4711"), else every
  // interface, for ranks on other machines.
  WorkerOptions worker;
  Time start_timeout = patient(std::chrono::seconds(30));  // until all ranks have met
  Time timeout = patient(std::chrono::seconds(60));  // of each call, from its start; kNever: none
  bool background = false;  // a thread advances calls while the caller computes
  bool ordered = false;     // the default of CallOptions::ordered
  bool tune = true;         // try the candidates on the first calls of each size, keep the fastest
  bool calibrate = true;    // measure links when starting (under 100 ms)
  size_t slot_bytes = 512 << 10;  // the largest message
  uint32_t node_size = 0;         // ranks per node; 0: found from the hosts they run on
  bool mask_lost = false;         // as of GroupOptions
  // Null: one of its own is opened with `worker` and `background`, which count for nothing else.
  std::shared_ptr<Endpoint> endpoint;
};

// The options of a group. All ranks must pass equal options, except for the times.
struct GroupOptions {
  // Tells groups apart: never used before by any of the members' endpoints. Not 0 for create();
  // split() and subgroup() make their own from their parent's and ignore this one.
  uint64_t uuid = 0;
  std::string name = "group";                              // for messages and timelines
  Time start_timeout = patient(std::chrono::seconds(30));  // until the neighbours are connected
  Time timeout = patient(std::chrono::seconds(60));  // of each call, from its start; kNever: none
  bool ordered = false;                              // the default of CallOptions::ordered
  bool tune = true;  // try the candidates on the first calls of each size, keep the fastest
  size_t slot_bytes = 512 << 10;  // the largest message
  // A rank that dies breaks its own windows and not the group: accesses to them, and waits for its
  // signals, end with Unavailable, and lost_ranks() has it. A call that is under way then, or
  // begins later, breaks the group as it does without.
  bool mask_lost = false;
};

// kBroken: see status(). reconfigure() leads from there to kStarting.
enum class GroupState : uint8_t { kStarting, kReady, kBroken };

// A call in flight. Valid until wait() or test() has reported its end.
struct Work {
  uint64_t sequence = 0;  // of the call, from 1; 0: none
};

// How one call is to run; what is left out is the communicator's default or chosen by its model.
struct CallOptions {
  std::optional<bool> ordered;  // bit-identical whatever algorithm, chunk, provider, placement
  std::optional<Algorithm> algorithm;
  uint32_t channels = 0;        // 0: chosen
  size_t chunk_bytes = 0;       // 0: chosen
  Time timeout = Time::zero();  // zero: the communicator's
  // For send() and receive(): a receive takes a message of its own tag only. For windows: a signal
  // stands behind puts of its own tag only. Any value.
  int32_t tag = 0;
  // For windows: another access follows at once, and this one may begin with it. Begins with any
  // progress otherwise.
  bool more = false;
  // Called once when the call has ended, well or not, by the thread that finds that out: one that
  // waits for any call of this endpoint, tests, calls progress() or abort(), or its background
  // thread. It holds no lock: the callback may begin other calls. wait() and test() report the end
  // after it has returned, and that of its group: so it must not wait for either. One that
  // destroys its own communicator leaves the group, but some memory stays (and the endpoint, if it
  // was its last communicator), and the log says so.
  void (*on_end)(void* context, Work work, const absl::Status& status) = nullptr;
  void* context = nullptr;
  // The call is not waited for: its place is free when `on_end` has returned. wait() and test()
  // must not name it.
  bool detached = false;
  // For kPreMulSum: what this rank's input is multiplied by, one element of the call's type. Read
  // before the call returns.
  const void* factor = nullptr;
  // The Work of group_begin(): the call ends with the others of that group. It begins at once; pass
  // the group's Work to wait() and test(), not this call's.
  Work group;
  // Order with streams of CUDA devices (DeviceStream in transport/transfer.h), for memory of theirs
  // or of the host's. No thread waits for them, and so beginning a call does not block; but they
  // need a timeout of the call, for nothing else ends a stream's wait.
  DeviceStream after;    // the call reads and writes nothing before all that is on it now has run
  DeviceStream release;  // as hold(), from the call's beginning on
};

// As the source of a receive: whichever rank sends first.
inline constexpr int kAnyRank = -1;

struct CommunicatorStats {
  uint64_t calls = 0;
  uint64_t messages = 0;
  uint64_t bytes_sent = 0;
  // Bytes received that were combined or copied straight from a peer's buffer, or that the peer
  // wrote to where the call wants them.
  uint64_t direct_bytes = 0;
  uint64_t sleeps = 0;        // times a waiting rank went to sleep
  uint64_t staged_calls = 0;  // on memory of devices
  uint64_t staged_bytes = 0;  // copied to and from devices
  uint64_t link_bytes = 0;    // of memory that links other than shared memory hold for messages now
};

class Communicator {
 public:
  // Meets the other ranks. DeadlineExceeded names the ranks that did not come; InvalidArgument for
  // duplicate ranks or other sizes; Unauthenticated for another key; FailedPrecondition for another
  // version or a generation that is over (after an abort all ranks come with the next one).
  static absl::StatusOr<std::unique_ptr<Communicator>> create(CommunicatorOptions options);
  // A group of the endpoints with these handles, the first being rank 0; `endpoint`'s own is among
  // them. Returns at once in state kStarting; calls may be made right away and wait until the links
  // that they use are up. Connections are made when they are first used, but for those to some
  // neighbours (up to 8 ranks: all), whose links make the group kReady.
  // InvalidArgument: no or too many handles, one twice, our own not among them, uuid 0;
  // AlreadyExists: this endpoint has used that uuid. What only shows when ranks connect breaks the
  // group, at both ends: another list of members or other options under the same uuid
  // (InvalidArgument), another cluster key, another version, a process that is gone.
  static absl::StatusOr<std::unique_ptr<Communicator>> create(
      std::shared_ptr<Endpoint> endpoint, absl::Span<const Handle> in_rank_order,
      GroupOptions options);
  // In a forked child it does nothing: the communicator is the parent's, and what is called there
  // returns InvalidArgument.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int ranks() const;
  const std::string& name() const;
  const std::shared_ptr<Endpoint>& endpoint() const;
  GroupState state() const;
  // Blocks until the group is ready (OK) or broken (its status()). DeadlineExceeded: neither within
  // `timeout`, and nothing has changed.
  absl::Status wait_ready(Time timeout = kNever);

  // --- other groups ------------------------------------------------------------------------
  // Collective: all ranks call it, as any other call. Ranks of equal `color` make up a new group,
  // in the order of their keys, and of their ranks here where those are equal. A negative color:
  // null. Existing connections and measured link costs are reused.
  absl::StatusOr<std::unique_ptr<Communicator>> split(int color, int key,
                                                      GroupOptions options = {});
  // A new group of these ranks, in this order; only they call it, and it does not block.
  // InvalidArgument: a rank that is not there, twice, or not this one's own.
  absl::StatusOr<std::unique_ptr<Communicator>> subgroup(absl::Span<const int> ranks,
                                                         GroupOptions options = {});

  // --- memory ------------------------------------------------------------------------------
  // Any memory works in any call. This memory needs no copy on its way: over shm peers read it in
  // place, over RDMA it is registered. Aligned to 64 bytes at least; zeroed.
  absl::StatusOr<CommBuffer> allocate(size_t bytes);
  // Memory of CUDA devices works in any call too (with gpudirect/ linked), at some ranks or at all,
  // and gives the same bits. Copy engines move it through pinned memory. The CPU sums or a kernel
  // of the device, whichever costs less by what was measured, or as the setting staging.sums says;
  // what only moves bytes launches no kernel. Beginning a call blocks until its input has left the
  // device, and what makes the input must have ended before; with CallOptions::after neither.
  // InvalidArgument for managed or freed memory and for a buffer in several allocations. A device
  // that fails or is lost ends the call, and the communicator, at every rank.
  void free(const CommBuffer& buffer);

  // --- calls -------------------------------------------------------------------------------
  // Counts are elements. `in` and `out` are equal (in place) or do not overlap; where one is
  // larger, in place means that the rank's own part lies at its place in the larger buffer.
  // Pointers are aligned to the element. A count of zero is a call that does nothing and still is
  // matched. Buffers must stay untouched until the call has ended.
  absl::StatusOr<Work> all_reduce_async(const void* in, void* out, size_t count, DataType type,
                                        ReduceOp op, const CallOptions& options = {});
  // in: ranks * count elements; out: count.
  absl::StatusOr<Work> reduce_scatter_async(const void* in, void* out, size_t count, DataType type,
                                            ReduceOp op, const CallOptions& options = {});
  // in: count elements; out: ranks * count.
  absl::StatusOr<Work> all_gather_async(const void* in, void* out, size_t count, DataType type,
                                        const CallOptions& options = {});
  absl::StatusOr<Work> broadcast_async(const void* in, void* out, size_t count, DataType type,
                                       int root, const CallOptions& options = {});
  // `out` is only used at the root.
  absl::StatusOr<Work> reduce_async(const void* in, void* out, size_t count, DataType type,
                                    ReduceOp op, int root, const CallOptions& options = {});
  // in and out: ranks * count elements. Not in place.
  absl::StatusOr<Work> all_to_all_async(const void* in, void* out, size_t count, DataType type,
                                        const CallOptions& options = {});
  // The root has a block of `count` elements for each rank in `in` (scatter), or gets one from each
  // into `out` (gather), in the order of the ranks; its own is one of them. The larger buffer is
  // only used at the root, which alone can have the call in place.
  absl::StatusOr<Work> scatter_async(const void* in, void* out, size_t count, DataType type,
                                     int root, const CallOptions& options = {});
  absl::StatusOr<Work> gather_async(const void* in, void* out, size_t count, DataType type,
                                    int root, const CallOptions& options = {});
  // all_gather and reduce_scatter with blocks of different lengths: `counts` has that of each
  // rank's block and is equal at all ranks, else all hear InvalidArgument; `offsets` says where the
  // blocks start in the larger buffer of this rank, which need not look like others'. Elements
  // between blocks are neither read nor written; blocks do not overlap. Both lists have ranks()
  // entries and are read before the call returns. Blocks may be empty. No rank sends bytes that no
  // other rank needs: reduce_scatter_v sends each block once, to its rank. in: `count` elements,
  // which is counts[rank()].
  absl::StatusOr<Work> all_gather_v_async(const void* in, size_t count, void* out,
                                          absl::Span<const size_t> counts,
                                          absl::Span<const size_t> offsets, DataType type,
                                          const CallOptions& options = {});
  // out: counts[rank()] elements.
  absl::StatusOr<Work> reduce_scatter_v_async(const void* in, absl::Span<const size_t> counts,
                                              absl::Span<const size_t> offsets, void* out,
                                              DataType type, ReduceOp op,
                                              const CallOptions& options = {});
  // Per rank: how many elements, and where they start. Receive counts must match what peers send.
  absl::StatusOr<Work> all_to_all_v_async(const void* in, absl::Span<const size_t> send_counts,
                                          absl::Span<const size_t> send_offsets, void* out,
                                          absl::Span<const size_t> receive_counts,
                                          absl::Span<const size_t> receive_offsets, DataType type,
                                          const CallOptions& options = {});
  // Point to point: no other rank takes part. A receive takes the first message that its source, or
  // with kAnyRank any rank, has sent to this rank with the same tag and that no earlier receive has
  // taken: what has equal source and tag comes in order, anything else in any order. Sends are
  // synchronous (as MPI_Ssend), small ones too: one ends only when a receive of the same count and
  // type has taken the data. So two ranks that both call send() first wait for each other until the
  // deadline: begin one of the two calls with send_async() or receive_async(). With another count
  // or type both hear InvalidArgument. Any number may be in flight between two ranks, in any order
  // of tags; the data of large ones moves when both calls are there, without a copy on its way
  // where memory of allocate() is sent (over shm) or received into (over any other provider, if
  // what is sent is such memory too). A receive from any rank fails when one is lost, as all calls
  // do. The messages of an all_to_all_v are matched in the same way and among themselves; that one
  // is otherwise called as every collective, by all ranks.
  absl::StatusOr<Work> send_async(const void* in, size_t count, DataType type, int to,
                                  const CallOptions& options = {});
  absl::StatusOr<Work> receive_async(void* out, size_t count, DataType type, int from,
                                     const CallOptions& options = {});
  // The rank that sent what this receive took, from when wait() or test() has reported its good end
  // until 1,024 more calls have begun. -1: no such receive.
  int source_of(Work work) const;
  absl::StatusOr<Work> barrier_async(const CallOptions& options = {});

  // The same, waited for.
  absl::Status all_reduce(const void* in, void* out, size_t count, DataType type, ReduceOp op,
                          const CallOptions& options = {});
  absl::Status reduce_scatter(const void* in, void* out, size_t count, DataType type, ReduceOp op,
                              const CallOptions& options = {});
  absl::Status all_gather(const void* in, void* out, size_t count, DataType type,
                          const CallOptions& options = {});
  absl::Status broadcast(const void* in, void* out, size_t count, DataType type, int root,
                         const CallOptions& options = {});
  absl::Status reduce(const void* in, void* out, size_t count, DataType type, ReduceOp op, int root,
                      const CallOptions& options = {});
  absl::Status all_to_all(const void* in, void* out, size_t count, DataType type,
                          const CallOptions& options = {});
  absl::Status scatter(const void* in, void* out, size_t count, DataType type, int root,
                       const CallOptions& options = {});
  absl::Status gather(const void* in, void* out, size_t count, DataType type, int root,
                      const CallOptions& options = {});
  absl::Status send(const void* in, size_t count, DataType type, int to,
                    const CallOptions& options = {});
  absl::Status receive(void* out, size_t count, DataType type, int from,
                       const CallOptions& options = {});
  absl::Status barrier(const CallOptions& options = {});

  // Several calls of one or more threads that are waited for as one: pass what group_begin()
  // returns to each as CallOptions::group, and then to group_end(). From then on it is a Work that
  // ends when all of them have, with the first error that one of them ended with; until then wait()
  // and test() refuse it (FailedPrecondition). Each rank groups its calls as it likes: other ranks
  // see no difference. group_begin(): ResourceExhausted as for a call. group_end(), and a call of a
  // group that is not open: InvalidArgument. A call that is refused is in no group.
  absl::StatusOr<Work> group_begin();
  absl::Status group_end(Work group);

  // Work put on the stream from now on runs when the call, or all of a group, has ended, or at its
  // timeout. It therefore also runs if the call failed; the next call and wait() report that. If
  // the call has ended already the stream does not wait, and this returns how it ended. The thread
  // that drives this communicator ends the stream's wait: call nothing that waits for the stream on
  // that thread (TransferRequest::release has the rest). NotFound: the call's end was told already.
  // InvalidArgument: the call has no timeout, or this is no stream that can wait.
  absl::Status hold(Work work, DeviceStream stream);

  // Blocks until the call has ended and returns how. Polls at first, then sleeps. DeadlineExceeded
  // with "still runs" in its text: not within `timeout`; the call runs on and can be waited for
  // again. A call's own deadline is CallOptions::timeout.
  absl::Status wait(Work work, Time timeout = kNever);
  // Advances, does not block: nullopt while the call runs, then how it ended.
  std::optional<absl::Status> test(Work work);
  // Advances everything by a bounded amount; true if anything happened. For callers with a loop of
  // their own.
  bool progress();

  // --- failure -----------------------------------------------------------------------------
  // Ends every call here with `why`, within 50 ms whatever the others do, and breaks the
  // communicator. From any thread. The others are told, and their calls end with an error that
  // names this rank; nothing of them is waited for.
  void abort(const absl::Status& why);
  // Replaces the members of this communicator in place, also if it is broken. Open calls end first
  // (Aborted). rank(), ranks() and the numbers of ranks are the new ones from then on; memory
  // stays. `uuid` and the handles as for create(): fewer members, more, or entirely others. The
  // Work ends when the group is ready, with DeadlineExceeded if that takes longer than `timeout`.
  // Present members (reconfigure()) and new ones (create()) use the same uuid.
  absl::StatusOr<Work> reconfigure(absl::Span<const Handle> in_rank_order, uint64_t uuid,
                                   Time timeout);
  // The handles of the ranks, in their order.
  std::vector<Handle> handles() const;
  // OK, or what broke the communicator.
  absl::Status status() const;
  // The ranks known to be dead or stopped, by their numbers here.
  std::vector<int> lost_ranks() const;
  // A new communicator of the ranks that still answer, in the old order, renumbered. All survivors
  // call it; they agree on who is left. This one stays broken.
  absl::StatusOr<std::unique_ptr<Communicator>> shrink();

  // --- explaining --------------------------------------------------------------------------
  // How a call of this size would run, every alternative with its predicted time, and what the last
  // such call took. For calls on device memory also where they summed, and the predicted cost of
  // the sums by the CPU and by a kernel.
  std::string explain(Collective collective, size_t bytes, const CallOptions& options = {}) const;
  // The links to every other rank: the route taken.
  std::string routes() const;
  // The last few thousand events, oldest first, one per line. When a call fails they are written as
  // JSON, and the error says where: $BATON_FLIGHT_RECORDER.<rank>.json, or without that variable
  // baton-flight-<user id>-<group>.<rank>.json in $TMPDIR or /tmp. "none" turns that off.
  std::string flight_record() const;
  CommunicatorStats stats() const;
  Worker& worker();

 private:
  friend class Window;
  friend class SteppedSplit;  // of tests in virtual time, where nothing may block
  class Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton
