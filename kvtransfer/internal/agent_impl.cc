// An agent's life, its memory, its lists and transfers.
#include "kvtransfer/internal/agent_impl.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "transport/internal/mapped.h"

namespace baton::kvtransfer {
namespace {

absl::StatusOr<MemoryRegion> register_range(Worker& worker, const Descriptor& where,
                                            const BackingFile& file) {
  void* const data = reinterpret_cast<void*>(where.address);
  absl::StatusOr<MemoryRegion> region =
      worker.register_memory(data, where.bytes, Access::kRemoteReadWrite, file);
  if (absl::IsInvalidArgument(region.status())) {  // read-only, perhaps
    absl::StatusOr<MemoryRegion> read_only =
        worker.register_memory(data, where.bytes, Access::kRemoteRead);
    if (read_only.ok()) region = std::move(read_only);
  }
  return region;
}

}  // namespace

absl::Status check_message(std::string_view message) {
  if (message.size() <= kMaxAgentMessage) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "a message of %u bytes is longer than the limit of %u: send the data as a transfer",
      message.size(), kMaxAgentMessage));
}

// A number may have been made one.
absl::Status check_op(Op op) {
  if (op == Op::kWrite || op == Op::kRead) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("op is Op::kWrite or Op::kRead, not %u", static_cast<unsigned>(op)));
}

absl::Status no_such_list() {
  return absl::NotFoundError("no such list: it was already released, or belongs to another agent");
}
absl::Status no_such_range(const Descriptor& where, MemoryKind kind) {
  return absl::NotFoundError(
      absl::StrFormat("no range of %u bytes at %#x, device %u, is registered as %s: name it as it "
                      "was registered",
                      where.bytes, where.address, where.device, kind_name(kind)));
}
absl::Status no_such_transfer() {
  return absl::NotFoundError(
      "no such transfer: it was already released, or belongs to another agent");
}

uint64_t next_agent_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Agent::Impl::Impl(std::unique_ptr<Worker> its_worker, ClusterKey cluster_key,
                  AgentOptions agent_options, std::unique_ptr<MetadataStore> store)
    : options(std::move(agent_options)),
      key(std::move(cluster_key)),
      worker(std::move(its_worker)),
      outbox(std::make_unique<AgentOutbox>(*worker)),
      files(std::make_unique<AgentFiles>(*worker)) {
  if (absl::StatusOr<Address> address = Address::decode(worker->address()); address.ok()) {
    uid = address->uid;
  }
  RemoteAgent& self = remotes[options.name];
  self.uid = uid;
  self.address = worker->address();
  self.epoch = next_agent_id();
  if (options.progress_thread) progress_thread = std::make_unique<ProgressThread>(*worker);
  if (options.serve_metadata && options.serve_thread) server = std::thread([this] { serve(); });
  if (store != nullptr) {
    keeper = std::make_unique<MetadataKeeper>(
        std::move(store), lease_of(options),
        MetadataKeeper::Events{[this](std::string_view agent, const std::string& bytes) {
                                 return found(agent, bytes);
                               },
                               [this](std::string_view agent) { gone(agent); }});
  }
}

Agent::Impl::~Impl() {
  keeper = nullptr;
  stopping = true;
  if (server.joinable()) server.join();
  for (auto& [id, transfer] : transfers) transfer->abort();
  files->stop();
  progress_thread = nullptr;
  calls.close();     // they use the worker
  worker = nullptr;  // ends what is open, and fences all memory
}

