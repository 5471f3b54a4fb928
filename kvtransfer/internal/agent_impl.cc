// An agent's life, its memory, its lists and transfers.
#include "kvtransfer/internal/agent_impl.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace baton::kvtransfer {

absl::Status check_kind(MemoryKind kind) {
  static constexpr const char* kNames[] = {"DRAM", "VRAM", "BLK", "OBJ", "FILE"};
  const auto number = static_cast<size_t>(kind);
  if (number == 0) return absl::OkStatus();
  if (number >= std::size(kNames)) {
    return absl::InvalidArgumentError(absl::StrFormat("no kind of memory has number %u", number));
  }
  if (kind == MemoryKind::kFile) {
    return absl::UnimplementedError(
        "files (FILE) are the remote side of a transfer with oneself: the local side is host "
        "memory "
        "(DRAM), and other agents do not reach them");
  }
  return absl::UnimplementedError(absl::StrFormat(
      "%s memory cannot be used here: this agent moves host memory (DRAM), and files (FILE) of its "
      "own; copy it there first",
      kNames[number]));
}

absl::Status check_message(std::string_view message) {
  if (message.size() <= kMaxAgentMessage) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "a message of %u bytes is longer than the limit of %u: send the data as a transfer",
      message.size(), kMaxAgentMessage));
}

