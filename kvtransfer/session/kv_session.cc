// The session: an agent, the two ends, and the thread that serves them while the engine computes.
#include "kvtransfer/kv_session.h"

#include <poll.h>

#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/loads.h"
#include "kvtransfer/session/sends.h"
#include "transport/base/json_depth.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {
namespace {

using nlohmann::json;

constexpr Time kShortTurn = std::chrono::milliseconds(1);
constexpr int kNapMs = 20;  // how often deadlines are looked at while something is under way

int milliseconds(Time time) {
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

// Only times are fractions in messages. Elsewhere one may be out of the range of the integer that
// is read from it, which C++ leaves undefined.
bool has_stray_fraction(const json& value, bool is_time = false) {
  if (!value.is_structured()) return value.is_number_float() && !is_time;
  for (auto it = value.begin(); it != value.end(); ++it) {
    const bool time = value.is_object() && (it.key() == "lease" || it.key() == "timeout");
    if (has_stray_fraction(*it, time)) return true;
  }
  return false;
}

}  // namespace

struct KvSession::Inside {
  explicit Inside(KvSessionOptions& options)
      : name(options.name),
        start_thread(options.start_thread),
        sends(core, options.lease, options.max_lease) {
    core.own = std::move(options.own_agent);
    core.agent = core.own != nullptr ? core.own.get() : options.agent;
    core.timeline = options.worker.timeline;
    core.may_be_read = options.may_be_read;
    core.shard = options.shard;
    core.clock = options.clock != nullptr ? options.clock : &Clock::steady();
    core.wake_thread = [this] { thread_bell.ring(); };
    core.wake_engine = [this] { engine_bell.ring(); };
  }

  bool turn() {
    if (core.agent == nullptr || core.mover == nullptr) return false;  // closed, or not in use yet
    for (const AgentMessage& message : core.agent->messages()) hear(message.agent, message.payload);
    const bool sending = sends.step();
    return loads.step() || sending;
  }

  // Whatever a peer says, the thread lives.
  void hear(const std::string& sender, const std::string& text) {
    std::string why = "it is nested too deep";
    try {
      if (!base::json_too_deep(text)) {
        const json message = json::parse(text);
        const std::string kind = message.at("kind").get<std::string>();
        const bool of_decode = kind == "want" || kind == "done";
        if (!has_stray_fraction(message)) {
          return of_decode ? sends.heard(sender, message)
                           : loads.heard(sender, message, text.size());
        }
        why = "it has a fraction where an integer belongs";
      }
    } catch (const json::exception& error) {
      why = error.what();
    }
    base::log_event(base::LogLevel::kWarning, "cannot parse a message from %s: %s", sender, why);
  }

  void serve() {
    while (!stop) {
      const Time began = Clock::steady().now();
      const bool busy = turn();
      // What it needs next may have come: while turns are short this thread takes it, and wakes no
      // other. With thousands of loads bytes must not wait for turns.
      const bool is_short = Clock::steady().now() - began < kShortTurn;
      if (busy && is_short && core.agent->progress()) continue;
      std::array<pollfd, 2> entries = {pollfd{core.agent->event_fd(), POLLIN, 0},
                                       pollfd{thread_bell.fd(), POLLIN, 0}};
      poll(entries.data(), entries.size(), sends.more() ? 0 : busy ? kNapMs : -1);
      for (const pollfd& entry : entries) {
        if (entry.revents != 0) base::EventFd::silence(entry.fd);
      }
    }
  }

