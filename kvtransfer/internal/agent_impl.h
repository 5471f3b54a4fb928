// The inside of an agent. Split by subject: agent.cc (the public calls), agent_impl.cc (its life,
// its memory, its lists and transfers), agent_remotes.cc (other agents and their metadata),
// agent_inbox.cc (messages), agent_store.cc (metadata in a store).
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvtransfer/agent.h"
#include "kvtransfer/internal/agent_file_transfer.h"
#include "kvtransfer/internal/agent_files.h"
#include "kvtransfer/internal/agent_list.h"
#include "kvtransfer/internal/agent_memory_kind.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/internal/agent_outbox.h"
#include "kvtransfer/internal/agent_ranges.h"
#include "kvtransfer/internal/agent_transfer.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "kvtransfer/metadata/metadata_keeper.h"
#include "transport/base/threads/calls_beside.h"
#include "transport/base/threads/forks.h"
#include "transport/progress_thread.h"

namespace baton::kvtransfer {

// What others may make an agent keep. Of messages that no caller reads: what comes then stays in
// the worker, where its senders' credit ends.
inline constexpr size_t kMostUnread = 64 << 20;
// Ranges of one agent that came in parts: four times what a worker can hold.
inline constexpr size_t kMostRemoteRanges = 1 << 18;
// Agents that gave their metadata unasked and have gone.
inline constexpr size_t kMostGoneRemotes = 1024;
// The worker tells of each peer that goes, but of those that it has forgotten before it was asked.
// Beyond this many senders, and twice the last count, drop those that are gone.
inline constexpr size_t kFewSenders = 64;

// Another agent; or this one, as others see it.
struct RemoteAgent {
  WorkerUid uid;
  std::string address;
  uint64_t epoch = 0;  // another one whenever another agent takes the name
  PeerId peer;         // generation 0: not called yet
  absl::Status lost;   // why it was lost, from then on until it is up again
  AgentMemoryTables<RemoteRegion> ranges;
  uint64_t told_by = 0;  // the peer that gave its own metadata unasked
  uint64_t told = 0;     // in Impl::unasked; 0: it is not there
};

// Locks: `inbox_mutex` before `mutex` before the worker's own. Callbacks of the worker take
// neither.
class Agent::Impl {
 public:
  Impl(std::unique_ptr<Worker> its_worker, ClusterKey cluster_key, AgentOptions agent_options,
       std::unique_ptr<MetadataStore> store);
  ~Impl();

  // agent_impl.cc
  absl::Status usable() const;
  absl::Status register_memory(absl::Span<const Descriptor> list, MemoryKind kind,
                               const BackingFile& file = {});
  absl::Status deregister_memory(absl::Span<const Descriptor> list, MemoryKind kind);
  // Whether a transfer that runs has parts in it that the worker has not had yet. Locked.
  bool is_awaited(const MemoryRegion& region) const;
  template <typename Row>
  absl::StatusOr<AgentListId> prepare(std::optional<std::string_view> agent,
                                      absl::Span<const Row> rows, MemoryKind kind);
  // `which`: the arguments of plan_agent_transfer().
  template <typename... Which>
  absl::StatusOr<AgentTransferId> make(Op op, const AgentList& local, const AgentList& remote,
                                       std::string_view message, const Which&... which);
  AgentTransferId keep(std::shared_ptr<AgentTransfer> transfer);
  // NotFound where the agent is not the one any more whose memory was prepared; `again`: a remedy.
  absl::Status check_epoch(const std::string& agent, uint64_t epoch, const char* again) const;
  std::shared_ptr<const AgentList> find_list(AgentListId id) const;
  absl::StatusOr<std::shared_ptr<AgentTransfer>> find_transfer(AgentTransferId id) const;
  absl::Status post(AgentTransferId id, const std::string_view* message);
  absl::Status release(AgentTransferId id, Time timeout);
  absl::Status check_fence(const AgentTransfer& transfer);  // of one that has ended
  void drive();                                             // progress, where no thread makes any

