// The agent's public calls.
#include "kvtransfer/agent.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_impl.h"
#include "kvtransfer/internal/agent_plan.h"
#include "transport/base/durations.h"

namespace baton::kvtransfer {
namespace {

absl::Status check_name(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxAgentName) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "an agent's name has 1 to %u bytes; this one has %u", kMaxAgentName, name.size()));
}

// A peer maps the file, and must not meet its end.
absl::Status check_mapped(const Descriptor& range, int fd, uint64_t offset) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat file {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &file) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("descriptor %d is not a memfd sealed against shrinking: make it by "
                        "memfd_create(..., MFD_ALLOW_SEALING), and seal it with F_SEAL_SHRINK",
                        fd));
  }
  const auto size = static_cast<uint64_t>(file.st_size);
  if (offset > size || range.bytes > size - offset || offset % 4096 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u bytes at offset %u are outside a file of %u, or do not begin at a page",
                        range.bytes, offset, size));
  }
  return absl::OkStatus();
}

}  // namespace

Agent::Agent(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Agent::~Agent() {
  if (!usable().ok()) (void)impl_.release();  // the parent's, and its threads are not here
}
absl::Status Agent::usable() const { return impl_->usable(); }

absl::StatusOr<std::unique_ptr<Agent>> Agent::create(AgentOptions options) {
  options.worker.name = options.name;
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
  if (!worker.ok()) return worker.status();
  return create(*std::move(worker), std::move(options));
}

absl::StatusOr<std::unique_ptr<Agent>> Agent::create(std::unique_ptr<Worker> worker,
                                                     AgentOptions options) {
  if (absl::Status status = check_name(options.name); !status.ok()) return status;
  absl::StatusOr<ClusterKey> key =
      options.worker.key ? *options.worker.key : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  std::unique_ptr<MetadataStore> store;
  if (!options.metadata_store.empty()) {
    auto made = make_metadata_store(options.metadata_store, lease_of(options));
    if (!made.ok()) return made.status();
    store = *std::move(made);
  }
  try {
    return std::unique_ptr<Agent>(new Agent(std::make_unique<Impl>(
        std::move(worker), *std::move(key), std::move(options), std::move(store))));
  } catch (const std::system_error& no_thread) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no thread for the agent: %s; raise `ulimit -u` or `ulimit -v`, or set "
                        "progress_thread to false",
                        no_thread.what()));
  }
}

const std::string& Agent::name() const { return impl_->options.name; }
const std::string& Agent::address() const { return impl_->worker->address(); }
uint16_t Agent::port() const { return impl_->worker->port(); }

absl::Status Agent::register_memory(absl::Span<const Descriptor> ranges, MemoryKind kind) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (kind == MemoryKind::kFile) {
    std::lock_guard lock(impl_->mutex);
    return impl_->files->add(ranges);
  }
  if (absl::Status status = check_kind(kind); !status.ok()) return status;
  return impl_->register_memory(ranges, kind);
}
absl::Status Agent::register_mapped(const Descriptor& range, int fd, uint64_t offset) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (absl::Status status = check_mapped(range, fd, offset); !status.ok()) return status;
  return impl_->register_memory({range}, MemoryKind::kDram, BackingFile{fd, offset});
}
absl::StatusOr<AgentListId> Agent::register_rows(absl::Span<const StridedDescriptor> rows,
                                                 MemoryKind kind) {
  std::vector<Descriptor> ranges;
  for (const StridedDescriptor& row : rows) {
    const std::optional<Descriptor> span = row.span();
    if (!span) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a row of %u descriptors, one every %u bytes, is not a range of memory",
                          row.count, row.stride));
    }
    ranges.push_back(*span);
  }
  if (absl::Status status = register_memory(ranges, kind); !status.ok()) return status;
  absl::StatusOr<AgentListId> list = prepare_local(rows, kind);
  if (!list.ok()) deregister_memory(ranges, kind).IgnoreError();
  return list;
}
absl::Status Agent::deregister_memory(absl::Span<const Descriptor> ranges, MemoryKind kind) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (kind == MemoryKind::kFile) {
    std::lock_guard lock(impl_->mutex);
    return impl_->files->remove(ranges);
  }
  if (absl::Status status = check_kind(kind); !status.ok()) return status;
  return impl_->deregister_memory(ranges, kind);
}

