// Agent: memory that other processes move to and fro by lists of descriptors. The face for engines
// that bring their own memory and call a transfer library the way they call NIXL.
//
//   auto agent = Agent::create({.name = "decode-0"});
//   (*agent)->register_memory({{address, bytes, 0}});
//   auto prefill = (*agent)->add_remote(bytes_of_the_other_agents_metadata);  // its name
//   auto mine   = (*agent)->prepare_local(pages_here);
//   auto theirs = (*agent)->prepare_remote(*prefill, pages_there);
//   auto move   = (*agent)->make_transfer(Op::kRead, *mine, {3, 1}, *theirs, {7, 8}, "request 5");
//   (*agent)->post(*move);
//   absl::Status status = (*agent)->wait(*move);
//
// A descriptor is (address, bytes, device), as its owner sees the address; its memory is the host's
// (MemoryKind::kDram) or a CUDA device's (kVram), either on each side of a transfer. A list of them
// is prepared once and becomes layouts (transport/layout.h): a transfer names two lists and the
// indices to pair. Posting one does not read its descriptors again.
//
// Memory of devices moves by whatever reaches it: adapters, copies between devices of one machine,
// or pinned memory of the host in between (gpudirect/README.md); the processor never touches it.
// What is promised of transfers, fences and ends is the same as for the host's. A kernel that reads
// what came starts after the transfer has ended; one that wrote what is sent has ended before
// post().
//
// Files (MemoryKind::kFile) are the remote side of a transfer with oneself, whose local side is
// host memory (kVram is Unimplemented): Op::kWrite writes to them, Op::kRead reads from them. Their
// descriptors are (offset, bytes, the number of an open file). Threads of the agent move vectors of
// pages at a time. What is promised is the same: a transfer ends once, and after its end no byte of
// it moves.
//
// Paged KV caches of two layouts: kvtransfer/agent_kv.h makes transfers out of lists of blocks.
//
// Threads: every call may come from any thread. Calls on one agent take its lock for a moment; of
// two threads that post one transfer at once, one gets AlreadyExists.
//
// Forks: a forked child makes agents of its own. Calls of its parent's agent fail there with
// InvalidArgument, or return nothing (those without a status); its destructor does nothing. Any
// thread may fork at any time: fork() waits, for a second at most, until no thread makes or ends an
// agent, and for the rounds in which agents meet and move bytes, for those hold locks of OpenSSL
// and UCX, which a child would find taken for ever. What it does not wait for is what others do
// with OpenSSL, and a callback that is longer than that. A child of a process that has met a peer
// over UCX has no UCX. vfork(), posix_spawn() and clone() pass this by: execute another program.
//
// Ownership: memory stays the caller's and must stay mapped until deregister_memory() has returned
// OK. Lists, indices and messages are copied. Ids are never used again in a process, so one that
// was released, or that belongs to another agent, is NotFound.
//
// Errors, everywhere: InvalidArgument (the request is wrong), NotFound (an id, an agent, or memory
// that is not known, or not any more), DataLoss (metadata that is damaged, of another version or of
// another cluster), Unavailable (the other agent is gone), ResourceExhausted, Unimplemented.
//
// Source: the calls and their meaning follow NIXL (ai-dynamo/nixl, src/api/cpp/nixl.h, 1.5);
// docs/from-nixl.md lists what differs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/transfer.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

// The longest name of an agent, in bytes: it is told in the handshake, where it is authenticated.
inline constexpr size_t kMaxAgentName = kMaxWorkerName;
// The longest message of notify() and of a transfer, in bytes.
inline constexpr size_t kMaxAgentMessage = 16 << 20;

// Kinds of memory, numbered as in NIXL. kDram, kVram and kFile can be registered; the others are
// refused with Unimplemented, by name. The kind is part of what a range is: what was registered as
// one is not found as another.
enum class MemoryKind : uint8_t { kDram = 0, kVram = 1, kBlock = 2, kObject = 3, kFile = 4 };

