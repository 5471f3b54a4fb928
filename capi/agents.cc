// The C interface: agents, their memory, other agents, messages.
#include <utility>

#include "absl/strings/str_split.h"
#include "capi/agent_handle.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

using namespace baton::capi;

namespace {

absl::StatusOr<baton::kvtransfer::AgentOptions> options_of(const baton_agent_options& from) {
  baton::kvtransfer::AgentOptions out;
  out.name = view(from.name);
  absl::StatusOr<baton::WorkerOptions> worker =
      worker_options({from.providers, from.require, from.key_file, from.listen_host,
                      from.listen_port, from.max_transfers, from.settings, from.advertise});
  if (!worker.ok()) return worker.status();
  out.worker = *std::move(worker);
  out.progress_thread = from.progress_thread != 0;
  out.serve_metadata = from.serve_metadata != 0;
  out.metadata_store = view(from.metadata_store);
  if (from.metadata_lease_ms != 0) {
    out.metadata_lease = std::chrono::milliseconds(from.metadata_lease_ms);
  }
  return out;
}

// The oldest message, one at a time: others may wait for the next one.
absl::Status give_message(baton_agent* agent, baton::Time timeout, const absl::Status& none,
                          baton_bytes* from, baton_bytes* message) {
  std::optional<baton::kvtransfer::AgentMessage> next;
  {
    std::lock_guard lock(agent->mutex);
    if (!agent->inbox.empty()) {
      next = std::move(agent->inbox.front());
      agent->inbox.pop_front();
    }
  }
  if (!next) {
    auto came = agent->agent->wait_messages(timeout, 1);
    if (came.empty()) return none;
    next = std::move(came.front());
  }
  absl::Status status = give_all({{next->agent, from}, {next->payload, message}});
  if (!status.ok()) {
    std::lock_guard lock(agent->mutex);
    agent->inbox.push_front(*std::move(next));
  }
  return status;
}

}  // namespace

absl::StatusOr<baton::WorkerOptions> baton::capi::worker_options(const WorkerWords& from) {
  WorkerOptions out;
  if (from.providers != nullptr && *from.providers != 0) {
    for (const auto& name : absl::StrSplit(from.providers, ',')) out.providers.emplace_back(name);
  }
  out.require = view(from.require);
  if (from.key_file != nullptr && *from.key_file != 0) {
    absl::StatusOr<ClusterKey> key = ClusterKey::from_file(from.key_file);
    if (!key.ok()) return key.status();
    out.key = *std::move(key);
  }
  out.listen_host = view(from.listen_host);
  out.listen_port = from.listen_port;
  out.advertise = view(from.advertise);
  if (from.max_transfers != 0) out.max_transfers = from.max_transfers;
  if (from.settings != nullptr && *from.settings != 0) {
    for (const auto& pair : absl::StrSplit(from.settings, ',')) {
      const std::string text(pair);
      if (absl::Status status = add_setting(text, out.settings); !status.ok()) return status;
    }
  }
  return out;
}

