// Metadata by a store: what is left there, and what is made of what was found.
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_impl.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {

std::chrono::milliseconds lease_of(const AgentOptions& options) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(options.metadata_lease);
}

absl::Status Agent::Impl::check_store() const {
  if (absl::Status good = usable(); !good.ok()) return good;
  if (keeper != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this agent has no store for metadata: name one when it is made (metadata_store), for "
      "example "
      "etcd://127.0.0.1:2379");
}

// Under the cluster's key, as metadata is: no other party can make others forget this agent.
std::string Agent::Impl::farewell() const {
  AgentMetadata out;
  out.withdrawn = true;
  out.name = options.name;
  out.uid = uid;
  out.address = worker->address();
  return out.encode(key);
}

absl::Status Agent::Impl::found(std::string_view agent, const std::string& bytes) {
  const absl::StatusOr<AgentMetadata> metadata = AgentMetadata::decode(bytes, key);
  absl::Status status = metadata.status();
  if (status.ok() && metadata->name != agent) {
    status = absl::DataLossError(absl::StrFormat(
        "the store's entry for \"%s\" is the metadata of \"%s\"", agent, metadata->name));
  }
  if (status.ok() && metadata->withdrawn) {
    remove_remote(agent, &metadata->uid);
    return absl::FailedPreconditionError(
        absl::StrFormat("agent \"%s\" removed its metadata", agent));
  }
  if (status.ok()) status = add_remote(bytes).status();
  if (!status.ok()) {
    base::log_event(base::LogLevel::kWarning, "%s: metadata of %s in the store: %s", options.name,
                    agent, status.message());
  }
  return status;
}

void Agent::Impl::gone(std::string_view agent) {
  {
    std::lock_guard lock(mutex);
    const auto known = remotes.find(agent);
    if (known == remotes.end()) return;
    const PeerId peer = known->second.peer;
    // The store knows less of it than a connection does.
    if (peer.generation != 0 && worker->peer_state(peer) == PeerState::kUp) return;
  }
  remove_remote(agent);
}

absl::Status Agent::publish_metadata(std::string_view metadata, std::string_view label) {
  if (absl::Status status = impl_->check_store(); !status.ok()) return status;
  std::string bytes(metadata);
  if (bytes.empty()) {
    std::lock_guard lock(impl_->mutex);
    bytes = impl_->whole_metadata().encode(impl_->key);
  }
  const absl::StatusOr<AgentMetadata> checked = AgentMetadata::decode(bytes, impl_->key);
  if (!checked.ok()) return checked.status();
  if (checked->uid != impl_->uid) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "this is the metadata of \"%s\": an agent publishes its own", checked->name));
  }
  impl_->keeper->publish(impl_->options.name, label, std::move(bytes));
  return absl::OkStatus();
}

absl::Status Agent::follow_metadata(std::string_view agent, std::string_view label) {
  if (absl::Status status = impl_->check_store(); !status.ok()) return status;
  if (agent.empty() || agent.size() > kMaxAgentName || agent == impl_->options.name) {
    return absl::InvalidArgumentError(
        absl::StrFormat("\"%s\" is not another agent's name", agent.substr(0, kMaxAgentName)));
  }
  impl_->keeper->follow(agent, label);
  return absl::OkStatus();
}

absl::Status Agent::withdraw_metadata() {
  if (absl::Status status = impl_->check_store(); !status.ok()) return status;
  impl_->keeper->withdraw(impl_->options.name, impl_->farewell());
  return absl::OkStatus();
}

absl::Status Agent::metadata_state(std::string_view agent) const {
  if (absl::Status status = impl_->check_store(); !status.ok()) return status;
  return impl_->keeper->state(agent);
}

}  // namespace baton::kvtransfer