// `bytes` bytes at `address` of the owner's process. `device` must be the one that the memory was
// registered with; for host memory it means nothing else. Of a CUDA device: the number that CUDA
// has for it in the owner's process, as cudaGetDevice() says it. Of a file: `bytes` bytes at the
// offset `address` of what the file descriptor `device` has open.
struct Descriptor {
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t device = 0;
  bool operator==(const Descriptor&) const = default;
};

// OK where this process can register memory of that kind, else Unimplemented: of kVram where there
// is no CUDA driver, or no device that this process may use, with the reason. Loads the driver to
// find out.
absl::Status memory_supported(MemoryKind kind);

// `count` descriptors, each `stride` bytes (>= bytes) after the one before.
struct StridedDescriptor {
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t device = 0;
  uint64_t stride = 0;
  uint64_t count = 0;

  // From its first byte to its last; none: it covers nothing, or more than there are addresses.
  std::optional<Descriptor> span() const {
    uint64_t size = 0, end = 0;
    if (count == 0 || __builtin_mul_overflow(count - 1, stride, &size) ||
        __builtin_add_overflow(size, bytes, &size) || __builtin_add_overflow(address, size, &end)) {
      return std::nullopt;
    }
    return Descriptor{address, size, device};
  }
};

// A prepared list, and a transfer made from two: valid until released. 0: none.
struct AgentListId {
  uint64_t value = 0;
  bool operator==(const AgentListId&) const = default;
};
struct AgentTransferId {
  uint64_t value = 0;
  bool operator==(const AgentTransferId&) const = default;
};

enum class AgentTransferState : uint8_t {
  kIdle,       // made, not posted
  kRunning,    // posted; or aborted, and bytes of it may still move
  kDone,       // all bytes are there, and its message is in the other agent's inbox
  kFailed,     // status() says why
  kCancelled,  // ended by abort()
};

struct AgentOutcome {
  AgentTransferState state = AgentTransferState::kIdle;
  absl::Status status;  // as Agent::status()
};

// A payload of statuses (absl::Status::GetPayload()) of which the reason is that a transfer was not
// posted.
inline constexpr char kNotPosted[] = "baton/not-posted";

// Times of the last post() of a transfer.
struct AgentTelemetry {
  Time start{};              // when it was posted, on the worker's clock
  Time post_duration{};      // inside post()
  Time transfer_duration{};  // from post() to the end
  uint64_t bytes = 0;
  uint64_t descriptors = 0;  // after neighbours on both sides were merged
};

struct AgentMessage {
  std::string agent;  // its sender
  std::string payload;
};

// A message of ours that no agent confirmed before its agent went or was given up. It may have come
// there all the same.
struct AgentLostMessage {
  std::string agent;  // it was for
  std::string payload;
  absl::Status why;
};

struct AgentStats {
  uint64_t lists = 0;          // prepared and not released
  uint64_t transfers = 0;      // made and not released
  uint64_t running = 0;        // of them, posted and not ended
  uint64_t remotes = 0;        // agents whose metadata is loaded
  uint64_t senders = 0;        // connections by which messages may come, or have come unread
  uint64_t registered = 0;     // descriptors registered now
  uint64_t messages_lost = 0;  // ever
  WorkerStats worker;
};

// Whether it is "name:4000", which DNS is asked for; not "10.0.0.1:4000", "[::1]:4000" or nonsense.
bool asks_dns(std::string_view host_port);