absl::StatusOr<std::string> Agent::metadata() const {
  if (absl::Status good = usable(); !good.ok()) return good;
  std::lock_guard lock(impl_->mutex);
  return impl_->whole_metadata().encode(impl_->key);
}
absl::StatusOr<std::string> Agent::partial_metadata(absl::Span<const Descriptor> ranges,
                                                    bool with_address, MemoryKind kind) const {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (absl::Status status = check_kind(kind); !status.ok()) return status;
  return impl_->partial_metadata(ranges, with_address, kind);
}
absl::StatusOr<std::string> Agent::add_remote(std::string_view metadata) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->add_remote(metadata);
}
void Agent::remove_remote(std::string_view agent) {
  if (!usable().ok()) return;
  if (impl_->keeper != nullptr) impl_->keeper->forget(agent);
  impl_->remove_remote(agent);
}
bool Agent::has_remote(std::string_view agent, absl::Span<const Descriptor> ranges,
                       MemoryKind kind) {
  if (!usable().ok()) return false;
  if (kind == MemoryKind::kFile && agent == name()) {
    std::lock_guard lock(impl_->mutex);
    return impl_->files->has(ranges);
  }
  return check_kind(kind).ok() && impl_->has_remote(agent, ranges, kind);
}

absl::Status Agent::wait_remote(std::string_view agent, absl::Span<const Descriptor> ranges,
                                Time timeout, MemoryKind kind) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (absl::Status good = check_kind(kind); !good.ok()) return good;
  constexpr std::chrono::milliseconds kLook{20};  // a store wakes no worker
  Worker& worker = *impl_->worker;
  const Time end = base::deadline_after(worker.clock().now(), timeout);
  while (!has_remote(agent, ranges, kind)) {
    const Time left = end - worker.clock().now();
    if (left <= Time::zero()) {
      return absl::DeadlineExceededError(absl::StrFormat("agent \"%s\" did not appear in time: %s",
                                                         agent, impl_->why_missing(agent)));
    }
    worker
        .wait_until(
            [&] { return worker.stats().notifications_waiting > 0 && impl_->unread < kMostUnread; },
            std::min<Time>(left, kLook))
        .IgnoreError();
  }
  return absl::OkStatus();
}

absl::Status Agent::Impl::fetch(std::string_view agent, std::string_view host_port,
                                const absl::StatusOr<PeerId>& peer) {
  // A caller that repeats this until it knows the name would fill the queue of an agent that is
  // still being connected to.
  if (agent.empty() && peer.ok() && outbox->is_sending(*peer, AgentFrameKind::kFetch)) {
    return absl::OkStatus();
  }
  {
    std::lock_guard lock(mutex);
    fetching.emplace(agent);
  }
  return say(host_port, AgentFrameKind::kFetch, agent, peer);
}
absl::Status Agent::fetch_metadata(std::string_view agent, std::string_view host_port) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->fetch(agent, host_port, impl_->caller(host_port));
}
absl::Status Agent::ask_metadata(std::string_view agent, std::string_view host_port) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (!asks_dns(host_port)) return fetch_metadata(agent, host_port);
  const absl::StatusOr<PeerId> peer = impl_->look_up(std::string(host_port));
  if (peer.ok() && peer->generation == 0) return absl::OkStatus();
  absl::Status asked = impl_->fetch(agent, host_port, peer);
  if (!asked.ok()) {
    std::lock_guard lock(impl_->mutex);
    impl_->looked_up.erase(std::string(host_port));  // that is what came of it
  }
  return asked;
}
absl::StatusOr<std::string> Agent::name_at(std::string_view host_port) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->name_at(host_port);
}
absl::Status Agent::send_metadata(std::string_view host_port, std::string_view metadata) {
  if (absl::Status good = usable(); !good.ok()) return good;
  std::string mine(metadata);
  if (mine.empty()) {
    std::lock_guard lock(impl_->mutex);
    mine = impl_->whole_metadata().encode(impl_->key);
  }
  return impl_->say(host_port, AgentFrameKind::kMetadata, mine, impl_->caller(host_port));
}
absl::Status Agent::invalidate_metadata(std::string_view host_port) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->say(host_port, AgentFrameKind::kInvalidate, {}, impl_->caller(host_port));
}