  // agent_remotes.cc
  AgentMetadata whole_metadata() const;  // locked
  absl::StatusOr<std::string> partial_metadata(absl::Span<const Descriptor> list, bool with_address,
                                               MemoryKind kind) const;
  // `from`: whose own it must be.
  struct Sender;
  absl::StatusOr<std::string> add_remote(std::string_view bytes, const Sender* from = nullptr);
  void remember_told(const std::string& agent, uint64_t by);  // inbox_mutex is held
  void forget_told(RemoteAgent& remote);                      // locked
  void remove_remote(std::string_view agent, const WorkerUid* only = nullptr);
  absl::StatusOr<std::string> name_at(std::string_view host_port);
  bool has_remote(std::string_view agent, absl::Span<const Descriptor> list, MemoryKind kind);
  std::string why_missing(std::string_view agent);  // as far as is known
  void look_at(RemoteAgent& remote);                // whether it is lost, or up again; locked
  void part_from(const RemoteAgent& remote);        // locked
  absl::StatusOr<RemoteAgent*> find_remote(std::string_view agent);  // locked
  absl::StatusOr<PeerId> peer_of(RemoteAgent& remote);               // locked
  bool is_up(PeerId peer) const;
  absl::StatusOr<PeerId> caller(std::string_view host_port);
  void call_again(const std::string& host_port);  // locked
  void take_called();                             // locked
  // caller(), where DNS has to be asked, without waiting for it. Generation 0: call it again.
  absl::StatusOr<PeerId> look_up(const std::string& host_port);
  absl::Status send(PeerId peer, AgentFrameKind kind, std::string_view payload);
  // `peer`: the listener there.
  absl::Status say(std::string_view host_port, AgentFrameKind kind, std::string_view payload,
                   const absl::StatusOr<PeerId>& peer);
  absl::Status fetch(std::string_view agent, std::string_view host_port,
                     const absl::StatusOr<PeerId>& peer);
  void say_again();  // what was said to an agent that was not there yet

  // agent_store.cc
  absl::Status check_store() const;
  std::string farewell() const;
  absl::Status found(std::string_view agent, const std::string& bytes);
  void gone(std::string_view agent);

  // agent_inbox.cc
  void pump();
  void hear(PeerId peer, AgentFrame frame);  // inbox_mutex is held
  void answer_who_asked();                   // inbox_mutex is held
  void forget_who_went();                    // inbox_mutex is held
  void serve();
  absl::Status notify(std::string_view agent, std::string_view message);
  std::vector<AgentMessage> messages();
  void take_messages(std::vector<AgentMessage>& out, size_t most);
  std::vector<AgentMessage> wait_messages(Time timeout, size_t most);

  const base::MadeHere made_here;
  const AgentOptions options;
  const ClusterKey key;
  WorkerUid uid;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<AgentOutbox> outbox;
  std::unique_ptr<AgentFiles> files;

  mutable std::mutex mutex;
  AgentMemoryTables<MemoryRegion> ranges;
  // This agent too; its ranges are those above, in the same order.
  std::map<std::string, RemoteAgent, std::less<>> remotes;
  std::map<std::string, PeerId> callers;  // by host:port
  struct Said {
    std::string host_port;
    AgentFrameKind kind;
    std::string payload;
    PeerId peer;  // it was said to
    Time until, next;
    Time warn;  // when people are told that it is not there yet
  };
  std::vector<Said> said;  // to listeners that were not met yet
  // The last agent whose metadata was asked for or given and did not come to be loaded, and why.
  std::pair<std::string, std::string> refused;
  base::CallsBeside<std::string, absl::StatusOr<PeerId>> calls;  // by host:port; with `mutex`
  std::map<std::string, absl::StatusOr<PeerId>> looked_up;       // what look_up() says next
  std::set<std::string, std::less<>> fetching;  // agents whose metadata was asked for
  std::map<uint64_t, std::string> unasked;      // agents that gave theirs unasked, each once
  absl::flat_hash_map<uint64_t, std::shared_ptr<const AgentList>> lists;
  absl::flat_hash_map<uint64_t, std::shared_ptr<AgentTransfer>> transfers;

  struct Sender {
    std::string name;
    WorkerUid uid;
    AgentAssembler parts;
  };
  std::mutex inbox_mutex;
  absl::flat_hash_map<uint64_t, Sender> senders;  // by peer
  std::vector<uint64_t> down;                     // of them, when what they sent is read
  size_t most_senders = kFewSenders;             // before the worker is asked which are still there
  absl::flat_hash_map<uint64_t, PeerId> asking;  // for our metadata
  std::deque<AgentMessage> inbox;
  std::atomic<size_t> unread{0};  // bytes of it
  std::atomic<int> awaiting{0};   // threads that wait for a message

  std::atomic<bool> stopping{false};
  std::unique_ptr<ProgressThread> progress_thread;
  std::thread server;
  std::unique_ptr<MetadataKeeper> keeper;  // none without a store
};

std::chrono::milliseconds lease_of(const AgentOptions& options);
absl::Status check_message(std::string_view message);
absl::Status check_op(Op op);
absl::Status no_such_list();
absl::Status no_such_range(const Descriptor& where, MemoryKind kind);
absl::Status no_such_transfer();

// A number that no list, transfer or epoch of this process has had.
uint64_t next_agent_id();

}  // namespace baton::kvtransfer