struct AgentOptions {
  std::string name;      // unique among the agents that meet; 1 to kMaxAgentName bytes
  WorkerOptions worker;  // key, listener, providers, settings; its name is the agent's
  // A thread that moves the bytes; it sleeps when there is nothing to do. Without it they move
  // inside post(), state(), wait(), release() and messages() only. With it too they move inside
  // state(), wait() and messages() when it is not at it: whoever asks again and again does the work
  // himself, and the thread stands back.
  bool progress_thread = true;
  // A thread that serves metadata to, and takes it from, agents that call fetch_metadata() and
  // send_metadata() with this agent's host:port (worker.listen_host and .listen_port). Each gives
  // its own; of those that have gone, the first beyond 1,024 are forgotten. The thread stands still
  // while 64 MiB of messages() are unread.
  bool serve_metadata = false;
  bool serve_thread = true;  // false: no such thread, messages() does its work
  // Where agents leave metadata for each other, by name: "etcd://HOST:PORT[,HOST:PORT...]/PREFIX",
  // "http://HOST:PORT/PATH" (a server that takes GET, PUT and DELETE below it), or "file:///FOLDER"
  // (which all agents see, and which is there: else create() is NotFound, or FailedPrecondition
  // where it cannot be written). "": nowhere. What an agent left is taken to be gone when the agent
  // has been dead for as long as `metadata_lease` (1 s to 24 h; in whole seconds for etcd; not used
  // for a folder, where the kernel knows).
  std::string metadata_store;
  Time metadata_lease = std::chrono::seconds(10);
};

class AgentKvPlan;  // kvtransfer/agent_kv.h

class Agent {
 public:
  // InvalidArgument for a name that is empty or too long, ResourceExhausted where no thread can be
  // had, and what Worker::create() says.
  static absl::StatusOr<std::unique_ptr<Agent>> create(AgentOptions options);
  // Over a worker that is there already, whose messages and peer events the agent takes from now
  // on: for whoever must drive it too, as a simulated fabric does. options.worker is not used but
  // for its key.
  static absl::StatusOr<std::unique_ptr<Agent>> create(std::unique_ptr<Worker> worker,
                                                       AgentOptions options);
  // Cancels and fences what runs. Nothing touches registered memory afterwards. In a forked child
  // it does nothing: the agent is the parent's.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // OK; or InvalidArgument, what each call says in a forked child.
  absl::Status usable() const;
  const std::string& name() const;
  // Where this agent listens: host:port users type the second one.
  const std::string& address() const;
  uint16_t port() const;

  // --- memory ------------------------------------------------------------------------------
  // Registers each range; all or none. Ranges may overlap and repeat. Memory that is mapped
  // read-only can be read by others and not written. A file may be shorter than its range until
  // something is read there; it stays open for the agent, whoever closes `device`, until its ranges
  // are deregistered. InvalidArgument: a range is of another kind than `kind` (memory of a device
  // as kDram, the host's as kVram), of another device than it says, managed memory, or in several
  // allocations. Unimplemented: kVram without a driver or a device.
  absl::Status register_memory(absl::Span<const Descriptor> ranges,
                               MemoryKind kind = MemoryKind::kDram);
  // One range, mapped MAP_SHARED from `offset` on of a memfd, or of a file of tmpfs, that cannot
  // shrink (F_SEAL_SHRINK; InvalidArgument without): agents of this machine map it too and reach it
  // with one copy and no system call for each page, while other memory costs them a
  // process_vm_readv() for every few pages. The descriptor stays open until the range is
  // deregistered.
  absl::Status register_mapped(const Descriptor& range, int fd, uint64_t offset = 0);
  // Registers what each row covers, from its first byte to its last, and prepares the rows as a
  // local list: an engine's cache in one call. All or nothing. deregister_memory() names a row as
  // one range.
  absl::StatusOr<AgentListId> register_rows(absl::Span<const StridedDescriptor> rows,
                                            MemoryKind kind = MemoryKind::kDram);
  // Takes registrations back, each named as it was registered; NotFound, and nothing changes, if
  // one is not there. Fences: nothing else touches the memory when it has returned OK. Lists over
  // it stay valid ids; transfers made from them fail. FailedPrecondition while a transfer of this
  // agent uses it.
  absl::Status deregister_memory(absl::Span<const Descriptor> ranges,
                                 MemoryKind kind = MemoryKind::kDram);