absl::Status Agent::connect(std::string_view agent) {
  if (absl::Status good = usable(); !good.ok()) return good;
  std::lock_guard lock(impl_->mutex);
  absl::StatusOr<RemoteAgent*> remote = impl_->find_remote(agent);
  return remote.ok() ? impl_->peer_of(**remote).status() : remote.status();
}
std::string Agent::explain(std::string_view agent) const {
  if (absl::Status good = usable(); !good.ok()) return std::string(good.message());
  std::lock_guard lock(impl_->mutex);
  absl::StatusOr<RemoteAgent*> remote = impl_->find_remote(agent);
  if (!remote.ok()) return std::string(remote.status().message());
  if ((*remote)->peer.generation == 0) return absl::StrFormat("%s: not called yet", agent);
  return impl_->worker->explain((*remote)->peer);
}

absl::StatusOr<AgentListId> Agent::prepare_local(absl::Span<const Descriptor> list,
                                                 MemoryKind kind) {
  return impl_->prepare(std::nullopt, list, kind);
}
absl::StatusOr<AgentListId> Agent::prepare_remote(std::string_view agent,
                                                  absl::Span<const Descriptor> list,
                                                  MemoryKind kind) {
  return impl_->prepare(agent, list, kind);
}
absl::StatusOr<AgentListId> Agent::prepare_local(absl::Span<const StridedDescriptor> rows,
                                                 MemoryKind kind) {
  return impl_->prepare(std::nullopt, rows, kind);
}
absl::StatusOr<AgentListId> Agent::prepare_remote(std::string_view agent,
                                                  absl::Span<const StridedDescriptor> rows,
                                                  MemoryKind kind) {
  return impl_->prepare(agent, rows, kind);
}
absl::Status Agent::release_list(AgentListId list) {
  if (absl::Status good = usable(); !good.ok()) return good;
  std::shared_ptr<const AgentList> last;  // freed after the lock
  std::lock_guard lock(impl_->mutex);
  const auto at = impl_->lists.find(list.value);
  if (at == impl_->lists.end()) return no_such_list();
  last = std::move(at->second);
  impl_->lists.erase(at);
  return absl::OkStatus();
}

absl::StatusOr<AgentTransferId> Agent::make_transfer(Op op, AgentListId local,
                                                     absl::Span<const int64_t> local_indices,
                                                     AgentListId remote,
                                                     absl::Span<const int64_t> remote_indices,
                                                     std::string_view message) {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (absl::Status good = check_op(op); !good.ok()) return good;
  const auto mine = impl_->find_list(local);
  const auto theirs = impl_->find_list(remote);
  if (mine == nullptr || theirs == nullptr) return no_such_list();
  if (!mine->agent.empty() || theirs->agent.empty()) {
    return absl::InvalidArgumentError(
        "the local list of a transfer must be of this agent's own memory, the remote list must "
        "have been prepared for a named agent");
  }
  if (absl::Status known = impl_->check_epoch(theirs->agent, theirs->epoch, "prepare the list");
      !known.ok()) {
    return known;
  }
  return impl_->make(op, *mine, *theirs, message, *mine, local_indices, *theirs, remote_indices);
}

absl::StatusOr<AgentTransferId> Agent::make_transfer(Op op, absl::Span<const Descriptor> local,
                                                     absl::Span<const Descriptor> remote,
                                                     std::string_view agent,
                                                     std::string_view message, MemoryKind kind,
                                                     MemoryKind local_kind) {
  if (absl::Status good = check_op(op); !good.ok()) return good;
  absl::StatusOr<AgentListId> mine = prepare_local(local, local_kind);
  if (!mine.ok()) return mine.status();
  absl::StatusOr<AgentListId> theirs = prepare_remote(agent, remote, kind);
  absl::StatusOr<AgentTransferId> out;
  if (!theirs.ok()) {
    out = theirs.status();
  } else {
    const auto a = impl_->find_list(*mine);
    const auto b = impl_->find_list(*theirs);
    out = impl_->make(op, *a, *b, message, *a, *b);
    release_list(*theirs).IgnoreError();
  }
  release_list(*mine).IgnoreError();
  return out;
}