extern "C" {

void baton_agent_options_init(baton_agent_options* options, size_t size) {
  baton_agent_options defaults{};
  defaults.progress_thread = 1;
  init_sized(defaults, options, size);
}

int32_t baton_agent_create(const baton_agent_options* options, baton_agent** agent,
                           baton_error* error) {
  if (!cleared(agent)) return invalid("agent is NULL: pass the address for the handle", error);
  baton_agent_options all;
  baton_agent_options_init(&all, sizeof all);
  if (!read_sized(options, all)) {
    return invalid("options: fill them in with baton_agent_options_init()", error);
  }
  return caught(error, [&] {
    const Making making;
    auto wanted = options_of(all);
    if (!wanted.ok()) return result_of(wanted.status(), error, About::kMaking);
    auto made = baton::kvtransfer::Agent::create(*std::move(wanted));
    if (!made.ok()) return result_of(made.status(), error, About::kMaking);
    auto handle = std::make_unique<baton_agent>();
    handle->agent = *std::move(made);
    *agent = handle.release();
    return result_of(absl::OkStatus(), error);
  });
}

int32_t baton_agent_open(const char* name, baton_agent** agent, baton_error* error) {
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = name;
  return baton_agent_create(&options, agent, error);
}

void baton_agent_destroy(baton_agent* agent) {
  if (!usable(agent)) return;
  if (agent->session != nullptr) agent->session->close();
  delete agent;
}
const char* baton_agent_name(const baton_agent* agent) {
  return usable(agent) ? agent->agent->name().c_str() : "";
}
uint16_t baton_agent_port(const baton_agent* agent) {
  return usable(agent) ? agent->agent->port() : 0;
}
int baton_agent_event_fd(const baton_agent* agent) {
  return usable(agent) ? agent->agent->event_fd() : -1;
}
int baton_agent_progress(baton_agent* agent) {
  return usable(agent) && agent->agent->progress() ? 1 : 0;
}

int32_t baton_agent_get_stats(const baton_agent* agent, baton_agent_stats* stats,
                              baton_error* error) {
  return guarded(agent, error, [&] {
    const baton::kvtransfer::AgentStats now = agent->agent->stats();
    baton_agent_stats out{};
    out.lists = now.lists;
    out.transfers = now.transfers;
    out.running = now.running;
    out.remotes = now.remotes;
    out.registered = now.registered;
    out.bytes_moved = now.worker.bytes_moved;
    out.transfers_ended = now.worker.transfers_ended;
    out.registrations = now.worker.registrations;
    out.peers_up = now.worker.peers_up;
    out.peers_lost = now.worker.peers_lost;
    out.messages_lost = now.messages_lost;
    return give_sized(out, stats, "stats: set its size to sizeof(baton_agent_stats)", error);
  });
}

int32_t baton_memory_supported(int32_t memory, baton_error* error) {
  return caught(error, [&] { return baton::kvtransfer::memory_supported(kind(memory)); });
}

int32_t baton_agent_register(baton_agent* agent, int32_t memory, const baton_descriptor* ranges,
                             size_t count, baton_error* error) {
  if (is_missing(ranges, count)) return missing(error);
  return guarded(agent, error, [&] {
    return agent->agent->register_memory(descriptors(ranges, count), kind(memory));
  });
}

int32_t baton_agent_deregister(baton_agent* agent, int32_t memory, const baton_descriptor* ranges,
                               size_t count, baton_error* error) {
  if (is_missing(ranges, count)) return missing(error);
  return guarded(agent, error, [&] {
    return agent->agent->deregister_memory(descriptors(ranges, count), kind(memory));
  });
}

int32_t baton_agent_register_mapped(baton_agent* agent, const baton_descriptor* range, int fd,
                                    uint64_t offset, baton_error* error) {
  if (range == nullptr) return invalid("range is NULL: pass where the memory is mapped", error);
  return guarded(agent, error, [&] {
    return agent->agent->register_mapped(descriptors(range, 1)[0], fd, offset);
  });
}

int32_t baton_memory_file(uint64_t bytes, int* fd, baton_error* error) {
  if (fd == nullptr) return invalid("fd is NULL: pass the address for the descriptor", error);
  *fd = -1;
  return caught(error, [&] {
    const absl::Status fits = baton::base::memory_fits("memory", bytes);
    if (!fits.ok()) return fits;
    auto file = baton::base::make_memory_file("baton-agent", bytes);
    if (file.ok()) *fd = file->release();
    return absl::OkStatus();
  });
}

int32_t baton_agent_metadata(const baton_agent* agent, baton_bytes* out, baton_error* error) {
  give_nothing(out);
  return guarded(agent, error, [&] { return give_made(agent->agent->metadata(), out); });
}

int32_t baton_agent_partial_metadata(const baton_agent* agent, int32_t memory,
                                     const baton_descriptor* ranges, size_t count, int with_address,
                                     baton_bytes* out, baton_error* error) {
  give_nothing(out);
  if (is_missing(ranges, count)) return missing(error);
  return guarded(agent, error, [&] {
    return give_made(
        agent->agent->partial_metadata(descriptors(ranges, count), with_address != 0, kind(memory)),
        out);
  });
}

int32_t baton_agent_add_remote(baton_agent* agent, const void* metadata, size_t size,
                               baton_bytes* name, baton_error* error) {
  give_nothing(name);
  if (metadata != nullptr && is_missing(metadata, size)) return missing(error);
  return guarded(agent, error,
                 [&] { return give_made(agent->agent->add_remote(view(metadata, size)), name); });
}

int32_t baton_agent_remove_remote(baton_agent* agent, const char* remote, baton_error* error) {
  return guarded(agent, error, [&] { agent->agent->remove_remote(view(remote)); });
}

int baton_agent_has_remote(baton_agent* agent, const char* remote, int32_t memory,
                           const baton_descriptor* ranges, size_t count) {
  if (is_missing(ranges, count)) return 0;
  const int32_t has = guarded(agent, nullptr, [&]() -> int32_t {
    return agent->agent->has_remote(view(remote), descriptors(ranges, count), kind(memory)) ? 1 : 0;
  });
  return has == 1 ? 1 : 0;
}

int32_t baton_agent_wait_remote(baton_agent* agent, const char* remote, int32_t memory,
                                const baton_descriptor* ranges, size_t count, int64_t timeout,
                                baton_error* error) {
  if (is_missing(ranges, count)) return missing(error);
  return guarded(agent, error, [&] {
    return agent->agent->wait_remote(view(remote), descriptors(ranges, count), timeout_of(timeout),
                                     kind(memory));
  });
}

int32_t baton_agent_fetch_metadata(baton_agent* agent, const char* remote, const char* host_port,
                                   baton_error* error) {
  return guarded(agent, error,
                 [&] { return agent->agent->fetch_metadata(view(remote), view(host_port)); });
}

int32_t baton_agent_ask_metadata(baton_agent* agent, const char* remote, const char* host_port,
                                 baton_error* error) {
  return guarded(agent, error,
                 [&] { return agent->agent->ask_metadata(view(remote), view(host_port)); });
}

int32_t baton_agent_send_metadata(baton_agent* agent, const char* host_port, const void* metadata,
                                  size_t size, baton_error* error) {
  if (metadata != nullptr && is_missing(metadata, size)) return missing(error);
  return guarded(agent, error, [&] {
    return agent->agent->send_metadata(view(host_port), view(metadata, size));
  });
}

int32_t baton_agent_invalidate_metadata(baton_agent* agent, const char* host_port,
                                        baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->invalidate_metadata(view(host_port)); });
}