  // --- agents that know each other ---------------------------------------------------------
  // What another agent needs to reach all registered memory of this one: bytes to be passed on
  // unchanged, by whatever means the application has. They hold keys to that memory, and a code
  // that only agents with the same cluster key can make or accept.
  absl::StatusOr<std::string> metadata() const;
  // The same for some registered ranges. It adds to what the other agent knows of this one.
  // `with_address`: also how to reach it, which it must know before it uses the ranges.
  absl::StatusOr<std::string> partial_metadata(absl::Span<const Descriptor> ranges,
                                               bool with_address,
                                               MemoryKind kind = MemoryKind::kDram) const;
  // Loads an agent's metadata and returns its name. Newer metadata of the same agent replaces (or,
  // if partial, extends) the old, up to 262,144 ranges in parts (ResourceExhausted); prepared lists
  // live on. Another agent of the same name, such as
  // one that was started again, takes its place: lists and transfers of the old one are NotFound.
  absl::StatusOr<std::string> add_remote(std::string_view metadata);
  // Forgets an agent and closes the connection: its lists are NotFound, and so is posting transfers
  // made from them. Quiet when it is not known. Returns at once. Where no transfer of ours with it
  // runs, nothing of that agent lands or is read here any more. Where one does, it goes on until
  // the other agent has said that no byte of it moves there either, or was silent for
  // peer.answer_ms; it ends as failed then, and release() waits for that.
  void remove_remote(std::string_view agent);
  // Whether the agent is known, is not known to be gone, and `ranges` are within its memory.
  bool has_remote(std::string_view agent, absl::Span<const Descriptor> ranges = {},
                  MemoryKind kind = MemoryKind::kDram);
  // Blocks until it is so. DeadlineExceeded when `timeout` ran out first; the text says what is
  // known of why: no agent answers there, its metadata was refused, it was lost.
  absl::Status wait_remote(std::string_view agent, absl::Span<const Descriptor> ranges = {},
                           Time timeout = kNever, MemoryKind kind = MemoryKind::kDram);
  // By the listener of an agent with serve_metadata, "host:port". All three return at once, but for
  // the time that DNS takes to look up a name, for which no other call waits; watch has_remote():
  // whoever is not there yet is called again, for a minute, as long as has_remote()
  // or messages() is called (or this agent has serve_metadata). fetch asks for the metadata of
  // `agent`; send gives ours (or `metadata`, partial); invalidate takes ours back there.
  absl::Status fetch_metadata(std::string_view agent, std::string_view host_port);
  // fetch_metadata() that does not wait for DNS either, for a thread that serves others meanwhile:
  // a name is looked up by another thread, and the call is made again, some times a second, until
  // has_remote(). One of them says what failed in looking it up.
  absl::Status ask_metadata(std::string_view agent, std::string_view host_port);
  // Both calls take "" for an agent whose name is not known. name_at() says the name of the agent
  // at that address; "": it was not reached yet. An error: the last call there was refused, or went
  // down.
  absl::StatusOr<std::string> name_at(std::string_view host_port);
  absl::Status send_metadata(std::string_view host_port, std::string_view metadata = {});
  absl::Status invalidate_metadata(std::string_view host_port);
  // By AgentOptions::metadata_store; FailedPrecondition without one. All return at once, and what
  // could not be done is tried again as long as the agent lives: metadata_state() says how things
  // stand. Whatever is left there counts only if it was made with the cluster's key, by an agent of
  // the name it is found under.
  //
  // Leaves ours there (or `metadata`, partial, under a label of its own). Call it again when memory
  // was registered since. Of two agents of one name the later one is refused (AlreadyExists) while
  // the first one lives, and takes its place when that is dead.
  absl::Status publish_metadata(std::string_view metadata = {}, std::string_view label = {});
  // Loads what `agent` leaves there, now and whenever it changes, until remove_remote(). An agent
  // whose lease has run out is removed, unless the connection to it is up.
  absl::Status follow_metadata(std::string_view agent, std::string_view label = {});
  // Takes ours back: whoever follows it removes this agent.
  absl::Status withdraw_metadata();
  // For this agent: OK when its metadata is published; AlreadyExists; Unavailable, with the
  // store's reason. For another: OK when it was found and loaded; NotFound when it is not
  // published; FailedPrecondition when it was taken back; DataLoss for what was refused.
  absl::Status metadata_state(std::string_view agent) const;
  // Starts connecting now instead of at the first use.
  absl::Status connect(std::string_view agent);
  // For people: the route taken to an agent, and why not a better one.
  std::string explain(std::string_view agent) const;