absl::Status Agent::post(AgentTransferId transfer, const std::string_view* message) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->post(transfer, message);
}

absl::StatusOr<AgentTransferState> Agent::state(AgentTransferId id) {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  impl_->worker->help();
  (*transfer)->feed();
  return (*transfer)->state();
}

absl::StatusOr<bool> Agent::local_free(AgentTransferId id) {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  impl_->worker->help();
  return (*transfer)->local_free();
}

absl::Status Agent::status(AgentTransferId id) const {
  const auto transfer = impl_->find_transfer(id);
  return transfer.ok() ? (*transfer)->outcome().status : transfer.status();
}

absl::StatusOr<AgentOutcome> Agent::outcome(AgentTransferId id) {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  impl_->worker->help();
  (*transfer)->feed();
  return (*transfer)->outcome();
}

absl::Status Agent::wait(AgentTransferId id, Time timeout) {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  AgentOutcome outcome;
  absl::Status waited = impl_->worker->wait_until(
      [&] {
        (*transfer)->feed();
        if ((*transfer)->state() == AgentTransferState::kRunning) return false;
        outcome = (*transfer)->outcome();  // kept: another thread may post it again at once
        return outcome.state != AgentTransferState::kRunning;
      },
      timeout);
  return waited.ok() ? outcome.status : waited;
}

absl::Status Agent::run(AgentTransferId id, Time timeout) {
  absl::Status status = post(id);
  if (absl::IsAlreadyExists(status)) return status;
  if (status.ok()) status = wait(id, timeout);
  absl::Status released = release(id);
  return status.ok() ? released : status;
}

absl::Status Agent::abort(AgentTransferId id) {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  (*transfer)->abort();
  impl_->drive();
  return absl::OkStatus();
}

absl::Status Agent::release(AgentTransferId id, Time timeout) {
  return impl_->release(id, timeout);
}

void Agent::abandon(AgentTransferId id) {
  if (!usable().ok()) return;
  std::shared_ptr<AgentTransfer> transfer;  // freed after the lock
  {
    std::lock_guard lock(impl_->mutex);
    const auto at = impl_->transfers.find(id.value);
    if (at == impl_->transfers.end()) return;
    transfer = std::move(at->second);
    impl_->transfers.erase(at);
  }
  transfer->abort();
}

absl::StatusOr<AgentTelemetry> Agent::telemetry(AgentTransferId id) const {
  const auto transfer = impl_->find_transfer(id);
  if (!transfer.ok()) return transfer.status();
  return (*transfer)->telemetry();
}

absl::Status Agent::notify(std::string_view agent, std::string_view message) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->notify(agent, message);
}
std::vector<AgentMessage> Agent::messages() {
  if (!usable().ok()) return {};
  return impl_->messages();
}
std::vector<AgentMessage> Agent::wait_messages(Time timeout, size_t most) {
  if (!usable().ok()) return {};
  return impl_->wait_messages(timeout, most);
}
std::vector<AgentLostMessage> Agent::lost_messages() {
  if (!usable().ok()) return {};
  return impl_->outbox->take_lost();
}
int Agent::event_fd() const { return usable().ok() ? impl_->worker->event_fd() : -1; }
bool Agent::progress() { return impl_->worker->progress(); }
absl::Status Agent::wait_until(const std::function<bool()>& ready, Time timeout) {
  if (absl::Status good = usable(); !good.ok()) return good;
  return impl_->worker->wait_until(ready, timeout);
}
void Agent::wake() {
  if (usable().ok()) impl_->worker->wake();
}

AgentStats Agent::stats() const {
  if (!usable().ok()) return {};
  AgentStats out;
  {
    std::lock_guard lock(impl_->inbox_mutex);
    out.senders = impl_->senders.size();
  }
  std::lock_guard lock(impl_->mutex);
  out.lists = impl_->lists.size();
  out.transfers = impl_->transfers.size();
  for (const auto& [id, transfer] : impl_->transfers) out.running += !transfer->quiet();
  out.remotes = impl_->remotes.size() - 1;
  out.registered = impl_->ranges.size() + impl_->files->ranges()->size();
  out.messages_lost = impl_->outbox->lost();
  out.worker = impl_->worker->stats();
  return out;
}

}  // namespace baton::kvtransfer