absl::Status Agent::Impl::usable() const {
  if (!made_here.elsewhere()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the agent belongs to the process that this one was forked from: make another one");
}

void Agent::Impl::drive() {
  if (progress_thread == nullptr) worker->progress();
}

absl::Status Agent::Impl::register_memory(absl::Span<const Descriptor> list, MemoryKind kind,
                                          const BackingFile& file) {
  std::lock_guard lock(mutex);
  std::vector<AgentRanges<MemoryRegion>::Range> mine;
  std::vector<AgentRanges<RemoteRegion>::Range> given;
  std::optional<internal::OneLookAtMappings> look;
  if (list.size() > 1 && kind == MemoryKind::kDram) look.emplace();
  absl::Status status;
  for (const Descriptor& where : list) {
    status = check_place(where, kind);
    if (status.ok()) {
      absl::StatusOr<MemoryRegion> region = register_range(*worker, where, file);
      status = region.status();
      if (region.ok()) mine.push_back({where, *region});
    }
    if (status.ok()) {
      absl::StatusOr<RemoteRegion> remote = worker->remote_region(mine.back().region);
      status = remote.status();
      if (remote.ok()) given.push_back({where, *remote});
    }
    if (!status.ok()) break;
  }
  if (!status.ok()) {
    for (const auto& made : mine) worker->deregister_memory(made.region).IgnoreError();
    return absl::Status(status.code(), absl::StrFormat("range %u of %u: %s", given.size(),
                                                       list.size(), status.message()));
  }
  RemoteAgent& self = remotes[options.name];
  ranges.replace(kind, ranges.of(kind)->with(std::move(mine)));
  self.ranges.replace(kind, self.ranges.of(kind)->with(std::move(given)));
  return absl::OkStatus();
}

bool Agent::Impl::is_awaited(const MemoryRegion& region) const {
  return std::any_of(transfers.begin(), transfers.end(),
                     [&](const auto& each) { return each.second->awaits(region); });
}

absl::Status Agent::Impl::deregister_memory(absl::Span<const Descriptor> list, MemoryKind kind) {
  std::lock_guard lock(mutex);
  const AgentRanges<MemoryRegion>& mine = *ranges.of(kind);
  std::vector<size_t> places = mine.find_all(list);
  for (size_t i = 0; i < list.size(); ++i) {
    if (places[i] == mine.kNone) return no_such_range(list[i], kind);
  }
  absl::Status status;
  size_t gone = 0;
  for (; gone < places.size(); ++gone) {
    const MemoryRegion& region = mine[places[gone]].region;
    status = files->uses(region)
                 ? absl::FailedPreconditionError(
                       "a transfer to or from a file uses this memory: release the transfer first")
             : is_awaited(region)
                 ? absl::FailedPreconditionError(
                       "a running transfer uses this memory: wait for its end, or release it")
                 : worker->deregister_memory(region);
    if (!status.ok()) break;
  }
  places.resize(gone);
  RemoteAgent& self = remotes[options.name];
  self.ranges.replace(kind, self.ranges.of(kind)->without(places));
  ranges.replace(kind, mine.without(std::move(places)));
  return status;
}

// `agent`: none for this one's own memory, to be the local side.
template <typename Row>
absl::StatusOr<AgentListId> Agent::Impl::prepare(std::optional<std::string_view> agent,
                                                 absl::Span<const Row> rows, MemoryKind kind) {
  if (absl::Status good = usable(); !good.ok()) return good;
  const bool of_files = kind == MemoryKind::kFile && agent == options.name;
  if (absl::Status status = check_kind(kind); !status.ok() && !of_files) return status;
  AgentMemoryTables<MemoryRegion>::Table mine;
  std::shared_ptr<const AgentRanges<FileRegion>> in_files;
  AgentMemoryTables<RemoteRegion>::Table theirs;
  std::string whose;
  uint64_t epoch = 0;
  {
    std::lock_guard lock(mutex);
    if (!agent) {
      mine = ranges.of(kind);
    } else {
      absl::StatusOr<RemoteAgent*> remote = find_remote(*agent);
      if (!remote.ok()) return remote.status();
      theirs = (*remote)->ranges.of(kind);
      if (of_files) in_files = files->ranges();
      epoch = (*remote)->epoch;
      whose = *agent;
    }
  }
  absl::StatusOr<AgentList> list = of_files ? make_agent_list(*in_files, rows, whose, kind)
                                   : agent  ? make_agent_list(*theirs, rows, whose, kind)
                                            : make_agent_list(*mine, rows, options.name, kind);
  if (!list.ok()) return list.status();
  list->agent = std::move(whose);
  list->epoch = epoch;
  const AgentListId id{next_agent_id()};
  auto kept = std::make_shared<const AgentList>(*std::move(list));
  std::lock_guard lock(mutex);
  lists.emplace(id.value, std::move(kept));
  return id;
}

template absl::StatusOr<AgentListId> Agent::Impl::prepare(std::optional<std::string_view>,
                                                          absl::Span<const Descriptor>, MemoryKind);
template absl::StatusOr<AgentListId> Agent::Impl::prepare(std::optional<std::string_view>,
                                                          absl::Span<const StridedDescriptor>,
                                                          MemoryKind);

AgentTransferId Agent::Impl::keep(std::shared_ptr<AgentTransfer> transfer) {
  const AgentTransferId id{next_agent_id()};
  std::lock_guard lock(mutex);
  transfers[id.value] = std::move(transfer);
  return id;
}

absl::Status Agent::Impl::check_epoch(const std::string& agent, uint64_t epoch,
                                      const char* again) const {
  std::lock_guard lock(mutex);
  const auto known = remotes.find(agent);
  if (known != remotes.end() && known->second.epoch == epoch) return absl::OkStatus();
  return absl::NotFoundError(absl::StrFormat(
      "agent \"%s\" was removed, or another agent has its name now: %s again", agent, again));
}

std::shared_ptr<const AgentList> Agent::Impl::find_list(AgentListId id) const {
  std::lock_guard lock(mutex);
  const auto at = lists.find(id.value);
  return at == lists.end() ? nullptr : at->second;
}

absl::StatusOr<std::shared_ptr<AgentTransfer>> Agent::Impl::find_transfer(
    AgentTransferId id) const {
  if (absl::Status good = usable(); !good.ok()) return good;
  std::lock_guard lock(mutex);
  const auto at = transfers.find(id.value);
  if (at == transfers.end()) return no_such_transfer();
  return at->second;
}

template <typename... Which>
absl::StatusOr<AgentTransferId> Agent::Impl::make(Op op, const AgentList& local,
                                                  const AgentList& remote, std::string_view message,
                                                  const Which&... which) {
  if (absl::Status status = check_message(message); !status.ok()) return status;
  std::shared_ptr<AgentTransfer> transfer;
  if (remote.of_files()) {
    if (local.kind != MemoryKind::kDram) return files_are_of_the_host(local.kind);
    if (!message.empty()) return files_hear_nothing();
    absl::StatusOr<AgentFilePlan> plan = plan_file_transfer(which...);
    if (!plan.ok()) return plan.status();
    transfer = std::make_shared<AgentFileTransfer>(*files, op, *std::move(plan), remote.agent,
                                                   remote.epoch);
  } else {
    absl::StatusOr<AgentPlan> plan = plan_agent_transfer(which...);
    if (!plan.ok()) return plan.status();
    transfer = std::make_shared<AgentWorkerTransfer>(*worker, *outbox, op, *std::move(plan),
                                                     remote.agent, remote.epoch, message);
  }
  return keep(std::move(transfer));
}

using Indices = absl::Span<const int64_t>;
template absl::StatusOr<AgentTransferId> Agent::Impl::make(Op, const AgentList&, const AgentList&,
                                                           std::string_view, const AgentList&,
                                                           const Indices&, const AgentList&,
                                                           const Indices&);
template absl::StatusOr<AgentTransferId> Agent::Impl::make(Op, const AgentList&, const AgentList&,
                                                           std::string_view, const AgentList&,
                                                           const AgentList&);

absl::Status Agent::Impl::post(AgentTransferId id, const std::string_view* message) {
  if (message != nullptr) {
    if (absl::Status status = check_message(*message); !status.ok()) return status;
  }
  std::shared_ptr<AgentTransfer> transfer;
  absl::Status posted;
  {
    // Held until the worker has it: remove_remote() drops an agent with which nothing runs.
    std::lock_guard lock(mutex);
    const auto at = transfers.find(id.value);
    if (at == transfers.end()) return no_such_transfer();
    transfer = at->second;
    const auto remote = remotes.find(transfer->agent());
    if (remote == remotes.end() || remote->second.epoch != transfer->epoch()) {
      return absl::NotFoundError(absl::StrFormat(
          "agent \"%s\" was removed, or another agent has its name now: prepare the lists again",
          transfer->agent()));
    }
    if (!transfer->needs_peer()) return transfer->post({}, message);
    const absl::StatusOr<PeerId> peer = peer_of(remote->second);
    if (!peer.ok()) return peer.status();
    posted = transfer->post(*peer, message);
  }
  drive();
  return posted;
}

// An agent that was lost without a word does not know that the transfer has ended.
absl::Status Agent::Impl::check_fence(const AgentTransfer& transfer) {
  const PeerId peer = transfer.moves_at();
  if (peer.generation == 0) return absl::OkStatus();
  const absl::Status parted = worker->disconnect(peer, Time::zero());  // how it has
  if (parted.ok()) return parted;
  return absl::UnavailableError(absl::StrFormat(
      "the transfer is released, but agent \"%s\" was given up: %s", transfer.agent(),
      absl::IsNotFound(parted) ? "the result is no longer kept" : parted.message()));
}

absl::Status Agent::Impl::release(AgentTransferId id, Time timeout) {
  const auto found = find_transfer(id);
  if (!found.ok()) return found.status();
  const std::shared_ptr<AgentTransfer>& transfer = *found;
  transfer->close();  // or another thread would post it behind the look that finds it quiet
  if (!transfer->quiet()) {
    transfer->abort();
    absl::Status waited = worker->wait_until([&] { return transfer->quiet(); }, timeout);
    if (!waited.ok()) {
      if (!transfer->needs_peer()) {
        return absl::DeadlineExceededError(
            "file I/O of the transfer is still running: keep its memory as it is, and release it "
            "again");
      }
      return absl::DeadlineExceededError(
          absl::StrFormat("agent \"%s\" has not yet confirmed that no more bytes of the transfer "
                          "move: keep its memory as it is, and release it again",
                          transfer->agent()));
    }
  }
  transfer->abort();  // one that waited for room
  absl::Status fenced = check_fence(*transfer);
  std::lock_guard lock(mutex);
  transfers.erase(id.value);
  return fenced;
}

}  // namespace baton::kvtransfer