  // --- lists -------------------------------------------------------------------------------
  // Prepares a list over registered memory: of this agent, or of a remote one (its own name stands
  // for itself). NotFound names the first descriptor that no registered range covers. Equal steps
  // and sizes cost no memory, whatever the number of descriptors: up to 2^32 - 1. Lists of files
  // are remote ones, of this agent; they are Unimplemented elsewhere.
  absl::StatusOr<AgentListId> prepare_local(absl::Span<const Descriptor> list,
                                            MemoryKind kind = MemoryKind::kDram);
  absl::StatusOr<AgentListId> prepare_remote(std::string_view agent,
                                             absl::Span<const Descriptor> list,
                                             MemoryKind kind = MemoryKind::kDram);
  // Rows of descriptors; an index counts the descriptors of all rows in order.
  absl::StatusOr<AgentListId> prepare_local(absl::Span<const StridedDescriptor> rows,
                                            MemoryKind kind = MemoryKind::kDram);
  absl::StatusOr<AgentListId> prepare_remote(std::string_view agent,
                                             absl::Span<const StridedDescriptor> rows,
                                             MemoryKind kind = MemoryKind::kDram);
  // Transfers made from it stay as they are. NotFound if it is released already.
  absl::Status release_list(AgentListId list);

  // --- transfers ---------------------------------------------------------------------------
  // Pairs local[local_indices[i]] with remote[remote_indices[i]]. InvalidArgument: no Op, the two
  // differ in number or are empty, an index is out of range, two of a pair differ in bytes.
  // `message`, if not empty, reaches the other agent's inbox when all bytes are there; with files
  // it is Unimplemented. Where a file's transfer fails, bytes of it may have moved; Internal or
  // ResourceExhausted says what the system said, and where.
  absl::StatusOr<AgentTransferId> make_transfer(Op op, AgentListId local,
                                                absl::Span<const int64_t> local_indices,
                                                AgentListId remote,
                                                absl::Span<const int64_t> remote_indices,
                                                std::string_view message = {});
  // Without prepared lists: pairs local[i] with remote[i]. `kind`: of the remote side;
  // `local_kind`: of the local one.
  absl::StatusOr<AgentTransferId> make_transfer(Op op, absl::Span<const Descriptor> local,
                                                absl::Span<const Descriptor> remote,
                                                std::string_view agent,
                                                std::string_view message = {},
                                                MemoryKind kind = MemoryKind::kDram,
                                                MemoryKind local_kind = MemoryKind::kDram);
  // Starts it. A transfer that has ended, in whatever way, may be posted again. AlreadyExists
  // while it runs. `message`, unless null, replaces the one it was made with. One above 60,000
  // bytes waits, and the transfer runs, while 64 MiB of these are on their way to that agent:
  // transfers get the room in turn. An agent keeps nothing of the message of a transfer that was
  // aborted or failed half-way through it.
  absl::Status post(AgentTransferId transfer, const std::string_view* message = nullptr);
  absl::StatusOr<AgentTransferState> state(AgentTransferId transfer);
  // How it ended: OK when done; Unavailable("... running") while it runs; FailedPrecondition
  // before post().
  absl::Status status(AgentTransferId transfer) const;
  // State and status of one moment, where other threads may post it again; moves bytes as state().
  absl::StatusOr<AgentOutcome> outcome(AgentTransferId transfer);
  // Blocks until it has ended and returns how. DeadlineExceeded when `timeout` ran out first: it
  // still runs.
  absl::Status wait(AgentTransferId transfer, Time timeout = kNever);
  // post(), wait() and release() in one, for callers that only wait; returns its result. When it
  // returns, no byte of it moves and the id is gone, whatever came of it; what ran out of time was
  // aborted (DeadlineExceeded). AlreadyExists, and nothing else happens: it runs already.
  absl::Status run(AgentTransferId transfer, Time timeout = kNever);
  // Asks for the end and returns at once: it has ended when state() says so.
  absl::Status abort(AgentTransferId transfer);
  // Whether its local memory may be used for something else: it does not run, or it was aborted and
  // waits for nothing but the other agent's word (Worker::local_free()). Moves bytes as state().
  absl::StatusOr<bool> local_free(AgentTransferId transfer);
  // Ends it, fenced: when this returns OK, no byte of the transfer moves any more, here or there,
  // and the id is gone. Blocks while the other agent is asked; one that stays silent is given up
  // after peer.answer_ms and peer.redial_ms (docs/settings.md), or DeadlineExceeded after
  // `timeout`: then the id is still there, to be released again, not posted. Unavailable, and the
  // id is gone: a write was not done when its agent was given up without a word, which may be alive
  // behind a network that is not. Nothing moves here any more; bytes that were on their way may
  // land there until it hears of the end.
  absl::Status release(AgentTransferId transfer, Time timeout = kNever);
  // For destructors: aborts, returns at once, and gives the id back. The fence comes later, and
  // until then deregister_memory() of its memory is FailedPrecondition.
  void abandon(AgentTransferId transfer);
  // FailedPrecondition before post().
  absl::StatusOr<AgentTelemetry> telemetry(AgentTransferId transfer) const;