int32_t baton_agent_publish_metadata(baton_agent* agent, const void* metadata, size_t size,
                                     const char* label, baton_error* error) {
  if (metadata != nullptr && is_missing(metadata, size)) return missing(error);
  return guarded(agent, error,
                 [&] { return agent->agent->publish_metadata(view(metadata, size), view(label)); });
}

int32_t baton_agent_follow_metadata(baton_agent* agent, const char* remote, const char* label,
                                    baton_error* error) {
  return guarded(agent, error,
                 [&] { return agent->agent->follow_metadata(view(remote), view(label)); });
}

int32_t baton_agent_withdraw_metadata(baton_agent* agent, baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->withdraw_metadata(); });
}

int32_t baton_agent_metadata_state(const baton_agent* agent, const char* name, baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->metadata_state(view(name)); });
}

int32_t baton_agent_connect(baton_agent* agent, const char* remote, baton_error* error) {
  return guarded(agent, error, [&] { return agent->agent->connect(view(remote)); });
}

int32_t baton_agent_explain(const baton_agent* agent, const char* remote, baton_bytes* out,
                            baton_error* error) {
  give_nothing(out);
  return guarded(agent, error, [&] { return give(agent->agent->explain(view(remote)), out); });
}

int32_t baton_notify(baton_agent* agent, const char* remote, const void* message, size_t size,
                     baton_error* error) {
  if (is_missing(message, size)) return missing(error);
  return guarded(agent, error,
                 [&] { return agent->agent->notify(view(remote), view(message, size)); });
}

int32_t baton_next_message(baton_agent* agent, baton_bytes* from, baton_bytes* message,
                           baton_error* error) {
  give_nothing(from, message);
  return guarded(agent, error, [&] {
    return give_message(agent, {}, absl::NotFoundError("no message"), from, message);
  });
}

int32_t baton_wait_message(baton_agent* agent, int64_t timeout, baton_bytes* from,
                           baton_bytes* message, baton_error* error) {
  give_nothing(from, message);
  return guarded(agent, error, [&] {
    return give_message(agent, timeout_of(timeout),
                        absl::DeadlineExceededError("no message came in that time"), from, message);
  });
}

int32_t baton_next_lost_message(baton_agent* agent, baton_bytes* to, baton_bytes* message,
                                baton_bytes* why, baton_error* error) {
  give_nothing(to, message, why);
  return guarded(agent, error, [&] {
    std::lock_guard lock(agent->mutex);
    if (agent->lost.empty()) {
      for (auto& next : agent->agent->lost_messages()) agent->lost.push_back(std::move(next));
    }
    if (agent->lost.empty()) return absl::NotFoundError("no message was lost");
    const baton::kvtransfer::AgentLostMessage& next = agent->lost.front();
    const std::string reason(next.why.message());
    absl::Status status = give_all({{next.agent, to}, {next.payload, message}, {reason, why}});
    if (status.ok()) agent->lost.pop_front();
    return status;
  });
}

}  // extern "C"
