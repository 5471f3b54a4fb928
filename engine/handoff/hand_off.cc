// The service: an agent, the two ends, and the thread that serves them while the engine computes.
#include "engine/handoff/hand_off.h"

#include <poll.h>
#include <zlib.h>

#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/core.h"
#include "engine/handoff/loads.h"
#include "engine/handoff/sends.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"
#include "transport/net/endpoint.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::KvLoad;
using kvtransfer::KvRequestId;
using nlohmann::json;

constexpr int kNapMs = 20;  // how often deadlines are looked at while something is under way

int milliseconds(Time time) {
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

class Service : public HandOff {
 public:
  Service(HandOffOptions options, Core core)
      : name_(std::move(options.name)),
        address_(absl::StrCat(options.host, ":", core.agent->port())),
        core_(std::move(core)),
        sends_(core_, options.lease),
        loads_(core_),
        start_thread_(options.start_thread) {
    core_.wake_thread = [this] { thread_bell_.ring(); };
    core_.wake_engine = [this] { engine_bell_.ring(); };
  }
  ~Service() override { close(); }
  absl::Status can_be_woken() const {
    return thread_bell_.status().ok() ? engine_bell_.status() : thread_bell_.status();
  }

  void close() override {
    stop_ = true;
    thread_bell_.ring();
    if (thread_.joinable()) thread_.join();
    core_.agent.reset();  // nothing reads the staging memory afterwards
    loads_.close();
    sends_.close();
  }

  absl::Status use_cache(const KvCache& cache) override {
    if (core_.cache.has_value()) return absl::FailedPreconditionError("it already has a cache");
    core_.cache.emplace(cache);
    core_.own = ForeignLayout::own(cache.geometry());
    if (start_thread_) thread_ = std::thread([this] { serve(); });
    return absl::OkStatus();
  }
  int event_fd() const override { return engine_bell_.fd(); }
  WorkerStats stats() const override {
    return core_.agent == nullptr ? WorkerStats{} : core_.agent->stats().worker;
  }
  std::string address() const override { return address_; }

  uint64_t open(absl::string_view transfer, size_t tokens) override {
    return sends_.open(transfer, tokens);
  }
  void computed(uint64_t send, uint32_t layer, size_t tokens,
                absl::Span<const uint32_t> blocks) override {
    sends_.computed(send, layer, tokens, blocks);
  }
  void restart(uint64_t send) override { sends_.restart(send); }
  void hold(uint64_t send) override { sends_.hold(send); }
  void drop(uint64_t send) override { sends_.drop(send); }
  std::vector<uint64_t> released() override { return sends_.released(); }
  kvtransfer::KvTransfer params_of(absl::string_view transfer) const override {
    return {
        .transfer = std::string(transfer), .agent = name_, .address = address_, .finished = true};
  }

  absl::Status start_load(KvLoad load) override { return loads_.start(std::move(load)); }
  bool is_exact(KvRequestId id) override { return loads_.is_exact(id); }
  void decline(const kvtransfer::KvTransfer& from) override { loads_.decline(from); }
  uint32_t layers_loaded(KvRequestId id) override { return loads_.layers_loaded(id); }
  absl::Status load_status(KvRequestId id) override { return loads_.status(id); }
  bool end_load(KvRequestId id) override { return loads_.end(id); }
  void progress() override { engine_bell_.silence(); }
  void wait(Time timeout, int fd) override {
    std::array<pollfd, 2> entries = {pollfd{engine_bell_.fd(), POLLIN, 0}, pollfd{fd, POLLIN, 0}};
    poll(entries.data(), entries.size(), milliseconds(timeout));
  }

  bool turn() override {
    if (core_.agent == nullptr) return false;  // it is closed
    for (const kvtransfer::AgentMessage& message : core_.agent->messages()) {
      hear(message.agent, message.payload);
    }
    const bool sending = sends_.step();
    return loads_.step() || sending;
  }

 private:
  // Whatever a peer says, the thread lives.
  void hear(const std::string& sender, const std::string& text) {
    std::string why;
    try {
      const absl::StatusOr<json> message = parse_json(text, "a message");
      if (message.ok()) {
        const std::string kind = message->at("kind").get<std::string>();
        if (kind == "want" || kind == "done") {
          sends_.heard(sender, *message);
        } else {
          loads_.heard(sender, *message);
        }
        return;
      }
      why = std::string(message.status().message());
    } catch (const json::exception& error) {
      why = error.what();
    }
    base::log_event(base::LogLevel::kWarning, "cannot parse a message from %s: %s", sender, why);
  }

  void serve() {
    while (!stop_) {
      const bool busy = turn();
      std::array<pollfd, 2> entries = {pollfd{core_.agent->event_fd(), POLLIN, 0},
                                       pollfd{thread_bell_.fd(), POLLIN, 0}};
      poll(entries.data(), entries.size(), sends_.more() ? 0 : busy ? kNapMs : -1);
      for (const pollfd& entry : entries) {
        if (entry.revents != 0) base::EventFd::silence(entry.fd);
      }
    }
  }

  const std::string name_;
  const std::string address_;
  Core core_;
  Sends sends_;
  Loads loads_;
  const bool start_thread_;
  base::EventFd thread_bell_;
  base::EventFd engine_bell_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

absl::StatusOr<ForeignLayout> Core::layout_in(const json& message) const {
  const json& theirs = member(message, "model");
  if (!theirs.is_string()) {
    return absl::FailedPreconditionError(
        "it does not name its model: run the same release of baton.vllm on both sides");
  }
  const auto name = theirs.get<std::string>();
  if (name.empty()) {
    return absl::FailedPreconditionError(
        "it does not identify its checkpoint by its files: give it and --kv-identity the same "
        "name");
  }
  if (name != model) {
    return absl::FailedPreconditionError(
        absl::StrCat("it has another model: ", name.substr(0, 16), ", ours ", model.substr(0, 16)));
  }
  absl::StatusOr<ForeignLayout> layout = ForeignLayout::parse(member(message, "kv"));
  if (!layout.ok()) return layout.status();
  if (absl::Status status = layout->fits(cache->geometry()); !status.ok()) return status;
  return layout;
}

bool is_text(const std::string& name) {
  try {
    (void)json(name).dump();
  } catch (const json::exception&) {
    return false;  // no UTF-8
  }
  return true;
}

uint32_t block_checksum(const std::byte* block, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const unsigned char*>(block), bytes));
}