absl::Status no_such_list() {
  return absl::NotFoundError("no such list: it was released already, or is another agent's");
}
absl::Status no_such_transfer() {
  return absl::NotFoundError("no such transfer: it was released already, or is another agent's");
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
      files(std::make_unique<AgentFiles>(*worker)),
      ranges(std::make_shared<AgentRanges<MemoryRegion>>()) {
  if (absl::StatusOr<Address> address = Address::decode(worker->address()); address.ok()) {
    uid = address->uid;
  }
  RemoteAgent& self = remotes[options.name];
  self.uid = uid;
  self.address = worker->address();
  self.epoch = next_agent_id();
  self.ranges = std::make_shared<AgentRanges<RemoteRegion>>();
  if (options.progress_thread) progress_thread = std::make_unique<ProgressThread>(*worker);
  if (options.serve_metadata) server = std::thread([this] { serve(); });
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
  worker = nullptr;  // ends what is open, and fences all memory
}

void Agent::Impl::drive() {
  if (progress_thread == nullptr) worker->progress();
}

absl::Status Agent::Impl::register_memory(absl::Span<const Descriptor> list,
                                          const BackingFile& file) {
  std::lock_guard lock(mutex);
  auto mine = std::make_shared<AgentRanges<MemoryRegion>>(*ranges);
  RemoteAgent& self = remotes[options.name];
  auto given = std::make_shared<AgentRanges<RemoteRegion>>(*self.ranges);
  std::vector<MemoryRegion> made;
  absl::Status status;
  for (const Descriptor& where : list) {
    void* data = reinterpret_cast<void*>(where.address);
    absl::StatusOr<MemoryRegion> region =
        worker->register_memory(data, where.bytes, Access::kRemoteReadWrite, file);
    if (absl::IsInvalidArgument(region.status())) {  // read-only, perhaps
      const auto read_only = worker->register_memory(data, where.bytes, Access::kRemoteRead);
      if (read_only.ok()) region = read_only;
    }
    absl::StatusOr<RemoteRegion> remote;
    if (region.ok()) {
      made.push_back(*region);
      remote = worker->remote_region(*region);
    } else {
      remote = region.status();
    }
    if (!remote.ok()) {
      status = absl::Status(remote.status().code(),
                            absl::StrFormat("range %u of %u: %s", made.size(), list.size(),
                                            remote.status().message()));
      break;
    }
    mine->add(where, *region);
    given->add(where, *remote);
  }
  if (!status.ok()) {
    for (const MemoryRegion& region : made) worker->deregister_memory(region).IgnoreError();
    return status;
  }
  ranges = std::move(mine);
  self.ranges = std::move(given);
  return absl::OkStatus();
}

absl::Status Agent::Impl::deregister_memory(absl::Span<const Descriptor> list) {
  std::lock_guard lock(mutex);
  auto mine = std::make_shared<AgentRanges<MemoryRegion>>(*ranges);
  for (const Descriptor& where : list) {
    const std::optional<size_t> at = mine->find(where);
    if (!at) {
      return absl::NotFoundError(absl::StrFormat(
          "no range of %u bytes at %#x, device %u, is registered: name it as it was registered",
          where.bytes, where.address, where.device));
    }
    mine->remove(*at);
  }
  mine = std::make_shared<AgentRanges<MemoryRegion>>(*ranges);
  RemoteAgent& self = remotes[options.name];
  auto given = std::make_shared<AgentRanges<RemoteRegion>>(*self.ranges);
  absl::Status status;
  for (const Descriptor& where : list) {
    const size_t at = *mine->find(where);
    status = files->uses((*mine)[at].region) ? absl::FailedPreconditionError(
                                                   "a transfer to or from a file uses this memory: "
                                                   "release that first")
                                             : worker->deregister_memory((*mine)[at].region);
    if (!status.ok()) break;
    mine->remove(at);
    given->remove(at);
  }
  ranges = std::move(mine);
  self.ranges = std::move(given);
  return status;
}

// `agent`: none for this one's own memory, to be the local side.
template <typename Row>
absl::StatusOr<AgentListId> Agent::Impl::prepare(std::optional<std::string_view> agent,
                                                 absl::Span<const Row> rows, MemoryKind kind) {
  const bool of_files = kind == MemoryKind::kFile && agent == options.name;
  if (absl::Status status = check_kind(kind); !status.ok() && !of_files) return status;
  std::shared_ptr<const AgentRanges<MemoryRegion>> mine;
  std::shared_ptr<const AgentRanges<FileRegion>> in_files;
  std::shared_ptr<const AgentRanges<RemoteRegion>> theirs;
  std::string whose;
  uint64_t epoch = 0;
  {
    std::lock_guard lock(mutex);
    if (!agent) {
      mine = ranges;
    } else {
      absl::StatusOr<RemoteAgent*> remote = find_remote(*agent);
      if (!remote.ok()) return remote.status();
      theirs = (*remote)->ranges;
      if (of_files) in_files = files->ranges();
      epoch = (*remote)->epoch;
      whose = *agent;
    }
  }
  absl::StatusOr<AgentList> list = of_files ? make_agent_list(*in_files, rows, whose)
                                   : agent  ? make_agent_list(*theirs, rows, whose)
                                            : make_agent_list(*mine, rows, options.name);
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

std::shared_ptr<const AgentList> Agent::Impl::find_list(AgentListId id) const {
  std::lock_guard lock(mutex);
  const auto at = lists.find(id.value);
  return at == lists.end() ? nullptr : at->second;
}

std::shared_ptr<AgentTransfer> Agent::Impl::find_transfer(AgentTransferId id) const {
  std::lock_guard lock(mutex);
  const auto at = transfers.find(id.value);
  return at == transfers.end() ? nullptr : at->second;
}

template <typename... Which>
absl::StatusOr<AgentTransferId> Agent::Impl::make(Op op, const AgentList& remote,
                                                  std::string_view message, const Which&... which) {
  if (absl::Status status = check_message(message); !status.ok()) return status;
  std::shared_ptr<AgentTransfer> transfer;
  if (remote.of_files()) {
    if (!message.empty()) return files_hear_nothing();
    absl::StatusOr<AgentFilePlan> plan = plan_file_transfer(which...);
    if (!plan.ok()) return plan.status();
    transfer = std::make_shared<AgentFileTransfer>(*files, op, *std::move(plan), remote.agent,
                                                   remote.epoch);
  } else {
    absl::StatusOr<AgentPlan> plan = plan_agent_transfer(which...);
    if (!plan.ok()) return plan.status();
    transfer = std::make_shared<AgentWorkerTransfer>(*worker, op, *std::move(plan), remote.agent,
                                                     remote.epoch, message);
  }
  const AgentTransferId id{next_agent_id()};
  std::lock_guard lock(mutex);
  transfers.emplace(id.value, std::move(transfer));
  return id;
}

using Indices = absl::Span<const int64_t>;
template absl::StatusOr<AgentTransferId> Agent::Impl::make(Op, const AgentList&, std::string_view,
                                                           const AgentList&, const Indices&,
                                                           const AgentList&, const Indices&);
template absl::StatusOr<AgentTransferId> Agent::Impl::make(Op, const AgentList&, std::string_view,
                                                           const AgentList&, const AgentList&);

absl::Status Agent::Impl::post(AgentTransferId id, const std::string_view* message) {
  if (message != nullptr) {
    if (absl::Status status = check_message(*message); !status.ok()) return status;
  }
  std::shared_ptr<AgentTransfer> transfer;
  absl::StatusOr<PeerId> peer;
  {
    std::lock_guard lock(mutex);
    const auto at = transfers.find(id.value);
    if (at == transfers.end()) return no_such_transfer();
    transfer = at->second;
    const auto remote = remotes.find(transfer->agent());
    if (remote == remotes.end() || remote->second.epoch != transfer->epoch()) {
      return absl::NotFoundError(absl::StrFormat(
          "agent \"%s\" was removed, or another one has its name now: prepare the lists again",
          transfer->agent()));
    }
    if (!transfer->needs_peer()) return transfer->post({}, message);
    peer = peer_of(remote->second);
  }
  if (!peer.ok()) return peer.status();
  absl::Status posted = transfer->post(*peer, message);
  drive();
  return posted;
}

// An agent that was lost without a word does not know that the transfer has ended.
absl::Status Agent::Impl::check_fence(const AgentTransfer& transfer) {
  const PeerId peer = transfer.moves_at();
  if (peer.generation == 0 || worker->peer_state(peer) != PeerState::kDown) return absl::OkStatus();
  const absl::Status parted = worker->disconnect(peer, Time::zero());  // how it has
  if (parted.ok()) return parted;
  return absl::UnavailableError(absl::StrFormat(
      "the transfer is released, but agent \"%s\" was given up: %s", transfer.agent(),
      absl::IsNotFound(parted) ? "how is forgotten by now" : parted.message()));
}

absl::Status Agent::Impl::release(AgentTransferId id, Time timeout) {
  const std::shared_ptr<AgentTransfer> transfer = find_transfer(id);
  if (transfer == nullptr) return no_such_transfer();
  if (!transfer->quiet()) {
    transfer->abort();
    absl::Status waited = worker->wait_until([&] { return transfer->quiet(); }, timeout);
    if (!waited.ok()) {
      if (!transfer->needs_peer()) {
        return absl::DeadlineExceededError(
            "a file answers slowly: keep the transfer's memory as it is, and release it again");
      }
      return absl::DeadlineExceededError(absl::StrFormat(
          "agent \"%s\" has not said yet that no byte of the transfer moves any more: keep its "
          "memory as it is, and release it again",
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