  const std::string name;
  const bool start_thread;
  std::string address;
  session::Core core;
  session::Sends sends;
  session::Loads loads{core};
  base::EventFd thread_bell;
  base::EventFd engine_bell;
  std::atomic<bool> stop{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<KvSession>> KvSession::create(KvSessionOptions options) {
  auto inside = std::make_unique<Inside>(options);
  session::Core& core = inside->core;
  if (core.agent == nullptr) {
    AgentOptions agent_options;  // named as workers of an engine are numbered
    agent_options.name = absl::StrCat(
        options.name, "/", options.shard.rank + options.shard.stage * options.shard.ranks);
    agent_options.worker = options.worker;
    agent_options.worker.listen_port = options.port;
    agent_options.serve_metadata = true;
    absl::StatusOr<std::unique_ptr<Agent>> agent = Agent::create(std::move(agent_options));
    if (!agent.ok()) return agent.status();
    core.own = *std::move(agent);
    core.agent = core.own.get();
  }
  if (core.agent->event_fd() < 0) return base::refused("eventfd", errno);
  for (const base::EventFd* bell : {&inside->thread_bell, &inside->engine_bell}) {
    if (!bell->status().ok()) return bell->status();
  }
  inside->address = absl::StrCat(options.host, ":", core.agent->port());
  return std::unique_ptr<KvSession>(new KvSession(std::move(inside)));
}

KvSession::KvSession(std::unique_ptr<Inside> inside) : inside_(std::move(inside)) {}
KvSession::KvSession(KvSession&& other) noexcept = default;
KvSession::~KvSession() { close(); }

absl::Status KvSession::use(std::unique_ptr<session::KvMover> mover) {
  if (inside_->core.mover != nullptr) {
    return absl::FailedPreconditionError("it already has a cache");
  }
  inside_->core.mover = std::move(mover);
  if (inside_->start_thread) inside_->thread = std::thread([in = inside_.get()] { in->serve(); });
  return absl::OkStatus();
}

void KvSession::close() {
  if (inside_ == nullptr) return;  // it was moved from
  inside_->stop = true;
  inside_->thread_bell.ring();
  if (inside_->thread.joinable()) inside_->thread.join();
  inside_->loads.stop();
  inside_->sends.stop();
  inside_->core.agent = nullptr;
  inside_->core.own.reset();  // nothing reads the mover's memory afterwards
  inside_->loads.close();
  inside_->sends.close();
}

Agent* KvSession::agent() { return inside_->core.agent; }
int KvSession::event_fd() const { return inside_->engine_bell.fd(); }
WorkerStats KvSession::stats() const {
  const Agent* const agent = inside_->core.agent;
  return agent == nullptr ? WorkerStats{} : agent->stats().worker;
}
const std::string& KvSession::address() const { return inside_->address; }
bool KvSession::turn() { return inside_->turn(); }

uint64_t KvSession::open(absl::string_view transfer, size_t tokens) {
  return inside_->sends.open(transfer, tokens);
}
void KvSession::computed(uint64_t send, uint32_t layer, size_t tokens,
                         absl::Span<const uint32_t> blocks) {
  inside_->sends.computed(send, layer, 0, tokens, blocks);
}
absl::Status KvSession::save(uint64_t send, uint32_t layer, uint64_t first_block,
                             absl::Span<const uint32_t> blocks) {
  absl::Status good = inside_->core.mover->check(layer, blocks);
  if (good.ok()) inside_->sends.computed(send, layer, first_block, 0, blocks);
  return good;
}
void KvSession::restart(uint64_t send) { inside_->sends.restart(send); }
void KvSession::hold(uint64_t send) { inside_->sends.hold(send); }
void KvSession::drop(uint64_t send) { inside_->sends.drop(send); }
void KvSession::fail(uint64_t send, const absl::Status& why) { inside_->sends.fail(send, why); }
std::optional<KvAsked> KvSession::next_asked() { return inside_->sends.next_asked(); }
void KvSession::refuse(absl::string_view transfer, const absl::Status& why) {
  inside_->sends.refuse(transfer, why);
}
bool KvSession::is_wanted(uint64_t send) { return inside_->sends.is_wanted(send); }
void KvSession::expect(uint64_t send, uint32_t loads, Time lease) {
  inside_->sends.expect(send, loads, lease);
}
void KvSession::give(uint64_t send, std::string payload) {
  inside_->sends.give(send, std::move(payload));
}
std::vector<uint64_t> KvSession::released() { return inside_->sends.released(); }
std::optional<uint64_t> KvSession::next_released() { return inside_->sends.next_released(); }
KvTransfer KvSession::params_of(absl::string_view transfer) const {
  return {.transfer = std::string(transfer),
          .agent = inside_->name,
          .address = inside_->address,
          .finished = true,
          .ranks = inside_->core.shard.ranks};
}

absl::Status KvSession::start_load(KvLoad load) {
  if (inside_->core.mover == nullptr) {
    return absl::FailedPreconditionError("use_cache() comes before the first load");
  }
  if (!load.transfer.has_value()) {
    return absl::InvalidArgumentError("a load by hand-off needs the name of its transfer");
  }
  absl::StatusOr<std::vector<KvRun>> runs = inside_->core.mover->runs_of(load);
  if (!runs.ok()) return runs.status();
  KvOrder order{load.id,  *std::move(load.transfer), *std::move(runs), load.timeout, load.silence,
                load.push};
  if (load.ask) {
    order.tokens = std::move(load.tokens);
    order.lease = load.lease;
  }
  order.first_token = load.first_token;
  return inside_->loads.start(std::move(order));
}
uint32_t KvSession::layers_loaded(KvRequestId id) { return inside_->loads.layers_loaded(id); }
absl::Status KvSession::load_status(KvRequestId id) { return inside_->loads.status(id); }
bool KvSession::is_exact(KvRequestId id) { return inside_->loads.is_exact(id); }
bool KvSession::end_load(KvRequestId id) { return inside_->loads.end(id); }
absl::Status KvSession::load(KvOrder order) { return inside_->loads.start(std::move(order)); }
std::optional<KvLoaded> KvSession::next_loaded() { return inside_->loads.next_loaded(); }
absl::Status KvSession::renew_load(KvRequestId id, Time timeout) {
  return inside_->loads.renew(id, timeout);
}
absl::StatusOr<std::string> KvSession::payload(KvRequestId id) {
  return inside_->loads.payload(id);
}
std::vector<uint32_t> KvSession::failed_blocks(KvRequestId id) {
  return inside_->loads.failed_blocks(id);
}
KvConnectorStats KvSession::session_stats() {
  return {inside_->sends.bytes_written(), inside_->loads.bytes_loaded(), inside_->loads.failed(),
          inside_->sends.failed(), inside_->loads.route()};
}
void KvSession::progress() { inside_->engine_bell.silence(); }
void KvSession::wait(Time timeout, int fd) {
  std::array<pollfd, 2> entries = {pollfd{event_fd(), POLLIN, 0}, pollfd{fd, POLLIN, 0}};
  poll(entries.data(), entries.size(), milliseconds(timeout));
}

}  // namespace baton::kvtransfer