absl::StatusOr<std::unique_ptr<HandOff>> HandOff::create(HandOffOptions options) {
  if (options.name.empty() || options.model.empty()) {
    return absl::InvalidArgumentError(
        "handing KV over needs a name for the agent and one for its checkpoint");
  }
  absl::StatusOr<std::unique_ptr<Staging>> staging = Staging::make(options.staging_bytes);
  if (!staging.ok()) return staging.status();
  kvtransfer::AgentOptions agent_options;
  agent_options.name = absl::StrCat(options.name, "/0");  // as workers of an engine are numbered
  agent_options.worker = options.worker;
  // A host that is said to be this machine's loopback is listened on, whichever family it is of.
  agent_options.worker.listen_host = net::loopback_host(options.host) ? options.host : "*";
  agent_options.worker.listen_port = options.port;
  agent_options.serve_metadata = true;
  absl::StatusOr<std::unique_ptr<kvtransfer::Agent>> agent =
      kvtransfer::Agent::create(std::move(agent_options));
  if (!agent.ok()) return agent.status();
  const kvtransfer::Descriptor range{.address = reinterpret_cast<uint64_t>((*staging)->base()),
                                     .bytes = (*staging)->bytes(),
                                     .device = 0};
  if (absl::Status status = (*agent)->register_memory(absl::MakeConstSpan(&range, 1));
      !status.ok()) {
    return status;
  }
  Core core;
  core.agent = *std::move(agent);
  if (core.agent->event_fd() < 0) return base::refused("eventfd", errno);
  core.staging = *std::move(staging);
  core.model = options.model;
  core.fingerprint = options.fingerprint;
  core.clock = options.clock != nullptr ? options.clock : &Clock::steady();
  auto service = std::make_unique<Service>(std::move(options), std::move(core));
  if (absl::Status status = service->can_be_woken(); !status.ok()) return status;
  return service;
}

}  // namespace baton::engine::handoff