  // --- messages ----------------------------------------------------------------------------
  // Sends bytes (also none) to an agent's inbox; at most kMaxAgentMessage. Returns at once, but for
  // one above 60,000 bytes while 64 MiB of these are on their way there, or no transfer is free:
  // that waits for 10 s at most, and is ResourceExhausted then. A shorter one is so at once when
  // those that this agent has not taken yet have their share of the transfers, a third
  // (WorkerOptions::max_transfers): nothing else waits for an agent that does not read. An
  // agent that is gone is Unavailable from when that is known until it is back: each such call
  // calls it once more, and waits 0.1 s for its answer. Those of one thread arrive in the order
  // sent, with two exceptions: one above 60,000 bytes may arrive later than those behind
  // it, and so may those on a connection that was lost or gave way to a better one. What is lost
  // after that, with its agent, is told by lost_messages().
  absl::Status notify(std::string_view agent, std::string_view message);
  // All that came since the last call, oldest first; also of agents that have gone, however many
  // came and went since. While no caller asks, 64 MiB are kept of those that have gone, of 65,536
  // of them at most: new ones are refused then, and told why.
  std::vector<AgentMessage> messages();
  // The same, but at most `most`, and blocks until there is one; empty when `timeout` ran out
  // first. Of several threads that wait, each gets what no other one has.
  std::vector<AgentMessage> wait_messages(Time timeout = kNever, size_t most = SIZE_MAX);
  // Those of our notify() that were lost since the last call, oldest first; at most the newest
  // 1,024 of them and 16 MiB (stats() counts all). event_fd() becomes readable. A transfer's
  // message is not among them: it fails with its transfer.
  std::vector<AgentLostMessage> lost_messages();

  // An eventfd that becomes readable when something happened: a transfer ended, a message came, an
  // agent went. Read it (8 bytes) to clear it.
  int event_fd() const;
  // Moves bytes, where no progress thread does; true if anything happened.
  bool progress();
  // Blocks until ready() holds, and moves bytes meanwhile where no progress thread does. ready() is
  // asked on this thread, after each round of progress. DeadlineExceeded when `timeout` ran out.
  absl::Status wait_until(const std::function<bool()>& ready, Time timeout = kNever);
  // Makes event_fd() readable, and wait_until() ask again. Any thread, but not while holding a lock
  // that ready() takes.
  void wake();
  AgentStats stats() const;

 private:
  friend class AgentKvPlan;
  class Impl;
  explicit Agent(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::kvtransfer
